"""Ways in which a batch travels as bytes, and what the tests of the wire send."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataproto import DataProto


def out_of_band(value: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])


def plain(protocol: int) -> Callable[[Any], Any]:
    return lambda value: pickle.loads(pickle.dumps(value, protocol=protocol))


CHANNELS = {"protocol 2": plain(2), "protocol 4": plain(4), "protocol 5": plain(5), "out of band": out_of_band}
channels = pytest.mark.parametrize("send", CHANNELS.values(), ids=CHANNELS)


def sent(value: Any) -> tuple[bytes, list[memoryview]]:
    """What travels: the pickle, and the memory beside it."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return text, [buffer.raw() for buffer in buffers]


def objects(*rows: Any) -> DataProto:
    return DataProto.from_dict(non_tensors={"o": list(rows)})


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def drawn(mode: str, size: tuple[int, int] = (37, 29)) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(noise(len(image.tobytes())).tobytes())
    return image


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]
