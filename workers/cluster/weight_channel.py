"""Sends weights from one process to others, without the driver and without a disk.

Used when engines run on devices separate from the actor's. The channel is a process group apart from the default one: its rank 0
holds the actor, each other rank holds a rollout engine.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

BUCKET_BYTES = 1 << 28  # tensors are sent together up to this size

Sending = tuple[distributed.Work, Tensor]
"""A broadcast that has begun, and its tensor, which has to last until it ends."""


class WeightChannel:
    """Broadcasts (name, tensor) pairs from rank 0, over NCCL between GPUs and over gloo otherwise."""

    def __init__(self, store: distributed.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """All ``size`` processes connect through ``store``."""
        timeout = timedelta(seconds=timeout_s)
        backend: Any = distributed.ProcessGroupNCCL if device.type == "cuda" else distributed.ProcessGroupGloo
        self._group = backend(store, rank, size, timeout)
        self._device = device

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """On rank 0: sends all pairs, bucket by bucket. The next bucket is gathered while one is on its way."""
        on_the_way: list[Sending] = []
        for bucket in _buckets(weights):
            header = json.dumps([(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in bucket])
            header_bytes = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            data = torch.cat([weight.contiguous().view(-1).view(torch.uint8) for _, weight in bucket])
            begun = [self._begin(each) for each in (torch.tensor([len(header_bytes)]), header_bytes, data)]
            for work, _ in on_the_way:
                work.wait()
            on_the_way = begun
        for work, _ in [*on_the_way, self._begin(torch.tensor([0]))]:
            work.wait()

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """On the other ranks: yields the pairs that rank 0 sends. Each bucket is freed before the next one arrives."""
        while size := int(self._broadcast(torch.zeros(1, dtype=torch.int64))):
            header = self._broadcast(torch.empty(size, dtype=torch.uint8)).cpu().numpy().tobytes()
            entries = [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(header)]
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in entries]
            parts = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)).split(sizes)
            for (name, dtype, shape), part in zip(entries, parts, strict=True):
                aligned = part.clone() if part.storage_offset() % dtype.itemsize else part
                yield name, aligned.view(dtype).view(shape)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        work, tensor = self._begin(tensor)
        work.wait()
        return tensor

    def _begin(self, tensor: Tensor) -> Sending:
        tensor = tensor.to(self._device)
        return self._group.broadcast([tensor]), tensor


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups pairs into lists of at most `BUCKET_BYTES`. A larger tensor is alone in its list; empty tensors are kept."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, weight in weights:
        if bucket and filled + weight.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, weight))
        filled += weight.nbytes
    if bucket:
        yield bucket
