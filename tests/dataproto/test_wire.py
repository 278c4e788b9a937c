"""Batches as bytes: everything comes back, once, without copies, and what is written stays with its writer."""

import copy
import ctypes
import dataclasses
import mmap
import os
import pickle
import runpy
import sys
import tracemalloc
import zlib
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from dataproto import DataProto, RaggedTensor
from dataproto._ops import buffers as memory
from dataproto._ops.equality import same_value
from dataproto.serialization import own_memory
from dataproto.serialization.skeleton import put_together, take_apart


def out_of_band(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])


def plain(protocol: int) -> Callable[[Any], Any]:
    return lambda value: pickle.loads(pickle.dumps(value, protocol=protocol))


CHANNELS = {"protocol 2": plain(2), "protocol 4": plain(4), "protocol 5": plain(5), "out of band": out_of_band}
channels = pytest.mark.parametrize("send", CHANNELS.values(), ids=CHANNELS)


def sent(value: Any) -> tuple[bytes, list[memoryview]]:
    """What travels: the pickle, and the memory beside it."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return text, [buffer.raw() for buffer in buffers]


def objects(*rows: Any) -> DataProto:
    return DataProto.from_dict(non_tensors={"o": list(rows)})


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


# Tensors

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda tensor: tensor,
    "strided": lambda tensor: tensor[:, ::2],
    "transposed": lambda tensor: tensor.transpose(0, 2),
    "expanded": lambda tensor: tensor[:1].expand(3, -1, -1),
    "rows": lambda tensor: tensor[1:],
    "empty": lambda tensor: tensor[:, :0],
}


@channels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(send: Callable[[Any], Any], dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(noise(4, 3, 64)).to(dtype)
    data = DataProto.from_dict({name: form(tensor)[:3] for name, form in FORMS.items() if name != "transposed"})
    data["o"] = [{"inside": tensor}, [FORMS["transposed"](tensor)], tensor.reshape(-1)[5]]
    back = send(data)
    assert back.names() == data.names()
    for name in data.names():
        assert same_value(back[name], data[name])
    assert same_value(back["o"][1][0], data["o"][1][0])


@channels
def test_gradients_conjugates_and_scalars(send: Callable[[Any], Any]) -> None:
    leaf = torch.randn(300, requires_grad=True)
    numbers = torch.randn(300, dtype=torch.complex64)
    back = send(objects(leaf, leaf * 2, numbers.conj(), numbers.conj().imag, torch.tensor(3)))["o"]
    assert [tensor.requires_grad for tensor in back] == [True, True, False, False, False]
    assert all(tensor.is_leaf for tensor in back)
    for tensor, expected in zip(back, (leaf, leaf * 2, numbers.conj(), numbers.conj().imag, torch.tensor(3))):
        assert torch.equal(tensor.detach(), expected.detach())


def test_memory_is_handed_over_not_copied() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(3), "r": RaggedTensor.from_list([[1], [2, 3], []])}, {"a": np.arange(3)}
    )
    data["o"] = [torch.randn(400)] * 3
    text, buffers = sent(data)
    addresses = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
    expected = [data["x"].data_ptr(), data["r"].storage.data_ptr(), data["a"].ctypes.data, data["o"][0].data_ptr()]
    assert addresses >= set(expected)
    back = pickle.loads(text, buffers=buffers)
    assert back["x"].data_ptr() == data["x"].data_ptr()
    assert back["r"].storage.data_ptr() == data["r"].storage.data_ptr()
    assert back["o"][2].data_ptr() == data["o"][0].data_ptr()
    assert len(text) < 2000


def test_a_view_travels_alone() -> None:
    storage = torch.zeros(1_000_000)
    rows = [storage[start : start + 1000] for start in (0, 1000, 0, 500)]
    data = DataProto.from_dict({"x": storage.view(1000, 1000)[4:8]}, {"o": rows})
    text, buffers = sent(data)
    assert sorted(buffer.nbytes for buffer in buffers) == [4000, 4000, 4000, 16000]
    assert len(text) < 2000
    back = pickle.loads(text, buffers=buffers)["o"]
    assert back[0].data_ptr() == back[2].data_ptr()  # the same memory, though two tensors, is written once
    assert len(pickle.dumps(RaggedTensor(storage, [1000] * 1000)[3:5])) < 10_000


def test_the_rows_of_ragged_columns_travel_once() -> None:
    ragged = RaggedTensor(torch.arange(10_000), [1000] * 10)
    back = plain(5)(DataProto(non_tensor_batch={"r": ragged[[3, 3, 7, 3]]}))["r"]
    assert back == ragged[[3, 3, 7, 3]]
    assert len(back.storage) == 2000


@channels
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_tensors(send: Callable[[Any], Any]) -> None:
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    inner = TensorDict(
        {"a": torch.randn(2, 5), "b": TensorDict({"c": torch.arange(2)}, batch_size=[2])}, batch_size=[2]
    )
    data = DataProto.from_dict({"n": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    data["t"] = inner
    data["o"] = [torch.nested.as_nested_tensor(rows, layout=torch.strided), torch.eye(3).to_sparse()]
    back = send(data)
    assert same_value(back["n"], data["n"])
    assert same_value(back["t"], inner)
    assert same_value(back["o"][0], data["o"][0])
    assert torch.equal(back["o"][1].to_dense(), torch.eye(3))
    assert torch.equal(send(objects(torch.nn.Parameter(torch.ones(2))))["o"][0], torch.ones(2))


# Arrays

ARRAYS = {
    "bool": np.array([[True, False]] * 600),
    "big-endian": np.arange(600, dtype=">i4"),
    "complex": np.full((30, 30), 1 + 2j),
    "half": np.arange(600, dtype=np.float16),
    "strings": np.array(["ä", "bcd"] * 300),
    "bytes": np.array([b"a", b"bcd"] * 300),
    "dates": np.arange("2020-01-01", "2023-01-01", dtype="M8[D]"),
    "times": np.arange(600).astype("m8[ms]"),
    "records": np.array([(1, 2.5, "x")] * 200, dtype=[("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "raw": np.zeros(200, dtype="V7"),
    "fortran": np.asfortranarray(np.arange(1200).reshape(30, 40)),
    "strided": np.arange(4000).reshape(40, 100)[::2, ::3],
    "reversed": np.arange(600)[::-1],
    "read-only": np.broadcast_to(np.arange(300), (4, 300)),
    "scalar": np.array(7.0),
    "no elements": np.zeros((3, 0, 2), dtype=np.float32),
    "no width": np.zeros(3, dtype="U0"),
    "objects": np.array([[1, "a"], [None, (2,)]], dtype=object),
    "records of objects": np.array([(1, [2])], dtype=[("a", "i4"), ("o", "O")]),
    "masked": np.ma.array([1, 2], mask=[True, False]),
    "matrix": np.arange(6).reshape(2, 3).view(np.recarray),
}


@channels
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_every_kind(send: Callable[[Any], Any], kind: str) -> None:
    array = ARRAYS[kind]
    back = send(objects({"inside": array}))["o"][0]["inside"]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()
    assert back.flags.f_contiguous or not array.flags.f_contiguous
    if array.ndim:
        column = send(DataProto(non_tensor_batch={"a": array}))["a"]
        assert column.tolist() == array.tolist()


@pytest.mark.parametrize("read_only", [False, True])
def test_arrays_may_be_written(read_only: bool) -> None:
    data = objects(np.zeros(1000), np.zeros(3))
    for array in data["o"]:
        array.flags.writeable = not read_only
    for send in CHANNELS.values():
        back = send(data)["o"]
        back[0][0] = back[1][0] = 1
    text, buffers = sent(data)
    if read_only:
        pickle.loads(text, buffers=buffers)["o"][0][0] = 1
    assert not any(array.any() for array in data["o"])


# Images

MODES = [
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
]


def drawn(mode: str, size: tuple[int, int] = (37, 29)) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(noise(len(image.tobytes())).tobytes())
    return image


@channels
@pytest.mark.parametrize("mode", [*MODES, "I;16B"])
@pytest.mark.parametrize("size", [(37, 29), (3, 2), (0, 4)], ids=str)
def test_images_of_every_mode(send: Callable[[Any], Any], mode: str, size: tuple[int, int]) -> None:
    image = drawn(mode, size)
    image.info["dpi"] = (72, 72)
    back = send(objects({"image": [image]}))["o"][0]["image"][0]
    assert type(back) is Image.Image
    assert back == image
    assert back.tobytes() == image.tobytes()
    assert back.info == {"dpi": (72, 72)}


@channels
def test_palettes_and_transparency(send: Callable[[Any], Any]) -> None:
    coloured = drawn("RGB").quantize(16)
    with_alpha = drawn("RGBA").quantize(16)
    see_through = coloured.copy()
    see_through.info["transparency"] = 3
    assert (coloured.im.getpalettemode(), with_alpha.im.getpalettemode()) == ("RGB", "RGBA")
    for image in (coloured, with_alpha, see_through):
        back = send(objects(image))["o"][0]
        assert back == image
        assert back.convert("RGBA") == image.convert("RGBA")
        assert back.im.getpalettemode() == image.im.getpalettemode()


@channels
def test_images_that_were_files(send: Callable[[Any], Any], tmp_path: Any) -> None:
    drawn("RGB").save(tmp_path / "a.png")
    opened = Image.open(tmp_path / "a.png")
    back = send(objects(opened))["o"][0]
    assert type(back) is Image.Image
    assert back.tobytes() == drawn("RGB").tobytes()
    assert same_value(back, opened)


def test_images_are_the_same_by_what_they_show() -> None:
    image = drawn("P")
    other = image.copy()
    other.info["dpi"] = (1, 1)
    assert same_value(image, other)
    other.putpalette(bytes(range(48)))
    assert not same_value(image, other)
    clear = image.copy()
    clear.info["transparency"] = 0
    assert not same_value(image, clear)
    assert not same_value(image, image.convert("RGB"))
    assert not same_value(image, None)


def test_image_memory_is_shared_where_pil_can() -> None:
    image = drawn("RGB")
    text, buffers = sent(objects(image))
    assert [buffer.nbytes for buffer in buffers] == [37 * 29 * 4]
    before = image.getpixel((0, 0))
    image.putpixel((0, 0), (1, 2, 3))
    back = pickle.loads(text, buffers=buffers)["o"][0]
    exported = int(PIL.__version__.split(".")[0]) >= 13  # others crash when they export memory that they borrowed
    assert back.getpixel((0, 0)) == ((1, 2, 3) if exported else before)
    received = bytearray(buffers[0])
    back = pickle.loads(text, buffers=[memoryview(received)])["o"][0]
    received[:3] = bytes((4, 5, 6))
    assert back.getpixel((0, 0)) == (4, 5, 6)
    back.putpixel((0, 0), (9, 9, 9))  # PIL copies what others may have before it writes
    assert received[:3] == bytes((4, 5, 6))


def test_images_in_several_pieces_of_memory() -> None:
    before = Image.core.get_block_size()
    Image.core.set_block_size(4096)
    try:
        image = drawn("RGB", (100, 100))
        with pytest.raises(ValueError, match=r"contiguous|multiple"):
            image.__arrow_c_array__()
        assert out_of_band(objects(image))["o"][0] == image
    finally:
        Image.core.set_block_size(before)


# Once, and together again


@channels
def test_rows_share_what_they_shared(send: Callable[[Any], Any]) -> None:
    image, patches, array, facts = drawn("RGB"), torch.randn(500), np.zeros(500), {"a": [1]}
    rows = [{"image": [image], "patches": patches, "array": array, "facts": facts} for _ in range(4)]
    data = DataProto.from_dict(non_tensors={"o": rows, "again": [patches] * 4}, meta_info={"image": image})
    back = send(data)
    first = back["o"][0]
    for row in back["o"]:
        assert row["patches"] is first["patches"]
        assert row["array"] is first["array"]
        assert row["image"][0] is first["image"][0]
        assert row["facts"] is first["facts"]
    assert back["again"][3] is first["patches"]
    assert back.meta_info["image"] is first["image"][0]


def test_what_rows_share_is_written_once() -> None:
    image, patches, array = drawn("RGB"), torch.randn(500), np.zeros(500)
    row = {"image": image, "patches": patches, "array": array}
    one, many = sent(objects(row)), sent(objects(*[dict(row) for _ in range(100)]))
    assert [buffer.nbytes for buffer in many[1][-3:]] == [4292, 2000, 4000]
    assert sum(buffer.nbytes for buffer in many[1]) - sum(buffer.nbytes for buffer in one[1]) < 4000
    assert len(pickle.dumps(objects(*[dict(row) for _ in range(100)]))) - len(pickle.dumps(objects(row))) < 4000


@pytest.mark.parametrize(("protocol", "copies"), [(4, 2), (5, 1)])
def test_copies_of_plain_pickling(protocol: int, copies: int) -> None:
    """With protocol 5 one, the result. Protocol 4 writes only bytes of its own: one more while it runs. Reading makes one."""
    size = 32 << 20
    data = DataProto.from_dict({name: torch.zeros(1024, 1024) for name in "abcdefgh"})
    assert sum(data[name].nbytes for name in data.names()) == size
    tracemalloc.start()
    try:
        text = pickle.dumps(data, protocol=protocol)
        assert (
            tracemalloc.get_traced_memory()[1] < (copies + 0.6) * size
        )  # pickle asks for up to half more than it fills
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        back = pickle.loads(text)
        assert tracemalloc.get_traced_memory()[1] - before < 1.1 * size
    finally:
        tracemalloc.stop()
    assert same_value(back["a"], data["a"])


# Objects

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    tensor: Any
    name: str = "a"


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "hold",
    [
        lambda value: {"k": value},
        lambda value: [value, (value, {"deep": [value]})],
        lambda value: OrderedDict(a=value),
        lambda value: defaultdict(list, a=[value]),
        lambda value: UserDict(a=value),
        lambda value: Pair(value, 1),
        lambda value: Record(value),
        lambda value: np.array([value, None], dtype=object),
        lambda value: RaggedTensor(value, [len(value)]),
        lambda value: DataProto.from_dict({"x": value}),
    ],
)
def test_containers_hand_over_what_they_hold(hold: Callable[[Any], Any]) -> None:
    tensor = torch.randn(5000)
    text, buffers = sent(objects(hold(tensor), 1))
    assert 20_000 in [buffer.nbytes for buffer in buffers]
    back = pickle.loads(text, buffers=buffers)["o"][0]
    assert type(back) is type(hold(tensor))
    assert len(text) < 5000


@channels
def test_other_objects_come_back_as_pickle_knows_them(send: Callable[[Any], Any]) -> None:
    opaque = Opaque({"n": 1})
    values = [
        opaque,
        opaque,
        {1, 2},
        frozenset("a"),
        b"bytes",
        bytearray(b"x"),
        3 + 4j,
        2**80,
        np.float32(1.5),
        deque([1]),
    ]
    values += [torch.float16, np.dtype("f4"), torch.Size([1, 2]), range(3), slice(1, 2), Opaque, len, ..., "ü" * 3000]
    back = send(objects(*values))["o"].tolist()
    assert back == values
    assert back[0] is back[1]


def test_an_object_that_pickle_refuses_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(objects(lambda: None))


def test_another_pickler_writes_the_objects_it_alone_can_write() -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")

    class Local:
        value = 5

    kind, function = cloudpickle.loads(cloudpickle.dumps(objects(Local, lambda: 6)))["o"]
    assert (kind.value, function()) == (5, 6)


@channels
def test_cycles(send: Callable[[Any], Any]) -> None:
    loop: list[Any] = [torch.ones(3)]
    loop.append(loop)
    data = objects(loop, 1)
    data["o"][1] = data["o"]
    back = send(data)["o"]
    assert back[0][1] is back[0]
    assert back[1] is back


def test_the_skeleton_names_nothing_else() -> None:
    hostile = pickle.dumps(len)
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.len"):
        put_together(hostile, [])
    skeleton, leaves, _ = take_apart({"a": [torch.ones(2), Opaque(1), len]})
    assert put_together(skeleton, ["x", "y", "z"]) == {"a": ["x", "y", "z"]}
    assert leaves[2] is len


@channels
def test_the_whole_batch(send: Callable[[Any], Any]) -> None:
    class Local(DataProto):
        pass

    data = DataProto.from_dict({"x": torch.arange(4)}, {"u": list("abcd")}, {"step": 3, "config": {"lr": 0.1}})
    data.to("cpu")
    for batch in (data, data[:0], data.select([]), DataProto(), DataProto(meta_info={"a": 1})):
        back = send(batch)
        assert back.meta_info == batch.meta_info
        assert len(back) == len(batch)
        assert back.names() == batch.names()
        assert (back.batch is None) == (batch.batch is None)
    assert send(data).batch.device == torch.device("cpu")
    item = send(data[1])
    assert (item.batch["x"].item(), item.non_tensor_batch, item.meta_info["step"]) == (1, {"u": "b"}, 3)
    assert send(RaggedTensor.from_list([[1], []])) == RaggedTensor.from_list([[1], []])
    whole = send([data, data])
    assert whole[0] is whole[1]


# Writing


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
