"""Limits of the engine. Imports no torch, so that a command shows its options at once."""

from dataclasses import dataclass
from typing import Literal

from dataproto.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits of what the engine holds and computes at a time."""

    token_budget: int = 16_384  # tokens of one packed pass; a longer row is computed alone
    activation_checkpointing: bool = False  # backward passes compute layers again: less memory, a third more work
    full_finetuning: bool = False  # one model may train all weights, with rank 0; it has a copy of the model of its own
    max_context_length: int | None = None  # tokens of a row, media included; None: the number of the model's positions
    max_models: int = 64  # adapters that are trained at the same time
    max_lora_rank: int = 64  # of an adapter
    max_samplers: int = 32  # snapshots whose adapters stay in memory; others are read from their files again
    max_num_seqs: int = 256  # answers that are decoded at the same time
    max_targets: int = (
        2**24
    )  # log-probs that a pass returns: tokens x targets of all rows, those that sparse ones do not list included
    image_bytes: int = 512 << 20  # memory for processed images
    sampler: Literal["hf", "vllm"] = "hf"  # the engine that samples
    vllm_memory_share: float = 0.5  # of the device, for vLLM's weights and KV cache
    vllm_adapters: int = 8  # snapshots that vLLM samples from in one step

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise InvalidConfig(f"{name}={value}: must be at least 1")
        if self.full_finetuning and self.sampler != "hf":
            raise InvalidConfig("full_finetuning=True needs sampler='hf': vLLM would be started for each snapshot")
        if self.sampler not in ("hf", "vllm"):
            raise InvalidConfig(f"sampler={self.sampler!r}: must be hf or vllm")
        if not 0 < self.vllm_memory_share < 1:
            raise InvalidConfig(f"vllm_memory_share={self.vllm_memory_share}: must be between 0 and 1")
