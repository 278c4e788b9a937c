"""Deep equality of columns and of the values inside them: NaN equals NaN, dtypes and shapes must agree, cycles are legal."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from dataproto._ops.image_buffers import is_image, same_image

Pairs = frozenset[tuple[int, int]]  # identities of the objects that are being compared, so that cycles end


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, device, shape and values are equal; O(1) if both read the same memory."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.device != right.device or left.is_nested != right.is_nested:
        return False
    if left.is_nested:
        parts = left.unbind(), right.unbind()
        return len(parts[0]) == len(parts[1]) and all(same_tensor(a, b) for a, b in zip(*parts))
    if left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout != torch.strided:
        return same_tensor(left.to_dense(), right.to_dense())
    if _view(left) == _view(right):
        return True
    if left.dtype == torch.complex32:  # torch does not compare it
        return same_tensor(torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj()))
    if left.element_size() == 1 and left.dtype.is_floating_point:  # torch does not compare fp8: compare the bits
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    if torch.equal(left, right):
        return True
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same memory in the same way, given equal dtype, device and shape."""
    return tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def same_array(left: np.ndarray, right: np.ndarray, pairs: Pairs = frozenset()) -> bool:
    """Whether dtype, shape and elements are equal; O(1) if both read the same memory."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.__array_interface__["data"] == right.__array_interface__["data"] and left.strides == right.strides:
        return True
    if left.dtype != object:
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")
    return all(type(a) is type(b) and same_value(a, b, pairs) for a, b in zip(left.flat, right.flat))


def same_value(left: Any, right: Any, pairs: Pairs = frozenset()) -> bool:
    """Deep equality of two Python values, with tensors and arrays anywhere inside.

    >>> same_value({"a": [float("nan"), torch.ones(2)]}, {"a": [float("nan"), torch.ones(2)]})
    True
    >>> same_value([1, 2], (1, 2))
    False
    """
    if left is right or (id(left), id(right)) in pairs:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_tensor(left, right)
    pairs = pairs | {(id(left), id(right))} if isinstance(left, np.ndarray | dict | list | tuple) else pairs
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and same_array(left, right, pairs)
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        return left.batch_size == right.batch_size and same_value(dict(left.items()), dict(right.items()), pairs)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key], pairs) for key in left)
    for kind in (list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            return len(left) == len(right) and all(same_value(a, b, pairs) for a, b in zip(left, right))
    if is_image(left) and is_image(right):
        return same_image(left, right)
    return _same_scalar(left, right)


def _same_scalar(left: Any, right: Any) -> bool:
    try:
        return bool(left == right) or (bool(left != left) and bool(right != right))
    except (RuntimeError, TypeError, ValueError):  # objects that cannot be compared count as different
        return False
