"""Messages between the two processes of the server: a JSON header and raw arrays. Nothing in a message is executed.

A frame is the sizes of header and body (two little-endian uint64), the header, and the body: the bytes of all arrays, one after
the other. In the header each array is its dtype, shape and place in the body, and each dataclass its name and fields.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataproto import chunks
from dataproto.errors import FileFormatError
from dataproto_server import backend
from workers.model.model_config import AdamParams

SIZES = struct.Struct("<QQ")
MOST_BYTES = 1 << 33  # of a frame
_KIND = "$"
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        backend.ModelInfo,
        backend.Capabilities,
        backend.LoraSpec,
        backend.SparseRows,
        backend.Datum,
        backend.Pass,
        backend.PassResult,
        backend.Failure,
        backend.Sampling,
        backend.SampleRequest,
        backend.Sample,
        backend.SampleResult,
        chunks.EncodedTextChunk,
        chunks.ImageChunk,
        AdamParams,
    )
}
"""The dataclasses that a message may hold."""


def pack(value: Any) -> list[bytes]:
    """A frame as the parts that are written one after the other.

    >>> frame = b"".join(pack({"mean": np.zeros(2, np.float32)}))
    >>> unpack(*split(frame))["mean"].tolist()
    [0.0, 0.0]
    """
    buffers: list[bytes] = []
    header = json.dumps(_encode(value, buffers, [0]), separators=(",", ":")).encode()
    return [SIZES.pack(len(header), sum(map(len, buffers))), header, *buffers]


def split(frame: bytes) -> tuple[bytes, bytes]:
    """Header and body of a whole frame."""
    header, _ = SIZES.unpack_from(frame)
    return frame[SIZES.size : SIZES.size + header], frame[SIZES.size + header :]


def frame_sizes(prefix: bytes) -> tuple[int, int]:
    """The sizes of header and body. Raises `FileFormatError` if they are absurd."""
    header, body = SIZES.unpack(prefix)
    if header + body > MOST_BYTES:
        raise FileFormatError(f"a frame of {header + body} bytes: at most {MOST_BYTES}")
    return header, body


def unpack(header: bytes, body: bytes) -> Any:
    """The value of a frame; its arrays are views of ``body``. Raises `FileFormatError` for what `pack` does not write."""
    try:
        return _decode(json.loads(header), memoryview(body))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"a frame is damaged: {error}") from error


def _encode(value: Any, buffers: list[bytes], place: list[int]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return {
            _KIND: "array",
            "dtype": array.dtype.str,
            "shape": array.shape,
            "at": _put(array.tobytes(), buffers, place),
        }
    if isinstance(value, bytes | bytearray | memoryview):
        return {_KIND: "bytes", "size": len(value), "at": _put(bytes(value), buffers, place)}
    if isinstance(value, Path):
        return {_KIND: "path", "path": str(value)}
    if is_dataclass(value) and TYPES.get(type(value).__name__) is type(value):
        found = {each.name: _encode(getattr(value, each.name), buffers, place) for each in fields(value)}
        return {_KIND: type(value).__name__, "fields": found}
    if isinstance(value, Mapping):
        return {_KIND: "dict", "items": [[_text(key), _encode(each, buffers, place)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(each, buffers, place) for each in value]
        return {_KIND: "tuple", "items": items} if isinstance(value, tuple) else items
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a message cannot hold the key {key!r}")
    return key


def _put(data: bytes, buffers: list[bytes], place: list[int]) -> int:
    at = place[0]
    buffers.append(data)
    place[0] += len(data)
    return at


def _decode(value: Any, body: memoryview) -> Any:
    if isinstance(value, list):
        return [_decode(each, body) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "array":
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject:
            raise FileFormatError("an array of objects")
        count = int(np.prod(value["shape"], dtype=np.int64))
        return (
            np.frombuffer(body, dtype, count, value["at"]).reshape(value["shape"])
            if count
            else np.empty(value["shape"], dtype)
        )
    if kind == "bytes":
        return bytes(body[value["at"] : value["at"] + value["size"]])
    if kind == "path":
        return Path(value["path"])
    if kind == "dict":
        return {key: _decode(each, body) for key, each in value["items"]}
    if kind == "tuple":
        return tuple(_decode(each, body) for each in value["items"])
    return TYPES[kind](**{name: _decode(each, body) for name, each in value["fields"].items()})
