"""Weights through a channel whose ends are two threads: equal to the bit, and gathered while others are on their way."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, distributed

from workers.cluster import host
from workers.cluster.host import WeightChannel

TIMEOUT_S = 120.0
WEIGHTS = [
    ("odd", torch.arange(7, dtype=torch.uint8)),
    ("half", torch.arange(12).bfloat16().view(3, 4)),
    ("empty", torch.empty(0, 3)),
    ("transposed", torch.arange(40.0).view(8, 5).t()),
    ("large", torch.arange(1000.0)),
    ("scalar", torch.tensor(3.5)),
]


@pytest.fixture
def ends() -> Iterator[tuple[WeightChannel, WeightChannel, ThreadPoolExecutor]]:
    """The sender, the receiver, and threads for them."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(lambda rank: WeightChannel(store, rank, 2, torch.device("cpu"), TIMEOUT_S), (0, 1))
        yield sender, receiver, pool


@pytest.mark.parametrize("bucket", [1, 64, 1 << 28])
def test_weights_arrive_to_the_bit(ends, monkeypatch, bucket):
    monkeypatch.setattr(host, "BUCKET_BYTES", bucket)
    sender, receiver, pool = ends
    for _ in range(2):
        sent = pool.submit(sender.send, iter(WEIGHTS))
        found = list(receiver.receive())
        sent.result(TIMEOUT_S)
        assert [name for name, _ in found] == [name for name, _ in WEIGHTS]
        for (_, one), (_, other) in zip(found, WEIGHTS, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_the_next_bucket_is_gathered_while_one_is_on_its_way(ends, monkeypatch):
    """Nothing is received before the second bucket has been asked for."""
    monkeypatch.setattr(host, "BUCKET_BYTES", 1 << 22)
    sender, receiver, pool = ends
    asked, weight = threading.Event(), torch.ones(1 << 20)

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "first", weight
        yield "second", weight  # asked for to see whether the first bucket has room for it
        asked.set()
        yield "third", weight

    sent = pool.submit(sender.send, weights())
    assert asked.wait(TIMEOUT_S / 4)
    assert [name for name, _ in receiver.receive()] == ["first", "second", "third"]
    sent.result(TIMEOUT_S)
