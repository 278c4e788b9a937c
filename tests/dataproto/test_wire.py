"""Batches as bytes: everything comes back, once, without copies."""

import dataclasses
import pickle
import tracemalloc
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto import DataProto, RaggedTensor
from dataproto.serialization.wire import put_together, take_apart
from dataproto.tensordict_utils import same_value
from helpers.wire_channels import CHANNELS, Opaque, channels, drawn, noise, objects, plain, sent

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
    if array.ndim:
        column = send(DataProto(non_tensor_batch={"a": array}))["a"]
        assert column.tolist() == array.tolist()


@pytest.mark.parametrize("read_only", [False, True])
def test_arrays_in_band_may_be_written(read_only: bool) -> None:
    data = objects(np.zeros(1000), np.zeros(3))
    for array in data["o"]:
        array.flags.writeable = not read_only
    for send in CHANNELS.values():
        back = send(data)["o"]
        back[0][0] = back[1][0] = 1
    assert not any(array.any() for array in data["o"])


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


@pytest.mark.slow
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
    from ray import cloudpickle

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
