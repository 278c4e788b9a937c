"""Between the training layout and the rollout layout.

Training splits a batch over dp; its sp x tp ranks, which are neighbours, come with the same rows. A rollout engine runs on
neighbours too, as many as its own tensor-parallel size, and all of them must see the same rows. So ranks exchange rows within
blocks of neighbours that hold whole numbers of both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any

from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from dataproto import DataProto
from dataproto.collectives import all_gather
from dataproto.errors import InvalidConfig, RowCountMismatch
from rollout.engine import RolloutEngine
from rollout.randomness import derive_seed
from workers.checkpoint import random_states, seed_everything, set_random_states
from workers.mesh import Ranks


@dataclass(frozen=True)
class Neighbours:
    """The ranks that exchange rows with this one.

    >>> alone = Neighbours()
    >>> alone.size, alone.engine_number
    (1, 0)
    """

    group: ProcessGroup | None = None  # None: this rank keeps to itself
    sharing: int = 1  # neighbours that come with the same rows
    engine: int = 1  # neighbours that run one engine together

    def __post_init__(self) -> None:
        if self.size % self.sharing or self.size % self.engine:
            raise InvalidConfig(
                f"{self.size} ranks that exchange rows hold no whole number of groups with the same rows ({self.sharing}) or of "
                f"engines ({self.engine})"
            )

    @property
    def size(self) -> int:
        return 1 if self.group is None else distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else distributed.get_rank(self.group)

    @property
    def engine_number(self) -> int:
        """Number of this rank's engine among those of the block."""
        return self.rank // self.engine


def neighbours(ranks: Ranks, tensor_parallel: int) -> Neighbours:
    """The block of this rank; every rank of the layout calls it.

    Raises:
        InvalidConfig: sizes that do not fit into each other.
    """
    sharing, world = ranks.size("sp", "tp"), ranks.size("dp", "sp", "tp")
    size = max(sharing, tensor_parallel)
    if size % sharing or size % tensor_parallel or world % size:
        raise InvalidConfig(
            f"rollout tensor_parallel={tensor_parallel} does not fit {ranks.layout}: it must divide sp x tp = {sharing}, or be a "
            f"multiple of it that divides dp x sp x tp = {world}"
        )
    if size == 1:
        return Neighbours()
    if size == sharing:
        return Neighbours(ranks.group("sp", "tp"), sharing, tensor_parallel)
    everybody = ranks.layout.world_size
    blocks = [distributed.new_group(list(range(start, start + size))) for start in range(0, everybody, size)]
    return Neighbours(blocks[distributed.get_rank() // size], sharing, tensor_parallel)


class ShardingManager:
    """A context in which the engine is awake, holds the actor's weights, and sees the rows its ranks must share.

    Random states are the rollout's own inside: the same on all ranks of an engine, different between engines, and going on
    where they were left; those of training stay as they were.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        neighbours: Neighbours | None = None,
        engine_number: int = 0,
    ) -> None:
        """``weights`` gives the actor's (name, full tensor) pairs; asked once for each entry where the engine lacks them."""
        self.engine = engine
        self.weights = weights
        self.neighbours = neighbours or Neighbours()
        self.stale = True
        self._engine_number = engine_number
        self._rows: list[int] = []  # of each holder in the block, in the batch that is being generated
        self._training_random: dict[str, Any] = {}
        self._rollout_random: dict[str, Any] | None = None

    def mark_stale(self) -> None:
        """The actor has changed: the next entry streams its weights."""
        self.stale = True

    def __enter__(self) -> "ShardingManager":
        kept = self.engine.wake()
        if self.stale or not kept:
            try:
                self.engine.load_weights(self.weights())
            except BaseException:
                self.engine.sleep()  # what training needs must not stay with an engine that is not used
                raise
            self.stale = False
        self._training_random = random_states()
        if self._rollout_random is None:
            seed_everything(derive_seed("rollout engine", self._engine_number))
        else:
            set_random_states(self._rollout_random)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollout_random = random_states()
        set_random_states(self._training_random)
        self.engine.sleep()

    def preprocess_data(self, data: DataProto) -> DataProto:
        """The rows that this rank's engine generates for: its share of those of all ranks of the block, in rank order."""
        block = self.neighbours
        if block.group is None:
            return data
        counts: list[Any] = [None] * block.size
        distributed.all_gather_object(counts, len(data), block.group)
        self._rows = counts[:: block.sharing]
        everything = _gathered(data, block, contributes=block.rank % block.sharing == 0)
        engines = block.size // block.engine
        bounds = [number * len(everything) // engines for number in range(engines + 1)]
        return everything[bounds[block.engine_number] : bounds[block.engine_number + 1]]

    def postprocess_data(self, data: DataProto) -> DataProto:
        """This rank's own rows out of those that the block's engines generated; ``n`` for each row that it came with.

        Raises:
            RowCountMismatch: the engines did not return the same number of rows for each prompt.
        """
        block = self.neighbours
        if block.group is None:
            return data
        if block.size > block.engine:
            data = _gathered(data, block, contributes=block.rank % block.engine == 0)
        samples, left = divmod(len(data), max(sum(self._rows), 1))
        if left:
            raise RowCountMismatch(f"the engines returned {len(data)} rows for {sum(self._rows)} prompts")
        starts = list(pairwise(accumulate(self._rows, initial=0)))
        start, stop = starts[block.rank // block.sharing]
        return data[samples * start : samples * stop]


def _gathered(data: DataProto, block: Neighbours, contributes: bool) -> DataProto:
    """The rows of the ranks that contribute, on every rank of the block; ``meta_info`` stays each rank's own."""
    gathered = all_gather(data.select(meta_info_keys=[]) if contributes else DataProto(), block.group)
    gathered.meta_info = dict(data.meta_info)
    return gathered
