"""What the tests show for each family: lists that they run over, and the table of `docs/models.md` that is made from them.

`python -m helpers.shown_models` in ``tests`` prints the table.
"""

from dataproto.vlm import family_of
from helpers.tiny_models import ALL_TYPES, FURTHER_TYPES, GEMMA4_TYPES, MODEL_TYPES, OMNI_TYPES, TEXT_TYPES

HF_ENGINE_TYPES = tuple(each for each in ALL_TYPES if each != "idefics3")
"""Families whose tokens from the HF engine are compared with a loop without a cache."""
TILED_TYPES = ("smolvlm", "idefics3")
"""Families whose greedy tokens, from images in files, are compared with those of Hugging Face's ``generate``."""
PIPELINE_TYPES = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_vl", "smolvlm", "gemma3", "gemma4", "qwen3")
"""Families of the tests of pipelines."""
LAYOUT_TYPES = (
    *(*FURTHER_TYPES, "qwen2_vl", "internvl", "glm4v", "qwen3_5_moe", "idefics3", "gemma4"),
    *(each for each in TEXT_TYPES if each not in MODEL_TYPES),
)
"""Families that are left to the long tests in at least one layout."""
VLLM_TYPES = (
    *(
        "qwen3_vl_moe",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3",
        "llama",
        "qwen2",
        "mistral",
        "smolvlm",
        "idefics3",
    ),
    *("glm4v", "glm4v_moe", "internvl", "internvl+qwen3_moe", "kimi_k25", *OMNI_TYPES),
)
"""Families of which vLLM samples the tokens of the other engine, with log-probs within 1e-4 in float32."""
VLLM_HALF_TYPES = ("qwen3_5", "qwen3_5_moe")
"""Families whose kernels of vLLM for the CPU compute in bfloat16 alone: log-probs within 0.05."""
VLLM_WINDOWED_TYPES = ("gemma3", *GEMMA4_TYPES)
"""Families with sliding windows, whose images see each other, by the same bounds as those of `VLLM_TYPES`."""
MEASURED_ON_H200 = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_5": "Qwen3.5-9B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
}
"""Families with a measurement in `benchmarks/RESULTS.md`, and the words there."""

NOT_SHOWN_ON_H200 = ("minicpmv4_6", "muse_glimmer", *OMNI_TYPES)
"""Families that failed or were left out when ``tests/workers/test_families_on_device.py`` last ran on an H200."""

NOT_SUPPORTED = "no"
FIELD = (
    ("Qwen3.5, Qwen3.6, Qwen3.8", "51 %", ("qwen3_5", "qwen3_5_moe")),
    ("Qwen2.5-Omni, Qwen3-Omni", "14 % since July", OMNI_TYPES),
    ("Gemma 3, Gemma 4", "17 %", ("gemma3", *GEMMA4_TYPES)),
    ("Kimi K2.5 and later", "7 %", ("kimi_k25",)),
    ("Qwen3-VL", "6 %", ("qwen3_vl", "qwen3_vl_moe")),
    ("Qwen2-VL, Qwen2.5-VL", EARLIER := "about 10 % with Qwen3-VL", ("qwen2_vl", "qwen2_5_vl")),
    ("InternVL", EARLIER, ("internvl", "internvl+qwen3_moe")),
    ("GLM-4.1V, GLM-4.5V, GLM-4.6V", EARLIER, ("glm4v", "glm4v_moe", "glm46v", "glm46v+glm4v_moe_text")),
    ("SmolVLM, Idefics3", EARLIER, ("smolvlm", "idefics3")),
    ("MiniCPM-V 4.6", "among the rest", ("minicpmv4_6",)),
    ("Muse Glimmer", "among the rest", ("muse_glimmer",)),
    ("language models", "not counted", TEXT_TYPES),
)
"""Groups of models: names, share of the names of vision-language models in the commits of nine frameworks, and families."""


def models_table() -> list[str]:
    """The lines of the table, a line for each family and for each group without one."""
    lines = [
        "| group | share of names | `model_type` | published | layouts | HF engine | vLLM | H200 |",
        "|" + "---|" * 8,
    ]
    for group, share, families in FIELD:
        if not families:
            lines.append(f"| {group} | {share} | {' | '.join([NOT_SUPPORTED] * 6)} |")
        for model_type in families:
            published = ", ".join(family_of(model_type).published) or "none"
            shown = " | ".join(
                [layouts(model_type), in_hf_engine(model_type), in_vllm(model_type), on_h200(model_type)]
            )
            lines.append(f"| {group} | {share} | `{model_type}` | {published} | {shown} |")
    return lines


def in_hf_engine(model_type: str) -> str:
    """Whether tests compare its tokens."""
    return "yes" if model_type in (*HF_ENGINE_TYPES, *TILED_TYPES) else "not tested"


def layouts(model_type: str) -> str:
    """The degrees of parallelism that tests compare with one process."""
    every, extra = model_type in LAYOUT_TYPES, family_of(model_type).experts is not None
    found = [name for name in ("dp", "sp", "tp") if every or model_type in MODEL_TYPES]
    found += ["pp"] * (every or model_type in PIPELINE_TYPES)
    found += ["ep"] * (extra and (every or model_type == "qwen3_vl_moe"))
    return " ".join(found)


def in_vllm(model_type: str) -> str:
    """How close vLLM comes."""
    if model_type in (*VLLM_TYPES, *VLLM_WINDOWED_TYPES):
        return "1e-4"
    if family_of(model_type).not_in_vllm:
        return "refused"
    return "0.05 in bfloat16" if model_type in VLLM_HALF_TYPES else "not tested"


def on_h200(model_type: str) -> str:
    """Whether there is a measurement, or only equal numbers."""
    if model_type in MEASURED_ON_H200:
        return "measured"
    return "not yet" if model_type in NOT_SHOWN_ON_H200 else "exact"


if __name__ == "__main__":
    print("\n".join(models_table()))
