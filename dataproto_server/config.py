"""A server for clients of the Tinker SDK: ``dataproto serve``.

Trains and samples LoRA adapters of vision-language models for many clients at once, and survives the kill of its processes.
Without options it serves a small model that it makes, and prints what a client needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dataproto.errors import InvalidConfig, check_at_least
from recipes.options import parse_config

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What requests and keys may take; more is refused, and the refusal names the option.

    Attributes:
        max_body_mb: size of a request's body
        max_images: images of a request
        max_image_megapixels: size of one image
        max_request_megapixels: size of all images of a request
        max_data: rows of a forward_backward request
        max_samples: samples that a request asks for (num_samples)
        max_topk: number of top-k log-probs
        max_runs: runs of a key in training at the same time
        max_queued_mb: size of a key's waiting requests that train; the same of its samples and of results in memory
        max_queued_requests: requests of a key that train and wait
        max_queued_samples: samples of a key that wait or are being sampled
        max_checkpoint_gb: size of a key's checkpoints
    """

    max_body_mb: int = 64
    max_images: int = 64
    max_image_megapixels: float = 20.0
    max_request_megapixels: float = 50.0
    max_data: int = 4096
    max_samples: int = 1024
    max_topk: int = 64
    max_runs: int = 16
    max_queued_mb: int = 2048
    max_queued_requests: int = 4096
    max_queued_samples: int = 4096
    max_checkpoint_gb: float = 100.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be above 0")


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
        check_at_least(1, self, *(name for name, value in vars(self).items() if type(value) is int))
        if self.full_finetuning and self.sampler != "hf":
            raise InvalidConfig("full_finetuning=True needs sampler='hf': vLLM would be started for each snapshot")
        if not 0 < self.vllm_memory_share < 1:
            raise InvalidConfig(f"vllm_memory_share={self.vllm_memory_share}: must be between 0 and 1")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (self.sampler != "vllm", "vllm-memory-share vllm-adapters", "another engine samples: add --sampler vllm")
        ]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What is served, where, and to whom.

    Attributes:
        model: models to serve: NAME, or NAME=PATH of a checkpoint; several names may share a path; default: a small model
        state: directory of checkpoints, journal and keys; the same one continues after a stop
        host: address to listen at; any but this machine's own needs --api-keys
        port: port to listen at; 0: any free one
        api_keys: file of lines "name: sha256 of a key"; default: one key, written into --state
        keep_last: newest checkpoints of each kind that a run keeps; 0: all
        snapshot_steps: updates of a run between snapshots; after a kill at most so many are computed again
        snapshot_seconds: seconds of a run between snapshots
        poll_seconds: seconds after which a request for a result is answered even if there is none
        gap_seconds: seconds for which requests wait for an earlier one of their run that has not come
        session_seconds: seconds of silence after which a client has ended
    """

    model: tuple[str, ...] = ()
    state: Path = Path("outputs/serve")
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Path | None = None
    keep_last: int = 0
    snapshot_steps: int = 8
    snapshot_seconds: float = 60.0
    poll_seconds: float = 25.0
    gap_seconds: float = 60.0
    session_seconds: float = 300.0
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if self.host not in LOCAL and self.api_keys is None:
            raise InvalidConfig(f"host={self.host} can be reached by others: give a file of keys with --api-keys")
        if not 0 <= self.port < 65536:
            raise InvalidConfig(f"port={self.port}: must be between 0 and 65535")
        if not 0 < self.poll_seconds <= 40:
            raise InvalidConfig(
                f"poll_seconds={self.poll_seconds}: must be above 0 and at most 40, as clients give up at 45"
            )
        check_at_least(1, self, "snapshot_steps")
        check_at_least(0, self, "keep_last")
        if min(self.snapshot_seconds, self.gap_seconds, self.session_seconds) <= 0:
            raise InvalidConfig("snapshot_seconds, gap_seconds and session_seconds must be above 0")

    @property
    def models(self) -> dict[str, str | None]:
        """The path of each model's checkpoint by its name; ``None`` if it has none, and the name is that of a hub."""
        return {name: path or None for name, _, path in (each.partition("=") for each in self.model)}


def parse(arguments: Sequence[str]) -> ServeConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    if gone := next((each for each in arguments if each.startswith(("--on", "--ray."))), None):
        raise InvalidConfig(f"{gone} has ended: dataproto serve computes on the machine on which it is started")
    return parse_config(arguments, ServeConfig(), __doc__, "dataproto serve")
