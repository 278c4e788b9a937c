"""Where the processes of a run stand on Ray; apart from `workers.ray_group`, so that asking for help does not load Ray."""

from dataclasses import dataclass

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class RayConfig:
    """Where processes run and how long they may take."""

    address: str | None = None  # of a running cluster, or "auto"; by default one starts here, seen by this machine only
    cpus: float = 1.0  # of each process
    gpus: float | None = None  # of each process; default: 1 if the cluster has any
    rollout_processes: int = 0  # with engines on devices of their own; 0: each actor process has one
    timeout_s: float = 1800.0  # of one call; a rank that takes longer counts as hanging
    object_store_gib: float | None = None  # of a cluster started here; Ray's own default: 30 % of the memory

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.cpus < 0 or self.rollout_processes < 0:
            raise InvalidConfig(
                f"ray: timeout_s={self.timeout_s} must be above 0, cpus={self.cpus} and "
                f"rollout_processes={self.rollout_processes} at least 0"
            )
