"""`Layout`: all degrees of parallelism, and the position of each rank."""

from dataclasses import dataclass, fields

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class Layout:
    """The degrees of data (dp), tensor (tp), pipeline (pp), sequence (sp) and expert (ep) parallelism.

    The world has pp x dp x sp x tp ranks. FSDP shards over the dp x sp / ``replicas`` ranks of one replica, and ep must divide
    their number.

    Attributes:
        dp: data parallelism: groups of ranks with rows of their own; FSDP shards the weights over them
        tp: tensor parallelism: ranks that share each layer
        pp: pipeline parallelism: stages, each with some of the layers
        sp: sequence parallelism (Ulysses): ranks that share the tokens of a row
        ep: expert parallelism: ranks that share the experts of a mixture
        replicas: copies of the sharded weights (HSDP), which divide dp; ranks of one copy are consecutive
        rollout: further processes, with engines on devices of their own; 0: each of the world's ranks has an engine

    >>> Layout(dp=2, tp=2).world_size
    4
    >>> Layout(dp=8, replicas=2).shards
    4
    >>> Layout(dp=2, tp=2).coordinates(rank=3)
    {'pp': 0, 'dp': 1, 'sp': 0, 'tp': 1}
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    replicas: int = 1
    rollout: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            least = 0 if field.name == "rollout" else 1
            if not isinstance(degree, int) or degree < least:
                raise InvalidConfig(f"layout.{field.name}={degree!r}: must be an integer of at least {least}")
        if self.dp % self.replicas:
            raise InvalidConfig(f"layout.replicas={self.replicas} must divide dp = {self.dp}")
        if self.shards % self.ep:
            ranks = "dp x sp / replicas" if self.replicas > 1 else "dp x sp"
            raise InvalidConfig(f"layout.ep={self.ep} must divide {ranks} = {self.shards}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    @property
    def engine_processes(self) -> int:
        """The number of processes that have an engine, or a part of one."""
        return self.rollout or self.world_size

    @property
    def shards(self) -> int:
        """The number of ranks that FSDP shards one copy of the weights over."""
        return self.dp * self.sp // self.replicas

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` along each axis; tp varies fastest, then sp, dp and pp."""
        if not 0 <= rank < self.world_size:
            raise InvalidConfig(f"rank {rank} is not in a world of {self.world_size} ranks")
        position: dict[str, int] = {}
        for axis in ("tp", "sp", "dp", "pp"):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in ("pp", "dp", "sp", "tp")}
