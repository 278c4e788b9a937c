"""Lossless encoding of images in files, for every mode of Pillow."""

import base64
import io
import math
from typing import Any

from dataproto.errors import FileFormatError

# An image that needs this many times the memory of its bytes is refused; `value_codec` writes images raw before they reach it.
MAX_RATIO = 342

_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA"}
_PLAIN = (type(None), bool, int, float, str, bytes)


def encode_image(image: Any) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """An image as its entry in the header, its pixels (PNG, or raw if PNG cannot hold them), and its ``info``.

    Writes the current frame only, and values of ``info`` of plain types only.

    >>> from PIL import Image
    >>> described, data, info = encode_image(Image.new("CMYK", (2, 2), "red"))
    >>> described, len(data)
    ({'mode': 'CMYK', 'size': [2, 2], 'codec': 'raw'}, 16)
    """
    from PIL import Image

    image.load()
    described: dict[str, Any] = {"mode": image.mode, "size": list(image.size)}
    if image.mode in ("P", "PA"):
        palette = bytes(image.getpalette(None) or b"")
        described["palette"] = [image.palette.mode, base64.b64encode(palette).decode()]
    pixels = image.tobytes()
    data = pixels
    if image.mode in _PNG_MODES and 0 < image.width * image.height <= (Image.MAX_IMAGE_PIXELS or math.inf):
        plain = Image.frombytes("L" if image.mode == "P" else image.mode, image.size, pixels)
        buffer = io.BytesIO()
        plain.save(buffer, format="PNG", compress_level=1)
        packed = buffer.getvalue()
        if len(packed) < len(pixels) and _memory(plain.mode, *image.size) <= MAX_RATIO * len(packed):
            data = packed
    described["codec"] = "raw" if data is pixels else "png"
    return described, data, {key: value for key, value in image.info.items() if _is_plain(key) and _is_plain(value)}


def decode_image(described: dict[str, Any], data: memoryview, info: dict[str, Any]) -> Any:
    """The inverse of `encode_image`.

    Raises:
        FileFormatError: the claimed image is too large for its bytes, or they are not an image of that mode and size.
    """
    from PIL import Image

    mode, codec, (width, height) = described["mode"], described["codec"], described["size"]
    if mode not in Image.MODES or type(width) is not int or type(height) is not int or min(width, height) < 0:
        raise FileFormatError(f"an image cannot have mode {mode!r:.20} and size {described['size']!r:.200}")
    if not isinstance(info, dict):
        raise FileFormatError("the info of an image is not a dict")
    plane = "L" if mode == "P" else mode
    bits = len(Image.new(plane, (8, 1)).tobytes())  # bits of a pixel: bytes of eight
    claimed = -(-width * bits // 8) * height
    bomb = _memory(plane, width, height) > MAX_RATIO * len(data)
    if codec not in ("raw", "png") or (claimed != len(data) if codec == "raw" else bomb):
        raise FileFormatError(f"{len(data)} bytes claim to be an image of {width} x {height} pixels, mode {mode}")
    image: Any
    if codec == "raw":
        image = Image.frombytes(plane, (width, height), bytes(data))
    else:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as opened:
            if (opened.mode, opened.size) != (plane, (width, height)):
                raise FileFormatError(f"an image is of mode {opened.mode} and size {opened.size}, not as described")
            image = opened.copy()  # a plain image, not a reader that keeps its bytes
    if mode in ("P", "PA"):
        palette_mode, colors = described["palette"]
        image.putpalette(base64.b64decode(colors), palette_mode)
        image.load()
    image.info = info
    return image


def _memory(mode: str, width: int, height: int) -> int:
    """The memory of an image in Pillow, in bytes, for the modes that PNG supports."""
    return width * height * (1 if mode in ("1", "L") else 4)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return kind in _PLAIN
