"""Damaged and hostile files: each raises one error, takes little memory, and runs nothing."""

import contextlib
import io
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict

from dataproto import DataProto, RaggedTensor
from dataproto.errors import FileFormatError
from helpers.examples import at_most


def rich() -> DataProto:
    """Something of every kind that a file can hold."""
    image = Image.frombytes("L", (8, 6), np.random.default_rng(0).bytes(48))
    rows = [{"image": [image], "n": 1, "t": ("x", None)}, {"image": [image], "b": b"bytes"}]
    return DataProto.from_dict(
        {"ids": torch.arange(6).view(2, 3)},
        {"media": rows, "tokens": RaggedTensor(torch.arange(5), [2, 3]), "texts": np.array(["a", "bc"])},
        {"inner": TensorDict({"x": torch.ones(2)}, batch_size=[2]), "loss": np.float32(0.5), 3: "three"},
    )


@pytest.fixture(scope="module")
def rich_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("rich") / "file"
    rich().save_to_disk(path)
    return path.read_bytes()


def load(content: bytes, path: Path, **options: bool) -> DataProto:
    path.write_bytes(content)
    return DataProto.load_from_disk(path, **options)


EACH = settings(max_examples=at_most(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EACH
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_flipped_bits_are_noticed(tmp_path: Path, rich_file: bytes, place: float, bit: int) -> None:
    """With ``verify``, unless they are where a zip file has no meaning: between its sections, and in times and flags."""
    damaged = bytearray(rich_file)
    damaged[int(place * len(damaged))] ^= 1 << bit
    try:
        back = load(bytes(damaged), tmp_path / "file", verify=True)
    except FileFormatError:
        return
    assert torch.equal(back["ids"], rich()["ids"])
    assert [row["image"][0].tobytes() for row in back["media"]] == [
        row["image"][0].tobytes() for row in rich()["media"]
    ]


@EACH
@given(st.floats(0, 1, exclude_max=True))
def test_cut_files_are_refused(tmp_path: Path, rich_file: bytes, share: float) -> None:
    with pytest.raises(FileFormatError):
        load(rich_file[: int(share * len(rich_file))], tmp_path / "file")


def test_damage_of_the_description_is_noticed_without_verify(tmp_path: Path, rich_file: bytes) -> None:
    with pytest.raises(FileFormatError):
        load(rich_file.replace(b"meta_info", b"meta_infp"), tmp_path / "file")


def bomb() -> dict[str, Any]:
    """A small PNG file of 300 MB of black pixels."""
    side, raw = 10_000, zlib.compressobj(9)
    rows = b"".join(raw.compress(bytes(3 * side + 1)) for _ in range(side)) + raw.flush()
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    assert len(rows) < 1 << 20
    return {"mode": "RGB", "size": [side, side], "codec": "png", "data": torch.zeros(len(rows), dtype=torch.uint8)}


FOUR = torch.zeros(4, dtype=torch.uint8)
LIES: list[Callable[[], Any]] = [
    lambda: ("array", "|O8", [1], torch.zeros(8, dtype=torch.uint8)),
    lambda: ("array", "<U0", [10**9], FOUR[:0]),
    lambda: ("array", "|V4", [1], FOUR),
    lambda: ("array", "<i4", [10**9], FOUR),
    lambda: ("array", "<U1", [1], torch.full((4,), 255, dtype=torch.uint8)),
    lambda: ("objects", [10**9], []),
    lambda: ("objects", [3], [1, 2]),
    lambda: ("RaggedTensor", torch.arange(3), torch.tensor([0]), torch.tensor([10**9])),
    lambda: ("RaggedTensor", torch.arange(3), torch.tensor([-1]), torch.tensor([1])),
    lambda: ("tensordict", {"x": torch.ones(2)}, [10**9], False),
    lambda: ("tensordict", [1], [2], False),
    lambda: ("scalar", "<i8", "AAAA"),
    lambda: ("scalar", "|O8", "AAAAAAAAAAA="),
    lambda: ("image", {"mode": "RGB", "size": [10_000, 10_000], "codec": "raw"}, {}, FOUR),
    lambda: ("image", {name: value for name, value in bomb().items() if name != "data"}, {}, bomb()["data"]),
    lambda: ("image", {"mode": "odd", "size": [1, 1], "codec": "raw"}, {}, FOUR),
    lambda: ("pickle", FOUR),
    lambda: ("unknown", 1),
    lambda: (),
]


def lying(lie: Any) -> bytes:
    """A file with right checksums whose meta_info is a lie."""
    buffer = io.BytesIO()
    written = {"format": "dataproto", "version": "3", "batch": None, "columns": {}, "meta_info": {"x": lie}}
    torch.save(written, buffer)
    return buffer.getvalue()


def test_a_forged_file_that_does_not_lie_is_read(tmp_path: Path) -> None:
    assert load(lying(("array", "<i4", [1], FOUR)), tmp_path / "file").meta_info["x"].tolist() == [0]


@pytest.mark.parametrize("number", range(len(LIES)))
def test_what_lies_is_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError):
        load(lying(LIES[number]()), tmp_path / "file")


def test_columns_that_are_none_are_refused(tmp_path: Path) -> None:
    for columns in ({"x": 3}, {"x": torch.ones(2), "y": torch.ones(3)}, [1]):
        buffer = io.BytesIO()
        torch.save({"format": "dataproto", "version": "3", "batch": None, "columns": columns, "meta_info": {}}, buffer)
        with pytest.raises(FileFormatError):
            load(buffer.getvalue(), tmp_path / "file")


def test_files_of_others_and_of_other_versions_are_refused(tmp_path: Path) -> None:
    for written, message in (
        ({"x": 1}, "not written by save_to_disk"),
        ({"format": "dataproto", "version": "9"}, "'9'"),
    ):
        torch.save(written, tmp_path / "file")
        with pytest.raises(FileFormatError, match=message):
            DataProto.load_from_disk(tmp_path / "file")


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(FileFormatError, match="not an ordinary file"):
            DataProto.load_from_disk(path)


@EACH
@given(st.integers(0, 2**32))
def test_nodes_that_are_exchanged_are_refused_or_read(tmp_path: Path, rich_file: bytes, seed: int) -> None:
    """Nodes in the place of each other, with right checksums: one error, or a batch."""
    (tmp_path / "file").write_bytes(rich_file)
    written, rng = torch.load(tmp_path / "file", weights_only=True), random.Random(seed)
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, list | dict):
            for key in range(len(node)) if isinstance(node, list) else list(node):
                places.append((node, key))
        for part in node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ():
            visit(part)

    visit(written)
    for _ in range(3):
        (one, key), (other, place) = rng.choice(places), rng.choice(places)
        one[key] = rng.choice([other[place], None, -1, "x", [], FOUR])
    torch.save(written, tmp_path / "forged")
    with contextlib.suppress(FileFormatError):
        assert isinstance(DataProto.load_from_disk(tmp_path / "forged"), DataProto)


@pytest.mark.slow
def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    """All the lies, loaded by a process that may not take 256 MiB more than it has; that it survives is the test."""
    for number, lie in enumerate(LIES):
        (tmp_path / str(number)).write_bytes(lying(lie()))
    code = f"""
import resource
from pathlib import Path
from dataproto import DataProto, errors
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
for number in range({len(LIES)}):
    try:
        DataProto.load_from_disk(f"{tmp_path}/{{number}}")
    except errors.FileFormatError:
        continue
    raise SystemExit(f"lie {{number}} was read")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
