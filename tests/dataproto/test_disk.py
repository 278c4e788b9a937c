"""Files: everything comes back as it was, and nothing in a file is run."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, safe_open, save_file
from tensordict import TensorDict

from dataproto import DataProto
from dataproto.equality import same_value
from dataproto.errors import FileFormatError


def round_trip(data: DataProto, path: Path, **options: bool) -> DataProto:
    data.save_to_disk(path, **options)
    return DataProto.load_from_disk(path, **options)


def assert_same(one: DataProto, other: DataProto) -> None:
    assert (one.batch is None) == (other.batch is None)
    assert len(one) == len(other)
    assert one.names() == other.names()
    for name in one.names():
        assert same_value(one[name], other[name]), name
    assert same_value(one.meta_info, other.meta_info)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0]]).to(dtype)
    back = round_trip(DataProto.from_dict({"a": values, "none": values[:, :0]}), tmp_path / "file")
    assert same_value(back["a"], values)
    assert back["none"].shape == (2, 0)
    assert back["none"].dtype == dtype


def test_views_and_shared_memory_can_be_written(tmp_path: Path) -> None:
    base = torch.arange(12).view(4, 3)
    data = DataProto.from_dict({"a": base, "b": base, "t": base[:, 1], "s": base.flip(0)})[1:3]
    back = round_trip(data, tmp_path / "file")
    assert back["t"].tolist() == [4, 7]
    assert_same(back, data)
    assert os.path.getsize(tmp_path / "file") < 2000


def test_nested_tensors_come_back(tmp_path: Path) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    data = DataProto.from_dict({"n": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    assert_same(round_trip(data, tmp_path / "file"), data)


VALUES = [
    *(
        None,
        True,
        3,
        -(10**30),
        0.1,
        float("inf"),
        float("nan"),
        "text",
        "\ud800 \x00",
        1 + 2j,
        b"bytes",
        bytearray(b"x"),
    ),
    *(
        [1, [2, None]],
        (1, (2,)),
        {3, 4},
        frozenset({5}),
        {"a": {"b": 1}},
        {1: "x", (2, 3): "y"},
        {"$": "tensor", "data": "0"},
    ),
    *(
        np.float32(1.5),
        np.int8(3),
        np.bool_(True),
        np.str_("s"),
        np.datetime64("2020-01-01"),
        torch.tensor(2.0),
        np.array(5),
    ),
    *(np.arange(6).reshape(2, 3)[:, ::2], np.array(["a", "bc"]), np.array([], dtype=np.float16), np.array([1 + 1j])),
    np.array([[1, "x"], [None, [2.0]]], dtype=object),
    {"pixel_values": torch.ones(4, 3, dtype=torch.bfloat16), "grid": np.array([[1, 2, 2]])},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value: object, tmp_path: Path) -> None:
    column = np.empty(2, dtype=object)
    column[0], column[1] = value, [value]
    data = DataProto(non_tensor_batch={"v": column}, meta_info={"v": value})
    back = round_trip(data, tmp_path / "file")
    for found in (back["v"][0], back["v"][1][0], back.meta_info["v"]):
        assert type(found) is type(value)
        assert same_value(found, value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), PLAIN, max_size=3))
def test_any_plain_facts_come_back(tmp_path: Path, facts: dict) -> None:
    assert same_value(round_trip(DataProto(meta_info=facts), tmp_path / "file").meta_info, facts)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "HSV"])
def test_images_come_back_to_the_pixel(mode: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    colors = Image.fromarray(noise)
    image = colors.convert("I").convert("I;16") if mode == "I;16" else colors.convert(mode)
    found = round_trip(DataProto.from_dict(non_tensors={"image": [image]}), tmp_path / "file")["image"][0]
    assert (found.mode, found.size) == (mode, (7, 5))
    assert np.array_equal(np.asarray(found), np.asarray(image))
    if mode == "P":
        assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(image.convert("RGB")))


def test_images_keep_transparency_and_orientation(tmp_path: Path) -> None:
    turned = Image.new("RGB", (2, 3), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.info["exif"] = exif.tobytes()
    clear = Image.new("P", (2, 2))
    clear.info["transparency"] = 0
    back = round_trip(DataProto.from_dict(non_tensors={"image": [turned, clear]}), tmp_path / "file")["image"]
    assert back[0].getexif()[0x0112] == 6
    assert back[1].convert("RGBA").getpixel((0, 0))[3] == 0


def test_shared_objects_are_written_once_and_shared_again(tmp_path: Path) -> None:
    image, pixels = Image.effect_noise((64, 64), 50), torch.randn(64, 64)
    data = DataProto.from_dict(non_tensors={"media": [{"image": [image], "pixels": pixels}, {}]})
    many = data.repeat(50)
    back = round_trip(many, tmp_path / "many")["media"]
    data.save_to_disk(tmp_path / "one")
    assert len({id(row["image"][0]) for row in back[:50]}) == 1
    assert len({id(row["pixels"]) for row in back[:50]}) == 1
    assert os.path.getsize(tmp_path / "many") < 2 * os.path.getsize(tmp_path / "one")


def test_loaded_memory_is_the_batch_s_own(tmp_path: Path) -> None:
    data = DataProto.from_dict({"a": torch.zeros(2)}, {"n": np.zeros(2)}, {"step": 1})
    back = round_trip(data, tmp_path / "file")
    back["a"].add_(1)
    back["n"] += 1
    assert_same(DataProto.load_from_disk(tmp_path / "file"), data)


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"only": "facts"}),
        DataProto(batch=TensorDict({}, batch_size=[3])),
        DataProto.from_dict({"a": torch.zeros(0, 3)}, {"b": []}),
        DataProto(batch=TensorDict({"a": torch.ones(2)}, batch_size=[2], device="cpu")),
    ],
)
def test_empty_and_partial_batches(data: DataProto, tmp_path: Path) -> None:
    back = round_trip(data, str(tmp_path / "file"))
    assert_same(back, data)
    assert (None if back.batch is None else back.batch.device) == (None if data.batch is None else data.batch.device)


# What may not be written or read


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value


class Attack:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["ATTACK_DIRECTORY"],)


def test_other_objects_need_pickle_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = DataProto.from_dict(non_tensors={"x": [{"deep": 1}, {"deep": Custom(5)}]})
    with pytest.raises(FileFormatError, match=r"column 'x', row 1, key 'deep' holds a Custom.*allow_pickle=True"):
        data.save_to_disk(path)
    assert list(tmp_path.iterdir()) == []
    data.save_to_disk(path, allow_pickle=True)
    with pytest.raises(FileFormatError, match="allow_pickle=True"):
        DataProto.load_from_disk(path)
    assert DataProto.load_from_disk(path, allow_pickle=True)["x"][1]["deep"].value == 5


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTACK_DIRECTORY", str(tmp_path / "attacked"))
    (tmp_path / "pickle").write_bytes(pickle.dumps(Attack()))
    torch.save({"x": Attack()}, tmp_path / "torch")
    DataProto.from_dict(non_tensors={"x": [Attack()]}).save_to_disk(tmp_path / "own", allow_pickle=True)
    for name in ("pickle", "torch", "own"):
        with pytest.raises(FileFormatError):
            DataProto.load_from_disk(tmp_path / name)
    assert not (tmp_path / "attacked").exists()
    DataProto.load_from_disk(tmp_path / "own", allow_pickle=True)
    assert (tmp_path / "attacked").exists()


def test_a_failed_save_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = DataProto.from_dict({"a": torch.arange(2)})
    data.save_to_disk(path)
    circle: list = []
    circle.append(circle)
    with pytest.raises(FileFormatError, match="contains itself"):
        DataProto(meta_info={"x": circle}).save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), data)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_places_that_cannot_be_opened_are_ordinary_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        DataProto().save_to_disk(tmp_path / "nowhere" / "file")


def rewrite(path: Path, change: dict | None = None, metadata: dict | None = None) -> None:
    """Replaces parts of a good file's header or metadata."""
    entries = load_file(path)
    with safe_open(path, "pt") as file:
        kept = dict(file.metadata())
    header = json.loads(entries["header"].numpy().tobytes())
    text = json.dumps({**header, **(change or {})}).encode()
    entries["header"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(entries, path, metadata={**kept, **(metadata or {})})


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"rows": 3, "on_device": False, "columns": {"a": {"$": "tensor", "data": "0"}}}},
        {"batch": {"columns": {}}},
        {"batch": 5},
        {"non_tensor_batch": {"b": {"$": "tensor", "data": "99"}}},
        {"non_tensor_batch": {"b": [1, 2]}},
        {"non_tensor_batch": {"b": {"$": "array", "dtype": "O", "shape": [2], "data": "0"}}},
        {"non_tensor_batch": {"b": {"$": "array", "dtype": "<i8", "shape": [9], "data": "0"}}},
        {"non_tensor_batch": {"b": {"$": "objects", "shape": [3], "items": [1]}}},
        {"non_tensor_batch": {"b": {"$": "objects", "shape": [3], "items": [1, 2, 3]}}},
        {"non_tensor_batch": {"b": {"$": "png", "mode": "RGB", "data": "0"}}},
        {"non_tensor_batch": {"b": {"$": "pixels", "mode": "RGB", "size": [9, 9], "data": "0"}}},
        {"meta_info": {"x": {"$": "unknown"}}},
        {"meta_info": {"x": {"$": "unknown", "data": "0"}}},
        {"meta_info": {"x": {"$": "tensor", "data": "0", "dtype": "load", "shape": [1]}}},
        {"meta_info": [1]},
        {"non_tensor_batch": None},
    ],
    ids=str,
)
def test_hostile_headers_are_refused(change: dict, tmp_path: Path) -> None:
    path = tmp_path / "file"
    DataProto.from_dict({"a": torch.arange(2)}).save_to_disk(path)
    rewrite(path, change)
    with pytest.raises(FileFormatError):
        DataProto.load_from_disk(path, allow_pickle=True)


def test_other_formats_and_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    DataProto.from_dict({"a": torch.arange(2)}).save_to_disk(path)
    rewrite(path, metadata={"version": "2"})
    with pytest.raises(FileFormatError, match="version '2'; this library reads '1'"):
        DataProto.load_from_disk(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(FileFormatError, match="was not written by save_to_disk"):
        DataProto.load_from_disk(path)


def test_cut_or_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    DataProto.from_dict({"a": torch.arange(64)}, {"image": [Image.new("RGB", (8, 8))] * 64}).save_to_disk(path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            DataProto.load_from_disk(path)
