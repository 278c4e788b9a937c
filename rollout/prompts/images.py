"""Images from wherever a data set keeps them: PIL objects, paths, bytes, parquet structs, data URIs.

Every image becomes 8-bit RGB here, once, for the image processor and the rollout engine alike: turned upright by its
EXIF orientation (as ``transformers`` and ``datasets`` do), transparency of every kind (alpha, palette, a transparent colour)
laid on white (as vLLM and ``qwen_vl_utils`` do; dropping it would turn a line drawing black on black), 16 bits scaled to 8,
the first frame of an animation. Whole numbers of 32 bits and floats (modes ``I`` and ``F``) are taken as 0 to 255; an image
with others is refused, since nothing tells which of them are black and white.

Files are only ever read as images of well-known raster formats; nothing in them runs, nothing is downloaded.
"""

import base64
import binascii
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dataproto.errors import InvalidMedia

MAX_IMAGE_PIXELS = 89_478_485
"""Larger images are refused unread (Pillow's own limit against decompression bombs)."""

_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")  # what Pillow reads from them in mode "I" has 16 bits
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_PAYLOADS = ("bytes", "image", "image_url", "url", "path")


def media_list(media: Any) -> list[Any]:
    """A column's media as a list; one that stands by itself is a list of one.

    >>> media_list("a.png"), media_list(None), media_list(("a.png", "b.png"))
    (['a.png'], [], ['a.png', 'b.png'])
    """
    if media is None:
        return []
    single = isinstance(media, (str, bytes, os.PathLike, Mapping, Image.Image))
    return [media] if single else list(media)


def load_image(source: Any, root: str | os.PathLike[str] | None = None) -> Image.Image:
    """The image as upright 8-bit RGB, decoded.

    ``source``: a PIL image, path, ``file://`` or ``data:`` URI, bytes, or a mapping that holds one of them, such as
    parquet's ``{"bytes": ..., "path": ...}`` or a chat message's part. Relative paths start at ``root``.
    Raises `InvalidMedia` for an image that is missing, broken, too large, of an unknown format or of an unknown range.

    >>> load_image(Image.new("RGBA", (2, 1), (0, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    with _opened(source, root) as image:
        try:
            return _to_rgb(image)
        except InvalidMedia as error:
            raise InvalidMedia(f"image {_describe(source)}: {error}") from error
        except Exception as error:
            raise InvalidMedia(f"image {_describe(source)} is broken: {_reason(error)}") from error


def image_size(source: Any, root: str | os.PathLike[str] | None = None) -> tuple[int, int]:
    """Height and width that `load_image` would give, read from the header; pixels are not decoded.

    >>> image_size(Image.new("RGB", (640, 480)))
    (480, 640)
    """
    with _opened(source, root) as image:
        width, height = image.size
        if "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS:
            width, height = height, width
        return height, width


@contextmanager
def _opened(source: Any, root: str | os.PathLike[str] | None) -> Iterator[Image.Image]:
    """The image with its header read and its size checked; closed afterwards unless it was the caller's."""
    found = _unwrap(source)
    image = found if isinstance(found, Image.Image) else _open(found, root, source)
    try:
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise InvalidMedia(
                f"image {_describe(source)} has {image.width} x {image.height} pixels, more than {MAX_IMAGE_PIXELS}"
            )
        yield image
    finally:
        if image is not found:
            image.close()


def _open(found: Any, root: str | os.PathLike[str] | None, source: Any) -> Image.Image:
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        return Image.open(_file_of(found, root), formats=formats)
    except InvalidMedia:
        raise
    except Exception as error:  # Pillow's plugins raise all kinds
        raise InvalidMedia(f"image {_describe(source)} cannot be read: {_reason(error)}") from error


def _file_of(found: Any, root: str | os.PathLike[str] | None) -> io.BytesIO | Path:
    if isinstance(found, (bytes, bytearray, memoryview)):
        return io.BytesIO(found)
    if isinstance(found, str) and found.startswith("data:"):
        return io.BytesIO(_data_uri(found))
    if isinstance(found, str) and found.startswith(("http://", "https://")):
        raise InvalidMedia(f"image {_describe(found)}: images are not downloaded; save it to a file first")
    if isinstance(found, str) and found.startswith("file://"):
        found = unquote(urlparse(found).path)
    if isinstance(found, (str, os.PathLike)):
        return Path(root or ".") / found
    raise InvalidMedia(f"image {_describe(found)} is neither a PIL image, a path, bytes nor a data URI")


def _unwrap(source: Any) -> Any:
    """What a mapping holds: the first payload that is not None (parquet fills absent keys with None)."""
    while isinstance(source, Mapping):
        payload = next((source[name] for name in _PAYLOADS if source.get(name) is not None), None)
        if payload is None:
            raise InvalidMedia(f"image {_describe(source)} holds neither bytes nor a path")
        source = payload
    if source is None:
        raise InvalidMedia("the image is missing (None)")
    return source


def _data_uri(uri: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidMedia(f"image {_describe(uri)}: only data URIs with base64 content are read")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise InvalidMedia(f"image {_describe(uri)}: its base64 content is broken: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS)
    image = ImageOps.exif_transpose(image)
    if sixteen_bits or image.mode in ("I", "F"):
        values = np.asarray(image)
        scaled = (values >> 8).astype(np.uint8) if sixteen_bits else _eight_bits(values, image.mode)
        scaled[values == image.info.get("transparency")] = 255
        return Image.fromarray(scaled).convert("RGB")
    if image.has_transparency_data:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Whole numbers or floats from 0 to 255 as uint8; Pillow would clip others. Raises `InvalidMedia` for these."""
    inside = bool((values >= 0).all() and (values <= 255).all())  # NaN is not
    if not inside or (mode == "F" and 0 < values.max() <= 1):
        raise InvalidMedia(
            f"its numbers (mode {mode!r}) go from {values.min():g} to {values.max():g}, so that black and white are unknown: "
            "scale them to 0 to 255 and give it as 8 bits, for instance Image.fromarray(array.astype('uint8'))"
        )
    return np.rint(values).astype(np.uint8)


def _reason(error: Exception) -> str:
    """An error without the file's name or content, which the message around it tells."""
    if isinstance(error, UnidentifiedImageError):
        return "it is of no known image format"
    return (isinstance(error, OSError) and error.strerror) or _shorten(str(error))


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _describe(source: Any) -> str:
    if isinstance(source, Mapping) and source.get("bytes") is not None:
        return f"{source.get('path') or ''} ({len(source['bytes'])} bytes)".strip()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"({len(source)} bytes)"
    return _shorten(str(source) if isinstance(source, os.PathLike) else repr(source))
