"""All degrees of parallelism in one value, and where a rank stands in it."""

from dataclasses import dataclass, fields

from dataproto.errors import InvalidConfig


@dataclass(frozen=True)
class Layout:
    """World = pp x dp x sp x tp; FSDP shards over dp x sp; ep divides dp x sp.

    >>> Layout(dp=2, tp=2).world_size
    4
    >>> Layout(dp=2, tp=2).coordinates(rank=3)
    {'pp': 0, 'dp': 1, 'sp': 0, 'tp': 1}
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or degree < 1:
                raise InvalidConfig(f"layout.{field.name}={degree!r}: a degree is a whole number of at least 1")
        if (self.dp * self.sp) % self.ep:
            raise InvalidConfig(f"layout.ep={self.ep} must divide dp x sp = {self.dp * self.sp}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.sp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` along each axis; tp varies fastest, then sp, dp, pp."""
        if not 0 <= rank < self.world_size:
            raise InvalidConfig(f"rank {rank} is outside a world of {self.world_size}")
        position: dict[str, int] = {}
        for axis in ("tp", "sp", "dp", "pp"):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in ("pp", "dp", "sp", "tp")}
