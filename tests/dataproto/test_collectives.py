"""Gathering batches over two processes that talk through gloo."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataproto import DataProto, all_gather_data_proto
from dataproto.equality import same_value
from dataproto.errors import ColumnConflict


def part(rank: int, rows: int) -> DataProto:
    """Row k of rank r holds the number 10 r + k in every column."""
    numbers = 10 * rank + torch.arange(rows)
    pixels = torch.full((4, 2), float(rank))
    return DataProto.from_dict(
        {
            "ids": torch.stack([numbers, numbers], dim=1),
            "half": numbers.to(torch.bfloat16),
            "flag": numbers % 2 == 0,
            "none": torch.zeros(rows, 0),
            "strided": torch.stack([numbers, -numbers])[0],
        },
        {
            "uid": [str(number) for number in numbers.tolist()],
            "media": [{"pixels": pixels}] * rows,
            "n": numbers.numpy(),
        },
        {"rank": rank},
    )


def gathered(rank: int, sizes: tuple[int, int]) -> Any:
    data = part(rank, sizes[rank])
    own = data["media"][0]["pixels"] if sizes[rank] else None
    assert all_gather_data_proto(data, dist.group.WORLD) is None
    expected = DataProto.concat([part(source, size).select(meta_info_keys=[]) for source, size in enumerate(sizes)])
    assert data.names() == expected.names()
    for name in expected.names():
        assert same_value(data[name], expected[name]), name
    assert data.meta_info == {"rank": rank}
    start = sum(sizes[:rank])
    assert all(row["pixels"] is own for row in data["media"][start : start + sizes[rank]])
    other = data["media"][sizes[0] :] if rank == 0 else data["media"][: sizes[0]]
    assert len({id(row["pixels"]) for row in other}) <= 1
    return len(data)


def refused(rank: int, change: Callable[[int, DataProto], None]) -> str:
    data = part(rank, 2)
    change(rank, data)
    names = data.names()
    try:
        all_gather_data_proto(data, dist.group.WORLD)
    except ColumnConflict as error:
        assert data.names() == names
        assert len(data["ids"]) == len(data["n"]) == 2
        return str(error)
    return "no error"


def only_on_rank_1(name: str, column: Any) -> Callable[[int, DataProto], None]:
    def change(rank: int, data: DataProto) -> None:
        if rank == 1:
            data[name] = column

    return change


def past_the_law(rank: int, data: DataProto) -> None:
    if rank == 1:
        data.non_tensor_batch["late"] = np.zeros(5)


def fields_of_one(rank: int) -> tuple[int, int]:
    objects, tensors = DataProto.from_dict(non_tensors={"a": [rank]}), DataProto.from_dict({"a": torch.tensor([rank])})
    all_gather_data_proto(objects, dist.group.WORLD)
    all_gather_data_proto(tensors, dist.group.WORLD)
    assert objects.batch is None
    assert objects["a"].tolist() == tensors["a"].tolist() == [0, 1]
    return len(objects), len(tensors)


SCENARIOS: dict[str, Callable[[int], Any]] = {
    "equal": lambda rank: gathered(rank, (3, 3)),
    "uneven": lambda rank: gathered(rank, (1, 4)),
    "one empty": lambda rank: gathered(rank, (2, 0)),
    "both empty": lambda rank: gathered(rank, (0, 0)),
    "one field": fields_of_one,
    "tensor more": lambda rank: refused(rank, only_on_rank_1("extra", torch.zeros(2))),
    "array more": lambda rank: refused(rank, only_on_rank_1("extra", ["a", "b"])),
    "dtype": lambda rank: refused(rank, only_on_rank_1("half", torch.zeros(2))),
    "shape": lambda rank: refused(rank, only_on_rank_1("ids", torch.zeros(2, 3, dtype=torch.int64))),
    "array shape": lambda rank: refused(rank, only_on_rank_1("n", np.zeros((2, 2)))),
    "unpicklable": lambda rank: refused(rank, only_on_rank_1("uid", [lambda: None] * 2)),
    "past the law": lambda rank: refused(rank, past_the_law),
}


def run(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name, scenario in SCENARIOS.items():
        try:
            outcome = scenario(rank)
        except BaseException as error:  # told to the test, so that the other rank is not left waiting without a word
            outcome = f"{type(error).__name__}: {error}"
        results.put((name, rank, outcome))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks report for every scenario."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(Path(tmp_path_factory.mktemp("store")) / "file")
    ranks = [context.Process(target=run, args=(rank, store, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    found: dict[str, list[Any]] = {name: [None, None] for name in SCENARIOS}
    for _ in range(2 * len(SCENARIOS)):
        name, rank, outcome = results.get(timeout=120)
        found[name][rank] = outcome
    for process in ranks:
        process.join(timeout=60)
    return found


@pytest.mark.parametrize(("scenario", "rows"), [("equal", 6), ("uneven", 5), ("one empty", 2), ("both empty", 0)])
def test_every_rank_gets_all_rows_in_rank_order(outcomes: dict[str, list[Any]], scenario: str, rows: int) -> None:
    assert outcomes[scenario] == [rows, rows]


def test_one_field_is_enough(outcomes: dict[str, list[Any]]) -> None:
    assert outcomes["one field"] == [(2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("tensor more", "ranks 0 and 1 hold different columns"),
        ("array more", "ranks 0 and 1 hold different columns"),
        ("dtype", "half torch.float32"),
        ("shape", "ids torch.int64 (B, 3)"),
        ("array shape", "'n' cannot be joined"),
        ("unpicklable", "rank 1 cannot send its batch"),
        ("past the law", "rank 1 cannot send its batch: column 'late' has 5 rows, the batch has 2"),
    ],
)
def test_what_cannot_be_gathered_raises_on_all_ranks(
    outcomes: dict[str, list[Any]], scenario: str, message: str
) -> None:
    assert outcomes[scenario][0] == outcomes[scenario][1]
    assert message in outcomes[scenario][0]
