"""Tiny random models of the Hugging Face classes, one for each family."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from dataproto.vlm import family_of

HYBRID_TYPES = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")
GLM_TYPES = ("glm4v", "glm4v_moe", "glm46v", "glm46v+glm4v_moe_text")
GEMMA4_TYPES = ("gemma4", "gemma4+per_layer", "gemma4+moe")
OMNI_TYPES = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Families that read sounds. In all tests a sound follows each image."""
MOE_TYPES = (
    *("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "glm46v+glm4v_moe_text", "internvl+qwen3_moe", "kimi_k25"),
    *("gemma4+moe", "qwen3_omni_moe_thinker"),
)
MROPE_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
WINDOWED_TYPES = ("gemma3", "gemma4")
VLM_TYPES = (*MROPE_TYPES, "internvl", "glm4v", "smolvlm", *WINDOWED_TYPES)
TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MODEL_TYPES = (*VLM_TYPES, "qwen3")  # one model without a vision tower for all
FURTHER_TYPES = (
    *("glm4v_moe", "glm46v", "glm46v+glm4v_moe_text", "internvl+qwen3_moe", "minicpmv4_6", "kimi_k25"),
    *("gemma4+per_layer", "gemma4+moe", "muse_glimmer", *OMNI_TYPES),
)
"""Families close to others, whose costly checks are left to the long tests."""
ALL_TYPES = tuple(dict.fromkeys((*MODEL_TYPES, *FURTHER_TYPES, "idefics3", *TEXT_TYPES)))
EACH_TYPE = tuple(each if each in MODEL_TYPES else pytest.param(each, marks=pytest.mark.long) for each in ALL_TYPES)
"""All families; costly checks of those beside `MODEL_TYPES` are left to the long tests."""
TILED = ("internvl", "internvl+qwen3_moe", "smolvlm", "idefics3")
VOCABULARY = 256
IMAGE, VIDEO, START, END = 250, 251, 252, 253
AUDIO, AUDIO_START, AUDIO_END = 254, 248, 249

CLASSES = {
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    **dict.fromkeys(GEMMA4_TYPES, ("Gemma4Config", "Gemma4ForConditionalGeneration")),
    "internvl": ("InternVLConfig", "InternVLForConditionalGeneration"),
    "glm4v": ("Glm4vConfig", "Glm4vForConditionalGeneration"),
    "glm4v_moe": ("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration"),
    "glm46v": ("Glm46VConfig", "Glm46VForConditionalGeneration"),
    "glm46v+glm4v_moe_text": ("Glm46VConfig", "Glm46VForConditionalGeneration"),
    "internvl+qwen3_moe": ("InternVLConfig", "InternVLForConditionalGeneration"),
    "minicpmv4_6": ("MiniCPMV4_6Config", "MiniCPMV4_6ForConditionalGeneration"),
    "kimi_k25": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration"),
    "muse_glimmer": ("MuseGlimmerConfig", "MuseGlimmerForConditionalGeneration"),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinkerConfig", "Qwen2_5OmniThinkerForConditionalGeneration"),
    "qwen3_omni_moe_thinker": ("Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "smolvlm": ("SmolVLMConfig", "SmolVLMForConditionalGeneration"),
    "idefics3": ("Idefics3Config", "Idefics3ForConditionalGeneration"),
}
_VISION = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_VISION["qwen3_5"] = {name: size for name, size in _VISION["qwen3_vl"].items() if name != "deepstack_visual_indexes"}
_VISION["qwen3_5_moe"] = _VISION["qwen3_5"]
_VISION["qwen2_5_omni_thinker"] = {
    name: size for name, size in _VISION["qwen2_5_vl"].items() if name != "tokens_per_second"
}
_VISION["qwen3_omni_moe_thinker"] = _VISION["qwen3_vl"]
_SOUND = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 64,
    "max_source_positions": 64,
}
_AUDIO: dict[str, dict[str, Any]] = {  # chunks of 8 frames, or windows of two chunks of 100
    "qwen2_5_omni_thinker": _SOUND | {"n_window": 4},
    "qwen3_omni_moe_thinker": _SOUND | {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 4},
}
_GLM_VISION = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "image_size": 32}
_VISION |= dict.fromkeys(GLM_TYPES, _GLM_VISION)
WINDOW = 7
"""Tokens that a query sees in layers with a sliding window: fewer than rows have, and than a prompt with images."""
TILE = 16  # side of tiles in pixels: 4 x 4 patches, 4 tokens
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
# As in config.json of published checkpoints. vLLM reads the last two; the Hugging Face classes assume them.
_QWEN3_TEXT = {"head_dim": 32, "rope_parameters": _ROPE | {"mrope_interleaved": True}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_TEXT_ONLY = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 32}}
_RECURRENT = {  # heads of attention are larger, since a quarter of them is rotated; vLLM's kernel takes recurrent ones from 64 on
    "num_attention_heads": 2,
    "head_dim": 64,
    "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_HALF_ROTATED = {
    "head_dim": 32,
    "attention_bias": True,  # as published checkpoints say, for vLLM
    "rope_parameters": _ROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
}
_GROUPED_EXPERTS = _HALF_ROTATED | {  # two groups of experts, of which a token is sent to one
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": False,  # as published checkpoints say, for vLLM
}
_TEXT = {
    "glm4v": _HALF_ROTATED,
    "glm46v": _HALF_ROTATED,
    "glm4v_moe": _GROUPED_EXPERTS,
    "glm46v+glm4v_moe_text": _GROUPED_EXPERTS | {"model_type": "glm4v_moe_text"},
    "qwen3_5": _RECURRENT,
    "qwen3_5_moe": _RECURRENT | _SPARSE,
    "qwen3_vl": _QWEN3_TEXT,
    "qwen3_vl_moe": _QWEN3_TEXT | _EXPERTS,
    "qwen3_omni_moe_thinker": _QWEN3_TEXT | _EXPERTS,
}


def tiny_config(model_type: str) -> Any:
    """Hidden 64, 2 decoder layers, 2 heads of 32, 1 key-value head; vision depth 2, 4-pixel patches merged 2 x 2."""
    if model_type.startswith("internvl"):
        return _tiny_internvl(model_type.endswith("moe"))
    if model_type == "gemma3":
        return _tiny_gemma3()
    if model_type in GEMMA4_TYPES:
        return _tiny_gemma4(model_type)
    if model_type in TEXT_TYPES:
        return getattr(transformers, CLASSES[model_type][0])(**_BASE_TEXT | _TEXT_ONLY.get(model_type, {}))
    if model_type in TILED:
        return _tiny_idefics3(model_type)
    if model_type == "minicpmv4_6":
        return _tiny_minicpm()
    if model_type == "kimi_k25":
        return _tiny_kimi()
    if model_type == "muse_glimmer":
        return _tiny_muse()
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    named = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if model_type in OMNI_TYPES:
        named = {
            **{name.replace("_id", "_index") if "2_5" in model_type else name: token for name, token in named.items()},
            "audio_token_index" if "2_5" in model_type else "audio_token_id": AUDIO,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
            "audio_config": _AUDIO[model_type],
            "position_id_per_seconds": 5,
        }
    text = _BASE_TEXT | {"rope_parameters": _ROPE}
    return getattr(transformers, CLASSES[model_type][0])(
        text_config=text | _TEXT.get(model_type, {}),
        vision_config=vision | _VISION[model_type],
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        **named,
        **({f"{name}_token_id": 246 + i for i, name in enumerate(_GLM_TOKENS)} if model_type in GLM_TYPES else {}),
    )


_GLM_TOKENS = ("image_start", "image_end", "video_start", "video_end")
_BASE_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _tiny_internvl(sparse: bool) -> Any:
    text = {"model_type": "qwen3_moe", "head_dim": 32} | _EXPERTS if sparse else {"model_type": "qwen2"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [TILE, TILE],
        "patch_size": [4, 4],
    }
    return transformers.InternVLConfig(
        text_config=_BASE_TEXT | text,
        vision_config=vision,
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def _tiny_gemma3() -> Any:
    """A layer with a sliding window, and one without. Images are 16 x 16 pixels, 4 tokens."""
    windowed = {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return transformers.Gemma3Config(
        text_config=_BASE_TEXT | windowed,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )


_GEMMA4_TEXT: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4+per_layer": {  # the last two of five layers have the keys and values of the two before them
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "use_bidirectional_attention": None,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4+moe": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}


def _tiny_gemma4(model_type: str) -> Any:
    """A layer with a sliding window, and one without, whose heads are twice as wide and whose keys are also values."""
    windowed = {
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 6.0,
        "hidden_size_per_layer_input": 0,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "patch_size": 4,
        "position_embedding_size": 64,
        "default_output_length": 70,  # published configs have it, and vLLM reads it
    }
    return transformers.Gemma4Config(
        text_config=_BASE_TEXT | windowed | _GEMMA4_TEXT[model_type],
        vision_config=vision | {"use_clipped_linears": model_type == "gemma4+per_layer"},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        boi_token_id=START,
        eoi_token_id=END,
        audio_token_id=249,
        boa_token_id=248,
        eoa_token_index=247,
        tie_word_embeddings=False,
    )


def _tiny_minicpm() -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    }
    return transformers.MiniCPMV4_6Config(
        text_config=_BASE_TEXT | _RECURRENT | {"model_type": "qwen3_5_text"},
        vision_config=vision,
        insert_layer_id=0,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )


def _tiny_kimi() -> Any:
    """A dense layer and a sparse one; heads have queries and keys of 16 + 64, and values of 24.

    The latent has the size of published ones, which vLLM's kernel for the CPU is compiled for.
    """
    latent = {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 64,
        "v_head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "num_nextn_predict_layers": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    return transformers.Kimi_K25Config(
        text_config=_BASE_TEXT | latent,
        vision_config=vision,
        projection_hidden_size=32,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def _tiny_muse() -> Any:
    """A layer with a sliding window, and one without positions. Windows of the tower have 4 x 4 patches."""
    text = {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": WINDOW,
        "final_logit_softcapping": 2.0,
        "output_multiplier": 0.5,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        "layer_types": ["window_attention", "full_attention"],
    }
    return transformers.MuseGlimmerConfig(
        text_config=_BASE_TEXT | text,
        vision_config=vision,
        out_hidden_size=128,
        projector_hidden_size=48,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )


def _tiny_idefics3(model_type: str) -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 4,
    }
    return getattr(transformers, CLASSES[model_type][0])(
        text_config=_BASE_TEXT | {"model_type": "llama", "head_dim": 32, "pad_token_id": None},
        vision_config=vision,
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def tiny_model(model_type: str, seed: int = 0, config: Any = None) -> Any:
    """A float32 model with sdpa attention, by default of `tiny_config`. No weight is zero, since zeros could hide errors."""
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[model_type][1])._from_config(
        tiny_config(model_type) if config is None else config, attn_implementation="sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        for name, weight in model.state_dict().items():  # buffers of checkpoints as well
            if name.endswith(
                ("input_min", "input_max", "output_min", "output_max")
            ):  # which are infinite: some values are cut
                weight.fill_(-1.0 if name.endswith("_min") else 1.0)
            weight.add_(torch.randn_like(weight) * 0.05)
    return model.eval()


def image_inputs(config: Any, *grids: tuple[int, int], seed: int = 0, kind: str = "image") -> dict[str, torch.Tensor]:
    """``multi_modal_inputs`` with random patches. A grid is rows and columns of patches of an image, for videos time first.

    For families with tiles the images become the number of tiles that hold these patches; of MiniCPM's features a side is 4
    patches, and images of more than 32 patches have two slices besides; for a model of text alone there are none.
    """
    if config.model_type in TEXT_TYPES:
        return {}
    vision = config.vision_config
    grid_thw = torch.tensor([(1, *grid)[-3:] for grid in grids])
    generator = torch.Generator().manual_seed(seed)
    if config.model_type == "gemma3":  # images of any size become squares of one size
        return {"pixel_values": torch.randn(len(grids), 3, TILE, TILE, generator=generator)} if grids else {}
    if config.model_type == "gemma4":
        return _placed_patches(config, grids, generator) if grids else {}
    if config.model_type in TILED:
        tiles = [ceil(rows * columns * 16 / TILE**2) for rows, columns in grids]
        pixels = torch.randn(sum(tiles), 3, TILE, TILE, generator=generator)
        if config.model_type == "internvl":  # with any language model
            return {"pixel_values": pixels}
        cut = torch.tensor([[1, count - 1] if count > 1 else [0, 0] for count in tiles])
        return {"pixel_values": pixels.unsqueeze(1), "image_tiles": cut}
    if config.model_type == "minicpmv4_6":
        return _sliced(vision, grids, generator)
    if config.model_type == "kimi_k25":
        pixels = torch.randn(int(grid_thw.prod(-1).sum()), 3, vision.patch_size, vision.patch_size, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid_thw} if grids else {}
    channels, times = getattr(vision, "in_channels", 3), getattr(vision, "temporal_patch_size", 2)
    dim = channels * times * vision.patch_size**2
    pixels = torch.randn(int(grid_thw.prod(-1).sum()), dim, generator=generator)
    suffix = "" if kind == "image" else "_videos"
    made = {f"pixel_values{suffix}": pixels, f"{kind}_grid_thw": grid_thw}
    if config.model_type in OMNI_TYPES and kind == "image":
        made |= sounds(config, *(rows * columns for rows, columns in grids), seed=seed) if grids else {}
    elif config.model_type in OMNI_TYPES:
        made["second_per_grid_ts"] = torch.full((len(grids),), 2.0)
    return made


def sounds(config: Any, *frames: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """``multi_modal_inputs`` of sounds of so many random mel frames; 100 more for Qwen3-Omni, see `LongerSounds`."""
    lengths = torch.tensor(frames) + (0 if config.model_type == OMNI_TYPES[0] else 100)
    generator = torch.Generator().manual_seed(seed + 100)
    features = torch.randn(int(lengths.sum()), config.audio_config.num_mel_bins, generator=generator)
    return {"input_features": features, "audio_feature_lengths": lengths}


def _placed_patches(config: Any, grids: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One image after another."""
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1) for rows, columns in grids]
    size = 3 * config.vision_config.patch_size**2
    return {
        "pixel_values": torch.rand(sum(map(len, places)), size, generator=generator),
        "image_position_ids": torch.cat(places),
    }


def _sliced(vision: Any, grids: tuple[tuple[int, int], ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    sizes, slices = [], []
    for rows, columns in grids:
        fine = rows * columns > 32
        sizes += [[4 * ceil(rows / 4), 4 * ceil(columns / 4)], *([[4, 4]] * 2 * fine)]
        slices.append([1, 2] if fine else [0, 0])
    patches = sum(rows * columns for rows, columns in sizes)
    pixels = torch.randn(patches, 3, vision.patch_size, vision.patch_size, generator=generator)
    return {"pixel_values": pixels, "target_sizes": torch.tensor(sizes), "image_slices": torch.tensor(slices)}


def takes_video(model_type: str) -> bool:
    """Whether the family has inputs for videos."""
    return bool(family_of(model_type).media_layout.names("video"))


def expand(config: Any, ids: list[int], *grids: tuple[int, int], clip: Any = None, **told: Any) -> Any:
    """The family's expansion of ``ids`` with images of these grids and the inputs ``clip`` of a video."""
    images = [image_inputs(config, grid) for grid in grids]
    told = {"encode_text": encode_text} | told
    return family_of(config).expand(ids, images if clip is None else [*images, clip], config, **told)


def encode_text(text: str) -> list[int]:
    """Token ids of the text that families insert around media."""
    if text.strip("\n") in ("<img>", "<start_of_image>", "<|image>", "<|image_start|>"):
        return [START]
    if text.strip("\n") in ("</img>", "<end_of_image>", "<image|>", "<|image_end|>"):
        return [END]
    return [60 + len(text)] if text.strip("\n") else [59] * len(text)


def forward_inputs(model: Any, types: torch.Tensor, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Token types ``(B, L)`` and joined media as the forward of Hugging Face takes them."""
    if model.config.model_type in OMNI_TYPES:
        return forward_media(model, media)
    name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    return {name: types.int(), **forward_media(model, media)}


def forward_media(model: Any, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Joined media as the forward of Hugging Face takes them: padded for Gemma 4, and MiniCPM's patches beside each other."""
    if "image_position_ids" in media:
        counts = family_of(model).grids(media, model.config).prod(1).tolist()
        fills = {"pixel_values": 0.0, "image_position_ids": -1}
        return {
            name: torch.nn.utils.rnn.pad_sequence(media[name].split(counts), batch_first=True, padding_value=fill)
            for name, fill in fills.items()
        }
    if "target_sizes" in media:
        pixels = media["pixel_values"].permute(1, 2, 0, 3)
        return {"pixel_values": pixels.reshape(1, *pixels.shape[:2], -1), "target_sizes": media["target_sizes"]}
    if model.config.model_type in OMNI_TYPES:
        made = dict(media)
        if "second_per_grid_ts" in made:
            made["video_second_per_grid"] = made.pop("second_per_grid_ts")
        if "input_features" in made:
            lengths = made.pop("audio_feature_lengths")
            parts = made["input_features"].split(lengths.tolist())
            made["input_features"] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)
            made["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return made
    return dict(media)


def rounding(name: str) -> float:
    """The norm of a gradient of this parameter that is rounding alone: a bias of keys has no effect on the softmax."""
    return 1e-6 if name.endswith("k_proj.bias") else 1e-8


def gradient_tolerance(model_type: str) -> float:
    """Of a gradient's norm: what the order of float32 sums may change. Recurrent layers sum over all tokens before, and Gemma 4's
    tower sums over all patches and padding.
    """
    return 1e-4 if model_type in (*HYBRID_TYPES, *GEMMA4_TYPES) else 1e-5


@contextmanager
def token_by_token() -> Iterator[None]:
    """Recurrent layers of Hugging Face compute token after token in here, in plain torch, also where kernels are installed. Their
    rule by chunks takes differences of sums of decays, which costs digits.
    """
    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            exact = inspect.unwrap(module.torch_recurrent_gated_delta_rule)
            stack.enter_context(mock.patch.object(module, "torch_chunk_gated_delta_rule", exact))
            stack.enter_context(mock.patch.object(module, "causal_conv1d_fn", inspect.unwrap(module.causal_conv1d_fn)))
        yield


def placeholder(model_type: str, kind: int = IMAGE) -> list[int]:
    """The token ids that a chat template writes for a medium; none for a model of text alone."""
    if model_type in TEXT_TYPES:
        return []
    if model_type in OMNI_TYPES and kind == IMAGE:
        return [START, IMAGE, END, AUDIO_START, AUDIO, AUDIO_END]
    return [kind] if any(family_of(model_type).image_text) else [START, kind, END]


def forward_positions(positions: torch.Tensor) -> torch.Tensor:
    """Position ids as a model expects them: ``(B, 4, L)`` becomes ``(4, B, L)``, ``(B, L)`` is unchanged."""
    return positions.transpose(0, 1) if positions.ndim == 3 else positions


def padded(rows: Any, side: str = "left") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``input_ids``, ``mm_token_type_ids`` and ``attention_mask`` ``(B, L)`` of rows ``(ids, token_types)``."""
    length = max(len(ids) for ids, _ in rows)
    out = torch.zeros(3, len(rows), length, dtype=torch.int64)
    for row, (ids, types) in enumerate(rows):
        place = slice(length - len(ids), length) if side == "left" else slice(0, len(ids))
        out[:, row, place] = torch.stack(
            [torch.as_tensor(ids), torch.as_tensor(types).long(), torch.ones(len(ids)).long()]
        )
    return out[0], out[1], out[2]


def whole_omni(path: Any) -> Any:
    """A checkpoint of a small Qwen2.5-Omni with the talker, which speaks, and the voices that belong to it."""
    thinker = tiny_config(OMNI_TYPES[0])
    speech = {f"tts_codec_{name}_token_id": 28 + place for place, name in enumerate(("start", "end", "pad", "mask"))}
    ends = dict.fromkeys(
        ("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id"), 7
    )
    talker = {**_BASE_TEXT, **speech, **ends, "vocab_size": 32, "embedding_size": 64, "hidden_size": 32, "head_dim": 32}
    tokens = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 16,
        "mel_dim": 8,
    }
    encoder = {"enc_emb_dim": 16, "enc_dim": 16, "enc_channels": (16, 16, 16, 16, 32), "num_embeds": 33}
    wave = {"mel_dim": 8, "upsample_initial_channel": 16, "upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4)}
    config = transformers.Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config=talker | {"rope_parameters": _ROPE},
        token2wav_config={"dit_config": tokens | encoder, "bigvgan_config": wave},
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5OmniForConditionalGeneration(config)
    model.save_pretrained(path)
    torch.save({"Ethan": {"bos_token": 1, "cond": torch.ones(2), "ref_mel": torch.ones(3)}}, path / "spk_dict.pt")
    return model


def embedded(family, model, ids, inputs, spans=None):
    """Embeddings with the features of joined media, and the `VLMFamily.extras`."""
    return family.merge(model, ids, family.features(model, inputs) if inputs else None, spans)
