"""A server for clients of the Tinker SDK: ``dataproto serve``.

Trains and samples LoRA adapters of vision-language models for many clients at once, and survives the kill of its processes.
Without options it serves a small model that it makes, and prints what a client needs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dataproto.errors import InvalidConfig
from dataproto_server.engine.engine_options import EngineOptions
from recipes.options import parse_config
from workers.cluster.ray_config import RayConfig

LOCAL = ("127.0.0.1", "localhost", "::1")
OF_TRAINING = ("rollout_processes", "reward_processes", "reward_timeout_s")
"""Options of Ray that do nothing for the one process of an engine."""


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What requests and keys may take; more is refused, and the refusal names the option.

    Attributes:
        max_body_mb: size of a request's body, also after decompression
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
        on: where the engine runs: in a process of this machine, or in one of a Ray cluster
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
    on: Literal["local", "ray"] = "local"
    ray: RayConfig = field(default_factory=RayConfig)
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
        if self.snapshot_steps < 1 or self.keep_last < 0:
            raise InvalidConfig(
                f"snapshot_steps={self.snapshot_steps} must be at least 1, and keep_last={self.keep_last} at least 0"
            )
        if min(self.snapshot_seconds, self.gap_seconds, self.session_seconds) <= 0:
            raise InvalidConfig("snapshot_seconds, gap_seconds and session_seconds must be above 0")
        self._check_ray()

    def _check_ray(self) -> None:
        given = [name for name, value in asdict(RayConfig()).items() if getattr(self.ray, name) != value]
        if given and self.on != "ray":
            raise InvalidConfig(
                f"ray.{given[0]} does nothing: the engine is in a process of this machine; add --on ray"
            )
        idle = [name for name in given if name in OF_TRAINING]
        if idle:
            raise InvalidConfig(f"ray.{idle[0]} does nothing: the server has one process of Ray; leave it out")

    @property
    def models(self) -> dict[str, str | None]:
        """The path of each model's checkpoint by its name; ``None`` if it has none, and the name is that of a hub."""
        pairs = (each.partition("=") for each in self.model)
        return {name: path or None for name, _, path in pairs}


def parse(arguments: Sequence[str]) -> ServeConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, ServeConfig(), __doc__, "dataproto serve")
