"""Damaged and hostile files end in one error, in little time and memory."""

import functools
import io
import json
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import FileFormatError
from dataproto.ragged import RaggedTensor
from dataproto.serialization.file import write_sections
from dataproto.tensordict_utils import same_value
from helpers.examples import at_most

Header = dict[str, Any]


def rich_batch() -> DataProto:
    """Something of every kind that a file can hold."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    picture, facts = Image.fromarray(noise), {"a": [1, 2.5, float("nan")], ("k", 1): 3, "t": ("x", b"y")}
    objects = [
        {"image": [picture, picture.convert("P"), picture.convert("CMYK")], "pixels": torch.ones(2, 3)},
        {"facts": facts, "text": np.array(["a", "bc"]), "blob": b"z" * 100, "scalar": np.float32(1.5)},
        {"facts": facts, "grid": np.arange(3)},
    ]
    return DataProto.from_dict(
        {"ids": torch.arange(12).view(3, 4), "mask": torch.ones(3, dtype=torch.bool)},
        {"media": objects, "n": np.arange(3.0), "r": RaggedTensor(torch.arange(6), [2, 0, 4])},
        {"step": 3, "facts": facts},
    )


def same(one: DataProto, other: DataProto) -> bool:
    columns = one.names() == other.names() and all(same_value(one[name], other[name]) for name in one.names())
    return columns and same_value(one.meta_info, other.meta_info)


def take_apart(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """A file's header, and its other sections."""
    parts = load_file(path)
    return json.loads(bytes(parts.pop("header"))), parts


def put_together(path: Path, header: Any, parts: dict[str, Tensor]) -> None:
    """A file with valid checksums, whatever the header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_sections(path, {"header": plain(text), **parts})


def plain(data: bytes = b"") -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_a_forged_file_with_nothing_changed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    rich_batch().save_to_disk(path)
    put_together(path, *take_apart(path))
    assert same(DataProto.load_from_disk(path, verify=True), rich_batch())


# Headers that lie, in files whose checksums are right


def node(kind: str, **fields: Any) -> Header:
    return {"$": kind, **fields}


def fact(value: Any) -> Header:
    return {"meta_info": {"x": value}}


def column(value: Any) -> Header:
    return {"non_tensor_batch": [["b", value]]}


def batch(*columns: Any, size: Any = (2,), on_device: Any = False) -> Header:
    return {"batch": node("tensordict", size=list(size), on_device=on_device, columns=list(columns))}


def image(mode: Any, size: Any, codec: Any = "raw", data: str = "spare", **fields: Any) -> Header:
    return node("image", mode=mode, size=size, codec=codec, data=data, info={}, **fields)


LIES: list[Any] = [
    batch(["a", node("tensor", data="a")], size=(3,)),
    batch(["a", node("tensor", data="a")], size=(2**40,)),
    batch(["a", node("tensor", data="a")], size=(-2,)),
    batch(["a", node("tensor", data="a")], size=("2",)),
    batch(["a", node("tensor", data="a")], ["b", node("tensor", data="a")]),
    batch(["a", "text"]),
    batch(["a", [1, 2]]),
    batch(["a", node("objects", shape=[2], items=[1, 2])]),
    batch([7, node("tensor", data="a")]),
    batch(["a", node("tensor", data="a")], ["a", node("tensor", data="empty")]),
    {"non_tensor_batch": [["b", node("objects", shape=[2], items=[1, 2])]] * 2},
    {"non_tensor_batch": [[7, node("objects", shape=[2], items=[1, 2])]]},
    fact(node("dict", items=[[1, "x"], [1, "y"]])),
    batch(["a", node("tensor", data="../../etc/passwd")]),
    batch(["a", node("tensor", data="/etc/passwd")]),
    batch(["a", node("tensor", data=["a"])]),
    batch(["a", node("nested", layout="jagged", rows=[1])]),
    {"batch": 5},
    {"batch": {"columns": {}}},
    {"non_tensor_batch": None},
    {"non_tensor_batch": [["a", node("objects", shape=[2], items=[1, 2])]]},
    column([1, 2]),
    column(node("array", dtype="O", shape=[1], data="spare")),
    column(node("array", dtype="|O8", shape=[1], data="spare")),
    column(node("array", dtype="<i8,O", shape=[1], data="spare")),
    column(node("array", dtype="<i8", shape=[9], data="spare")),
    column(node("array", dtype="<i8", shape=[2**61], data="spare")),
    column(node("array", dtype="<i8", shape=[-1], data="spare")),
    column(node("array", dtype="<i8", shape=[1.0], data="spare")),
    column(node("array", dtype="|S0", shape=[2**50], data="spare")),
    column(node("array", dtype="<U2", shape=[1], data="spare")),
    column(node("array", dtype="|u1", shape=[0, 2**40], data="empty")),
    column(node("array", dtype="|u1", shape=[1] * 40 + [8], data="spare")),
    column(node("objects", shape=[3], items=[1])),
    column(node("objects", shape=[3], items=[1, 2, 3])),
    column(node("objects", shape=[0, 2**40], items=[])),
    column(node("ragged", values=node("tensor", data="spare"), starts="starts", lengths="huge")),
    column(node("ragged", values=node("tensor", data="spare"), starts="starts", lengths="negative")),
    column(node("ragged", values=node("tensor", data="spare"), starts="starts", lengths="spare")),
    column(node("ragged", values=[1, 2], starts="starts", lengths="lengths")),
    column(node("ref", n=10**9)),
    column(node("ref", n=-1)),
    column(node("ref", n="0")),
    fact(image("RGB", [9, 9])),
    fact(image("RGB", [2**31, 2**31])),
    fact(image("RGB", [-8, -1])),
    fact(image("L", [8.0, 1])),
    fact(image("L", [8, 1], data="a")),
    fact(image("EVIL", [8, 1])),
    fact(image(["L"], [8, 1])),
    fact(image("P", [8, 1])),
    fact(image("P", [8, 1], palette=["RGB", "AAAA" * 1000])),
    fact(image("P", [8, 1], palette=["1;1", "AAAA"])),
    fact(image("P", [8, 1], palette=[None, "AAAA"])),
    fact(image("L", [8, 1], codec="tiff")),
    fact(image("RGB", [8, 8], codec="png")),
    fact(image("RGB", [100, 100], codec="png", data="png")),
    fact(image("L", [50, 50], codec="png", data="png")),
    fact(image("RGB", [50, 50], codec="png", data="cut png")),
    fact(image("RGB", [20_000, 20_000], codec="png", data="bomb")),
    fact(image("1", [8000, 8000], codec="png", data="bits")),
    fact({**image("L", [8, 1]), "info": [1]}),
    fact(node("unknown")),
    fact(node("unknown", data="spare")),
    fact(node(["tensor"], data="spare")),
    fact(node("pickle", data="spare")),
    fact(node("scalar", dtype="<f4", value="AAAAAAAA")),
    fact(node("scalar", dtype="O", value="AAAAAAAA")),
    fact(node("scalar", dtype="<U999999999", value="AAAA")),
    fact(node("scalar", dtype="<U1", value="/////w==")),
    fact(node("float", value="one")),
    fact(node("bytes", value=7)),
    fact(node("dict", items=[[[1], 2]])),
    fact(node("dict", items=[[node("ref", n=0), 2]])),
    fact(node("dict", items=[[node("list", items=[]), 2]])),
    fact(node("dict", items=[[k * (2**61 - 1), 0] for k in range(100_000)])),
    fact(node("tuple", items=5)),
    {"meta_info": [1]},
    {"meta_info": None},
    [],
    b"",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"batch":null,"non_tensor_batch":[],"meta_info":{"x":' + b"[" * 900 + b"]" * 900 + b"}}",
    b'{"batch":null,"non_tensor_batch":[],"meta_info":{"x":' + b"7" * 100_000 + b"}}",
    b'{"batch":null,"non_tensor_batch":[]}',
]


GOOD = {**batch(["a", node("tensor", data="a")]), "non_tensor_batch": [], "meta_info": {}}


def png(pixels: bytes, width: int, height: int) -> bytes:
    """A PNG file (RGB) of compressed rows."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    chunks = [(b"IHDR", size + bytes([8, 2, 0, 0, 0])), (b"IDAT", pixels), (b"IEND", b"")]
    framed = [
        len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big") for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@functools.cache
def sections_to_use() -> dict[str, Tensor]:
    """What the lying headers speak of. The bomb holds 300 MB of black pixels."""
    noise = b"".join(b"\0" + np.random.default_rng(row).bytes(150) for row in range(50))
    packer = zlib.compressobj(9)
    black = b"".join(packer.compress(bytes(30_001)) for _ in range(10_000)) + packer.flush()
    whole = png(zlib.compress(noise), 50, 50)
    blobs = {"a": b"12", "spare": b"\xff" * 8, "empty": b"", "png": whole, "cut png": whole[:3000]}
    blobs["bomb"] = png(black, 10_000, 10_000)
    bits = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bits, "PNG")
    blobs["bits"] = bits.getvalue().ljust(33_000, b"\0")  # 8 MB of bits, which Pillow keeps in 64 MB
    words = {"starts": [0, 0], "lengths": [4, 4], "huge": [2**62, 2**62], "negative": [-1, 9]}
    numbers = {name: torch.tensor(values) for name, values in words.items()}
    return {**{name: plain(blob) for name, blob in blobs.items()}, **numbers}


def forge(path: Path, lie: Any) -> None:
    """A file with right checksums and a header that lies, and the sections that it speaks of."""
    header = {**GOOD, **lie} if isinstance(lie, dict) else lie
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    used = {name: part for name, part in sections_to_use().items() if f'"{name}"'.encode() in text}
    put_together(path, text, used)


@pytest.mark.slow
def test_the_sections_of_the_forgeries_can_be_read(tmp_path: Path) -> None:
    """The forgeries below are refused for their lies, not for how they are made."""
    ragged = node("ragged", values=node("tensor", data="spare"), starts="starts", lengths="lengths")
    picture = image("RGB", [50, 50], codec="png", data="png")
    forge(tmp_path / "file", {**fact([picture, node("array", dtype="<i8", shape=[0], data="empty")]), **column(ragged)})
    data = DataProto.load_from_disk(tmp_path / "file", verify=True)
    assert data["b"].lengths.tolist() == [4, 4]
    assert data.meta_info["x"][0].size == (50, 50)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LIES)))
def test_a_header_that_lies_is_refused(number: int, tmp_path: Path) -> None:
    forge(tmp_path / "file", LIES[number])
    with pytest.raises(FileFormatError, match=str(tmp_path / "file")):
        DataProto.load_from_disk(tmp_path / "file")


def test_elements_that_take_no_bytes_are_refused(tmp_path: Path) -> None:
    lie = json.dumps({**GOOD, "batch": None, **column(node("array", dtype="|S0", shape=[2**40], data="none"))}).encode()
    put_together(tmp_path / "file", lie, {"none": plain()})
    with pytest.raises(FileFormatError, match="elements of an array take no bytes"):
        DataProto.load_from_disk(tmp_path / "file")
    text = np.zeros(2, dtype=[("none", "S0"), ("n", "i4")])["none"]
    with pytest.raises(FileFormatError, match="column 'text' holds a ndarray"):
        DataProto(non_tensor_batch={"text": text}).save_to_disk(tmp_path / "file")


def test_a_section_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    put_together(tmp_path / "file", GOOD, {"a": plain(b"12"), "hidden": plain(b"x")})
    with pytest.raises(FileFormatError, match="nothing uses section 'hidden'"):
        DataProto.load_from_disk(tmp_path / "file")


# Heads that lie; safetensors compares places, sizes and names


def raw_file(path: Path, head: Any, data: bytes) -> None:
    """A safetensors file with a head of one's own."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(start: Any, stop: Any, dtype: Any = "U8", shape: Any = None) -> Header:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


TEXT = json.dumps({"batch": None, "non_tensor_batch": [], "meta_info": {}}).encode()
END = len(TEXT)
CHECKSUMS = [zlib.crc32(f"header torch.uint8 ({END},)".encode()), {"header": zlib.crc32(TEXT)}]
METADATA = {"format": "dataproto", "version": "2", "checksums": json.dumps(CHECKSUMS)}
GOOD_HEAD = {"__metadata__": METADATA, "header": entry(0, END)}


def test_a_head_of_one_s_own_is_read(tmp_path: Path) -> None:
    raw_file(tmp_path / "file", GOOD_HEAD, TEXT)
    assert len(DataProto.load_from_disk(tmp_path / "file", verify=True)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"__metadata__": {**METADATA, "version": "3"}}, "version '3'; this library reads '2'"),
        ({"__metadata__": {**METADATA, "checksums": "[0, {}]"}}, "head does not match"),
        ({"__metadata__": {"format": "dataproto", "version": "2"}}, "checksums"),
        ({"__metadata__": {"format": "pt"}}, "was not written by save_to_disk"),
        ({"__metadata__": None}, "was not written by save_to_disk"),
        ({"header": entry(0, END - 1)}, "damaged"),
        ({"header": entry(0, 2**63)}, "damaged"),
        ({"header": entry(0, END, shape=[2**62, 2**62])}, "damaged"),
        ({"header": entry(0, END, "I8")}, "head does not match"),
        ({"more": entry(END, END, shape=[0, 2**40])}, "head does not match"),
    ],
    ids=str,
)
def test_a_head_that_lies_is_refused(change: Header, message: str, tmp_path: Path) -> None:
    raw_file(tmp_path / "file", {**GOOD_HEAD, **change}, TEXT)
    with pytest.raises(FileFormatError, match=message):
        DataProto.load_from_disk(tmp_path / "file")


@pytest.mark.parametrize("start", [b"", bytes(8), b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", b"\x80\x04N."])
def test_a_start_that_is_no_start_is_refused(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(start)
    with pytest.raises(FileFormatError):
        DataProto.load_from_disk(tmp_path / "file")


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileFormatError, match="not an ordinary file"):
            DataProto.load_from_disk(path)


# Damage


@pytest.fixture(scope="module")
def rich_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("rich") / "file"
    rich_batch().save_to_disk(path)
    assert same(DataProto.load_from_disk(path, verify=True), rich_batch())
    return path.read_bytes()


def loaded(path: Path, **options: bool) -> DataProto | None:
    try:
        return DataProto.load_from_disk(path, **options)
    except FileFormatError:
        return None


QUICK = settings(max_examples=at_most(150), suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(st.lists(st.tuples(st.floats(0, 0.999999), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_are_noticed(tmp_path: Path, rich_file: bytes, flips: list[tuple[float, int]]) -> None:
    """With ``verify`` wherever they are; without, they can only change the elements of tensors and arrays."""
    changed = bytearray(rich_file)
    for place, bits in flips:
        changed[int(place * len(changed))] ^= bits
    (tmp_path / "file").write_bytes(changed)
    checked, unchecked = loaded(tmp_path / "file", verify=True), loaded(tmp_path / "file")
    assert checked is None or same(checked, rich_batch())
    if unchecked is not None:
        assert unchecked.get_data_info() == rich_batch().get_data_info()
        same(unchecked, rich_batch())  # every element can be read
        for name in ("facts", "blob", "scalar"):
            assert same_value(unchecked["media"][1][name], rich_batch()["media"][1][name])
        assert unchecked["media"][0]["image"] == list(rich_batch()["media"][0]["image"])
        assert unchecked["r"].lengths.tolist() == [2, 0, 4]


@QUICK
@given(st.floats(0, 0.999999), st.floats(0, 1), st.sampled_from(["cut", "drop", "double", "zero"]))
def test_cut_and_shifted_files_are_refused(
    tmp_path: Path, rich_file: bytes, start: float, part: float, how: str
) -> None:
    first = int(start * len(rich_file))
    last = first + 1 + int(part * (len(rich_file) - first - 1))
    middle = {"cut": b"", "drop": b"", "double": rich_file[first:last] * 2, "zero": bytes(last - first)}[how]
    changed = rich_file[:first] + middle + (b"" if how == "cut" else rich_file[last:])
    (tmp_path / "file").write_bytes(changed)
    assert changed == rich_file or loaded(tmp_path / "file", verify=True) is None


SCALARS: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**62,
    2**70,
    1.5,
    "",
    "x",
    "ids",
    "objects/1",
    "<f4",
    "|O8",
    "RGB",
    "P",
    "png",
]
JUNK = st.sampled_from([*SCALARS, [], {}, [1] * 3, {"$": "x"}, {"$": "ref", "n": 0}, {"$": "tensor", "data": "ids"}])


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in a tree of JSON."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [each for key in keys for each in [(tree, key), *places(tree[key])]]


@settings(QUICK, max_examples=at_most(300))
@given(
    st.lists(
        st.tuples(st.integers(0, 2**16), JUNK | st.integers(0, 2**16).map(lambda place: ("copy", place))),
        min_size=1,
        max_size=3,
    )
)
@pytest.mark.slow
def test_forged_headers_are_refused_or_read(tmp_path: Path, rich_file: bytes, edits: list[tuple[int, Any]]) -> None:
    """Headers in which nodes were exchanged for junk and for each other, with right checksums: one error, or a batch."""
    (tmp_path / "file").write_bytes(rich_file)
    header, parts = take_apart(tmp_path / "file")
    for place, junk in edits:
        found = places(header)
        container, key = found[place % len(found)]
        if isinstance(junk, tuple):
            source, name = found[junk[1] % len(found)]
            junk = source[name]
        container[key] = json.loads(json.dumps(junk))
    put_together(tmp_path / "file", header, parts)
    data = loaded(tmp_path / "file", verify=True)
    event("refused" if data is None else "read")
    if data is not None:
        data.check_consistency()
        assert repr(data)


# Bounds


def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    """All the lies, loaded by a process that may not take 256 MiB more than it has; that it survives is the test."""
    for number, lie in enumerate(LIES):
        forge(tmp_path / f"{number}", lie)
    sparse = tmp_path / "sparse"
    raw_file(sparse, {**GOOD_HEAD, "more": entry(END, END + 2**42)}, TEXT)
    os.truncate(sparse, sparse.stat().st_size + 2**42)
    program = """
        import resource, sys
        from dataproto import DataProto
        from dataproto.errors import FileFormatError
        from PIL import PngImagePlugin

        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 2**28
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        refused = 0
        for path in sys.argv[1:]:
            try:
                DataProto.load_from_disk(path)
            except FileFormatError:
                refused += 1
        print(refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    files = [str(path) for path in (*(tmp_path / f"{number}" for number in range(len(LIES))), sparse)]
    command = [sys.executable, "-c", textwrap.dedent(program), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    refused, kib = map(int, done.stdout.split())
    assert refused == len(files)
    assert kib < 100_000
