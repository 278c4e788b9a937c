"""The change between the training layout and the rollout layout.

Training splits a batch over dp; all pp x sp x tp ranks of one dp position have the same rows. A rollout engine runs on
``tensor_parallel`` consecutive ranks, and all of them must see the same rows. So ranks exchange rows within blocks: the smallest
sets of ranks that contain every dp position and every engine either completely or not at all. The ranks of a block need not be
consecutive: two stages of a pipeline are not.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from dataproto import DataProto
from dataproto.distributed import all_gather
from dataproto.errors import RowCountMismatch, end_after, undoing
from dataproto.packing import other_response_columns, token_widths, widen
from rollout.engine import RolloutEngine
from rollout.sampling import derive_seed
from workers.ranks.mesh import Ranks, gathered
from workers.training.checkpoint import random_states, seed_everything, set_random_states
from workers.training.memory import GENERATION, PHASES

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns (name, full tensor) pairs, which all ranks take together."""


@dataclass(frozen=True)
class Neighbours:
    """A block: this rank and the ranks that exchange rows with it, in order of rank.

    >>> alone = Neighbours()
    >>> alone.rank, alone.engine
    (0, 0)
    """

    group: ProcessGroup | None = None  # None: this rank exchanges no rows
    holders: tuple[int, ...] = (0,)  # the dp position of each rank: ranks of one position have the same rows
    engines: tuple[int, ...] = (0,)
    """The number of each rank's engine among all engines: ranks of one number run it together."""

    @property
    def rank(self) -> int:
        """This rank's place in the block."""
        return 0 if self.group is None else distributed.get_rank(self.group)

    @property
    def engine(self) -> int:
        """The number of this rank's engine."""
        return self.engines[self.rank]


def neighbours(ranks: Ranks, tensor_parallel: int) -> Neighbours:
    """The block of this rank; every rank of the layout calls it. ``tensor_parallel``: see `rollout.engine.engine_ranks`."""
    layout, world = ranks.layout, ranks.layout.world_size
    holders = [layout.coordinates(rank)["dp"] for rank in range(world)]
    engines = [rank // tensor_parallel for rank in range(world)]  # vLLM's external launcher takes consecutive ranks
    blocks = joined_blocks(holders, engines)
    if len(blocks) == world:
        rank = 0 if ranks.mesh is None else distributed.get_rank()
        return Neighbours(None, (holders[rank],), (engines[rank],))
    group = cast("ProcessGroup", distributed.new_subgroups_by_enumeration(blocks)[0])  # each rank is in a block
    members = distributed.get_process_group_ranks(group)
    return Neighbours(group, tuple(holders[rank] for rank in members), tuple(engines[rank] for rank in members))


def engine_group(ranks: Ranks, tensor_parallel: int) -> ProcessGroup | None:
    """The ranks of this rank's engine, over gloo; ``None`` for an engine of one rank. Every rank of the layout calls it."""
    if tensor_parallel == 1:
        return None
    world = range(ranks.layout.world_size)
    blocks = [list(world[start : start + tensor_parallel]) for start in world[::tensor_parallel]]
    return cast("ProcessGroup", distributed.new_subgroups_by_enumeration(blocks, backend="gloo")[0])


def joined_blocks(*partitions: Sequence[int]) -> list[list[int]]:
    """The smallest blocks of ranks that split no group of any partition, in order of their first ranks.

    A partition has one label for each rank; ranks of one label are a group. For two stages of two dp positions, first with
    engines of one rank, then of two:

    >>> joined_blocks([0, 1, 0, 1], [0, 1, 2, 3])
    [[0, 2], [1, 3]]
    >>> joined_blocks([0, 1, 0, 1], [0, 0, 1, 1])
    [[0, 1, 2, 3]]
    """
    blocks: list[set[int]] = []
    for labels in partitions:
        for label in set(labels):
            group = {rank for rank, other in enumerate(labels) if other == label}
            apart = [block for block in blocks if not block & group]
            blocks = [*apart, group.union(*(block for block in blocks if block & group))]
    return sorted(sorted(block) for block in blocks)


def first_places(labels: Sequence[int]) -> dict[int, int]:
    """The first index of each label, in that order.

    >>> first_places([7, 7, 2, 7, 2])
    {7: 0, 2: 2}
    """
    return {label: labels.index(label) for label in labels}


def rows_by_holder(holders: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """The number of rows of each dp position, in order of its first rank, from each rank's dp position and number of rows.

    >>> rows_by_holder([0, 1, 0, 1], [3, 2, 3, 2])
    {0: 3, 1: 2}

    Raises:
        RowCountMismatch: ranks of one position differ.
    """
    rows = {holder: counts[first] for holder, first in first_places(holders).items()}
    for holder, count in zip(holders, counts, strict=True):
        if count != rows[holder]:
            raise RowCountMismatch(
                f"ranks of one dp position have to get the same rows, but those of position {holder} have {rows[holder]} and "
                f"{count}"
            )
    return rows


def run_end(labels: Sequence[object], bound: int) -> int:
    """The first bound from ``bound`` on that does not part neighbours with the same label.

    >>> [run_end("aabbb", bound) for bound in range(6)]
    [0, 2, 2, 5, 5, 5]
    """
    while 0 < bound < len(labels) and labels[bound - 1] == labels[bound]:
        bound += 1
    return bound


class ShardingManager:
    """A context in which the engine is awake, holds the actor's weights, and sees the rows that its ranks share.

    Inside, the random states are the rollout's: the same on all ranks of an engine, different between engines, and continued from
    the last time. Those of training are restored at the end.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: Weights,
        neighbours: Neighbours | None = None,
        shares_device: bool = True,
        ranks: Ranks | None = None,
        adapter: Weights | None = None,
    ) -> None:
        """``weights`` returns the actor's (name, full tensor) pairs; called on each entry at which the engine lacks them.

        With an ``adapter`` they are the base's, which the engine gets once; then only the adapter's matrices are streamed to it.
        An engine that has a device for itself (``shares_device=False``) stays awake, and keeps its weights.
        The engines of ``ranks`` take weights at the same time.
        """
        self.ranks = ranks or Ranks()
        self.engine = engine
        self.weights, self.adapter = weights, adapter
        self.has_base = False  # what the actor computes with, which is not always what the checkpoint holds
        self.neighbours = neighbours or Neighbours()
        self.shares_device = shares_device
        self.stale = True
        self.version = 0  # how often the engine has got weights
        self._phase = ExitStack()  # of the memory that generation takes
        self._rows: dict[int, int] = {}  # of each dp position in the block, in the batch that is being generated
        self._training_random: dict[str, Any] = {}
        self._rollout_random: dict[str, Any] | None = None

    def mark_stale(self) -> None:
        """Marks the engine's weights as stale: the next entry streams the actor's. An engine that can make room begins to."""
        self.stale = True
        if self.shares_device and hasattr(self.engine, "make_room"):
            self.engine.make_room()

    def __enter__(self) -> "ShardingManager":
        """Wakes the engine; an error of one engine is raised on all ranks, see `Ranks.fail_together`."""
        self._phase.enter_context(PHASES.phase(GENERATION))
        with undoing(*self._rest):  # training needs the memory
            with self.ranks.fail_together():
                kept = self.engine.wake()
            self._bring_up_to_date(kept)
        self.stale = False
        self._training_random = random_states()
        if self._rollout_random is None:
            seed_everything(derive_seed("rollout engine", self.neighbours.engine))
        else:
            set_random_states(self._rollout_random)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        end_after(error, self._continue_training_random, *self._rest)

    def _bring_up_to_date(self, kept: bool) -> None:
        """Streams what the engine lacks.

        Args:
            kept: whether the engine still has the weights that it got.
        """
        lacks = not kept or not self.has_base if self.adapter is not None else not kept or self.stale
        if lacks:
            with self.ranks.fail_together():
                self._stream(self.engine.load_weights, self.weights)
            self.has_base = True
        if self.adapter is not None and (lacks or self.stale):
            with self.ranks.fail_together():
                self._stream(self.engine.load_adapter, self.adapter)
        self.version += lacks or self.stale

    def _stream(self, load: Callable[[Iterable[tuple[str, Tensor]]], None], weights: Weights) -> None:
        tensors = iter(weights())
        try:
            load(tensors)
        except Exception as error:
            end_after(error, partial(deque, tensors, maxlen=0))  # other ranks continue to gather and take them
            raise

    def _continue_training_random(self) -> None:
        self._rollout_random = random_states()
        set_random_states(self._training_random)

    @property
    def _rest(self) -> list[Callable[[], None]]:
        """What frees the memory of the rollout."""
        return [*([self.engine.sleep] if self.shares_device else []), self._phase.close]

    def preprocess_data(self, data: DataProto, together: str | None = None) -> DataProto:
        """The rows for this rank's engine: its share of the rows of all dp positions in the block, in their order.

        Args:
            together: a column; neighbouring rows with the same value get the same engine.

        Raises:
            RowCountMismatch: ranks of one dp position have different numbers of rows; raised on all ranks of the block.
        """
        block = self.neighbours
        if block.group is None:
            return data
        self._rows = rows_by_holder(block.holders, gathered(len(data), block.group))
        everything = data if len(self._rows) == 1 else _gathered(data, block, block.holders)
        engines = list(first_places(block.engines))
        number = engines.index(block.engine)
        start, stop = (each * len(everything) // len(engines) for each in (number, number + 1))
        if together is not None:
            start, stop = (run_end(everything[together], bound) for bound in (start, stop))
        return everything[start:stop]

    def postprocess_data(self, data: DataProto, holder: str | None = None) -> DataProto:
        """This rank's rows out of those that the block's engines generated.

        Args:
            holder: a column with the dp position of each row's prompt; by default there are equally many rows for each prompt.

        Raises:
            RowCountMismatch: the engines did not return the same number of rows for each prompt.
        """
        block = self.neighbours
        if block.group is None:
            return data
        if len(set(block.engines)) > 1:
            data = _gathered(data, block, block.engines)
        if holder is not None:
            return data[np.flatnonzero(data[holder] == block.holders[block.rank])]
        prompts = sum(self._rows.values())
        samples, left = divmod(len(data), max(prompts, 1))
        if left:
            raise RowCountMismatch(f"the engines returned {len(data)} rows for {prompts} prompts")
        own = block.holders[block.rank]
        stop = dict(zip(self._rows, accumulate(self._rows.values()), strict=True))[own]
        return data[samples * (stop - self._rows[own]) : samples * stop]


def _gathered(data: DataProto, block: Neighbours, labels: Sequence[int]) -> DataProto:
    """The rows of the first rank of each label, as wide as the widest, on every rank; ``meta_info`` stays each rank's own.

    Beside ranks with rows, one without any adds no columns either: an engine that decoded nothing does not have all of them.
    """
    told = gathered((len(data), token_widths(data), other_response_columns(data)), block.group)
    told = [each for each in told if each[0]] or told
    _, widths, others = zip(*told)
    prompt, response = map(max, zip(*widths))
    data = widen(
        data, max(prompt, token_widths(data)[0]), max(response, token_widths(data)[1]), set.intersection(*others)
    )
    contributes = block.rank in first_places(labels).values() and (len(data) > 0 or not told[0][0])
    whole = all_gather(data.select(meta_info_keys=[]) if contributes else DataProto(), block.group)
    whole.meta_info = dict(data.meta_info)
    return whole
