"""Between the training layout and the rollout layout."""

from collections.abc import Callable, Iterable
from types import TracebackType

from torch import Tensor, distributed

from dataproto import DataProto
from dataproto.protocol import all_gather_data_proto
from rollout.engine import RolloutEngine


class ShardingManager:
    """A context in which the engine is awake, holds the actor's weights, and sees the rows its group must share.

    Args:
        engine: the rollout engine of this rank.
        weights: gives the actor's (name, full tensor) pairs; called once for each entry with stale weights.
        group: ranks whose engines must see the same rows; ``None`` if each sees its own.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self.engine = engine
        self.weights = weights
        self.group = group
        self.stale = True

    def mark_stale(self) -> None:
        """The actor has changed: the next entry streams its weights."""
        self.stale = True

    def __enter__(self) -> "ShardingManager":
        self.engine.wake()
        if self.stale:
            self.engine.load_weights(self.weights())
            self.stale = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.sleep()

    def preprocess_data(self, data: DataProto) -> DataProto:
        """All rows of the group, in rank order, on each of its ranks: tensors and non-tensors alike."""
        if self.group is None or distributed.get_world_size(self.group) == 1:
            return data
        gathered = data[:]
        all_gather_data_proto(gathered, self.group)
        return gathered

    def postprocess_data(self, data: DataProto) -> DataProto:
        """This rank's own rows out of those of the group."""
        if self.group is None or distributed.get_world_size(self.group) == 1:
            return data
        return data.chunk(distributed.get_world_size(self.group))[distributed.get_rank(self.group)]
