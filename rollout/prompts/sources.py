"""What a row gives as a medium of any kind: a path, a ``file://`` or ``data:`` URI, base64, bytes, or a mapping with one of them.

Nothing is downloaded.
"""

import base64
import binascii
import io
import os
import re
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import Image, UnidentifiedImageError

from dataproto.errors import InvalidMedia, raised_as

Root = str | os.PathLike[str] | None
"""The folder at which relative paths start."""

_BARE_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|ZkxhQ|T2dnU|SUQz)[A-Za-z0-9+/]{40}")
"""The base64 of a PNG, JPEG, GIF, WebP, WAV, FLAC, OGG or MP3 without the head of a data URI: 40 characters without a dot end no
path."""
_BASE64 = ("data", "base64")
_PAYLOADS = ("bytes", "image", "image_url", "array", "audio", "audio_url", "input_audio", *_BASE64, "url", "path")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width", "nframes")


def media_list(media: Any) -> list[Any]:
    """The media of a row as a list. A single medium becomes a list of one, such as a sound that is an array of numbers, or a pair
    of one and its rate.

    >>> media_list("a.png"), media_list(None), media_list(("a.png", "b.png"))
    (['a.png'], [], ['a.png', 'b.png'])
    >>> len(media_list(np.zeros(16_000))), len(media_list((np.zeros(16_000), 16_000)))
    (1, 1)
    """
    if media is None:
        return []
    single = isinstance(media, (str, bytes, os.PathLike, Mapping, Image.Image)) or is_sampled(media)
    return list(media) if isinstance(media, Iterable) and not single else [media]


def is_sampled(source: Any) -> bool:
    """Whether a source is an array of numbers, or a pair of one and its rate."""
    array = source[0] if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Integral) else source
    return isinstance(array, np.ndarray) and array.ndim > 0 and array.dtype.kind in "fiu"


def check_sizes(source: Mapping[str, Any], kind: str) -> None:
    """Raises `InvalidMedia` for a mapping that asks for a size of its own, as Qwen's do, where no medium is resized by it."""
    if sizes := [name for name in _SIZES if source.get(name) is not None]:
        raise InvalidMedia(
            f"{kind} has its own {', '.join(sizes)}, which are not read here: resize it, or set --max-pixels"
        )


def unwrapped(source: Any, kind: str) -> Any:
    """The payload of a mapping: its first value that is not None (parquet fills absent keys with None). Raises `InvalidMedia`."""
    while isinstance(source, Mapping):
        name = next((name for name in _PAYLOADS if source.get(name) is not None), None)
        if name is None:
            raise InvalidMedia(f"{kind} {described(source)} contains neither bytes nor a path")
        check_sizes(source, kind)
        bare = name in _BASE64 and isinstance(source[name], str) and not source[name].startswith("data:")
        source = f"data:;base64,{source[name]}" if bare else source[name]
    if source is None or (isinstance(source, str) and not source.strip()):
        raise InvalidMedia(f"the {kind} is missing ({source!r})")
    return source


def file_of(found: Any, root: Root, kind: str) -> io.BytesIO | Path:
    """The bytes or the file that an `unwrapped` source names. Raises `InvalidMedia`."""
    if isinstance(found, (bytes, bytearray, memoryview)):
        return io.BytesIO(found)
    if isinstance(found, str) and found.startswith("data:"):
        return io.BytesIO(_data_uri(found, kind))
    if isinstance(found, str) and _BARE_BASE64.match(found):
        return io.BytesIO(_data_uri(f"data:;base64,{found}", kind))
    if isinstance(found, str) and found.startswith(("http://", "https://")):
        raise InvalidMedia(f"{kind} {described(found)}: {kind}s are not downloaded; save it to a file first")
    if isinstance(found, str) and found.startswith("file://"):
        found = unquote(urlparse(found).path)
    if isinstance(found, (str, os.PathLike)):
        return Path(root or ".") / found
    own = {"image": "a PIL image", "sound": "an array with its sampling rate"}[kind]
    raise InvalidMedia(f"{kind} {described(found)} is neither {own}, a path, bytes nor a data URI")


def media_file(source: Any, root: Root = None) -> Path | None:
    """The file that would be read; `None` for a medium that is not a file of its own.

    >>> media_file({"bytes": None, "path": "a.png"}, "data"), media_file(b"...")
    (PosixPath('data/a.png'), None)
    """
    try:
        found = unwrapped(source, "image")
        file = file_of(found, root, "image") if isinstance(found, (str, os.PathLike)) else None
    except InvalidMedia:
        return None
    return file if isinstance(file, Path) else None


def _data_uri(uri: str, kind: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidMedia(f"{kind} {described(uri)}: only data URIs with base64 content are read")
    with raised_as(InvalidMedia, f"{kind} {described(uri)}: its base64 content is broken", binascii.Error):
        return base64.b64decode("".join(payload.split()), validate=True)


def why_unread(error: Exception, found: Any, root: Root) -> str:
    """Why a source cannot be read, without the file's name or content, which the enclosing message contains."""
    if isinstance(error, FileNotFoundError):
        return f"{error.strerror}{sought_in(found, root)}"
    if isinstance(error, UnidentifiedImageError):
        return "its image format is unknown"
    return (isinstance(error, OSError) and error.strerror) or _shorten(str(error))


def sought_in(file: Any, root: Root) -> str:
    """Where a file that does not exist has been sought, for messages."""
    absolute = os.path.isabs(str(file).removeprefix("file://"))
    return "" if absolute else f" in {Path(root or '.').absolute()}, where relative paths start (--media-root)"


def _shorten(text: str) -> str:
    """At most 200 characters of it. The end is kept, which is a file's name.

    >>> len(_shorten("x" * 500)), _shorten("folder/" * 100 + "7.png")[-12:]
    (200, 'folder/7.png')
    """
    return text if len(text) <= 200 else f"{text[:98]}...{text[-99:]}"


def described(source: Any) -> str:
    """A source in a message, without its content."""
    if isinstance(source, Mapping) and source.get("bytes") is not None:
        return f"{source.get('path') or ''} ({len(source['bytes'])} bytes)".strip()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"({len(source)} bytes)"
    if isinstance(source, np.ndarray):
        return f"(array of shape {source.shape})"
    if isinstance(source, Image.Image):
        return f"(mode {source.mode}, {source.width} x {source.height} pixels)"
    return _shorten(str(source) if isinstance(source, os.PathLike) else repr(source))
