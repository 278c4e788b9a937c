"""Many small tensors as few large ones: one copy to another device, and one stream of bytes to a file and its digest."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""Of dtypes in a safetensors file."""
PART_BYTES = 8 << 20  # that are digested and written at a time
SPARE = 1 / 4  # of a device's memory that copies for files leave free
ALIGNMENT = 8  # of the first tensor in a file


@dataclass(frozen=True)
class PackedTensors:
    """Tensors of one dtype and device, one after the other.

    >>> packed = pack({"a": torch.ones(2, 2), "b": torch.zeros(3)})
    >>> packed.flat.tolist(), list(packed.tensors())
    ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], ['a', 'b'])
    """

    shapes: Mapping[str, torch.Size]
    flat: Tensor  # (n,)
    filled: torch.cuda.Event | None = None  # when the device has filled it

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, which share the memory of this one."""
        parts = self.flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def on_host(self) -> "PackedTensors":
        """The same in host memory, by one copy, for which any thread may ask. It waits for nothing that began after `pack`."""
        if self.filled is None:
            return replace(self, flat=self.flat.cpu())
        with torch.cuda.stream(torch.cuda.Stream(self.flat.device)):
            self.filled.wait()
            return replace(self, flat=self.flat.cpu(), filled=None)

    def for_writing(self) -> "PackedTensors":
        """The same for a thread that writes it to a file: on its device if more than `SPARE` of its memory is free, otherwise in
        host memory.

        `on_host` blocks the device for all threads: for 49 ms with 60 MB on an H200.
        """
        if self.filled is None:
            return self.on_host()
        free, total = torch.cuda.mem_get_info(self.flat.device)  # what the allocator keeps for itself is not free
        return self if free > SPARE * total else self.on_host()

    def is_finite(self) -> bool:
        """Whether all numbers are finite. Waits for the device once."""
        return bool(self.flat.isfinite().all())

    def in_float32(self) -> "PackedTensors":
        """The same in float32, for the thread that has packed them."""
        return replace(self, flat=self.flat.float(), filled=None)


def pack(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> PackedTensors:
    """A copy of tensors of one dtype and device, of which there is one at least, in ``dtype`` or their own."""
    shapes, first = {name: tensor.shape for name, tensor in tensors.items()}, next(iter(tensors.values()))
    count = sum(shape.numel() for shape in shapes.values())
    flat = torch.empty(count, dtype=dtype or first.dtype, device=first.device)
    packed = PackedTensors(shapes, flat)
    with torch.no_grad():  # one call: on a device, a kernel for each of many small matrices takes longer than they do
        torch._foreach_copy_(list(packed.tensors().values()), list(tensors.values()))
    if not flat.is_cuda:
        return packed
    filled = torch.cuda.Event()
    filled.record(torch.cuda.current_stream(flat.device))
    return replace(packed, filled=filled)


def pack_by_kind(tensors: Mapping[str, Tensor]) -> list[PackedTensors]:
    """Copies of tensors of any dtypes and devices, one for each kind; see `PackedTensors.for_writing`."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return [pack(group).for_writing() for group in groups.values()]


def write_packed(packs: Sequence[PackedTensors], file: Path, metadata: Mapping[str, str] | None = None) -> str:
    """Writes tensors as a safetensors file, and returns the SHA-256 of it, which is computed at the same time.

    Neither the copies from a device, nor the digest, nor the writing holds Python's lock: several threads write several files at
    once.
    """
    packs = sorted(packs, key=lambda each: -each.flat.element_size())  # so that all tensors are aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for each in packs:
        size = each.flat.element_size()
        ends = accumulate((shape.numel() * size for shape in each.shapes.values()), initial=place)
        for (name, shape), begin in zip(each.shapes.items(), ends):
            offsets = [begin, begin + shape.numel() * size]
            header[name] = {"dtype": NAMES[each.flat.dtype], "shape": list(shape), "data_offsets": offsets}
        place += each.flat.numel() * size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with file.open("wb") as opened, ThreadPoolExecutor(1) as hashing:
        for part in _parts(len(text).to_bytes(8, "little") + text, packs):
            digested = hashing.submit(digest.update, part)
            opened.write(part)
            digested.result()
    return digest.hexdigest()


def _parts(start: bytes, packs: Sequence[PackedTensors]) -> Iterable[bytes | memoryview]:
    """The bytes of a file, in parts. Each part is valid until the next is asked for."""
    yield start
    for each in packs:
        parts = each.flat.view(torch.uint8).split(PART_BYTES)
        for part in parts if each.filled is None else _staged(parts, each.filled):
            yield part.cpu().numpy().data


def _staged(parts: Sequence[Tensor], filled: torch.cuda.Event) -> Iterable[Tensor]:
    """Copies parts from a device to pinned host memory, each to the same place: a part is valid until the next is asked for.

    A copy to ordinary host memory is 35 times slower (H200), and blocks the device for all threads.
    """
    stream = torch.cuda.Stream(parts[0].device)
    staging = torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True)
    filled.wait(stream)
    for part in parts:
        with torch.cuda.stream(stream):
            staged = staging[: part.numel()].copy_(part, non_blocking=True)
        stream.synchronize()
        yield staged
