"""The rows of `benchmarks/dataproto.py`: a function for each row of its table, which returns the work of one side.

To add a row, write a function like those below: it prepares the data and returns the function to measure.
"""

import ctypes
import functools
import importlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A row of the table: its name, and the limit of our figure, relative to another side's or absolute."""

    name: str
    work: Callable[[str], Work | None]
    limit: tuple[str, float] | None
    unit: str

    def met(self, found: dict[str, float]) -> str:
        if self.limit is None or "ours" not in found:
            return ""
        side, share = self.limit
        bound = share if side == "number" else found[side] * share if side in found else None
        return "" if bound is None else "yes" if found["ours"] <= bound else "**no**"

    def target(self) -> str:
        if self.limit is None:
            return ""
        side, share = self.limit
        if side == "number":
            return f"{share:g} {self.unit}"
        return f"1/{1 / share:.0f} of verl" if side == "verl" else f"{share:g} x floor"


ROWS: list[Row] = []


def row(name: str, limit: tuple[str, float] | None = None, unit: str = "ms") -> Callable[[Any], Any]:
    """Registers a row. Its function takes a side, prepares the data, and returns the work to time, or ``None`` for no work.

    With a unit other than ms, the figure is the return value of the work.
    """

    def add(work: Callable[[str], Work | None]) -> Callable[[str], Work | None]:
        ROWS.append(Row(name, work, limit, unit))
        return work

    return add


# The batches


def proto(side: str) -> Any:
    return importlib.import_module("dataproto.protocol" if side == "ours" else "verl.protocol").DataProto


def numbers(columns: int, rows: int = 1024, width: int = 4096) -> dict[str, Any]:
    """Columns ``(rows, width)`` int64 of 32 MiB each."""
    import torch

    return {f"column {number}": torch.arange(rows * width).view(rows, width) + number for number in range(columns)}


def pictures(count: int) -> tuple[list[Any], list[Any]]:
    """Images of 512 x 512 and patches (1024, 1176) float32."""
    import numpy as np
    import torch
    from PIL import Image

    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (512, 512, 3), dtype=np.uint8)) for _ in range(count)]
    return images, [torch.randn(1024, 1176) for _ in range(count)]


def objects(values: Sequence[Any]) -> Any:
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def media(side: str, images: Sequence[Any], patches: Sequence[Any]) -> Any:
    """A batch of two multimodal columns."""
    columns = {
        "multi_modal_data": objects([{"image": [image]} for image in images]),
        "multi_modal_inputs": objects([{"pixel_values": each} for each in patches]),
    }
    return proto(side).from_dict(non_tensors=columns)


# The wire


def batch_or_arrays(side: str, columns: int = 8) -> Any:
    """256 MiB of tensors in a batch, or as a dict of arrays."""
    tensors = numbers(columns)
    return {name: each.numpy() for name, each in tensors.items()} if side == "floor" else proto(side).from_dict(tensors)


@row("pickle round trip of 256 MiB of tensors, out of band", ("verl", 1 / 100))
def out_of_band(side: str) -> Work:
    data = batch_or_arrays(side)

    def work() -> Any:
        buffers: list[Any] = []
        text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(text, buffers=buffers)

    return work


@row("the same, plain `pickle.dumps` and `loads`", ("verl", 1 / 4))
def plain(side: str, protocol: int | None = None) -> Work:
    data = batch_or_arrays(side)
    return lambda: pickle.loads(pickle.dumps(data, protocol=protocol))


@row("the same with `protocol=5`", ("verl", 1 / 4))
def plain_5(side: str) -> Work:
    return plain(side, protocol=5)


def peak_of_dumps(side: str, protocol: int | None) -> Work:
    data = batch_or_arrays(side)

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def work() -> float:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory("VmRSS")
        text = pickle.dumps(data, protocol=protocol)
        return (memory("VmHWM") - before - len(text)) / (256 << 20)

    return work


@row("peak memory of plain `pickle.dumps` beyond its result", ("number", 1.02), "copies")
def peak(side: str) -> Work:
    return peak_of_dumps(side, None)


@row("the same with `protocol=5` ", ("number", 0.02), "copies")
def peak_5(side: str) -> Work:
    return peak_of_dumps(side, 5)


# Ray


@functools.cache
def started_ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error", object_store_memory=3 << 30)
    return ray


@row("Ray put + get of 256 MiB of tensors", ("verl", 1 / 15))
def ray_tensors(side: str) -> Work:
    data, ray = batch_or_arrays(side), started_ray()
    return lambda: ray.get(ray.put(data))


@row("Ray put + get of 128 rows of PIL 512 x 512 and patches 1024 x 1176 float32", ("verl", 1 / 15))
def ray_media(side: str) -> Work:
    import numpy as np

    images, patches = pictures(128)
    ray = started_ray()
    if side == "floor":
        data: Any = {"images": [np.asarray(image) for image in images], "patches": [each.numpy() for each in patches]}
    else:
        data = media(side, images, patches)
    return lambda: ray.get(ray.put(data))


class RayBlobs:
    """A blob store in Ray's object store."""

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def put(self, buffer: Any) -> Any:
        self.refs.append(started_ray().put(buffer))
        return self.refs[-1]

    def get(self, ref: Any) -> Any:
        import ray

        return ray.get(ref)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RayBlobs, ()


def parts_of_samples(side: str) -> Callable[[], tuple[list[Any], list[Any]]]:
    """Puts 16 images x 8 samples, not grouped, in 8 parts. The floor puts each image and its patches once.

    The work returns the objects of the parts and the other objects that they need.
    """
    import numpy as np

    images, patches = pictures(16)
    ray = started_ray()
    if side == "floor":
        arrays = [np.asarray(image) for image in images] + [each.numpy() for each in patches]
        return lambda: ([ray.put(each) for each in arrays], [])
    data = media(side, images * 8, patches * 8)
    if side == "verl":
        return lambda: ([ray.put(part) for part in data.chunk(8)], [])

    def work() -> tuple[list[Any], list[Any]]:
        from dataproto import shared_blobs

        blobs = RayBlobs()
        with shared_blobs(blobs):
            return [ray.put(part) for part in data.chunk(8)], blobs.refs

    return work


@row("16 images x 8 samples, not grouped, put as 8 parts: bytes in the object store", ("floor", 1.05), "MiB")
def ray_parts(side: str) -> Work:
    put, ray = parts_of_samples(side), started_ray()

    def work() -> float:
        parts, others = put()
        found = ray.experimental.get_object_locations([*parts, *others])
        return sum(each["object_size"] for each in found.values()) / 2**20

    return work


@row("the same: put and get all parts")
def ray_parts_time(side: str) -> Work:
    put, ray = parts_of_samples(side), started_ray()
    return lambda: ray.get(put()[0])


# The verbs, on 1024 x 4096 x 5 int64


def order(rows: int = 1024) -> Any:
    import torch

    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


@row("`make_iterator(128)` over 1024 x 4096 x 5 int64", ("verl", 1 / 20))
def iterate(side: str) -> Work:
    tensors = numbers(5)
    if side == "floor":
        return lambda: list(zip(*(each.split(128) for each in tensors.values())))
    data = proto(side).from_dict(tensors)
    return lambda: list(data.make_iterator(128, 1))


@row("the same, shuffled")
def iterate_shuffled(side: str) -> Work:
    tensors, rows = numbers(5), order()
    if side == "floor":
        return lambda: [[each.index_select(0, chosen) for each in tensors.values()] for chosen in rows.split(128)]
    data = proto(side).from_dict(tensors)
    return lambda: list(data.make_iterator(128, 1, seed=1, dataloader_kwargs={"shuffle": True}))


@row("`union` of 5 identical columns (shared storage)", ("number", 1))
def union(side: str) -> Work:
    tensors = numbers(5)
    if side == "floor":
        return lambda: {**tensors, **tensors}
    data, other = (proto(side).from_dict(dict(tensors)) for _ in range(2))
    return lambda: data.union(other)


@row("`reorder`", ("floor", 1.2))
def reorder(side: str) -> Work:
    tensors, rows = numbers(5), order()
    if side == "floor":
        kept: dict[str, Any] = {}
        return lambda: kept.update({name: each.index_select(0, rows) for name, each in tensors.items()})
    data = proto(side).from_dict(tensors)
    return lambda: data.reorder(rows)


@row("`select_idxs` of half the rows", ("floor", 1.2))
def rows_of(side: str) -> Work:
    tensors, rows = numbers(5), order()[:512]
    if side == "floor":
        return lambda: {name: each.index_select(0, rows) for name, each in tensors.items()}
    data = proto(side).from_dict(tensors)
    return lambda: data.select_idxs(rows)


@row("`concat` of 8 parts", ("floor", 1.2))
def concat(side: str) -> Work:
    import torch

    tensors = numbers(5)
    if side == "floor":
        pieces = {name: each.chunk(8) for name, each in tensors.items()}
        return lambda: {name: torch.cat(each) for name, each in pieces.items()}
    parts = proto(side).from_dict(tensors).chunk(8)
    return lambda: proto(side).concat(parts)


@row("`repeat(8)` of 128 rows", ("floor", 1.2))
def repeat(side: str) -> Work:
    tensors = numbers(5, rows=128)
    if side == "floor":
        return lambda: {name: each.repeat_interleave(8, dim=0) for name, each in tensors.items()}
    data = proto(side).from_dict(tensors)
    return lambda: data.repeat(8)


@row("`chunk(8)`, 100 times")
def chunk(side: str) -> Work:
    tensors = numbers(5)
    if side == "floor":
        return lambda: [[each.chunk(8) for each in tensors.values()] for _ in range(100)]
    data = proto(side).from_dict(tensors)
    return lambda: [data.chunk(8) for _ in range(100)]


@row("`select` of 2 columns, 100 times")
def select_columns(side: str) -> Work:
    tensors = numbers(5)
    if side == "floor":
        return lambda: [{name: tensors[name] for name in ("column 0", "column 1")} for _ in range(100)]
    data = proto(side).from_dict(tensors)
    return lambda: [data.select(["column 0", "column 1"]) for _ in range(100)]


# Positions


@row("m-RoPE positions, 256 rows x 2,048 tokens with images (beside: HF's `get_rope_index`)", ("verl", 1 / 10))
def positions(side: str) -> Work | None:
    import torch
    import transformers

    config = transformers.Qwen2_5_VLConfig()
    grids, types = [], torch.zeros(256, 2048, dtype=torch.int8)
    for line in range(256):
        start = 200 + line
        for height, width in ((20, 30), (32, 32), (44, 18)):  # patches; a token is 2 x 2 of them
            grids.append([1, height, width])
            types[line, start : start + height * width // 4] = 1
            start += height * width // 4 + 20
    mask = (torch.arange(2048) >= torch.arange(256)[:, None] % 100).long()  # left padding
    ids, grid = torch.where(types == 1, config.image_token_id, 5), torch.tensor(grids)
    if side == "floor":
        return lambda: torch.ones(256, 4, 2048, dtype=torch.int64)
    if side == "ours":
        from dataproto.vlm import family_of

        family = family_of(config)
        return lambda: family.position_ids(types, mask, grid, None, None, config)
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config).model
    return lambda: model.get_rope_index(
        input_ids=ids, mm_token_type_ids=types, image_grid_thw=grid, attention_mask=mask
    )


# Collation: 1,024 rows of 64 to 1,024 tokens


def token_lists() -> list[list[int]]:
    import random

    draw = random.Random(0)
    return [[draw.randrange(150_000) for _ in range(draw.randint(64, 1024))] for _ in range(1024)]


@row("rollout collation, 1,024 rows (beside: a loop over tokens; floor: the same numbers from arrays)", ("verl", 1 / 7))
def collate_rollouts(side: str) -> Work:
    import numpy as np
    import torch

    tokens = token_lists()
    log_probs = [[-1 / (token + 1) for token in each] for each in tokens]
    if side == "ours":
        from rollout.engine import Completion
        from rollout.responses import collate_responses

        done = [Completion(number, *each, "stop") for number, each in enumerate(zip(tokens, log_probs))]
        return lambda: collate_responses(done, 1024, 0)
    if side == "floor":
        values, floats = (np.concatenate(each) for each in (tokens, log_probs))
        filled = np.arange(1024) < np.array([len(each) for each in tokens])[:, None]

        def place() -> Any:
            grids = np.zeros(filled.shape, dtype=np.int64), np.zeros(filled.shape, dtype=np.float32)
            for grid, flat in zip(grids, (values, floats)):
                grid[filled] = flat
            return *grids, filled.astype(np.int64)

        return place

    def loop() -> Any:
        columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for ids, floats in zip(tokens, log_probs):
            grown: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
            for token, log_prob in zip(ids, floats):
                for each, value in zip(grown, (token, 1, log_prob)):
                    each.append(value)
            for each, column in zip(grown, columns):
                column.append(each + [0] * (1024 - len(each)))
        return [torch.tensor(column) for column in columns]

    return loop


def first_fit_loop(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        for place, room in enumerate(rooms):
            if lengths[number] <= room:
                bins[place].append(number)
                rooms[place] -= lengths[number]
                break
        else:
            bins.append([number])
            rooms.append(capacity - lengths[number])
    return bins


@row("first-fit-decreasing bins of 4,096 tokens for 1,024 rows (beside: a loop over bins)")
def fit(side: str) -> Work | None:
    lengths = [len(each) for each in token_lists()]
    if side == "ours":
        from dataproto.planning import first_fit_decreasing

        return lambda: first_fit_decreasing(lengths, 4096)
    return (lambda: first_fit_loop(lengths, 4096)) if side == "verl" else None


@row("1,024 rows balanced over 64 ranks")
def balanced(side: str) -> Work | None:
    lengths = [len(each) for each in token_lists()]
    if side == "ours":
        from dataproto.planning import balance

        return lambda: balance(lengths, 64)
    if side == "verl":
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

        return lambda: get_seqlen_balanced_partitions(lengths, 64, equal_size=False)
    return None
