"""Limits of the engine. Imports no torch, so that a command shows its options at once."""

from dataclasses import dataclass
from typing import Literal

from dataproto.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits of what the engine holds and computes at a time.

    Attributes:
        token_budget: tokens of one packed pass; a longer row has a pass of its own
        activation_checkpointing: compute layers again in backward passes: less memory, a third more work
        full_finetuning: let one model train all weights, with rank 0; it has a copy of the model of its own
        max_context_length: tokens of a row, media included; default: the number of the model's positions
        max_models: adapters that are trained at the same time
        max_lora_rank: largest rank of an adapter
        max_samplers: snapshots whose adapters stay in memory; others are read from their files again
        max_num_seqs: answers that are decoded at the same time
        max_targets: log-probs that a pass returns: tokens x targets of all rows, those that sparse ones do not list
            included
        image_bytes: memory for processed images
        sampler: engine that samples
        vllm_memory_share: share of the device for vLLM's weights and KV cache
        vllm_adapters: snapshots that vLLM samples from in one step
    """

    token_budget: int = 16_384
    activation_checkpointing: bool = False
    full_finetuning: bool = False
    max_context_length: int | None = None
    max_models: int = 64
    max_lora_rank: int = 64
    max_samplers: int = 32
    max_num_seqs: int = 256
    max_targets: int = 2**24
    image_bytes: int = 512 << 20
    sampler: Literal["hf", "vllm"] = "hf"
    vllm_memory_share: float = 0.5
    vllm_adapters: int = 8

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

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (self.sampler != "vllm", "vllm-memory-share vllm-adapters", "another engine samples: add --sampler vllm"),
        ]
