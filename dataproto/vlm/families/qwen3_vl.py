"""Qwen3-VL, dense and mixture of experts: prompts state the time of each video frame in text, and deep vision features
("DeepStack", arXiv 2406.04334) are added to the hidden states after the first decoder layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto.vlm.costs import attention_weights, dense_layer_weights, patch_tower_flops
from dataproto.vlm.family import DECODER_PLAN, EXPERT_PLAN, VLMFamily
from dataproto.vlm.media import MediaSpans


class Qwen3VL(VLMFamily):
    """Qwen3-VL, dense."""

    model_type = "qwen3_vl"
    published: tuple[str, ...] = ("Qwen3-VL",)
    mergers = ("model.visual.merger", "model.visual.deepstack_merger_list")
    videos_by_frame = True
    deep_method = "_deepstack_process"

    def deep_features(self, output: Any) -> Sequence[Any]:
        """The levels of DeepStack."""
        levels: Sequence[Any] = output.deepstack_features
        return levels

    def deep_layers(self, config: Any) -> int:
        """One layer for each level."""
        return len(config.vision_config.deepstack_visual_indexes)

    def extras(self, features: Tensor, shape: torch.Size, spans: MediaSpans) -> dict[str, Tensor]:
        """``visual_pos_masks (B, L)`` bool, true at the M media tokens, and ``deepstack_visual_embeds (D, M, H)``, which decoder
        layer d adds to these tokens in order.
        """
        mask = torch.zeros(shape, dtype=torch.bool, device=spans.positions.device)
        mask.view(-1).index_fill_(0, spans.positions, True)
        deep = features[:, 1:].index_select(0, spans.features)
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": deep.transpose(0, 1)}

    def placed_extras(self, extras: Mapping[str, Tensor], spans: MediaSpans) -> dict[str, Tensor]:
        """The places ``(M,)`` instead of the mask."""
        return {**extras, "visual_pos_masks": spans.positions} if extras else {}

    def dense_extras(self, levels: Tensor) -> dict[str, Any]:
        """The levels of all tokens, and no places."""
        return {"deepstack_visual_embeds": levels}

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within a frame, an MLP of two layers, and one more merger for each deep level."""
        vision = config.vision_config
        width, mergers = int(vision.hidden_size), 1 + self.deep_layers(config)
        mlp = 2 * width * int(vision.intermediate_size)
        return patch_tower_flops(vision, grids, width, mlp, int(vision.out_hidden_size), mergers)


class Qwen3Mixture(VLMFamily):
    """What families with Qwen3's mixture of experts share."""

    experts = "model.language_model.layers.*.mlp.experts"
    tensor_plan = (*DECODER_PLAN, *EXPERT_PLAN)

    def layer_weights(self, text: Any, layer: int) -> int:
        """Attention, router and the experts that a token is sent to; some layers may be dense."""
        if layer in (text.mlp_only_layers or ()) or (layer + 1) % text.decoder_sparse_step:
            return dense_layer_weights(text)
        experts = 3 * int(text.num_experts_per_tok * text.moe_intermediate_size)
        return attention_weights(text) + int(text.hidden_size) * (int(text.num_experts) + experts)


class Qwen3VLMoe(Qwen3Mixture, Qwen3VL):
    """Qwen3-VL with a mixture of experts."""

    model_type = "qwen3_vl_moe"
    published: tuple[str, ...] = ("Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B")

    def rollout_weight(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Checkpoints hold the weights of experts as ``(experts, in, out)``, the model as ``(experts, out, in)``."""
        if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            return name, weight.transpose(1, 2)
        return name, weight
