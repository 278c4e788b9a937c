"""Files: everything comes back as it was, and nothing in a file is run."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from safetensors.torch import load_file, safe_open
from tensordict import TensorDict

from dataproto import DataProto
from dataproto.errors import FileFormatError
from dataproto.ragged import RaggedTensor
from dataproto.tensordict_utils import same_value
from helpers.examples import at_most


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
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0]]).to(dtype)
    columns = {
        "byte": torch.tensor([1, 2], dtype=torch.uint8),
        "a": values,
        "none": values[:, :0],
        "cut": values[:, 1:],
    }
    back = round_trip(DataProto.from_dict(columns, {"one": [values[0, 0], values[1, 1]]}), tmp_path / "file")
    assert_bits(back["a"], values)
    assert_bits(back["cut"], values[:, 1:])
    assert_bits(back["one"][1], values[1, 1])
    assert back["none"].shape == (2, 0)
    assert back["none"].dtype == dtype


def assert_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    assert torch.equal(*flat)


def test_negated_expanded_and_tracked_tensors_are_written_as_they_read(tmp_path: Path) -> None:
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    columns = {"neg": negated, "wide": torch.ones(1).expand(2), "p": torch.ones(2)}
    columns["p"].requires_grad_()
    back = round_trip(DataProto.from_dict(columns), tmp_path / "file")
    assert back["neg"].tolist() == [-2, 4]
    assert back["wide"].tolist() == back["p"].tolist() == [1, 1]


def test_views_and_shared_memory_can_be_written(tmp_path: Path) -> None:
    base = torch.arange(12).view(4, 3)
    data = DataProto.from_dict({"a": base, "b": base, "t": base[:, 1], "s": base.flip(0)})[1:3]
    back = round_trip(data, tmp_path / "file")
    assert back["t"].tolist() == [4, 7]
    assert_same(back, data)
    assert os.path.getsize(tmp_path / "file") < 2000


def test_nested_tensors_come_back(tmp_path: Path) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    data = DataProto.from_dict({"n": nested}, {"objects": [nested, nested]})
    assert_same(round_trip(data, tmp_path / "file"), data)


def test_batches_in_batches_come_back(tmp_path: Path) -> None:
    inner = TensorDict({"x": torch.arange(6).view(2, 3), "header": torch.ones(2)}, batch_size=[2])
    data = DataProto(batch=TensorDict({"inner": inner, "inner/x": torch.zeros(2)}, batch_size=[2]))
    assert_same(round_trip(data, tmp_path / "file"), data)


def ragged_columns() -> dict[str, RaggedTensor]:
    ragged = RaggedTensor(torch.arange(12.0).view(6, 2), [2, 0, 4])
    return {
        "whole": ragged,
        "chosen": ragged[[2, 0, 2]],
        "overlapping": RaggedTensor.windows(torch.arange(9), [0, 1, 5], [3, 3, 4]),
        "empty": RaggedTensor(torch.empty(0, 3, dtype=torch.bfloat16), [0, 0, 0]),
    }


def test_ragged_columns_come_back(tmp_path: Path) -> None:
    data = DataProto(non_tensor_batch=ragged_columns())
    back = round_trip(data, tmp_path / "file")
    assert all(isinstance(back[name], RaggedTensor) for name in data.names())
    assert_same(back, data)


def test_repeated_ragged_rows_are_written_once(tmp_path: Path) -> None:
    data = DataProto(non_tensor_batch={"r": RaggedTensor(torch.arange(10_000), [4_000, 6_000])})
    back = round_trip(data.repeat(8), tmp_path / "file")
    assert_same(back, data.repeat(8))
    assert len(back["r"].storage) == 10_000
    assert os.path.getsize(tmp_path / "file") < 90_000


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
        b"bytes",
    ),
    *(
        [1, [2, None]],
        (1, (2,)),
        {"a": {"b": 1}},
        {1: "x", (2, 3): "y"},
        {"$": "tensor", "data": "0"},
    ),
    *(
        np.float32(1.5),
        np.int8(3),
        np.bool_(True),
        np.str_("s"),
        torch.tensor(2.0),
        np.array(5),
    ),
    *(np.arange(6).reshape(2, 3)[:, ::2], np.array(["a", "bc"]), np.array([], dtype=np.float16)),
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


@settings(max_examples=at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), PLAIN, max_size=3))
@pytest.mark.slow
def test_any_plain_facts_come_back(tmp_path: Path, facts: dict) -> None:
    assert same_value(round_trip(DataProto(meta_info=facts), tmp_path / "file").meta_info, facts)


def noise(mode: str, size: tuple[int, int] = (7, 5)) -> Image.Image:
    """Random bytes as an image of a mode; for modes with a palette, a random one."""
    random = np.random.default_rng(0)
    blank = Image.new(mode, size)
    image = Image.frombytes(mode, size, random.bytes(len(blank.tobytes())))
    if mode in ("P", "PA"):
        image.putpalette(random.bytes(768))
    return image


@pytest.mark.parametrize("size", [(7, 5), (64, 48), (0, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("mode", Image.MODES)
def test_images_of_every_mode_come_back_to_the_bit(mode: str, size: tuple[int, int], tmp_path: Path) -> None:
    image, blank = noise(mode, size), Image.new(mode, size)
    found = round_trip(DataProto.from_dict(non_tensors={"image": [image, blank]}), tmp_path / "file")["image"]
    for one, other in zip(found, (image, blank)):
        assert type(one) is Image.Image
        assert one == other  # mode, size, info, palette and pixels
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("colors", [1, 3, 200, 256])
@pytest.mark.parametrize("palette", ["RGB", "RGBA"])
def test_palettes_come_back(palette: str, colors: int, tmp_path: Path) -> None:
    image = Image.frombytes("P", (16, 16), bytes(range(256)))
    image.putpalette(np.random.default_rng(0).bytes(len(palette) * colors), palette)
    found = round_trip(DataProto.from_dict(non_tensors={"image": [image]}), tmp_path / "file")["image"][0]
    assert found.getpalette(None) == image.getpalette(None)
    assert found.convert("RGBA") == image.convert("RGBA")


def test_images_keep_what_is_known_of_them(tmp_path: Path) -> None:
    turned = Image.new("RGB", (2, 3), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.info.update(exif=exif.tobytes(), dpi=(72.0, 72.0), note="x", odd=object())
    clear = Image.new("P", (2, 2))
    clear.info["transparency"] = 0
    back = round_trip(DataProto.from_dict(non_tensors={"image": [turned, clear]}), tmp_path / "file")["image"]
    assert back[0].getexif()[0x0112] == 6
    assert back[0].info == {key: value for key, value in turned.info.items() if key != "odd"}
    assert back[1].convert("RGBA").getpixel((0, 0))[3] == 0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_opened_image_files_become_plain_images(kind: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise("RGB", (32, 32)).save(buffer, kind)
    opened = Image.open(buffer)
    found = round_trip(DataProto.from_dict(non_tensors={"image": [opened]}), tmp_path / "file")["image"][0]
    assert type(found) is Image.Image
    assert (found.mode, found.tobytes(), found.convert("RGBA")) == (
        opened.mode,
        opened.tobytes(),
        opened.convert("RGBA"),
    )


def test_pictures_are_compressed_and_blank_ones_can_be_read(tmp_path: Path) -> None:
    drawing, blank = Image.new("RGB", (512, 512), "white"), Image.new("L", (2048, 2048))
    ImageDraw.Draw(drawing).line((5, 5, 400, 300), fill="black", width=3)
    data = DataProto.from_dict(non_tensors={"image": [drawing, blank]})
    assert_same(round_trip(data, tmp_path / "file"), data)
    assert os.path.getsize(tmp_path / "file") < 50_000


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.slow
def test_blank_images_are_never_taken_for_bombs(mode: str, tmp_path: Path) -> None:
    data = DataProto.from_dict(non_tensors={"image": [Image.new(mode, (side, side)) for side in (100, 1000, 3000)]})
    assert_same(round_trip(data, tmp_path / "file"), data)


def test_shared_objects_are_written_once_and_shared_again(tmp_path: Path) -> None:
    image, pixels = Image.effect_noise((64, 64), 50), torch.randn(64, 64)
    data = DataProto.from_dict(non_tensors={"media": [{"image": [image], "pixels": pixels}, {}]})
    many = data.repeat(50)
    back = round_trip(many, tmp_path / "many")["media"]
    data.save_to_disk(tmp_path / "one")
    assert len({id(row["image"][0]) for row in back[:50]}) == 1
    assert len({id(row["pixels"]) for row in back[:50]}) == 1
    assert os.path.getsize(tmp_path / "many") < 2 * os.path.getsize(tmp_path / "one")


def test_containers_and_memory_that_rows_share_are_shared_again(tmp_path: Path) -> None:
    pixels, facts = torch.randn(8, 4), {"a": [1, {"b": 2}]}
    rows = [{"facts": facts, "view": pixels[2:4], "array": pixels.numpy()} for _ in range(3)]
    data = DataProto.from_dict({"x": pixels, "y": pixels}, {"media": rows + [facts] * 5}, {"facts": facts})
    back = round_trip(data, tmp_path / "file")
    assert_same(back, data)
    assert back["media"][0] is not back["media"][1]
    for key in ("facts", "view", "array"):
        assert len({id(row[key]) for row in back["media"][:3]}) == 1
    assert back["media"][0]["facts"] is back["media"][7] is back.meta_info["facts"]
    assert back["x"].data_ptr() == back["y"].data_ptr()


def test_loaded_memory_is_the_batch_s_own(tmp_path: Path) -> None:
    data = DataProto.from_dict({"a": torch.zeros(2)}, {"n": np.zeros(2)}, {"step": 1})
    back = round_trip(data, tmp_path / "file")
    back["a"].add_(1)
    back["n"] += 1
    assert_same(DataProto.load_from_disk(tmp_path / "file"), data)


def test_tensors_and_arrays_stay_in_the_file_until_they_are_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pixels = torch.ones(3, 5, dtype=torch.bfloat16)
    data = DataProto.from_dict({"a": torch.zeros(100_000)[:2]}, {"n": np.ones(2), "o": [{"pixels": pixels}, {}]})
    back = round_trip(data, path)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    for address in (back["a"].data_ptr(), back["n"].ctypes.data, back["o"][0]["pixels"].data_ptr()):
        assert any(start <= address < end for start, end in ranges)


def test_a_file_that_is_replaced_leaves_loaded_batches_as_they_were(tmp_path: Path) -> None:
    data = DataProto.from_dict({"a": torch.zeros(50_000)})
    back = round_trip(data, tmp_path / "file")
    DataProto.from_dict({"a": torch.ones(50_000)}).save_to_disk(tmp_path / "file")
    assert_same(back, data)
    back.save_to_disk(tmp_path / "file")  # from the memory of the file that it replaces
    assert_same(DataProto.load_from_disk(tmp_path / "file"), data)


def test_any_safetensors_reader_finds_the_columns(tmp_path: Path) -> None:
    ragged = RaggedTensor(torch.arange(3), [1, 2])
    names = ["ids", "header", "checksums", "__metadata__", "objects/1", "../../x", "\ud800", "", "a/b"]
    columns = {name: torch.arange(2) + number for number, name in enumerate(names)}
    data = DataProto.from_dict(columns, {"n": np.arange(2.0), "r": ragged})
    assert_same(round_trip(data, tmp_path / "file"), data)
    found = load_file(tmp_path / "file")
    for name in ("ids", "../../x", "a/b"):
        assert torch.equal(found[name], columns[name])
    assert found["n"].tolist() == [0, 1]
    assert found["r"].tolist() == [0, 1, 2]
    assert found["r/lengths"].tolist() == [1, 2]
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata().keys() == {"format", "version", "checksums"}


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


def test_a_file_of_an_earlier_release_is_read() -> None:
    """`written_in_2026.dp` was written once, and is never written again."""
    back = DataProto.load_from_disk(Path(__file__).with_name("written_in_2026.dp"), verify=True)
    assert back["ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (back["half"].dtype, back["half"].tolist()) == (torch.bfloat16, [0.5, -1.0, 3.0])
    assert back["uid"].tolist() == ["a", "b", "c"]
    images = [row["image"][0] for row in back["media"][:2]]
    assert images[0] is images[1]
    assert (images[0].size, images[0].getpixel((1, 2)), images[0].getpixel((0, 0))) == (
        (6, 4),
        (200, 0, 7),
        (10, 20, 30),
    )
    assert torch.equal(back["pixels"][0]["pixel_values"], torch.ones(2, 3))
    assert [row.tolist() for row in back["tokens"]] == [[0], [1, 2, 3], [4, 5]]
    assert (back["numbers"].tolist(), back["texts"].tolist()) == ([1.0, 2.0, 3.0], ["x", "yy", "z"])
    facts = {"step": 3, "pair": (1, float("inf")), "by number": {1: "a", (2, 3): "b"}, "loss": np.float32(0.25)}
    assert same_value(back.meta_info, facts)


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


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=torch.complex64), np.array(["2020"], "M8[D]"), {3, 4}, frozenset({5})]
)
def test_rare_kinds_of_values_need_pickle_too(value: object, tmp_path: Path) -> None:
    data = DataProto(meta_info={"x": value})
    with pytest.raises(FileFormatError, match=r"field .meta_info., key .x. holds a .*allow_pickle=True"):
        data.save_to_disk(tmp_path / "file")
    assert same_value(round_trip(data, tmp_path / "file", allow_pickle=True).meta_info, data.meta_info)


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
