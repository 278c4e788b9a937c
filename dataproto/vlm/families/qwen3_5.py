"""Qwen3.5, and Qwen3.6 and 3.8, which share its classes: three of four decoder layers are recurrent (Gated DeltaNet,
arXiv:2412.06464), the others attend, with a gate on their output. Tower and prompts are those of Qwen3-VL, without its deep
features.
"""

from typing import Any

from torch import Tensor

from dataproto.vlm.costs import attention_weights, attention_width
from dataproto.vlm.families.qwen3_vl import Qwen3VL
from dataproto.vlm.family import DECODER_PLAN, EXPERT_PLAN, TensorPlan, VLMFamily

CHUNK = 64  # Updates of a recurrent state by so many tokens are computed together.

RECURRENT_PLAN: TensorPlan = (
    ("model.language_model.layers.*.linear_attn", "recurrent"),
    ("model.language_model.layers.*.linear_attn.in_proj_z", "colwise"),
    ("model.language_model.layers.*.linear_attn.in_proj_b", "colwise"),
    ("model.language_model.layers.*.linear_attn.in_proj_a", "colwise"),
    ("model.language_model.layers.*.linear_attn.out_proj", "rowwise"),
)
"""Tensor-parallel plan of recurrent layers: their heads are split."""


class Qwen35(VLMFamily):
    """Qwen3.5, dense, and the dense models of Qwen3.6 and Qwen3.8, whose checkpoints are of the same type."""

    model_type = "qwen3_5"
    published: tuple[str, ...] = ("Qwen3.5", "Qwen3.6-27B", "Qwen3.8-27B")
    videos_by_frame = True
    recurrent_mixers = "model.language_model.layers.*.linear_attn"
    float32_weights = (
        "model.language_model.layers.*.linear_attn.A_log",
        "model.language_model.layers.*.linear_attn.dt_bias",
    )
    unused_weights = ("mtp.*",)  # The model that trains has no prediction head.
    prediction_head = "mtp."
    tensor_plan = (*DECODER_PLAN, *RECURRENT_PLAN)
    vision_flops = Qwen3VL.vision_flops

    def layer_weights(self, text: Any, layer: int) -> int:
        """Attention with an output gate, or the projections of a recurrent layer; and the MLP."""
        return self.mixer_weights(text, layer) + 3 * int(text.hidden_size * text.intermediate_size)

    def mixer_weights(self, text: Any, layer: int) -> int:
        """Weights that mix tokens in decoder layer number ``layer``."""
        if text.layer_types[layer] == "full_attention":
            return attention_weights(text) + int(text.hidden_size) * attention_width(text)
        keys = int(text.linear_num_key_heads * text.linear_key_head_dim)
        values = int(text.linear_num_value_heads * text.linear_value_head_dim)
        projections = 2 * keys + 3 * values + 2 * int(text.linear_num_value_heads)
        return int(text.hidden_size) * projections + int(text.linear_conv_kernel_dim) * (2 * keys + values)

    def mixing_flops(self, text: Any, lengths: Tensor) -> Tensor:
        """Attention in the layers that have it, and the chunked rule of the others; see `recurrence_flops`."""
        layers = list(text.layer_types)
        attending = layers.count("full_attention")
        pairs = lengths * (lengths + 1) // 2
        return (
            4 * attention_width(text) * attending * pairs + (len(layers) - attending) * recurrence_flops(text) * lengths
        )


class Qwen35Moe(Qwen35):
    """Qwen3.5 with a mixture of experts in every layer, and one expert that all tokens share."""

    model_type = "qwen3_5_moe"
    published: tuple[str, ...] = ("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B")
    experts = "model.language_model.layers.*.mlp.experts"
    tensor_plan = (
        *(entry for entry in Qwen35.tensor_plan if ".mlp." not in entry[0]),
        *EXPERT_PLAN,
        ("model.language_model.layers.*.mlp.shared_expert.gate_proj", "colwise"),
        ("model.language_model.layers.*.mlp.shared_expert.up_proj", "colwise"),
        ("model.language_model.layers.*.mlp.shared_expert.down_proj", "rowwise"),
    )

    def layer_weights(self, text: Any, layer: int) -> int:
        """What mixes tokens, the router, the experts that a token is sent to, and the shared expert with its gate."""
        experts = 3 * int(text.num_experts_per_tok * text.moe_intermediate_size + text.shared_expert_intermediate_size)
        return self.mixer_weights(text, layer) + int(text.hidden_size) * (int(text.num_experts) + 1 + experts)


def recurrence_flops(text: Any) -> int:
    """Operations of the gated delta rule for one token of one layer, computed in chunks of 64 tokens (arXiv:2412.06464, section
    3.3).

    For each value head with keys of size D and values of size E: products of keys with keys and of queries with keys within the
    chunk (``2 C D`` each, C the chunk), the triangular system (``C (D + E)``), values read within the chunk (``2 C E``), and
    four products with the state: what it holds under the keys, what queries read, the outputs and the update (``2 D E`` each,
    of which the correction is one: three in all).
    """
    keys, values = int(text.linear_key_head_dim), int(text.linear_value_head_dim)
    within = CHUNK * (4 * keys + (keys + values) + 2 * values)
    return int(text.linear_num_value_heads) * (within + 6 * keys * values)
