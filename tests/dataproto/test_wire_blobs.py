"""Parts of one batch that are sent one by one put what they share into a store, once."""

import pickle
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto, RaggedTensor, shared_blobs
from dataproto.serialization.wire import SharedBlobs
from dataproto.tensordict_utils import same_value

SHELF: dict[int, bytes] = {}


class Shelf:
    """A store in this process; what is pickled of it is its name."""

    def put(self, buffer: np.ndarray) -> int:
        assert buffer.dtype == np.uint8
        assert buffer.ndim == 1
        SHELF[len(SHELF)] = buffer.tobytes()
        return len(SHELF) - 1

    def get(self, ref: int) -> bytes:
        return SHELF[ref]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shelf)

    __hash__ = None


@pytest.fixture(autouse=True)
def _empty_shelf() -> None:
    SHELF.clear()


def batch(images: int = 4, samples: int = 8) -> DataProto:
    """Samples of every image, not grouped: 0, 1, 2, 3, 0, 1, ..."""
    noise = np.random.default_rng(0)
    drawn = [Image.fromarray(noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in range(images)]
    media = [{"image": [image]} for image in drawn]
    inputs = [{"pixels": torch.randn(500), "array": np.zeros(300), "grid": torch.ones(1, 3)} for _ in range(images)]
    patches = RaggedTensor(torch.randn(images * 400, 50), [400] * images)
    data = DataProto.from_dict({"n": torch.arange(images), "r": patches}, {"media": media, "inputs": inputs})
    data = data.repeat(samples, interleave=False)
    data["x"] = torch.randn(len(data), 1000)
    data["s"] = RaggedTensor(torch.arange(len(data)), [1] * len(data))
    return data


@pytest.mark.parametrize("protocol", [4, 5])
def test_each_distinct_buffer_is_put_once(protocol: int) -> None:
    data = batch()
    with shared_blobs(Shelf()):
        sent = [pickle.dumps(part, protocol=protocol) for part in data.chunk(8)]
    sizes = sorted(map(len, SHELF.values()))
    assert sizes == sorted([40 * 40 * 4, 500 * 4, 300 * 8, 400 * 50 * 4] * 4)
    columns = data["x"].nbytes + data["n"].nbytes + data["s"].nbytes
    assert sum(map(len, sent)) < columns + 8 * 4000
    back = DataProto.concat([pickle.loads(part) for part in sent])
    for name in data.names():
        assert same_value(back[name], data[name])


def test_rows_of_a_part_share_again() -> None:
    data = batch()
    with shared_blobs(Shelf()):
        sent = pickle.dumps(data[:16])
    back = pickle.loads(sent)
    assert back["media"][0]["image"][0] is back["media"][12]["image"][0]
    assert back["inputs"][1]["pixels"] is back["inputs"][5]["pixels"]
    assert len(back["r"].storage) == 4 * 400


def test_only_what_is_sent_is_put() -> None:
    data = batch()
    with shared_blobs(Shelf()):
        pickle.dumps(data[1:2])
    assert len(SHELF) == 4
    with shared_blobs(Shelf()):
        pickle.dumps(DataProto.from_dict({"x": torch.zeros(100, 100)}, {"o": [{"small": torch.zeros(10)}] * 100}))
    assert len(SHELF) == 4


def test_sharing_ends_with_the_block() -> None:
    data = batch()
    with pytest.raises(RuntimeError, match="inside"), shared_blobs(Shelf()):
        raise RuntimeError("inside")
    text = pickle.dumps(data)
    assert not SHELF
    assert same_value(pickle.loads(text)["inputs"], data["inputs"])
    for _ in range(2):
        with shared_blobs(Shelf()):
            pickle.dumps(data)
    assert len(SHELF) == 2 * 16


def test_inner_blocks_and_other_threads_share_by_themselves() -> None:
    data, found = batch(), []
    with shared_blobs(Shelf()):
        pickle.dumps(data)
        thread = threading.Thread(target=lambda: found.append(pickle.loads(pickle.dumps(data))))
        thread.start()
        thread.join()
        assert len(SHELF) == 16
        with shared_blobs(Shelf()):
            pickle.dumps(data)
        assert len(SHELF) == 32
        pickle.dumps(data)
        assert len(SHELF) == 32
    assert same_value(found[0]["inputs"], data["inputs"])


def test_what_a_store_does_not_have_is_an_error() -> None:
    with shared_blobs(Shelf()):
        text = pickle.dumps(batch())
    SHELF.clear()
    with pytest.raises(KeyError):
        pickle.loads(text)


class Full:
    def put(self, buffer: np.ndarray) -> Any:
        raise MemoryError("the store is full")

    def get(self, ref: Any) -> Any:
        raise KeyError(ref)


def test_a_store_that_fails_says_so() -> None:
    with shared_blobs(Full()), pytest.raises(MemoryError, match="full"):
        pickle.dumps(batch())


def test_ragged_rows_and_items_alone() -> None:
    data = batch()
    with shared_blobs(Shelf()):
        rows, item = pickle.dumps(data["r"][[1, 1]]), pickle.dumps(data[1])
        pickle.dumps(data["s"])
    assert sorted(map(len, SHELF.values())) == sorted([400 * 50 * 4, 40 * 40 * 4, 500 * 4, 300 * 8])  # one row, twice
    assert pickle.loads(rows) == data["r"][[1, 1]]
    assert same_value(pickle.loads(item).non_tensor_batch["inputs"], data["inputs"][1])


def test_what_came_from_a_store_is_not_put_there_again() -> None:
    data = batch().select(non_tensor_batch_keys=["media", "inputs"])  # rows of ragged tensors are joined when read
    with shared_blobs(Shelf()):
        back = pickle.loads(pickle.dumps(data))
    shared = len(SHELF)
    with shared_blobs(Shelf()):
        again = pickle.loads(pickle.dumps(back[::-1]))
    assert len(SHELF) == shared
    assert same_value(again["media"], data["media"][::-1])
    assert same_value(again["inputs"], data["inputs"][::-1])


EDITS: dict[str, Callable[[DataProto], Any]] = {
    "a tensor": lambda data: data["inputs"][0]["pixels"].mul_(2),
    "an array": lambda data: data["inputs"][0]["array"].fill(9),
    "an image": lambda data: data["media"][0]["image"][0].putpixel((0, 0), (1, 2, 3)),
    "a ragged row": lambda data: data["r"][0].fill_(9),
    "a column": lambda data: data["x"].zero_(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_was_received_and_written_is_sent_on(edit: Callable[[DataProto], Any]) -> None:
    data = batch()
    with shared_blobs(Shelf()):
        first = pickle.dumps(data)
    stored = dict(SHELF)
    back = pickle.loads(first).writable()
    edit(back)
    with shared_blobs(Shelf()):
        again = pickle.loads(pickle.dumps(back))
    with shared_blobs(Shelf()):
        once_more = pickle.loads(pickle.dumps(again))
    edit(expected := pickle.loads(pickle.dumps(data)))
    for name in data.names():
        assert same_value(again[name], expected[name])
        assert same_value(once_more[name], expected[name])
        assert same_value(pickle.loads(first)[name], data[name])
    assert stored == {number: SHELF[number] for number in stored}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_is_written_between_two_openings_is_put_again(edit: Callable[[DataProto], Any]) -> None:
    data, blobs = batch(), SharedBlobs(Shelf())
    with blobs.open():
        pickle.dumps(data)
    edit(data)
    for _ in range(2):
        with blobs.open():
            back = pickle.loads(pickle.dumps(data))
        for name in data.names():
            assert same_value(back[name], data[name])


def test_what_is_one_in_the_store_becomes_one() -> None:
    data = batch().select(batch_keys=[], non_tensor_batch_keys=["media", "inputs"])
    with shared_blobs(Shelf()):
        parts = [pickle.loads(pickle.dumps(part)) for part in data.chunk(8)]
        back = pickle.loads(pickle.dumps(DataProto.concat(parts)))
    assert len(SHELF) == 12
    assert back["inputs"][0]["pixels"] is back["inputs"][4]["pixels"]
    assert back["media"][0]["image"][0] is back["media"][28]["image"][0]


LEAVES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda number: torch.full((5000,), number),
    "arrays": lambda number: np.full(5000, number),
    "images": lambda number: Image.new("RGB", (60, 60), (number, number, number)),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_a_relay_that_lets_go_sends_each_on_as_it_is(make: Callable[[int], Any]) -> None:
    expected = [DataProto.from_dict(non_tensors={"o": [make(number)]}) for number in range(8)]
    with shared_blobs(Shelf()):
        sent = [pickle.dumps(data) for data in expected]
    stored, relayed = len(SHELF), []
    with shared_blobs(Shelf()):
        for text in sent:
            received = pickle.loads(text)
            relayed.append(pickle.dumps(received))
            del received  # the next one may lie at the same address
    assert len(SHELF) == stored
    for text, data in zip(relayed, expected):
        assert same_value(pickle.loads(text)["o"], data["o"])


class ByContent(Shelf):
    """Gives equal bytes one reference."""

    def put(self, buffer: np.ndarray) -> int:
        SHELF[zlib.crc32(buffer)] = buffer.tobytes()
        return zlib.crc32(buffer)


def test_leaves_of_equal_bytes_stay_apart_in_a_store_by_content() -> None:
    shapes = [(6400, 2), (2, 6400), (12800,), (12800,)]
    leaves: list[Any] = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    leaves += [np.zeros(12800, dtype=np.float32), Image.new("L", (512, 100)), Image.new("L", (100, 512)), leaves[0]]
    data = DataProto.from_dict(non_tensors={"o": leaves})
    with shared_blobs(ByContent()):
        back = pickle.loads(pickle.dumps(data))
        again = pickle.loads(pickle.dumps(back))
    assert len(SHELF) == 1
    for received in (back["o"], again["o"]):
        assert same_value(received, data["o"])
        assert received[7] is received[0]


def test_another_store_gets_its_own() -> None:
    class Other(Shelf):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Other)

        def __reduce__(self) -> tuple[type, tuple[()]]:
            return Shelf, ()

    data = batch()
    with shared_blobs(Shelf()):
        back = pickle.loads(pickle.dumps(data))
    shared = len(SHELF)
    with shared_blobs(Other()):
        pickle.dumps(back)
    assert len(SHELF) == 2 * shared


def test_shared_blobs_that_stay_remember() -> None:
    data, blobs = batch(), SharedBlobs(Shelf())
    with blobs.open():
        pickle.dumps(data)
    shared = len(SHELF)
    pickle.dumps(data)
    with blobs.open():
        sent = pickle.dumps(data.repeat(2))
    assert len(SHELF) == shared
    assert same_value(pickle.loads(sent)["inputs"], data.repeat(2)["inputs"])


def test_nothing_is_remembered_of_leaves_that_are_gone() -> None:
    from dataproto.serialization import wire

    before = len(wire._origins)
    with shared_blobs(Shelf()):
        back = pickle.loads(pickle.dumps(batch()))
    assert len(wire._origins) > before
    del back
    assert len(wire._origins) == before
