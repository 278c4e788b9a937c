"""Tensors of a checkpoint, and what is made of them, of which any part can be read without the rest.

Checkpoints often hold a weight in another form than the model: each expert by itself, queries, keys and values apart, or rows and
columns swapped. `Stacked`, `Joined` and `Swapped` are such weights. A part of them is read as the parts of the tensors that it
consists of.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dataproto.errors import CheckpointError, raised_as
from rollout.pretrained import file_if_there

PLAIN_NUMBERS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Types of numbers that need no scale, and their names in safetensors files."""

Range = tuple[slice, ...]
"""A part of a tensor: for each dimension a slice with start and stop."""


class StoredTensor(Protocol):
    """A tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of the checkpoint's tensors that it is made of."""
        ...

    def read(self, part: Range) -> Tensor:
        """A part that is not empty. It may be a view of a mapped file, and must not be written to."""
        ...


def whole(shape: Sequence[int]) -> Range:
    """All of a tensor.

    >>> whole((2, 3))
    (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, size) for size in shape)


class CheckpointFiles:
    """The weights of a checkpoint directory or hub name, in safetensors files.

    Files are mapped, not read. Mapped pages that were read count as memory of the process, so files are open only within
    `opened`.
    """

    def __init__(self, source: str, download: bool = True) -> None:
        """
        Args:
            source: directory or hub name.
            download: files of a hub name that are not on this machine; otherwise they are absent.

        Raises:
            CheckpointError: a file that the index names is absent, or a file is damaged.
        """
        self.source, self._download = source, download
        self._open = threading.local()
        self.files = self._find()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.files)

    def tensor(self, name: str) -> "FileTensor":
        """The tensor of this name; call within `opened`."""
        return FileTensor(self, name, tuple(self._handle(self.files[name]).get_slice(name).get_shape()))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Files that this thread reads from stay open until the block ends."""
        what = f"the weights of {self.source} cannot be read"
        with ExitStack() as stack, raised_as(CheckpointError, what, SafetensorError, OSError):
            self._open.stack, self._open.handles = stack, {}
            try:
                yield
            finally:
                del self._open.stack, self._open.handles

    def read(self, name: str, part: Range) -> Tensor:
        """A part of the tensor of this name; call within `opened`."""
        handle = self._handle(self.files[name])
        return handle.get_slice(name)[part] if part else handle.get_tensor(name)

    def kind(self, name: str) -> str:
        """The type of a tensor's numbers by its name in safetensors files, such as ``BF16``; call within `opened`."""
        return str(self._handle(self.files[name]).get_slice(name).get_dtype())

    def _handle(self, file: str) -> Any:
        handles = self._open.handles
        if file not in handles:
            handles[file] = self._open.stack.enter_context(safe_open(file, framework="pt"))
        return handles[file]

    def _find(self) -> dict[str, str]:
        """The file of each tensor."""
        single = self._path(SAFE_WEIGHTS_NAME)
        if single is not None:
            with self.opened():
                return dict.fromkeys(self._handle(single).keys(), single)
        index = self._path(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            return {}
        places: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        paths = {name: self._path(name) for name in sorted(set(places.values()))}
        absent = [name for name, path in paths.items() if path is None]
        if absent and self._download:
            raise CheckpointError(f"{self.source} lacks {absent[:3]}, which {SAFE_WEIGHTS_INDEX_NAME} names")
        return {name: path for name, file in places.items() if (path := paths[file]) is not None}

    def _path(self, name: str) -> str | None:
        return file_if_there(self.source, name, local_files_only=not self._download)


@dataclass(frozen=True)
class FileTensor:
    """A tensor as the checkpoint holds it."""

    files: CheckpointFiles
    name: str
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, part: Range) -> Tensor:
        return self.files.read(self.name, part)


@dataclass(frozen=True)
class Several:
    """What is made of tensors along a dimension."""

    tensors: tuple[StoredTensor, ...]
    dim: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for each in self.tensors for name in each.names)


class Stacked(Several):
    """Tensors of one shape along a new dimension ``dim``."""

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0].shape
        return (*first[: self.dim], len(self.tensors), *first[self.dim :])

    def read(self, part: Range) -> Tensor:
        inner = (*part[: self.dim], *part[self.dim + 1 :])
        return torch.stack([each.read(inner) for each in self.tensors[part[self.dim]]], self.dim)


class Joined(Several):
    """Tensors joined along ``dim``."""

    @property
    def shape(self) -> tuple[int, ...]:
        first, total = self.tensors[0].shape, sum(each.shape[self.dim] for each in self.tensors)
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    def read(self, part: Range) -> Tensor:
        wanted, begin, found = part[self.dim], 0, []
        for each in self.tensors:
            size = each.shape[self.dim]
            here = slice(max(wanted.start - begin, 0), min(wanted.stop - begin, size))
            if here.start < here.stop:
                found.append(each.read((*part[: self.dim], here, *part[self.dim + 1 :])))
            begin += size
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@dataclass(frozen=True)
class Swapped:
    """A tensor with two dimensions swapped."""

    tensor: StoredTensor
    dims: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return self.tensor.names

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._swap(self.tensor.shape))

    def read(self, part: Range) -> Tensor:
        return self.tensor.read(tuple(self._swap(part))).transpose(*self.dims)

    def _swap(self, values: Sequence[Any]) -> list[Any]:
        swapped, (one, other) = list(values), self.dims
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return swapped
