"""Batches through Ray's object store, on this machine only: columns are mapped, and what parts share is stored once."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from PIL import Image

from dataproto import DataProto, RaggedTensor, shared_blobs
from dataproto.tensordict_utils import same_value


class RayBlobs:
    """A store of buffers in Ray's object store; counts what is put."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, buffer: np.ndarray) -> ray.ObjectRef:
        self.sizes.append(buffer.nbytes)
        return ray.put(buffer)

    def get(self, ref: ray.ObjectRef) -> np.ndarray:
        return ray.get(ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayBlobs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RayBlobs, ()


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers cannot import a test
    ray.init(
        "local",  # else it joins any cluster of this machine
        num_cpus=1,
        object_store_memory=128 << 20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


def batch(images: int = 4, samples: int = 8) -> DataProto:
    """Samples of every image, not grouped: 0, 1, 2, 3, 0, 1, ..."""
    noise = np.random.default_rng(0)
    drawn = [Image.fromarray(noise.integers(0, 256, (200, 200, 3), dtype=np.uint8)) for _ in range(images)]
    inputs = [{"pixel_values": torch.randn(300, 200), "grid": torch.ones(1, 3)} for _ in range(images)]
    data = DataProto.from_dict({"n": torch.arange(images)}, {"media": drawn, "inputs": inputs})
    data["patches"] = RaggedTensor(torch.randn(images * 100, 200), [100] * images)
    data = data.repeat(samples, interleave=False)
    data["x"], data["half"] = torch.randn(len(data), 10_000), torch.randn(len(data), 10_000).bfloat16()
    data["a"] = np.arange(len(data) * 5000).reshape(len(data), 5000)
    return data


def address_of(value: Any) -> int:
    return value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()


def lies_in_the_store(address: int) -> bool:
    """Whether an address is in memory that this process maps from the object store."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return "plasma" in line
    return False


def columns_of(data: DataProto) -> dict[str, Any]:
    """Everything large in a batch."""
    dense = {name: data[name] for name in ("x", "half", "a")}
    return {**dense, "patches": data["patches"].storage, "pixels": data["inputs"][0]["pixel_values"]}


@ray.remote
def look(data: DataProto) -> tuple[dict[str, bool], float, tuple[int, int, int]]:
    """What a worker finds: whether columns are mapped, and some of their values."""
    mapped = {name: lies_in_the_store(address_of(column)) for name, column in columns_of(data).items()}
    sums = sum(float(row["pixel_values"].sum()) for row in data["inputs"])
    return mapped, sums, data["media"][1].getpixel((3, 3))


def test_columns_are_mapped_not_copied() -> None:
    data = batch()
    ref = ray.put(data)
    one = ray.get(ref)
    for name, column in columns_of(one).items():
        assert lies_in_the_store(address_of(column)), name
        assert not lies_in_the_store(address_of(columns_of(data)[name]))
    for name in data.names():
        assert same_value(one[name], data[name])
    mapped, sums, pixel = ray.get(look.remote(ref))
    assert set(mapped.values()) == {True}
    assert sums == pytest.approx(sum(float(row["pixel_values"].sum()) for row in data["inputs"]), rel=1e-4)
    assert pixel == data["media"][1].getpixel((3, 3))


def test_a_copy_may_be_written_and_reaches_nobody_else() -> None:
    data = batch()
    ref = ray.put(data)
    received = ray.get(ref)
    received["media"][0].putpixel((0, 0), (7, 7, 7))  # an image copies itself
    mine = received.writable()
    for column in columns_of(mine).values():
        assert not lies_in_the_store(address_of(column))
        column.fill(7) if isinstance(column, np.ndarray) else column.fill_(7)
    reader = ray.get(ref)
    assert all(same_value(reader[name], data[name]) for name in data.names())


def test_a_batch_outlives_its_reference() -> None:
    data = batch()
    received = ray.get(ray.put(data))
    for _ in range(20):
        ray.put(np.full(10 << 20, 255, dtype=np.uint8))  # would take the place of what nobody holds
    for name in data.names():
        assert same_value(received[name], data[name])


@ray.remote
def dim(data: DataProto) -> DataProto:
    """A worker that writes into a copy of what it received, and sends it on."""
    data = data.writable()
    data["inputs"][0]["pixel_values"].mul_(2)
    data["media"][0].putpixel((0, 0), (7, 7, 7))
    with shared_blobs(RayBlobs()):
        return ray.put(data)


def test_what_a_worker_writes_is_sent_on() -> None:
    data = batch()
    before = data["inputs"][0]["pixel_values"].clone()
    with shared_blobs(RayBlobs()):
        ref = ray.put(data)
    back = ray.get(ray.get(dim.remote(ref)))
    assert torch.equal(back["inputs"][0]["pixel_values"], before * 2)
    assert back["media"][4].getpixel((0, 0)) == (7, 7, 7)
    assert same_value(back["inputs"][1], data["inputs"][1])
    assert torch.equal(ray.get(ref)["inputs"][0]["pixel_values"], before)


def test_parts_put_each_distinct_buffer_once() -> None:
    data, store = batch(), RayBlobs()
    with shared_blobs(store):
        refs = [ray.put(part) for part in data.chunk(8)]
    assert sorted(store.sizes) == [100 * 200 * 4] * 4 + [200 * 200 * 4] * 4 + [300 * 200 * 4] * 4
    parts = ray.get(refs)
    back = DataProto.concat(parts)
    for name in data.names():
        assert same_value(back[name], data[name])
    assert all(lies_in_the_store(part["inputs"][0]["pixel_values"].data_ptr()) for part in parts)
    with shared_blobs(store):
        once = ray.get(ray.put(back.select(non_tensor_batch_keys=["media", "inputs"])))
    assert len(store.sizes) == 12
    assert once["inputs"][0]["pixel_values"] is once["inputs"][4]["pixel_values"]


def test_parts_reach_workers_after_the_sender_let_go() -> None:
    data = batch()
    with shared_blobs(RayBlobs()):
        results = [look.remote(part) for part in data.chunk(4)]
    expected = sum(float(row["pixel_values"].sum()) for row in data["inputs"][:8])
    for mapped, sums, pixel in ray.get(results):
        assert mapped == {"x": True, "half": True, "a": True, "patches": False, "pixels": True}  # joined from its rows
        assert sums == pytest.approx(expected, rel=1e-4)
        assert pixel == data["media"][1].getpixel((3, 3))
