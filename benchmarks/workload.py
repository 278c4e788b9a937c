"""Models and batches for benchmarks: the sizes of Qwen-VL with random weights, and rows like those of rollouts."""

import contextlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from dataproto import DataProto
from dataproto.vlm import family_of, media_grids
from dataproto.vlm.families.qwen3_5 import CHUNK, recurrence_flops
from recipes.configs.shared.published_models import PUBLISHED


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _text(size: str) -> dict[str, Any]:
    """The sizes of a published model's decoder."""
    return _without(PUBLISHED[size]["text_config"], "vocab_size", "rope_parameters")


VISION = _without(PUBLISHED["3b"]["vision_config"], "out_hidden_size") | {"tokens_per_second": 2}
TINY_VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 160, "num_heads": 2, "fullatt_block_indexes": [3]}
TEXT: dict[str, dict[str, Any]] = {
    "3b": _text("3b"),
    "7b": _text("7b"),
    "32b": _text("32b"),
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
VOCABULARY = {size: PUBLISHED[size]["text_config"]["vocab_size"] for size in ("3b", "7b", "32b", "30b-a3b")} | {
    "qwen3.5-9b": 248_320,
    "omni-30b-a3b": 152_064,
}
MOE_VISION = _without(PUBLISHED["30b-a3b"]["vision_config"], "out_hidden_size")
MOE_TEXT = _text("30b-a3b")
TINY_MOE_VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
TINY_MOE_TEXT = MOE_TEXT | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
HYBRID_TEXT = {  # of Qwen3.5-9B
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TINY_HYBRID_TEXT = TEXT["tiny"] | {  # vLLM's kernel for the CPU takes heads from 64 on
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SIZES = (*TEXT, "30b-a3b", "tiny-moe", "omni-30b-a3b", "tiny-omni", "qwen3.5-9b", "tiny-qwen3.5")
"""Qwen2.5-VL's, Qwen3-VL-30B-A3B, the thinker of Qwen3-Omni-30B-A3B, and Qwen3.5-9B."""
AUDIO = {  # of Qwen3-Omni-30B-A3B
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
}
TINY_AUDIO = AUDIO | {
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "downsample_hidden_size": 8,
}


@dataclass(frozen=True)
class Shape:
    """Lengths of a batch in tokens; image sizes in merged patches along a side."""

    text: tuple[int, int] = (50, 300)
    images: tuple[int, int] = (1, 3)
    side: tuple[int, int] = (11, 36)  # 300 to 1,000 pixels of 28 each
    response: tuple[int, int] = (100, 2048)
    typical_response: int = 500  # median of the log-normal distribution, of shape 0.7
    sound: tuple[int, int] = (800, 1600)  # mel frames of 10 ms, for models that read sound
    total: int = 4096


TINY = Shape(text=(5, 30), side=(2, 6), response=(10, 200), typical_response=50, total=410)


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """In here workers load random weights, on their devices, from directories that hold a config alone."""
    from workers.model.patches import place_parameter
    from workers.model.quantized import four_bit
    from workers.weights.hollow_model import all_tensors, initialise, local_part

    def hollow_model(path: str, family: Any, with_head: bool = False) -> tuple[Any, None, None]:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = family.model_class().from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        initialise(model)
        return model.eval(), None, None

    def fill(module: Any, prefix: str, files: None, sources: None, hollow: set[str]) -> None:
        for name, tensor in all_tensors(module):
            local, part = local_part(tensor.detach())
            if name not in hollow or not local.numel():
                continue
            torch.manual_seed(zlib.crc32(f"{name} {part}".encode()))  # equal where ranks hold the same part
            local.normal_(std=0.02) if tensor.ndim > 1 else local.fill_(float(name.endswith("weight")))

    def fill_in_4_bits(layers: Any, files: None, sources: None, device: torch.device, dtype: torch.dtype) -> None:
        for name, layer in layers.items():
            torch.manual_seed(zlib.crc32(name.encode()))
            weight = torch.empty(layer.out_features, layer.in_features, device=device, dtype=dtype).normal_(std=0.02)
            place_parameter(layer, "weight", four_bit(weight, name))

    with (
        mock.patch("workers.training.loading.hollow_model", hollow_model),
        mock.patch("workers.training.loading.fill", fill),
        mock.patch("workers.training.loading.fill_in_4_bits", fill_in_4_bits),
    ):
        yield


STEP = Shape(text=(134, 134), images=(1, 1), side=(15, 15), response=(512, 512), typical_response=10**6)
LONG = Shape(response=(28_000, 32_000), typical_response=30_000, total=32_768)
TINY_LONG = Shape(text=(5, 30), side=(2, 6), response=(2800, 3200), typical_response=3000, total=3300)
TINY_STEP = Shape(text=(13, 13), images=(1, 1), side=(4, 4), response=(50, 50), typical_response=10**6, total=410)


def shape_of(size: str, rows: str = "mixed") -> Shape:
    """The rows of a size: ``mixed``; ``geo3k`` with prompts of 361 tokens with one image of 225, and responses of 512; ``long``,
    with responses of about 30,000 tokens.
    """
    full, tiny = {"mixed": (Shape(), TINY), "geo3k": (STEP, TINY_STEP), "long": (LONG, TINY_LONG)}[rows]
    return tiny if size.startswith("tiny") else full


def counted_recurrence(config: Any) -> str:
    """How the operations of recurrent layers are counted; empty for a model without."""
    family, text = family_of(config), config.get_text_config()
    if family.recurrent_mixers is None:
        return ""
    rule, layers = recurrence_flops(text), range(int(text.num_hidden_layers))
    recurrent = [layer for layer in layers if text.layer_types[layer] == "linear_attention"]
    weights = 2 * sum(family.layer_weights(text, layer) for layer in layers)
    share = len(recurrent) * rule / (weights + len(recurrent) * rule)
    return (
        f"operations of the delta rule: {rule / 1e6:.1f} million a token in each of {len(recurrent)} of {len(layers)} layers, as "
        f"its form in chunks of {CHUNK} needs them (arXiv:2412.06464, section 3.3; `recurrence_flops`), {share:.1%} of the "
        "decoder's with its weights; three times that with the backward pass, and nothing that is computed again"
    )


def model_config(size: str, layers: int | None = None) -> Any:
    """The config of a size, with ``layers`` decoder layers if given."""
    words, tiny = VOCABULARY.get(size, 1024), size.startswith("tiny")
    kind, text, vision = _parts(size, tiny)
    if layers is not None:
        text = text | {"num_hidden_layers": layers}
    sound: dict[str, Any] = {}
    if "omni" in size:
        heard = TINY_AUDIO if tiny else AUDIO
        sound = {name: words - 9 - number for number, name in enumerate(SOUND_TOKENS)}
        sound |= {"audio_config": heard | {"output_dim": text["hidden_size"]}}
    shared = {
        "vocab_size": words,
        "max_position_embeddings": 32_768,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": size == "3b",
    }
    return kind(
        text_config=shared | text,
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        image_token_id=words - 8,
        video_token_id=words - 7,
        vision_start_token_id=words - 6,
        vision_end_token_id=words - 5,
        tie_word_embeddings=size == "3b",
        **sound,
    )


SOUND_TOKENS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")


def vision_of(size: str) -> dict[str, Any]:
    """The tower of a size of Qwen2.5-VL."""
    return VISION | (TINY_VISION if size == "tiny" else {"intermediate_size": 3456} if size == "32b" else {})


def _parts(size: str, tiny: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The class of a config, and what is special in its text and vision parts."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    interleaved = rope | {"mrope_interleaved": True}
    if "qwen3.5" in size:
        sections = [4, 2, 2] if tiny else [12, 10, 10]
        text = TINY_HYBRID_TEXT if tiny else HYBRID_TEXT
        text = text | {"rope_parameters": interleaved | {"mrope_section": sections, "partial_rotary_factor": 0.25}}
        vision = TINY_MOE_VISION if tiny else MOE_VISION
        return transformers.Qwen3_5Config, text, {k: v for k, v in vision.items() if k != "deepstack_visual_indexes"}
    if size in ("30b-a3b", "tiny-moe", "omni-30b-a3b", "tiny-omni"):
        text = TINY_MOE_TEXT if tiny else MOE_TEXT
        text = text | {"rope_parameters": interleaved | {"mrope_section": [4, 6, 6] if tiny else [24, 20, 20]}}
        kind = transformers.Qwen3OmniMoeThinkerConfig if "omni" in size else transformers.Qwen3VLMoeConfig
        return kind, text, TINY_MOE_VISION if tiny else MOE_VISION
    text = TEXT[size] | {"rope_parameters": rope | {"mrope_section": [4, 6, 6] if tiny else [16, 24, 24]}}
    return transformers.Qwen2_5_VLConfig, text, vision_of(size)


def make_batch(config: Any, shape: Shape, prompts: int, samples: int, seed: int) -> DataProto:
    """``prompts`` x ``samples`` rows like those of a rollout, with the samples of a prompt next to each other."""
    family, rng = family_of(config), np.random.default_rng(seed)
    vision, words, audio = config.vision_config, config.image_token_id - 8, getattr(config, "audio_config", None)
    dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pool = torch.from_numpy(rng.standard_normal((8 * shape.total, dim), dtype=np.float32))  # images are parts of it
    rows, media = [], []
    for _ in range(prompts):
        while True:  # a prompt that leaves room for the shortest response
            sides = rng.integers(shape.side[0], shape.side[1] + 1, (rng.integers(*shape.images, endpoint=True), 2))
            text = int(rng.integers(*shape.text, endpoint=True))
            if text + int(sides.prod(1).sum()) + 2 * len(sides) <= shape.total - shape.response[0]:
                break
        grids = torch.tensor([[1, 2 * height, 2 * width] for height, width in sides.tolist()])
        patches = int(grids.prod(1).sum())
        first = int(rng.integers(0, len(pool) - patches))
        inputs = {"pixel_values": pool[first : first + patches], "image_grid_thw": grids}
        marks = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id] * len(sides)
        if audio is not None:
            frames = int(rng.integers(*shape.sound, endpoint=True))
            inputs["input_features"] = torch.from_numpy(rng.standard_normal((frames, audio.num_mel_bins), np.float32))
            inputs["audio_feature_lengths"] = torch.tensor([frames])
            marks += [config.audio_start_token_id, config.audio_token_id, config.audio_end_token_id]
        ids, types = family.expand([*marks, *rng.integers(0, words, text).tolist()], inputs, config)
        rows += [(torch.from_numpy(ids), torch.from_numpy(types))] * samples
        media += [inputs] * samples
    drawn = np.exp(rng.normal(math.log(shape.typical_response), 0.7, len(rows))).astype(int)
    lengths = [
        min(int(np.clip(length, *shape.response)), shape.total - len(ids))
        for length, (ids, _) in zip(drawn, rows, strict=True)
    ]
    prompt, width = max(len(ids) for ids, _ in rows), max(lengths)
    ids, mask = (torch.zeros(len(rows), prompt + width, dtype=torch.int64) for _ in range(2))
    types = torch.zeros(len(rows), prompt + width, dtype=torch.int8)
    for row, ((prompt_ids, prompt_types), length) in enumerate(zip(rows, lengths, strict=True)):
        start, stop = prompt - len(prompt_ids), prompt + length
        ids[row, start:prompt], types[row, start:prompt] = prompt_ids, prompt_types
        ids[row, prompt:stop] = torch.from_numpy(rng.integers(0, words, length))
        mask[row, start:stop] = 1
    positions = family.position_ids(
        types[:, :prompt], mask[:, :prompt], media_grids(media)["image_grid_thw"], None, None, config
    )
    after = family.extend_positions(positions, mask[:, :prompt], width)
    objects = np.empty(len(rows), dtype=object)
    objects[:] = media
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": types,
            "position_ids": torch.cat([positions, after], dim=-1),
            "response_mask": mask[:, prompt:],
            "old_log_probs": torch.full((len(rows), width), -math.log(config.text_config.vocab_size)),
            "advantages": torch.from_numpy(rng.standard_normal((len(rows), 1), dtype=np.float32)).repeat(1, width),
        },
        non_tensors={
            "multi_modal_inputs": objects,
            "uid": np.array([str(row // samples) for row in range(len(rows))], dtype=object),
        },
    )
