"""Collectives of 8, 64 and 512 ranks: what arrives, and how many collectives of torch a call makes.

Some ranks are threads of this process, and each of the others sends what one of these sends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from dataproto import DataProto, distributed
from dataproto.distributed import all_gather
from dataproto.ragged import RaggedTensor

COLLECTIVES = 2 + 2 + 1
"""What is told as sizes and pickles; two agreements; the messages."""
TIMEOUT_S = 300.0

Like = Callable[[int, int], int]
ALIKE: dict[str, tuple[Like, dict[int, int]]] = {  # the rank that a rank is like, of so many; the rows of those ranks
    "equal": (lambda rank, size: 0, {0: 2}),
    "unequal": (lambda rank, size: rank % 3, {0: 1, 1: 2, 2: 3}),
    "the first of eight": (lambda rank, size: min(rank % 8, 1), {0: 2, 1: 0}),  # of an engine's ranks
    "the second alone": (lambda rank, size: int(rank == 1), {0: 0, 1: 3}),
}


def batch(rank: int, rows: int) -> DataProto:
    """Row k of rank r holds the number 4 r + k in every column."""
    numbers = 4 * rank + torch.arange(rows)
    columns = {"ids": torch.stack([numbers, numbers], dim=1), "mask": numbers % 2 == 0}
    return DataProto.from_dict(
        columns, {"uid": [str(each) for each in numbers.tolist()], "ragged": RaggedTensor(numbers, [1] * rows)}
    )


class Represented(threaded.ProcessLocalGroup):
    """A group of ``size`` ranks, of which few exist."""

    alike: list[int]
    meeting: threading.Barrier
    told: dict[int, list[torch.Tensor]]

    def meet(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What each rank of all passes to its call."""
        self.told[self._rank] = [tensor.clone() for tensor in tensors]
        self.meeting.wait(TIMEOUT_S)
        found = [self.told[rank] for rank in self.alike]
        self.meeting.wait(TIMEOUT_S)
        return found

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for place, (tensor,) in zip(outputs[0], self.meet(inputs), strict=True):
            place.copy_(tensor)
        return threaded.ret_work(outputs)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """The largest, which is all that is asked for."""
        tensors[0].copy_(torch.stack([tensor for (tensor,) in self.meet(tensors)]).amax(0))
        return threaded.ret_work(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors[0].copy_(self.meet(tensors)[opts.rootRank][0])
        return threaded.ret_work(tensors)


@contextmanager
def represented(alike: list[int]) -> Iterator[None]:
    """In here a thread may be one of the ranks that others are like."""

    class Group(Represented):
        pass

    Group.alike, Group.meeting, Group.told = alike, threading.Barrier(len(set(alike))), {}
    dist.Backend.register_backend("represented", lambda store, rank, size, timeout: Group(rank, size), devices=["cpu"])
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        isolate(False)


@contextmanager
def counting() -> Iterator[threading.local]:
    """In here ``made.count`` is the number of collectives that a thread has made."""
    made = threading.local()

    def counted(collective: Any) -> Any:
        @wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            made.count = getattr(made, "count", 0) + 1
            return collective(*args, **kwargs)

        return call

    places = [(dist, "all_reduce"), (dist, "broadcast"), (dist.distributed_c10d, "all_gather")]
    if hasattr(dist.distributed_c10d, "all_gather_single"):  # gathers objects from torch 2.15 on
        places.append((dist.distributed_c10d, "all_gather_single"))
    with ExitStack() as stack:
        for place, name in (*places, (distributed, "all_gather_equal")):
            stack.enter_context(mock.patch.object(place, name, counted(getattr(place, name))))
        yield made


def numbers_of_collectives(alike: list[int], act: Callable[[int], None]) -> set[int]:
    """Runs ``act`` on each of the ranks that others are like; how many collectives it makes on them."""
    found: dict[int, Any] = {}

    def run(rank: int, made: threading.local) -> None:
        try:
            dist.init_process_group("represented", rank=rank, world_size=len(alike), store=dist.HashStore())
            made.count = 0
            act(rank)
            found[rank] = made.count
        except BaseException as error:
            found[rank] = error
            Represented.__subclasses__()[-1].meeting.abort()

    with counting() as made, represented(alike):
        ranks = [threading.Thread(target=run, args=(rank, made)) for rank in sorted(set(alike))]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    return set(found.values())


@pytest.mark.parametrize("rows", ALIKE)
@pytest.mark.parametrize("size", [8, 64, 512])
def test_rows_of_all_ranks_take_as_many_collectives_on_any_number_of_ranks(size, rows):
    like, counts = ALIKE[rows]
    alike = [like(rank, size) for rank in range(size)]
    numbers = [4 * rank + row for rank in alike for row in range(counts[rank])]

    def act(rank: int) -> None:
        found = all_gather(batch(rank, counts[rank]))
        assert found["ids"][:, 0].tolist() == numbers
        assert torch.cat(list(found["ragged"])).tolist() == numbers
        assert found["uid"].tolist() == [str(each) for each in numbers]

    assert numbers_of_collectives(alike, act) == {COLLECTIVES}
