"""The configs of published models by name, so that a run can be fitted to devices, or planned, without their checkpoints."""

from typing import Any

from dataproto.errors import InvalidConfig

_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def _dense(hidden: int, inner: int, layers: int, heads: int, key_value_heads: int, words: int = 152_064) -> Any:
    text = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": words,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    tied = hidden == 2048
    vision = _QWEN2_5_VISION | {"out_hidden_size": hidden} | ({"intermediate_size": 3420} if hidden < 4096 else {})
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _mixture(hidden: int, experts_width: int, layers: int, heads: int) -> Any:
    text = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": experts_width,
        "vocab_size": 151_936,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    }
    vision = _QWEN3_VISION | {"out_hidden_size": hidden}
    return {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision}


PUBLISHED: dict[str, Any] = {
    "3b": _dense(2048, 11_008, 36, 16, 2, words=151_936),
    "7b": _dense(3584, 18_944, 28, 28, 4),
    "32b": _dense(5120, 27_648, 64, 40, 8),
    "72b": _dense(8192, 29_568, 80, 64, 8),
    "30b-a3b": _mixture(2048, 768, 48, 32),
    "235b-a22b": _mixture(4096, 1536, 94, 64),
}
"""Qwen2.5-VL of four sizes, and Qwen3-VL's mixtures."""


def published_config(name: str) -> Any:
    """The config of a published model.

    >>> config = published_config("72b")
    >>> config.text_config.num_hidden_layers, config.vision_config.out_hidden_size
    (80, 8192)

    Raises:
        InvalidConfig: the table does not have it.
    """
    from transformers import AutoConfig  # which the presets, that need the table only, do not wait for

    if name not in PUBLISHED:
        raise InvalidConfig(f"preset {name!r} is unknown: choose one of {', '.join(PUBLISHED)}, or give --model-path")
    return AutoConfig.for_model(**PUBLISHED[name])
