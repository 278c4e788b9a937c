"""`Layout`: all degrees of parallelism, and the position of each rank."""

from dataclasses import dataclass, fields

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class Layout:
    """The degrees of data (dp), tensor (tp), pipeline (pp), sequence (sp) and expert (ep) parallelism.

    The world has pp x dp x sp x tp ranks. FSDP shards over dp x sp, and ep must divide dp x sp.

    >>> Layout(dp=2, tp=2).world_size
    4
    >>> Layout(dp=2, tp=2).coordinates(rank=3)
    {'pp': 0, 'dp': 1, 'sp': 0, 'tp': 1}
    """

    dp: int = 1  # groups of ranks with rows of their own; FSDP shards the weights over them
    tp: int = 1  # ranks that share each layer
    pp: int = 1  # stages, each with some of the layers
    sp: int = 1  # ranks that share the tokens of a row (Ulysses)
    ep: int = 1  # ranks that share the experts of a mixture

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or degree < 1:
                raise InvalidConfig(f"layout.{field.name}={degree!r}: must be an integer of at least 1")
        if (self.dp * self.sp) % self.ep:
            raise InvalidConfig(f"layout.ep={self.ep} must divide dp x sp = {self.dp * self.sp}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` along each axis; tp varies fastest, then sp, dp and pp."""
        if not 0 <= rank < self.world_size:
            raise InvalidConfig(f"rank {rank} is not in a world of {self.world_size} ranks")
        position: dict[str, int] = {}
        for axis in ("tp", "sp", "dp", "pp"):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in ("pp", "dp", "sp", "tp")}
