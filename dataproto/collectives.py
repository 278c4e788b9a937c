"""Batches across the ranks of a process group."""

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from dataproto.errors import ColumnConflict
from dataproto.rows import join

if TYPE_CHECKING:
    from dataproto.protocol import DataProto


@dataclass
class _Outline:
    """What a rank must know of another before it can receive its columns."""

    rows: int = 0
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)  # dtype, shape of a row
    arrays: list[str] = field(default_factory=list)
    pickled_bytes: int = 0
    device: str = "cpu"  # where the bytes travel: the first rank decides
    problem: str | None = None


def all_gather_data_proto(data: "DataProto", process_group: Any) -> None:
    """Gives every rank of the group the rows of all of them, in rank order; in place. Ranks may hold different numbers of rows.

    Tensors come back on the device they were on. ``meta_info`` stays each rank's own.

    Raises:
        ColumnConflict: ranks hold different columns, dtypes or shapes, or one of them holds something that cannot be sent. All
            ranks raise, none waits for ever, and no batch is changed.
    """
    payload, outline = _outline(data, process_group)
    outlines: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(outlines, outline, group=process_group)
    _check_same(outlines)
    device = torch.device(outlines[0].device)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    batch = None
    if data.batch is not None:
        columns = {name: data.batch[name] for name in sorted(outline.tensors)}
        gathered = {name: _gather(tensor, outlines, name, process_group, device) for name, tensor in columns.items()}
        rows = sum(each.rows for each in outlines)
        tensors = {name: gathered[name] for name in outline.tensors}
        batch = TensorDict(tensors, batch_size=[rows], device=data.batch.device)
    arrays = {}
    if outline.arrays:
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = _gather_bytes(flat, [each.pickled_bytes for each in outlines], process_group, device)
        rank = dist.get_rank(process_group)
        parts = [
            data.non_tensor_batch if source == rank else pickle.loads(part.cpu().numpy().tobytes())
            for source, part in enumerate(received)
        ]
        arrays = {name: join([part[name] for part in parts], name) for name in data.non_tensor_batch}
    data.batch, data.non_tensor_batch = batch, arrays


def _outline(data: "DataProto", group: Any) -> tuple[bytes, _Outline]:
    """The pickled arrays and the outline; what goes wrong on this rank is told to the others instead of raised here."""
    try:
        data.check_consistency()
        tensors = data._tensors()
        nested = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor) or tensor.is_nested]
        if nested:
            return b"", _Outline(problem=f"columns {nested} are not dense tensors")
        payload = pickle.dumps(data.non_tensor_batch, protocol=5) if data.non_tensor_batch else b""
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        return b"", _Outline(problem=str(error))
    shapes = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    devices = [tensor.device.type for tensor in tensors.values()]
    return payload, _Outline(
        len(data),
        shapes,
        sorted(data.non_tensor_batch),
        len(payload),
        _transport(group, devices[0] if devices else "cpu"),
    )


def _check_same(outlines: list[_Outline]) -> None:
    for rank, outline in enumerate(outlines):
        if outline.problem:
            raise ColumnConflict(f"rank {rank} cannot send its batch: {outline.problem}")
        if (outline.tensors, outline.arrays) != (outlines[0].tensors, outlines[0].arrays):
            raise ColumnConflict(
                f"ranks 0 and {rank} hold different columns: {_describe(outlines[0])} and {_describe(outline)}"
            )


def _describe(outline: _Outline) -> str:
    tensors = [f"{name} {dtype} (B, {', '.join(map(str, shape))})" for name, (dtype, shape) in outline.tensors.items()]
    return "; ".join([*tensors, *(f"{name} objects" for name in outline.arrays)]) or "none"


def _transport(group: Any, wanted: str) -> str:
    """The kind of device that the group's backend sends from: the wanted one where it can."""
    kinds = [part.split(":")[0] for part in str(dist.get_backend_config(group)).split(",") if ":" in part]
    return wanted if wanted in kinds or not kinds else kinds[0]


def _gather(
    tensor: torch.Tensor, outlines: list[_Outline], name: str, group: Any, device: torch.device
) -> torch.Tensor:
    """One column ``(B, ...)`` of every rank, as bytes, so that every dtype can travel over every backend."""
    dtype, shape = outlines[0].tensors[name]
    row_bytes = dtype.itemsize * int(np.prod(shape))
    if row_bytes == 0:
        return tensor.new_empty((sum(outline.rows for outline in outlines), *shape))
    flat = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
    received = _gather_bytes(flat, [outline.rows * row_bytes for outline in outlines], group, device)
    return torch.cat([part.view(dtype).view(-1, *shape) for part in received]).to(tensor.device)


def _gather_bytes(flat: torch.Tensor, sizes: list[int], group: Any, device: torch.device) -> list[torch.Tensor]:
    """The bytes ``(sizes[r],)`` of every rank r; collectives want equal sizes, so shorter ones travel with a tail."""
    longest = max(sizes)
    sent = flat.to(device)
    if len(flat) < longest:
        sent = torch.cat([sent, sent.new_empty(longest - len(flat))])
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(received, sent, group=group)
    return [part[:size] for part, size in zip(received, sizes)]
