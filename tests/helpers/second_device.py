"""A pretended second device: its tensors hold their numbers in host memory, and refuse what those of a GPU refuse.

PyTorch for CPUs has one device, so code that mixes the model's device with the host passes every test there. Within
`second_device` a tensor can be made on `DEVICE` and moved there and back. An operation on tensors of both raises `MixedDevices`,
except what a GPU takes too: copies, and numbers and indices on the host. It notes where the host would wait for a GPU. What only
runs where ``device.type`` is ``"cuda"``, such as variable-length flash attention, does not run here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("maia", 0)  # a type that torch knows, and nothing here has code for
PACKAGES = ("dataproto", "rollout", "workers", "recipes", "transformers")
MOVES = "dataproto.transfer"  # the module whose copies to the device the host does not wait for

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.copy.default}
_INDEXED = {
    *(_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default),
    *(_aten._unsafe_index.Tensor, _aten._unsafe_index_put.default),
}
_TAKE_NUMBERS = {*_INDEXED, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor, _aten.fill.Tensor, _aten.fill_.Tensor}
_WAIT = {  # their results, or the sizes of these, depend on numbers on the device
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}


class MixedDevices(RuntimeError):
    """An operation on tensors of both devices."""


class OnSecondDevice(Tensor):
    """A tensor on `DEVICE`.

    Torch itself takes it for one on the meta device: autograd knows how to run there without a GPU.
    """

    held: Tensor
    """The numbers, in host memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnSecondDevice":
        options = {"dtype": held.dtype, "layout": held.layout, "device": "meta"}
        made = Tensor._make_wrapper_subclass(cls, held.size(), held.stride(), held.storage_offset(), **options)
        made.held = held
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_meta(self) -> bool:
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:
        raise TypeError(f"numpy reads no tensor on {DEVICE}: copy it to the host first")

    def __repr__(self) -> str:
        return f"OnSecondDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(op, args, kwargs or {})[0]


class _Devices(TorchDispatchMode):
    """Sees operations without a tensor on the device too, such as those that make one there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, waited = _computed(op, args, kwargs or {})
        if waited and not (waited == "copy" and _caller() == MOVES):
            self.waits.append(_caller())
        return result


class _StoredNumbers(TorchFunctionMode):
    """Sees numbers that are stored at indices on the device: for CUDA alone torch makes tensors of them on the host."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = function is Tensor.__setitem__ and not isinstance(args[2], Tensor)
        if numbers and any(isinstance(each, OnSecondDevice) for each in tree_leaves(args[1])):
            self.waits.append(_caller())
        return function(*args, **(kwargs or {}))


@contextmanager
def second_device() -> Iterator[list[str]]:
    """Within it there is a second device. Yields the modules of `PACKAGES` whose calls the host would wait for, in their order,
    each as often as it waits; "" is none of them, such as a backward pass.

    The host waits for numbers, for sizes that depend on numbers, and for copies in both directions, except those to the device by
    `dataproto.transfer.move`. A number that is stored at indices on the device is such a copy.
    """
    devices, before = _Devices(), torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor(numbers, device=DEVICE)` is a copy from the host
    try:
        with torch.autograd.set_multithreading_enabled(False), devices, _StoredNumbers(devices.waits):
            yield devices.waits
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _computed(op: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, str]:
    """The result of an operation, and why the host would wait for a GPU's: for ``"numbers"``, a ``"copy"`` there, or not ("")."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in tensors if isinstance(each, OnSecondDevice)]
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        device = DEVICE if device.type == "meta" else device
    if not there and (device is None or device.type != DEVICE.type):
        return op(*args, **kwargs), ""
    if there and op not in _COPIES:
        _check(op, args, tensors)
    stays = bool(there) if device is None else device.type == DEVICE.type
    if op in _COPIES and device is None:
        stays = isinstance(args[0], OnSecondDevice)
    if device is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = op(*tree_map(_held, args), **tree_map(_held, kwargs))
    given = {id(_held(each)): each for each in tensors}  # operations in place return what they were given

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given.get(id(value)) if id(value) in given else OnSecondDevice(value) if stays else value

    return tree_map(wrapped, result), _waits(op, args, kwargs, stays)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnSecondDevice) else value


def _check(op: Any, args: Any, tensors: list[Tensor]) -> None:
    if any(not isinstance(each, OnSecondDevice) and each.is_meta for each in tensors):
        raise NotImplementedError(f"{op}: torch makes a tensor without numbers of a list of indices: give it a tensor")
    if op in _INDEXED and isinstance(args[0], OnSecondDevice):  # by indices that lie anywhere
        tensors = [args[0], *(each for each in args[2:3] if isinstance(each, Tensor))]
    takes_numbers = torch.Tag.pointwise in op.tags or op in _TAKE_NUMBERS
    if any(not isinstance(each, OnSecondDevice) and (each.ndim or not takes_numbers) for each in tensors):
        raise MixedDevices(f"{op}: " + ", ".join(f"{tuple(each.shape)} on {each.device}" for each in tensors))


def _waits(op: Any, args: Any, kwargs: dict[str, Any], stays: bool) -> str:
    tensors = [each for each in args if isinstance(each, Tensor)]
    if op in _COPIES:
        here = not isinstance(tensors[-1], OnSecondDevice)
        return "copy" if here and stays else "" if here or stays else "numbers"
    if op in _INDEXED:
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        if not all(isinstance(each, OnSecondDevice) for each in (args[0], *indices)):
            return "copy"
        return "numbers" if any(each.dtype in (torch.bool, torch.uint8) for each in indices) else ""
    if op is _aten.repeat_interleave.Tensor:
        return "numbers" if kwargs.get("output_size") is None else ""
    return "numbers" if op._schema.name.removeprefix("aten::") in _WAIT else ""


def _caller() -> str:
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in PACKAGES:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals["__name__"]
