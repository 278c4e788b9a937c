"""Tensors as bytes, and tensors beside objects in one ``TensorDict``."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto.errors import ColumnConflict, InvalidColumn, RowCountMismatch
from dataproto.protocol import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from dataproto.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list, same_value

TENSORS = [
    torch.arange(6, dtype=torch.int16).view(2, 3),
    torch.tensor([[True, False]]),
    torch.randn(2, 3).to(torch.bfloat16),
    torch.randn(4).to(torch.float8_e5m2),
    torch.randn(3, 4)[:, ::2],
    torch.randn(3, requires_grad=True),
    torch.tensor(5.0),
    torch.empty(0, 3),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_single_tensors(tensor: torch.Tensor) -> None:
    dtype, shape, data = serialize_single_tensor(tensor)
    assert dtype == str(tensor.dtype).removeprefix("torch.")
    assert tuple(shape) == tuple(tensor.shape)
    assert memoryview(data).nbytes == tensor.numel() * tensor.element_size()
    back = deserialize_single_tensor((dtype, shape, bytes(data)))
    assert same_value(back, tensor.detach())


@pytest.mark.parametrize(
    "encoded", [("nothing", (1,), b"abcd"), ("load", (1,), b"abcd"), ("float32", (2,), b"abcd"), (3, (1,), b"abcd")]
)
def test_wrong_encodings_are_refused(encoded: tuple) -> None:
    with pytest.raises(InvalidColumn):
        deserialize_single_tensor(encoded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_tensordicts(layout: torch.layout) -> None:
    nested = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    source = TensorDict({"n": nested, "x": torch.arange(4).view(2, 2)}, batch_size=[2], device="cpu")
    batch_size, device, items = serialize_tensordict(source)
    assert (batch_size, device, sorted(items)) == ((2,), "cpu", ["n", "x"])
    assert items["n"][0] == str(layout).removeprefix("torch.")
    back = deserialize_tensordict((batch_size, device, items))
    assert back.batch_size == source.batch_size
    assert back.device == source.device
    assert same_value(back["x"], source["x"])
    assert all(same_value(one, other) for one, other in zip(back["n"].unbind(), nested.unbind()))
    with pytest.raises(ValueError, match="2 or 3 values"):
        deserialize_tensordict(((2,), None, {"x": (1,)}))
    with pytest.raises(InvalidColumn, match="layout 'load'"):
        deserialize_tensordict(((2,), None, {"x": ("load", [])}))


def test_jagged_tensors_may_vary_in_a_later_dimension() -> None:
    rows = [torch.arange(8).view(4, 2), torch.arange(12).view(4, 3)]  # m-RoPE positions (4, L)
    nested = nested_tensor_from_tensor_list(rows)
    assert [row.tolist() for row in nested.unbind()] == [row.tolist() for row in rows]
    for wrong in ([], [torch.zeros(2), torch.zeros(2, 2)], [torch.zeros(1, 2), torch.zeros(2, 1)], [torch.tensor(1)]):
        with pytest.raises(InvalidColumn):
            nested_tensor_from_tensor_list(wrong)


def test_get_tensordict() -> None:
    made = get_tensordict({"x": torch.zeros(2, 3), "scores": [[], [0.5]], "n": np.array([1, 2])}, {"step": 7})
    assert made.batch_size == torch.Size([2])
    assert [list(row) for row in made["scores"]] == [[], [0.5]]
    assert made["n"] == [1, 2]
    assert made["step"] == 7
    assert get_tensordict({}, {"step": 1}).batch_size == torch.Size([])
    ragged = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert get_tensordict({"r": ragged})["r"].is_nested


def test_get_tensordict_refuses() -> None:
    with pytest.raises(RowCountMismatch, match="'a': 2, 'b': 3"):
        get_tensordict({"a": torch.zeros(2), "b": [1, 2, 3]})
    with pytest.raises(ColumnConflict, match="a"):
        get_tensordict({"a": torch.zeros(2)}, {"a": 1})
    strided = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    for wrong in ([torch.zeros(1)], torch.tensor(1.0), "ab", np.array(1), strided):
        with pytest.raises(InvalidColumn, match="'a'"):
            get_tensordict({"a": wrong})  # type: ignore[dict-item]
