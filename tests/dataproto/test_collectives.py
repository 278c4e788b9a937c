"""Batches over four processes that talk through gloo."""

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from dataproto import DataProto, all_gather_data_proto, distributed
from dataproto.distributed import all_gather
from dataproto.errors import ColumnConflict, InvalidIndex, RankFailure
from dataproto.ragged import RaggedTensor
from dataproto.tensordict_utils import same_value

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
RANKS = 4
ROWS = (3, 1, 0, 4)  # of each rank


def part(rank: int, rows: int) -> DataProto:
    """Row k of rank r holds the number 10 r + k in every column."""
    numbers = 10 * rank + torch.arange(rows)
    media = {"image": [Image.new("RGB", (8, 8), (rank, 0, 0))], "pixels": torch.full((4, 2), float(rank))}
    ragged = RaggedTensor(torch.arange(8 * rank, 8 * rank + 8).view(4, 2), [3, 1])
    return DataProto.from_dict(
        {
            "ids": torch.stack([numbers, numbers], dim=1),
            "flag": numbers % 2 == 0,
            "none": torch.zeros(rows, 0),
            "strided": torch.stack([numbers, -numbers])[0],
        },
        {
            "uid": [str(number) for number in numbers.tolist()],
            "media": [media] * rows,
            "n": numbers.numpy(),
            "text": np.array([f"row {number}" for number in numbers.tolist()], dtype=str),
            "ragged": ragged[[0, 1, 1, 0][:rows]],
        },
        {"size": 7},
    )


def assert_same(one: DataProto, other: DataProto) -> None:
    assert one.names() == other.names()
    assert (one.batch is None) == (other.batch is None)
    for name in one.names():
        assert same_value(one[name], other[name]), name
    assert same_value(one.meta_info, other.meta_info)


def everybody(size: int) -> DataProto:
    return DataProto.concat([part(rank, ROWS[rank]) for rank in range(size)])


# Scenarios: functions of (rank, size) that every rank runs; an assertion that fails is told to the test


def gathers_all_rows(rank: int, size: int) -> None:
    data = part(rank, ROWS[rank])
    found = all_gather(data)
    assert_same(found, everybody(size))
    assert_same(data, part(rank, ROWS[rank]))


def gathers_equal_rows(rank: int, size: int) -> None:
    assert_same(all_gather(part(rank, 2)), DataProto.concat([part(each, 2) for each in range(size)]))


def gathers_no_rows(rank: int, size: int) -> None:
    found = all_gather(part(rank, 0))
    assert len(found) == 0
    assert_same(found, part(0, 0))


def gathers_from_a_rank_without_columns(rank: int, size: int) -> None:
    found = all_gather(part(rank, ROWS[rank]) if rank else DataProto(meta_info={"size": 7}))
    assert_same(found, DataProto.concat([part(each, ROWS[each]) for each in range(1, size)]))


def gathers_nothing_at_all(rank: int, size: int) -> None:
    assert_same(all_gather(DataProto()), DataProto())


def gathers_columns_of_one_field(rank: int, size: int) -> None:
    objects, tensors = DataProto.from_dict(non_tensors={"a": [rank]}), DataProto.from_dict({"a": torch.tensor([rank])})
    ragged = DataProto(non_tensor_batch={"a": RaggedTensor(torch.full((rank,), rank), [rank])})
    assert all_gather(objects)["a"].tolist() == all_gather(tensors)["a"].tolist() == list(range(size))
    assert all_gather(objects).batch is None
    assert [row.tolist() for row in all_gather(ragged)["a"]] == [[each] * each for each in range(size)]


def gathers_every_dtype(rank: int, size: int) -> None:
    def columns(each: int) -> dict[str, torch.Tensor]:
        return {str(dtype): torch.arange(each, each + 3).to(dtype) for dtype in DTYPES}

    found = all_gather(DataProto.from_dict(columns(rank)))
    for name in columns(0):
        expected = torch.cat([columns(each)[name].view(torch.uint8) for each in range(size)])
        assert torch.equal(found[name].view(torch.uint8), expected), name
        assert found[name].dtype == columns(0)[name].dtype


def gathers_nested_and_tracked_tensors(rank: int, size: int) -> None:
    def batch(each: int) -> DataProto:
        rows = [torch.full((each + 1,), float(each)), torch.zeros(2)]
        tracked = torch.full((2,), float(each), requires_grad=True)
        return DataProto.from_dict({"nested": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "t": tracked})

    found = all_gather(batch(rank))
    rows = [row.tolist() for row in found["nested"].unbind()]
    assert rows == [row for each in range(size) for row in ([float(each)] * (each + 1), [0.0, 0.0])]
    assert not found["t"].requires_grad


def shares_what_rows_share(rank: int, size: int) -> None:
    data = part(rank, 4)
    found = all_gather(data)
    assert all(row is data["media"][0] for row in found["media"][4 * rank : 4 * rank + 4])
    for source in range(size):
        rows = found["media"][4 * source : 4 * source + 4]
        assert len({id(row["pixels"]) for row in rows}) == len({id(row["image"][0]) for row in rows}) == 1
    found["media"][0]["pixels"].add_(1)  # what arrived is this rank's own
    assert len(found["ragged"].storage) == 4 * size


def merges_facts(rank: int, size: int) -> None:
    data = part(rank, 1)
    data.meta_info = {"step": 3, "metrics": {"loss": rank}, "timing_s": {"gen": rank}}
    expected = {"step": 3, "metrics": {"loss": list(range(size))}, "timing_s": {"gen": size - 1}}
    assert all_gather(data).meta_info == expected


def gathers_in_place_and_keeps_facts(rank: int, size: int) -> None:
    data = part(rank, ROWS[rank])
    data.meta_info["rank"] = rank
    assert all_gather_data_proto(data, dist.group.WORLD) is None
    assert data.meta_info == {"size": 7, "rank": rank}
    assert_same(data.select(meta_info_keys=["size"]), everybody(size))


def takes_ranks_within_a_group(rank: int, size: int) -> None:
    last = [size - 2, size - 1]
    group = dist.new_group(last)
    if rank not in last:
        assert InvalidIndex in raised(lambda: all_gather(part(rank, 1), group))[0].__mro__
        return
    assert_same(all_gather(part(rank, 2), group), DataProto.concat([part(each, 2) for each in last]))


def survives_random_batches(rank: int, size: int) -> None:
    """Each rank finds its own rows among all, whatever the rows."""
    for seed in range(8):
        counts = np.random.default_rng(seed).integers(0, 5, size).tolist()
        mine = part(rank, counts[rank])
        mine.pop(non_tensor_batch_keys=["text"])  # its dtype is as wide as the longest of all rows
        end = sum(counts[: rank + 1])
        assert_same(all_gather(mine)[end - counts[rank] : end], mine)


def counted(act: Callable[[], Any]) -> tuple[Any, int]:
    """The result of ``act`` and the number of collectives that it made."""
    names = {
        dist: ("all_reduce", "broadcast"),
        dist.distributed_c10d: ("all_gather",),
        distributed: ("all_gather_equal",),
    }
    with ExitStack() as stack:
        made = [
            stack.enter_context(mock.patch.object(place, name, wraps=getattr(place, name)))
            for place, several in names.items()
            for name in several
        ]
        result = act()
    return result, sum(each.call_count for each in made)


COLLECTIVES = 2 + 2 + 1  # what is told (a size and a pickle), two agreements, and the messages


def makes_as_many_collectives_on_any_number_of_ranks(rank: int, size: int) -> None:
    for rows in (2, 3 + rank % 2, 4 if rank == size - 1 else 0):
        _, count = counted(lambda rows=rows: all_gather(part(rank, rows)))
        assert count == COLLECTIVES, (rows, count)


def gathers_by_broadcasts_what_is_too_large_to_fill_up(rank: int, size: int) -> None:
    with mock.patch.object(distributed, "LITTLE", 0):
        found, count = counted(lambda: all_gather(part(rank, 4 if rank == size - 1 else 0)))
    assert_same(found, part(size - 1, 4))
    assert COLLECTIVES <= count < COLLECTIVES + size, count  # pickles have a part of every rank


GOOD = [
    makes_as_many_collectives_on_any_number_of_ranks,
    gathers_by_broadcasts_what_is_too_large_to_fill_up,
    *(gathers_all_rows, gathers_equal_rows, gathers_no_rows, gathers_from_a_rank_without_columns),
    *(gathers_nothing_at_all, gathers_columns_of_one_field, gathers_every_dtype, gathers_nested_and_tracked_tensors),
    *(shares_what_rows_share, merges_facts, gathers_in_place_and_keeps_facts),
    *(takes_ranks_within_a_group, survives_random_batches),
]


# What must fail, and the same on all ranks


class Poison:
    """Can be pickled, but not read."""

    def __reduce__(self) -> Any:
        return dict, (5,)


def raised(act: Callable[[], Any]) -> tuple[type, str]:
    try:
        act()
    except Exception as error:
        return type(error), str(error)
    return type(None), "no error"


def on_last(
    change: Callable[[DataProto], Any], call: Callable[[DataProto], Any] = all_gather
) -> Callable[[int, int], Any]:
    """A call in which the last rank's batch was changed; no batch may be different afterwards."""

    def scenario(rank: int, size: int) -> tuple[type, str]:
        data = part(rank, 2)
        if rank == size - 1:
            change(data)
        names = data.names()
        error = raised(lambda: call(data))
        assert data.names() == names
        assert all(len(data[name]) in (2, 5) for name in names)
        return error

    return scenario


def put(name: str, column: Any) -> Callable[[DataProto], None]:
    return lambda data: data.__setitem__(name, column)


def past_the_law(data: DataProto) -> None:
    data.non_tensor_batch["late"] = np.zeros(5)


def in_place(data: DataProto) -> None:
    all_gather_data_proto(data, dist.group.WORLD)


def call_by_rank(*calls: Callable[[DataProto], Any]) -> Callable[[int, int], tuple[type, str]]:
    return lambda rank, size: raised(lambda: calls[min(rank, 1)](part(rank, 2)))


RAGGED = RaggedTensor(torch.zeros(2, 3, dtype=torch.int64), [1, 1])

# name -> (scenario, error, what its message holds, with {last} and {others} for the ranks)
BAD: dict[str, tuple[Callable[[int, int], Any], type, str]] = {
    "tensor more": (
        on_last(put("extra", torch.zeros(2))),
        ColumnConflict,
        "column 'extra' is absent on {others} and tensor torch.float32 (B) on {last}",
    ),
    "objects more": (on_last(put("extra", ["a", "b"])), ColumnConflict, "column 'extra' is absent on {others}"),
    "column less": (
        on_last(lambda data: data.pop(["ids"])),
        ColumnConflict,
        "'ids' is tensor torch.int64 (B, 2) on {others} and absent on {last}",
    ),
    "dtype": (on_last(put("flag", torch.zeros(2))), ColumnConflict, "tensor torch.float32 (B) on {last}"),
    "shape": (on_last(put("ids", torch.zeros(2, 3).long())), ColumnConflict, "tensor torch.int64 (B, 3) on {last}"),
    "ragged tail": (on_last(put("ragged", RAGGED)), ColumnConflict, "ragged torch.int64 (B, n, 3) on {last}"),
    "ragged here": (
        on_last(put("ids", RAGGED)),
        ColumnConflict,
        "'ids' is tensor torch.int64 (B, 2) on {others} and ragged",
    ),
    "array dtype": (on_last(put("n", np.zeros(2))), ColumnConflict, "array float64 (B) on {last}"),
    "array shape": (on_last(put("n", np.zeros((2, 2), int))), ColumnConflict, "array int64 (B, 2) on {last}"),
    "array here": (on_last(put("uid", np.zeros(2))), ColumnConflict, "'uid' is objects on {others} and array float64"),
    "in place": (on_last(put("extra", ["a", "b"]), in_place), ColumnConflict, "column 'extra' is absent on {others}"),
    "unpicklable": (on_last(put("uid", [lambda: None] * 2)), RankFailure, "no batch was exchanged: "),
    "unpicklable fact": (on_last(lambda data: data.meta_info.update(f=lambda: 0)), RankFailure, "on {last}"),
    "past the law": (
        on_last(past_the_law),
        RankFailure,
        "RowCountMismatch: column 'late' has 5 rows, the batch has 2 on {last}",
    ),
    "unreadable": (
        on_last(put("uid", [Poison(), 1])),
        RankFailure,
        "TypeError: 'int' object is not iterable on {others}",
    ),
    "facts differ": (
        on_last(lambda data: data.meta_info.update(size=8)),
        RankFailure,
        "Conflicting values for meta_info key 'size': 7 and 8 on rank",
    ),
    "not a batch": (call_by_rank(all_gather, lambda _: all_gather([1])), RankFailure, "not a list on rank"),  # type: ignore[arg-type]
}


# Running them


def run(rank: int, size: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    scenarios = {**{scenario.__name__: scenario for scenario in GOOD}, **{name: case[0] for name, case in BAD.items()}}
    for name, scenario in scenarios.items():
        try:
            outcome = scenario(rank, size)
        except BaseException as error:  # told to the test, so that the other ranks are not left waiting without a word
            outcome = f"{type(error).__name__}: {error}"
        results.put((name, rank, outcome))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank reports for every scenario."""
    size = RANKS
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dataproto.distributed"])
    results = context.Queue()
    store = str(Path(tmp_path_factory.mktemp("store")) / "file")
    ranks = [context.Process(target=run, args=(rank, size, store, results), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    found: dict[str, list[Any]] = {name: [None] * size for name in [*(case.__name__ for case in GOOD), *BAD]}
    for _ in range(size * len(found)):
        name, rank, outcome = results.get(timeout=120)
        found[name][rank] = outcome
    for process in ranks:
        process.join(timeout=60)
    return found


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in GOOD])
def test_every_rank(outcomes: dict[str, list[Any]], name: str) -> None:
    assert outcomes[name] == [None] * RANKS


@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise_the_same(outcomes: dict[str, list[Any]], name: str) -> None:
    _, error, message = BAD[name]
    assert len(set(outcomes[name])) == 1
    assert outcomes[name][0][0] is error
    assert message.format(last="rank 3", others="ranks 0, 1, 2") in outcomes[name][0][1]


def test_distinct_media_and_rows_are_sent_once() -> None:
    media = {"image": [Image.effect_noise((64, 64), 50)], "pixels": torch.randn(64, 64), "array": np.random.rand(64)}
    ragged = RaggedTensor(torch.arange(1000), [1000])
    one = DataProto.from_dict(non_tensors={"media": [media], "ragged": ragged})
    sizes = []
    for data in (one, one.repeat(8)):
        sizes.append(len(distributed._pickled(data)[0]))
    assert sizes[0] > 64 * 64 * 5 + 8000
    assert sizes[1] < sizes[0] + 2000
