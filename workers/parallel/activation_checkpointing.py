"""Activation checkpointing: the backward pass computes parts of the repeated layers again instead of keeping them.

``full`` keeps only a layer's input and computes the layer again (a third more work). ``selective`` also keeps the results of
matrix products, attention and other ranks, so that only norms, activations and rotary embeddings are computed again. Tokens that
a split layer gathers, which would be the whole sequence on every rank, are gathered again (arXiv:2205.05198), but for compiled
layers with split experts: see `workers.parallel.compiling.compile_in_parts`.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import replace_forward
from workers.parallel.transform import Transform, repeated_layers
from workers.ranks.mesh import Ranks

# Operators whose results ``selective`` keeps, by name, since not every build of torch has all of them.
COSTLY = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten._grouped_mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._flash_attention_forward.default",
    "torch_attn._varlen_attn.default",
    "dataproto.segment_attention.default",
    "dataproto.block_attention.default",
    "dataproto.delta_rule.default",
    "dataproto.low_rank_linear.default",
    "dataproto.flash_attention_4.default",
    "_c10d_functional.all_to_all_single.default",  # other ranks would have to send these again
    "_c10d_functional.reduce_scatter_tensor.default",
)


class ActivationCheckpointing(Transform):
    """Repeated layers that keep little for the backward pass and compute the rest again."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return options.activation_checkpointing != "none"

    def apply(self, module: PackedVLM) -> None:
        """Replaces ``forward`` of each layer instance: hooks of FSDP stay outside, torch.compile sees the checkpoint inside."""
        for layer in repeated_layers(module):
            replace_forward(layer, Checkpointed(layer.forward, self.options.activation_checkpointing == "selective"))


class Checkpointed:
    """A forward function whose activations are computed again in the backward pass."""

    def __init__(self, forward: Callable[..., Any], selective: bool) -> None:
        self.forward, self.selective = forward, selective
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if selective:
            self.options["context_fn"] = selective_contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.options, **kwargs)


def selective_contexts() -> tuple[Any, Any]:
    """The contexts of a layer's forward pass, which keeps the results of `costly_operators`, and of its recomputation."""
    keeping, looking_up = create_selective_checkpoint_contexts(keep_costly)
    return keeping, KeptResults(looking_up)


# Under this name torch keeps compiled layers on disk, traced and split into forward and backward pass, for the next run.
selective_contexts.cache_hash = hashlib.sha256(" ".join(COSTLY).encode()).hexdigest()  # type: ignore[attr-defined]


class KeptResults(TorchDispatchMode):
    """Looks up the results of `costly_operators`, and computes any other operator, whether the forward pass had it or not.

    torch's own mode refuses operators that the forward pass did not have. Hooks of FSDP have such: where a layer continues after
    its split experts (shared experts, a norm), its recomputation begins before FSDP's backward pass reaches the experts. FSDP
    then takes the experts for the root of a new forward pass, and records that for the profiler.
    """

    supports_higher_order_operators = True

    def __init__(self, looking_up: Any) -> None:
        super().__init__()
        self.looking_up = looking_up

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own mode: compiled parts of a layer stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in costly_operators():
            return self.looking_up.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def keep_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy for `create_selective_checkpoint_contexts`."""
    return CheckpointPolicy.MUST_SAVE if operator in costly_operators() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def costly_operators() -> frozenset[Any]:
    """The operators of `COSTLY` that this torch has."""
    found = []
    for name in COSTLY:
        operator: Any = torch.ops
        for part in name.split("."):
            operator = getattr(operator, part, None)
            if operator is None:
                break
        else:
            found.append(operator)
    return frozenset(found)
