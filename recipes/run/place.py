"""Where a run's models stand: what the configurations of all recipes ask of it."""

from typing import Protocol

from dataproto.errors import InvalidConfig
from rollout.engine import ENGINES
from workers.ranks.layout import Layout


class Placed(Protocol):
    """The fields of a recipe's configuration that say where and in what portions it runs."""

    @property
    def engine(self) -> str: ...

    @property
    def on(self) -> str: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def max_restarts(self) -> int: ...


def check_place(config: Placed) -> None:
    """Refuses what no machine could run.

    Raises:
        InvalidConfig: an unknown engine, a number out of range, or several processes without Ray.
    """
    if config.engine not in ENGINES:
        raise InvalidConfig(f"engine {config.engine!r} is unknown: choose one of {', '.join(sorted(ENGINES))}")
    if config.max_restarts < 0:
        raise InvalidConfig(f"max_restarts={config.max_restarts}: must be at least 0")
    if config.on == "local" and config.layout.world_size > 1:
        raise InvalidConfig(f"{config.layout} needs {config.layout.world_size} processes: add --on ray")
