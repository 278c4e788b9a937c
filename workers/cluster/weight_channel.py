"""Weights from one process to others, without the driver and without a disk.

For roles that stand on devices of their own. The channel is a process group apart from the default one: its first rank holds
the actor, the others a rollout engine each.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

BUCKET_BYTES = 1 << 28  # tensors are sent together up to this size


class WeightChannel:
    """Broadcasts (name, tensor) pairs from rank 0: over NCCL between GPUs, else over gloo."""

    def __init__(self, store: distributed.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """All ``size`` processes meet by ``store``."""
        timeout = timedelta(seconds=timeout_s)
        kind: Any = distributed.ProcessGroupNCCL if device.type == "cuda" else distributed.ProcessGroupGloo
        self.group = kind(store, rank, size, timeout)
        self.device = device

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Rank 0: sends all pairs, bucket by bucket."""
        for bucket in buckets(weights):
            header = json.dumps([(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in bucket])
            described = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            self._broadcast(torch.tensor([len(described)]))
            self._broadcast(described)
            self._broadcast(torch.cat([weight.contiguous().view(-1).view(torch.uint8) for _, weight in bucket]))
        self._broadcast(torch.tensor([0]))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The other ranks: the pairs that rank 0 sends, one after the other; a bucket is let go of before the next comes."""
        while size := int(self._broadcast(torch.zeros(1, dtype=torch.int64))):
            header = self._broadcast(torch.empty(size, dtype=torch.uint8)).cpu().numpy().tobytes()
            forms = [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(header)]
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in forms]
            parts = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)).split(sizes)
            for (name, dtype, shape), part in zip(forms, parts, strict=True):
                aligned = part.clone() if part.storage_offset() % dtype.itemsize else part
                yield name, aligned.view(dtype).view(shape)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        self.group.broadcast([tensor]).wait()
        return tensor


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Pairs in lists of about `BUCKET_BYTES`; a larger tensor stands alone. Empty tensors travel along."""
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
