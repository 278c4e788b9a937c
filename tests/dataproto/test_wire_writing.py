"""What is written into a received batch stays with its writer."""

import copy
import ctypes
import mmap
import os
import pickle
import runpy
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataproto import DataProto, RaggedTensor
from dataproto._ops import buffers as memory
from dataproto._ops.equality import same_value
from dataproto.serialization import own_memory
from helpers.wire_channels import CHANNELS, Opaque, drawn, noise, sent


def rich() -> DataProto:
    draw = torch.Generator().manual_seed(0)
    tensors = {"x": torch.arange(4000).view(4, 1000), "y": torch.randn(4, 300, generator=draw)}
    image, patches = drawn("RGB"), torch.randn(500, generator=draw)
    data = DataProto.from_dict(
        tensors, {"o": [{"image": image, "patches": patches} for _ in range(4)], "u": list("abcd")}
    )
    data["a"] = np.arange(4)
    data["r"] = RaggedTensor(torch.arange(1000.0), [100, 0, 400, 500])
    return data


def test_verbs_do_not_write_into_memory_that_was_handed_over() -> None:
    from test_ragged_columns import VERBS

    text, handed_over = sent(rich())
    buffers = [bytearray(buffer) for buffer in handed_over]
    before = [zlib.crc32(buffer) for buffer in buffers]
    received = pickle.loads(text, buffers=buffers)
    received["n"], received["uid"] = torch.arange(4), list("abcd")
    for name, (change, _) in VERBS.items():
        if name not in ("union", "concat", "or part"):
            change(received.select())
    received.union(received.select())
    DataProto.concat([received, received])
    received.to(torch.bfloat16)
    assert [zlib.crc32(buffer) for buffer in buffers] == before


def write_everywhere(data: DataProto) -> None:
    """All ways in which a user writes into a batch like `rich`."""
    data.batch["x"][data.batch["x"] > 1] = 7
    data["x"][1].mul_(2)
    data["y"].numpy()[...] = 7
    data["a"][:] = 7
    data["r"][2].fill_(7)
    torch.add(data["r"].storage, 1, out=data["r"].storage)
    data["o"][0]["patches"][:100] = 7
    data["o"][0]["image"].load()[0, 0] = (7, 7, 7)
    data["o"][0]["image"].paste((8, 8, 8), (1, 1, 3, 3))


@pytest.mark.parametrize("send", [*CHANNELS.values(), DataProto.writable], ids=[*CHANNELS, "writable"])
def test_what_is_received_may_be_written(send: Callable[[Any], Any]) -> None:
    data, mine = rich(), rich()
    received = send(data)
    write_everywhere(received)
    write_everywhere(mine)
    for name in data.names():
        assert same_value(received[name], mine[name])
        assert same_value(data[name], rich()[name])
    assert received["o"][3]["patches"] is received["o"][0]["patches"]


@pytest.mark.parametrize("kind", ["bytes", "mapped", "without a right to its file"])
def test_readers_of_one_buffer_do_not_see_what_others_write(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, handed_over = sent(rich())
    content = b"".join(handed_over)
    if kind == "bytes":
        memory: Any = memoryview(content)
    else:
        with open(tmp_path / "shared", "w+b") as file:
            file.write(content)
            file.flush()
            memory = memoryview(mmap.mmap(file.fileno(), 0)).toreadonly()
        (tmp_path / "shared").unlink()  # as in Ray's object store
        monkeypatch.setattr(own_memory, "_LARGE", 1)
        if kind != "mapped":
            monkeypatch.setattr(own_memory, "_descriptors", lambda: iter(()))
            monkeypatch.setattr(own_memory, "_places", {})
            monkeypatch.setattr(own_memory, "_open_if", lambda place, file: None)
    ends = np.cumsum([buffer.nbytes for buffer in handed_over]).tolist()
    buffers = [memory[end - buffer.nbytes : end] for end, buffer in zip(ends, handed_over)]
    one, other = (pickle.loads(text, buffers=buffers) for _ in range(2))
    write_everywhere(one)
    written = rich()
    write_everywhere(written)
    for reader, expected in ((one, written), (other, rich()), (pickle.loads(text, buffers=buffers), rich())):
        for name in expected.names():
            assert same_value(reader[name], expected[name])
    assert bytes(memory) == content


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere read-only memory is copied")
@pytest.mark.parametrize("direct", [True, False], ids=["by its mapping", "by its descriptor"])
def test_shared_pages_are_copied_when_they_are_written(
    direct: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 20
    with open(tmp_path / "shared", "w+b") as file:
        file.write(b"a" * size)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        (tmp_path / "shared").unlink()
        if not direct:  # only privileged processes may open it
            allowed = own_memory._open_if
            refuse = lambda place, file: None if "map_files" in place else allowed(place, file)  # noqa: E731
            monkeypatch.setattr(own_memory, "_open_if", refuse)
        bits = own_memory.OwnMemory().bits(memoryview(mapped).toreadonly()[100:-100])
    mapped[size // 2 : size // 2 + 1] = b"b"
    assert bits[size // 2 - 100] == ord("b")  # the same memory
    bits[:] = ord("c")
    assert mapped[:] == b"a" * (size // 2) + b"b" + b"a" * (size // 2 - 1)
    before = Path("/proc/self/maps").read_text().count(" (deleted)")
    del bits
    assert Path("/proc/self/maps").read_text().count(" (deleted)") == before - 1


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere read-only memory is copied")


@pytest.fixture
def unnamed(tmp_path: Path) -> Iterator[mmap.mmap]:
    """1 MiB of a file that is mapped, and has no name any more but is still open."""
    with open(tmp_path / "shared", "w+b") as file:
        file.write(b"a" * (1 << 20))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        (tmp_path / "shared").unlink()
        yield mapped


def is_shared(bits: np.ndarray, mapped: mmap.mmap) -> bool:
    """Whether bytes show what is written into the mapping."""
    mapped[:1] = b"x" if mapped[:1] != b"x" else b"y"
    return bool(bits[0] == mapped[0])


def test_without_proc_memory_is_copied(unnamed: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise FileNotFoundError("/proc/self/maps")

    monkeypatch.setattr(own_memory, "open", refuse, raising=False)
    bits = own_memory.OwnMemory().bits(memoryview(unnamed).toreadonly())
    assert bits.flags.writeable
    assert bits.tobytes() == unnamed[:]
    assert not is_shared(bits, unnamed)


@linux_only
def test_descriptors_of_other_files_are_not_touched(
    unnamed: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file on a server that does not answer would hang whoever asks about it."""
    touched: list[str] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def touch(place: Any, *args: Any, **options: Any) -> Any:
            touched.append(str(place))
            return call(place, *args, **options)

        return touch

    opened, descriptors = own_memory._open_if, own_memory._descriptors
    with open(tmp_path / "other", "wb") as other, monkeypatch.context() as patch:
        first = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        patch.setattr(own_memory, "_descriptors", lambda: iter([first, *descriptors()]))
        patch.setattr(own_memory, "_places", {})
        patch.setattr(own_memory, "_open_if", lambda at, file: None if "map_files" in at else opened(at, file))
        patch.setattr(os, "stat", watched(os.stat))
        patch.setattr(os, "open", watched(os.open))
        bits = own_memory.OwnMemory().bits(memoryview(unnamed).toreadonly())
    assert is_shared(bits, unnamed)
    assert first not in touched


@linux_only
def test_another_file_at_the_place_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come between the look and the opening. A pipe must not be waited for."""
    (tmp_path / "file").write_bytes(b"a")
    os.mkfifo(tmp_path / "pipe")
    file = os.stat(tmp_path / "file")
    expected = file.st_dev, file.st_ino
    (tmp_path / "another").write_bytes(b"b")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda place, **_: file)
        assert own_memory._open_if(str(tmp_path / "another"), expected) is None
        assert own_memory._open_if(str(tmp_path / "pipe"), expected) is None
    assert len(os.listdir("/proc/self/fd")) == before


@linux_only
def test_beyond_a_number_of_mappings_memory_is_copied(unnamed: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, shared = own_memory.OwnMemory(), memoryview(unnamed).toreadonly()
    monkeypatch.setattr(own_memory, "_mappings", set())
    monkeypatch.setattr(own_memory, "_MOST", 2)
    held = [memory.bits(shared) for _ in range(3)]
    assert [is_shared(bits, unnamed) for bits in held] == [True, True, False]
    del held[0]
    held.append(memory.bits(shared))
    assert is_shared(held[-1], unnamed)


@linux_only
def test_a_file_that_was_not_found_is_looked_for_again(unnamed: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, opened = memoryview(unnamed).toreadonly(), own_memory._open_if
    monkeypatch.setattr(own_memory, "_open_if", lambda at, file: None if "map_files" in at else opened(at, file))
    with monkeypatch.context() as patch:
        patch.setattr(own_memory, "_descriptors", lambda: iter(()))
        assert not is_shared(own_memory.OwnMemory().bits(shared), unnamed)
    assert is_shared(own_memory.OwnMemory().bits(shared), unnamed)


def test_bytes_are_compared_on_systems_without_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: Any) -> Any:
        raise TypeError(name)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    fresh = runpy.run_path(memory.__file__, run_name="dataproto._ops.buffers")
    assert fresh["same_bytes"](noise(100), noise(100).tobytes())
    assert not fresh["same_bytes"](noise(100), bytes(100))


def test_a_writable_copy_of_a_batch_that_was_never_sent() -> None:
    data = rich()
    data.meta_info["table"] = torch.ones(3)
    opaque = Opaque(1)
    data["p"] = [opaque] * 4
    made = data.writable()
    made["x"].zero_()
    made["o"][0]["new"] = 1
    made.meta_info["table"].zero_()
    assert data["x"].sum() > 0
    assert "new" not in data["o"][0]
    assert data.meta_info["table"].sum() == 3
    assert made["p"][0] is opaque
    values = torch.ones(2, requires_grad=True)
    DataProto.from_dict({"v": values * 2}).writable()["v"].sum().backward()
    assert values.grad.tolist() == [2, 2]


def test_deepcopy_copies_all() -> None:
    data = rich()
    data["p"] = [Opaque([1])] * 4
    made = copy.deepcopy(data)
    made["x"].zero_()
    made["p"][0].value.append(2)
    assert data["x"].sum() > 0
    assert data["p"][0].value == [1]
    holder = copy.deepcopy({"a": data, "b": data})
    assert holder["a"] is holder["b"]
