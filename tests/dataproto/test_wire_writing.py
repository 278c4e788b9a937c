"""What is written into a received batch stays with its writer."""

import copy
import ctypes
import pickle
import runpy
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataproto import DataProto, RaggedTensor
from dataproto.serialization import buffers as memory
from dataproto.tensordict_utils import same_value
from helpers.wire_channels import CHANNELS, Opaque, drawn, noise, sent


def rich() -> DataProto:
    draw = torch.Generator().manual_seed(0)
    tensors = {"x": torch.arange(4000).view(4, 1000), "y": torch.randn(4, 300, generator=draw)}
    image, patches = drawn("RGB"), torch.randn(500, generator=draw)
    data = DataProto.from_dict(
        tensors, {"o": [{"image": image, "patches": patches} for _ in range(4)], "u": list("abcd")}
    )
    data["a"], data["a2"] = np.arange(4), np.arange(4000).reshape(4, 1000)
    data["r"] = RaggedTensor(torch.arange(1000.0), [100, 0, 400, 500])
    return data


def test_verbs_do_not_write_into_memory_that_was_handed_over() -> None:
    from test_ragged_columns import VERBS

    text, handed_over = sent(rich())
    buffers = [bytearray(buffer) for buffer in handed_over]
    before = [zlib.crc32(buffer) for buffer in buffers]
    received = pickle.loads(text, buffers=buffers)
    received["n"], received["uid"] = torch.arange(4), list("abcd")
    for name, (change, _) in VERBS.items():
        if name not in ("union", "concat", "or part"):
            change(received.select())
    received.union(received.select())
    DataProto.concat([received, received])
    received.to(torch.bfloat16)
    assert [zlib.crc32(buffer) for buffer in buffers] == before


def write_everywhere(data: DataProto) -> None:
    """All ways in which a user writes into a batch like `rich`."""
    data.batch["x"][data.batch["x"] > 1] = 7
    data["x"][1].mul_(2)
    data["y"].numpy()[...] = 7
    data["a"][:] = 7
    data["r"][2].fill_(7)
    torch.add(data["r"].storage, 1, out=data["r"].storage)
    data["o"][0]["patches"][:100] = 7
    data["o"][0]["image"].load()[0, 0] = (7, 7, 7)
    data["o"][0]["image"].paste((8, 8, 8), (1, 1, 3, 3))


OWN = {name: send for name, send in CHANNELS.items() if name != "out of band"}


@pytest.mark.parametrize("send", [*OWN.values(), DataProto.writable], ids=[*OWN, "writable"])
def test_what_is_a_readers_own_may_be_written(send: Callable[[Any], Any]) -> None:
    data, mine = rich(), rich()
    received = send(data)
    write_everywhere(received)
    write_everywhere(mine)
    for name in data.names():
        assert same_value(received[name], mine[name])
        assert same_value(data[name], rich()[name])
    assert received["o"][3]["patches"] is received["o"][0]["patches"]


def test_a_writable_copy_of_a_received_batch_leaves_the_shared_memory_as_it_was() -> None:
    text, handed_over = sent(rich())
    buffers = [memoryview(bytes(buffer)) for buffer in handed_over]
    received = pickle.loads(text, buffers=buffers)
    with pytest.raises(ValueError, match="read-only"):
        received["a2"][:] = 7
    received["o"][0]["image"].paste((8, 8, 8), (1, 1, 3, 3))  # an image copies itself
    write_everywhere(received.writable())
    other = pickle.loads(text, buffers=buffers)
    assert all(same_value(other[name], rich()[name]) for name in other.names())


def test_bytes_are_compared_on_systems_without_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: Any) -> Any:
        raise TypeError(name)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    fresh = runpy.run_path(memory.__file__, run_name="dataproto.serialization.buffers")
    assert fresh["same_bytes"](noise(100), noise(100).tobytes())
    assert not fresh["same_bytes"](noise(100), bytes(100))


def test_a_writable_copy_of_a_batch_that_was_never_sent() -> None:
    data = rich()
    data.meta_info["table"] = torch.ones(3)
    opaque = Opaque(1)
    data["p"] = [opaque] * 4
    made = data.writable()
    made["x"].zero_()
    made["o"][0]["new"] = 1
    made.meta_info["table"].zero_()
    assert data["x"].sum() > 0
    assert "new" not in data["o"][0]
    assert data.meta_info["table"].sum() == 3
    assert made["p"][0] is opaque
    values = torch.ones(2, requires_grad=True)
    DataProto.from_dict({"v": values * 2}).writable()["v"].sum().backward()
    assert values.grad.tolist() == [2, 2]


def test_deepcopy_copies_all() -> None:
    data = rich()
    data["p"] = [Opaque([1])] * 4
    made = copy.deepcopy(data)
    made["x"].zero_()
    made["p"][0].value.append(2)
    assert data["x"].sum() > 0
    assert data["p"][0].value == [1]
    holder = copy.deepcopy({"a": data, "b": data})
    assert holder["a"] is holder["b"]
