"""Options of `launch(..., on="ray")`. This module does not import Ray."""

from dataclasses import dataclass, field
from typing import Any

from dataproto.errors import InvalidConfig, check_at_least


@dataclass(frozen=True)
class RayConfig:
    """Resources and time limits of the processes that Ray runs.

    Attributes:
        address: address of a running cluster, or "auto"; by default Ray starts here, open to this machine only
        cpus: CPUs of each process
        gpus: GPUs of each process; default: 1 if the cluster has any
        reward_processes: processes that share the rows to be scored by a function
        reward_timeout_s: seconds in which a batch must be scored
        timeout_s: seconds of one call; a rank that takes longer counts as hanging
        object_store_gib: size of the object store of a cluster started here; Ray's default: 30 % of the memory
        env_vars: environment variables of all processes
        pip: packages that Ray installs for the processes
        working_dir: directory that Ray copies to all nodes, where processes begin in it and find its modules
        show_logs: print here what the processes print
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None
    reward_processes: int = 1
    reward_timeout_s: float = 600.0
    timeout_s: float = 1800.0
    object_store_gib: float | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    pip: tuple[str, ...] = ()
    working_dir: str | None = None
    show_logs: bool = False

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's runtime environment of the processes.

        >>> RayConfig(env_vars={"NCCL_DEBUG": "WARN"}).runtime_env
        {'env_vars': {'NCCL_DEBUG': 'WARN'}}
        """
        parts = {"env_vars": dict(self.env_vars), "pip": list(self.pip), "working_dir": self.working_dir}
        return {name: value for name, value in parts.items() if value}

    def __post_init__(self) -> None:
        check_at_least(1, self, "reward_processes", group="ray.")
        check_at_least(0, self, "cpus", group="ray.")
        if not (self.timeout_s > 0 and self.reward_timeout_s > 0):
            times = f"timeout_s={self.timeout_s} and reward_timeout_s={self.reward_timeout_s}"
            raise InvalidConfig(f"ray: {times} must be above 0")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (self.address is not None, "object-store-gib", "a running cluster has its own: leave out --ray.address")
        ]

    def check_started(self, started: "RayConfig") -> None:
        """Checks that a Ray that runs in this program was ``started`` with those of these options that only a start can set.

        Raises:
            InvalidConfig: it was not.
        """
        wanted = self.runtime_env | ({"show_logs": True} if self.show_logs else {})
        late = [name for name in wanted if getattr(self, name) != getattr(started, name)]
        if late:
            raise InvalidConfig(
                f"ray: {', '.join(late)} cannot be set since Ray already runs in this program: give ray.init a runtime_env (and "
                "log_to_driver) there, or let launch start Ray"
            )
