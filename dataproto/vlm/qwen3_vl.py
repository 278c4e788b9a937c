"""Qwen3-VL, dense and mixture of experts: videos told frame by frame with times in text, and deep vision features
("DeepStack", arXiv 2406.04334) that are added to the hidden states behind the first decoder layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dataproto.vlm.family import DECODER_PLAN, VLMFamily
from dataproto.vlm.flops import (
    attention_weights,
    dense_layer_weights,
    frame_pairs,
    merger_weights,
    patch_weights,
    vision_flops,
)
from dataproto.vlm.media import MediaSpans
from dataproto.vlm.mrope import Pieces


def _frames(grids: Tensor, seconds: Tensor | Sequence[float] | None, config: Any) -> Pieces:
    """Each frame is a piece of its own; its time stands in the text before it, so ``seconds`` plays no part."""
    frames = torch.repeat_interleave(grids, grids[:, 0], dim=0)
    frames[:, 0] = 1
    return Pieces.of_grids(frames, config.vision_config.spatial_merge_size)


def _deep_features(output: Any) -> Sequence[Any]:
    levels: Sequence[Any] = output.deepstack_features
    return levels


def _deepstack(features: Tensor, shape: torch.Size, spans: MediaSpans) -> dict[str, Tensor]:
    """``visual_pos_masks (B, L)`` bool, the media tokens, and ``deepstack_visual_embeds (D, M, H)``: what decoder layer
    d adds to each of them, in the mask's order.
    """
    mask = torch.zeros(shape, dtype=torch.bool, device=spans.positions.device)
    mask.view(-1)[spans.positions] = True
    deep = features[:, 1:].index_select(0, spans.features)
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": deep.transpose(0, 1)}


def _deep_layers(config: Any) -> int:
    return len(config.vision_config.deepstack_visual_indexes)


def _dense_deepstack(levels: Tensor) -> dict[str, Tensor]:
    """Every token takes part; most of them get zeros."""
    everywhere = torch.ones(1, levels.shape[1], dtype=torch.bool, device=levels.device)
    return {"visual_pos_masks": everywhere, "deepstack_visual_embeds": levels}


def _vision_flops(config: Any, grids: Tensor) -> Tensor:
    vision = config.vision_config
    width = int(vision.hidden_size)
    mergers = 1 + len(vision.deepstack_visual_indexes)
    return vision_flops(
        grids,
        patch=patch_weights(vision, width),
        block=4 * width**2 + 2 * width * int(vision.intermediate_size),
        merger=mergers * merger_weights(vision, width, int(vision.out_hidden_size)),
        merge_size=int(vision.spatial_merge_size),
        width=width,
        pairs=[frame_pairs(grids)] * int(vision.depth),
    )


def _expert_layer_weights(text: Any, layer: int) -> int:
    """Router and the experts chosen for a token, or a dense MLP in the layers that have one."""
    sparse = layer not in (text.mlp_only_layers or ()) and (layer + 1) % text.decoder_sparse_step == 0
    if not sparse:
        return dense_layer_weights(text, layer)
    experts = 3 * int(text.num_experts_per_tok * text.moe_intermediate_size)
    return attention_weights(text) + int(text.hidden_size) * (int(text.num_experts) + experts)


def _expert_weight(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Checkpoints hold the experts' weights ``(experts, in, out)``, the model ``(experts, out, in)``."""
    if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
        return name, weight.transpose(1, 2)
    return name, weight


QWEN3_VL = VLMFamily(
    model_type="qwen3_vl",
    vision_flops=_vision_flops,
    layer_weights=dense_layer_weights,
    videos=_frames,
    videos_by_frame=True,
    deep_features=_deep_features,
    extras=_deepstack,
    deep_layers=_deep_layers,
    dense_extras=_dense_deepstack,
    mergers=("model.visual.merger", "model.visual.deepstack_merger_list"),
)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    layer_weights=_expert_layer_weights,
    rollout_weight=_expert_weight,
    experts="model.language_model.layers.*.mlp.experts",
    tensor_plan=(
        *DECODER_PLAN,
        ("model.language_model.layers.*.mlp.experts.gate_up_proj", "packed_colwise"),
        ("model.language_model.layers.*.mlp.experts.down_proj", "rowwise"),
    ),
)
