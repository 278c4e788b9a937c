"""PIL images as bytes: as their own memory, for messages, and losslessly encoded, for files.

PIL stores a pixel of RGB in four bytes. The modes in ``SHARED`` use that layout here, so that reading needs no decoding. Every
version of Pillow from 11 on makes an image over memory that it is given; from 13 on an image's own memory is read without a copy.
"""

import base64
import ctypes
import io
import math
import sys
from typing import Any, TypeAlias

import numpy as np

from dataproto.errors import FileFormatError
from dataproto.serialization.buffers import Memory, memory_of

Palette: TypeAlias = "tuple[str, bytes] | None"  # The mode and the colours.

# These are the modes whose memory PIL shares, and its name for their layout.
SHARED = {"L": "L", "P": "P", "RGB": "RGBX", "RGBA": "RGBA", "RGBX": "RGBX", "CMYK": "CMYK", "I;16": "I;16"}


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image; does not import PIL."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pixels_of(image: Any) -> np.ndarray:
    """The pixels ``(n,)`` uint8, writable: the memory of the image if Pillow exports it and it is in one block, else a copy."""
    image.load()
    # Pillow exports images from version 11.2 on, but crashes the process before 13 if the memory of the image is foreign.
    exports_safely = int(sys.modules["PIL"].__version__.split(".")[0]) >= 13
    if image.mode in SHARED and exports_safely and 0 not in image.size:
        try:
            return _own_memory(image)
        except ValueError:  # It is in several blocks, as in very large images.
            pass
    return memory_of(image.tobytes("raw", SHARED.get(image.mode, image.mode)))  # No other object holds these bytes.


def palette_of(image: Any) -> Palette:
    """The palette of an image, with alpha if it has any; ``None`` for modes without a palette."""
    if image.mode not in ("P", "PA"):
        return None
    image.load()
    mode = image.im.getpalettemode()
    return mode, bytes(image.getpalette(mode))


def image_of(pixels: np.ndarray, mode: str, size: tuple[int, int], palette: Palette) -> Any:
    """The inverse of :func:`pixels_of`, over the memory of ``pixels`` where PIL can."""
    from PIL import Image

    if mode in SHARED and pixels.size:
        image = Image.Image()._new(Image.core.map_buffer(pixels, size, "raw", 0, (mode, 0, 1)))
        image.readonly = 0  # Else PIL would copy the memory on the first write.
    else:
        image = Image.frombytes(mode, size, pixels)
    if palette is not None and palette[1]:
        image.putpalette(palette[1], palette[0])
    return image


def same_image(left: Any, right: Any) -> bool:
    """Whether mode, size, palette, transparency and pixels are equal; ignores the class and the rest of ``info``."""
    if (left.mode, left.size) != (right.mode, right.size) or palette_of(left) != palette_of(right):
        return False
    return left.info.get("transparency") == right.info.get("transparency") and bool(left.tobytes() == right.tobytes())


class _ArrowArray(ctypes.Structure):
    """``struct ArrowArray`` of Arrow's C data interface."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")),
]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _own_memory(image: Any) -> np.ndarray:
    """The memory that ``image`` exports, ``(n,)`` uint8; ValueError if its rows are in several blocks."""
    _, capsule = image.__arrow_c_array__()
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    pixels = array.children[0].contents if array.n_children else array
    width = {"L": 1, "P": 1, "I;16": 2}.get(image.mode, 4)
    return Memory(capsule, pixels.buffers[1], image.width * image.height * width).bits()


# Images in files

# An image that needs this many times the memory of its bytes is refused; images are written raw before they reach it.
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
    bits = len(Image.new(plane, (8, 1)).tobytes())  # The bits of a pixel are the bytes of eight pixels.
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
            image = opened.copy()  # A copy is a plain image, not a reader that keeps its bytes.
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
