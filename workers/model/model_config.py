"""Options of the models that training runs: precision, memory, speed and which weights are trained."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of the forward and backward pass.

    Except for ``freeze_vision`` and the adapters (``lora_*``), they change speed and memory, and results only by rounding.
    """

    token_budget: int = (
        16_384  # tokens of a micro-batch on each rank; ranks along sp share a micro-batch of sp times as many
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the computation; "auto": bfloat16 on CUDA
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # what the backward pass recomputes
    compile: bool = False  # torch.compile for the repeated layers
    flash_attention: Literal["torch", "fa4"] = "torch"  # on CUDA: torch's kernel, or FlashAttention 4 (the extra "fa4")
    reshard_after_forward: bool = (
        True  # free a layer's gathered weights after each use; False: gather once for all micro-batches
    )
    offload: bool = False  # keep sharded weights, gradients and optimizer in host memory
    freeze_vision: bool = False  # the vision tower is not trained and runs without gradients
    lora_rank: int = 0  # above 0: train adapters of this rank, not weights, in the decoder's linear layers and experts
    lora_alpha: float = 32.0  # an adapter's output is scaled by alpha / rank
    lora_vision: bool = False  # adapt the vision tower too; without it, adapters leave the tower frozen
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = (
        "1f1b"  # order of forward and backward passes, with layout.pp > 1
    )
    pipeline_chunks: int = 2  # stages on each rank, with "interleaved"
    pipeline_layers: tuple[int, ...] | None = None  # decoder layers of each stage, in order; None: split evenly

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise InvalidConfig(f"token_budget={self.token_budget}: must be at least 1")
        if self.lora_rank < 0 or self.lora_alpha <= 0:
            raise InvalidConfig(
                f"lora_rank={self.lora_rank} must be at least 0 and lora_alpha={self.lora_alpha} above 0"
            )
        if self.lora_vision and (not self.lora_rank or self.freeze_vision):
            raise InvalidConfig(
                f"lora_vision=True adapts the vision tower: it needs lora_rank above 0 (now {self.lora_rank}) and "
                "freeze_vision=False"
            )
        if self.pipeline_chunks < 2:
            raise InvalidConfig(f'pipeline_chunks={self.pipeline_chunks}: "interleaved" needs at least 2')


def compute_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of matrix products for a `ModelConfig.dtype`; ``"auto"`` is bfloat16 on CUDA and float32 on other devices."""
    if name == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def in_autocast_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype of autocast, or unchanged where autocast is off."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
