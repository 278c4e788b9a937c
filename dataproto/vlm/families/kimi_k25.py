"""Kimi K2.5 and K2.6: the decoder of DeepSeek-V3, whose attention compresses keys and values (multi-head latent attention,
arXiv:2412.19437, section 2.1), with a tower for images of any size. Positions are one-dimensional.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig
from dataproto.vlm.costs import causal_pairs, siglip_flops
from dataproto.vlm.families.glm4v import GLM4VMoe, mixture_weights
from dataproto.vlm.family import TensorPlan, VLMFamily, moved
from dataproto.vlm.media import Options, ShrunkImages

ATTENTION = "model.language_model.layers.*.self_attn"

LATENT_PLAN: TensorPlan = (
    (f"{ATTENTION}.q_b_proj", "colwise"),
    (f"{ATTENTION}.kv_b_proj", "colwise"),
    (f"{ATTENTION}.o_proj", "rowwise"),
)
"""Tensor-parallel plan of latent attention: heads are split, compressed queries, keys and values are computed on every rank."""

TOWER = "vision_tower.encoder"
BLOCK = rf"{TOWER}.blocks.\1"
PUBLISHED_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_tower\.layers\.(\d+)\.norm1", rf"{BLOCK}.norm0"),
    (r"^model\.vision_tower\.layers\.(\d+)\.norm2", rf"{BLOCK}.norm1"),
    (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc1", rf"{BLOCK}.mlp.fc0"),
    (r"^model\.vision_tower\.layers\.(\d+)\.mlp\.fc2", rf"{BLOCK}.mlp.fc1"),
    (r"^model\.vision_tower\.layers\.(\d+)\.attn\.proj", rf"{BLOCK}.wo"),
    (r"^model\.vision_tower\.layers\.(\d+)\.attn\.([qkv])_proj", rf"{BLOCK}.wqkv.\2"),
    (r"^model\.vision_tower\.final_layernorm", f"{TOWER}.final_layernorm"),
    (r"^model\.vision_tower\.patch_embed\.pos_emb\.position_embeddings", "vision_tower.patch_embed.pos_emb.weight"),
    (r"^model\.mm_projector\.in_proj", "mm_projector.proj.0"),
    (r"^model\.mm_projector\.out_proj", "mm_projector.proj.2"),
    (r"^model\.", ""),
)
"""Patterns of names of parameters, of which the first that fits is replaced, and the names in published checkpoints. Queries,
keys and values of the tower, which are one tensor there, get a name with a letter that `KimiK25.rollout_weights` takes away.
"""

SAVED_NAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}
"""Beginnings of names that transformers 5.23 writes, because it applies the rules that it reads checkpoints by backwards to more
names than they are for, and the published ones."""


class SquarePatches(ShrunkImages):
    """`PatchGrids` of only images, whose patches ``(patches, 3, side, side)`` lie row by row."""

    limit, unit = "max_patches", "patch"

    def merge_size(self, config: Any) -> int:
        """From the config of the tower."""
        return int(config.vision_config.merge_kernel_size[0])

    def unit_area(self, processor: Any) -> int:
        """That of a patch."""
        return int(processor.patch_size) ** 2

    def patch_shape(self, vision: Any) -> tuple[int, ...]:
        """That of its pixels."""
        return (3, int(vision.patch_size), int(vision.patch_size))

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Of the image after `scaled_size`, filled up to whole features."""
        patch, side = int(processor.patch_size), self.merge_size(config) * int(processor.patch_size)
        most = int(options["max_patches"]), int(processor.size["max_height"])
        return math.prod(-(-size // side) for size in scaled_size(height, width, patch, *most))


def scaled_size(height: int, width: int, patch: int, max_patches: int, max_side: int) -> tuple[int, int]:
    """Height and width of an image that is scaled down to at most ``max_patches``, and ``max_side`` along each side.

    >>> scaled_size(140, 280, 14, max_patches=50, max_side=512), scaled_size(30, 20, 14, max_patches=50, max_side=512)
    ((70, 140), (30, 20))
    """
    patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(max_patches / patches), max_side * patch / height, max_side * patch / width)
    found = (min(max(1, int(side * scale)), max_side * patch) for side in (height, width))
    return next(found), next(found)


class KimiK25(VLMFamily):
    """Kimi K2.5. After the first dense layers a mixture of experts, chosen as GLM-4.5V does."""

    model_type = "kimi_k25"
    published = ("Kimi-K2.5", "Kimi-K2.6")
    vllm_module = "vllm.transformers_utils.processors.kimi_k25_vision_fused"
    """Older versions run code in the checkpoint."""
    rollout_modality = "vision_chunk"
    media_layout = SquarePatches()
    mrope = False
    vision_tower = "model.vision_tower"
    vision_blocks = "model.vision_tower.layers"
    mergers = ("model.mm_projector",)
    checkpoint_names = PUBLISHED_NAMES
    experts = GLM4VMoe.experts
    tensor_plan = (*(each for each in GLM4VMoe.tensor_plan if ".self_attn." not in each[0]), *LATENT_PLAN)
    expert_count = GLM4VMoe.expert_count
    expert_weights = GLM4VMoe.expert_weights

    def check_supported(self, config: Any) -> None:
        """Refuses queries that are not compressed: other decoders of the type have them."""
        super().check_supported(config)
        if config.get_text_config().q_lora_rank is None:
            raise InvalidConfig(
                "models of type kimi_k25 with q_lora_rank=None are not supported: use Kimi K2.5 or K2.6"
            )

    def banned_ids(self, config: Any) -> tuple[int, ...]:
        """Those of the vocabulary: published configs name a token of videos after its end."""
        size = int(config.get_text_config().vocab_size)
        return tuple(token for token in super().banned_ids(config) if token < size)

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower and the projector. What depends only on grids is computed where they are."""
        tower, projector = (model.get_submodule(path) for path in self.vision_parts)
        pixels, grids = media["pixel_values"], media["image_grid_thw"]
        if grids.device != pixels.device:
            vision_kwargs = moved(grid_arguments(tower, grids), pixels.device) | vision_kwargs
        pixels = pixels.to(tower.patch_embed.proj.weight.dtype)
        features: Tensor = projector(tower(pixels, grid_thw=grids, **vision_kwargs).pooler_output).squeeze(1)
        return features

    def stored_name(self, name: str) -> str:
        """See `SAVED_NAMES`."""
        for saved, published in SAVED_NAMES.items():
            if name.startswith(saved):
                return published + name.removeprefix(saved)
        return name

    def rollout_weights(self, weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
        """Experts apart, and the tower's queries, keys and values as one tensor, in which the two numbers that are rotated
        together are neighbours.

        Raises:
            ValueError: the tower's queries, keys or values of a layer are missing.
        """
        heads = int(config.vision_config.num_attention_heads)
        waiting: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
        for name, weight in super().rollout_weights(weights, config):
            before, fused, after = name.partition(".wqkv.")
            if ".mlp.experts." in name:
                yield from apart(name, weight)
                continue
            if not fused:
                yield name, weight
                continue
            which, kind = after.split(".")
            parts = waiting[before, kind]
            parts[which] = weight if which == "v" else neighbours(weight, heads)
            if len(parts) == 3:
                del waiting[before, kind]
                yield f"{before}.wqkv.{kind}", torch.cat([parts["q"], parts["k"], parts["v"]])
        for (before, kind), parts in waiting.items():
            given = ", ".join(sorted(parts))
            raise ValueError(
                f"{before}.wqkv.{kind} has only {given}: give the tower's queries, keys and values (q, k, v) together"
            )

    def rollout_config(self, config: Any) -> dict[str, Any]:
        """The class that published configs name, and how they say that experts are scored, which transformers leaves out."""
        scores = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": scores}

    def rollout_media(self, media: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Grids under vLLM's name."""
        return {"grid_thws" if name == "image_grid_thw" else name: value for name, value in media.items()}

    def layer_weights(self, text: Any, layer: int) -> int:
        """Attention with compressed queries, keys and values; a dense MLP, or router, chosen and shared experts."""
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        queries = int(text.q_lora_rank) * (hidden + heads * int(text.qk_nope_head_dim + text.qk_rope_head_dim))
        latent, values = int(text.kv_lora_rank), heads * int(text.v_head_dim)
        keys = hidden * (latent + int(text.qk_rope_head_dim)) + latent * (heads * int(text.qk_nope_head_dim) + values)
        attention = queries + keys + values * hidden
        if layer < int(text.first_k_dense_replace):
            return attention + 3 * hidden * int(text.intermediate_size)
        return attention + hidden * mixture_weights(text)

    def mixing_flops(self, text: Any, lengths: Tensor) -> Tensor:
        """Attention whose values are narrower than its keys."""
        width = int(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
        return 2 * int(text.num_hidden_layers * text.num_attention_heads) * width * causal_pairs(lengths)

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within an image, an MLP of two layers, and a projector of two."""
        vision, merge = config.vision_config, self.merge_size(config)
        joined = merge**2 * int(vision.hidden_size)
        return siglip_flops(vision, grids, joined**2 + joined * int(config.text_config.hidden_size), merge)


def apart(name: str, experts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights of each expert, of fused ones ``(experts, out, in)``."""
    path, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for number, expert in enumerate(experts):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{path}.{number}.{part}.weight", weight


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection ``(heads * D, ...)`` reordered in each head: numbers i and i + D / 2 become 2 i and 2 i + 1.

    >>> neighbours(torch.arange(8), heads=2)
    tensor([0, 2, 1, 3, 4, 6, 5, 7])
    """
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 2)


def grid_arguments(tower: Any, grids: Tensor) -> dict[str, Any]:
    """Keywords of the tower's forward that depend only on grids ``(N, 3)`` of images, computed where the grids are."""
    from transformers import vision_utils as hf
    from transformers.models.kimi_k25.modeling_kimi_k25 import get_vision_frame_index, get_vision_temporal_merge_index

    table = tower.patch_embed.pos_emb
    bounds = hf.get_vision_cu_seqlens(grids, merge_temporal=True)
    indices, weights = hf.get_vision_interpolation_indices_and_weights(
        grids, table.num_grid_per_side, table.interpolation_mode, table.interpolation_align_corners
    )
    return {
        "position_ids": hf.get_vision_position_ids(grids, 1),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
        "interp_indices": indices,
        "interp_weights": weights,
        "frame_index": get_vision_frame_index(grids),
        "temporal_merge_index": get_vision_temporal_merge_index(grids, *tower.merge_kernel_size),
    }
