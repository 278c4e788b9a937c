"""GLM-4.1V, 4.5V and 4.6V: patches with grids and multimodal rotary positions as in Qwen2-VL, but images only. The placeholder of
a video frame is that of an image, so Hugging Face's forward cannot distinguish the images of a row from its videos.
"""

from typing import Any

from torch import Tensor

from dataproto.errors import InvalidMedia, raised_as
from dataproto.vlm.costs import attention_weights, dense_layer_weights, frame_pairs, patch_weights, tower_flops
from dataproto.vlm.family import DECODER_PLAN, EXPERT_PLAN, VLMFamily
from dataproto.vlm.media import Options, PatchGrids

NO_CLASS = "vLLM has no class for it; GLM-4.6V is of type glm4v_moe, which it has"


class _ImageGrids(PatchGrids):
    """`PatchGrids` without videos, for a processor that resizes in another way."""

    video_names = ()

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Computed by the processor."""
        with raised_as(InvalidMedia, f"image of height {height} and width {width}", ValueError):
            patches = processor.get_number_of_image_patches(height, width, dict(options))
        return int(patches) // self.merge_size(config) ** 2


class GLM4V(VLMFamily):
    """GLM-4.1V, and GLM-4.6V-Flash, which is of the same type."""

    model_type = "glm4v"
    published: tuple[str, ...] = ("GLM-4.1V-9B", "GLM-4.6V-Flash")
    media_layout = _ImageGrids()
    gated_tower = True
    tower_indexes_grids = True
    mergers = ("model.visual.downsample", "model.visual.merger")
    tensor_plan = (
        *(entry for entry in DECODER_PLAN if not entry[0].endswith((".gate_proj", ".up_proj"))),
        ("model.language_model.layers.*.mlp.gate_up_proj", "packed_colwise"),
    )

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within a frame and a gated MLP; the merger has a gated MLP too."""
        vision = config.vision_config
        width, out, merge = int(vision.hidden_size), int(vision.out_hidden_size), int(vision.spatial_merge_size)
        return tower_flops(
            grids,
            patch=patch_weights(vision, width),
            block=4 * width**2 + 3 * width * out,
            merger=merge**2 * width * out + out**2 + 3 * out * int(vision.intermediate_size),
            merge_size=merge,
            width=width,
            pairs=[frame_pairs(grids)] * int(vision.depth),
        )


class GLM4VMoe(GLM4V):
    """GLM-4.5V and GLM-4.6V: after the first dense layers a mixture of experts, and experts that all tokens share.

    The router takes the best experts of the best groups by sigmoid scores with a correction, which is no parameter: it is kept as
    the checkpoint has it, in float32, and no gradient reaches it.
    """

    model_type = "glm4v_moe"
    published: tuple[str, ...] = ("GLM-4.5V", "GLM-4.6V")
    experts = "model.language_model.layers.*.mlp.experts"
    tensor_plan = (
        *DECODER_PLAN,
        *EXPERT_PLAN,
        ("model.language_model.layers.*.mlp.shared_experts.gate_proj", "colwise"),
        ("model.language_model.layers.*.mlp.shared_experts.up_proj", "colwise"),
        ("model.language_model.layers.*.mlp.shared_experts.down_proj", "rowwise"),
    )

    def layer_weights(self, text: Any, layer: int) -> int:
        """Attention, the router, the experts that a token is sent to and the shared ones; the first layers are dense."""
        if layer < int(text.first_k_dense_replace):
            return dense_layer_weights(text)
        return attention_weights(text) + int(text.hidden_size) * mixture_weights(text)

    def expert_count(self, text: Any) -> int:
        """As GLM's configs name it."""
        return int(text.n_routed_experts)

    def expert_weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        """Sigmoid scores, without the correction that only chooses, scaled to a sum and by a factor."""
        scores = logits.sigmoid().gather(-1, chosen)
        if router.norm_topk_prob:
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return scores * float(router.routed_scaling_factor)


def mixture_weights(text: Any) -> int:
    """Weights of a mixture that one number of a token's state is multiplied with: of the router, of chosen and shared experts."""
    experts = 3 * int((text.num_experts_per_tok + text.n_shared_experts) * text.moe_intermediate_size)
    return int(text.n_routed_experts) + experts


class GLM46V(GLM4V):
    """The class of transformers that takes GLM's language models by their type, with the dense one."""

    model_type = "glm46v"
    published: tuple[str, ...] = ()
    not_in_vllm = NO_CLASS


class GLM46VMoe(GLM4VMoe):
    """The same with the mixture of experts."""

    model_type = "glm46v+glm4v_moe_text"
    published: tuple[str, ...] = ()
    not_in_vllm = NO_CLASS
