"""PIL images as their bytes, and back, without a copy where PIL can share its memory.

PIL stores a pixel of RGB in four bytes. The modes in ``SHARED`` use that layout here, so that reading needs no decoding. Every
version of Pillow from 11 on makes an image over memory that it is given; from 13 on an image's own memory is read without a copy.
"""

import ctypes
import sys
from typing import Any, TypeAlias

import numpy as np

from dataproto._ops.buffers import Memory, memory_of

Palette: TypeAlias = "tuple[str, bytes] | None"  # mode and colours

# Modes whose memory PIL shares, and its name for their layout.
SHARED = {"L": "L", "P": "P", "RGB": "RGBX", "RGBA": "RGBA", "RGBX": "RGBX", "CMYK": "CMYK", "I;16": "I;16"}


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image; does not import PIL."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pixels_of(image: Any) -> np.ndarray:
    """The pixels ``(n,)`` uint8, writable: the memory of the image if Pillow exports it and it is in one block, else a copy."""
    image.load()
    if image.mode in SHARED and _exports_safely() and 0 not in image.size:
        try:
            return _own_memory(image)
        except ValueError:  # in several blocks, as in very large images
            pass
    return memory_of(image.tobytes("raw", SHARED.get(image.mode, image.mode)))  # no other object holds these bytes


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
        image.readonly = 0  # else PIL would copy the memory on the first write
    else:
        image = Image.frombytes(mode, size, pixels)
    if palette is not None and palette[1]:
        image.putpalette(palette[1], palette[0])
    return image


def same_image(left: Any, right: Any) -> bool:
    """Whether mode, size, palette, transparency and pixels are equal; ignores the class and the rest of ``info``."""
    if (left.mode, left.size) != (right.mode, right.size) or palette_of(left) != palette_of(right):
        return False
    same_alpha = left.info.get("transparency") == right.info.get("transparency")
    return same_alpha and bool(left.tobytes() == right.tobytes())


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


def _exports_safely() -> bool:
    """Pillow exports images from version 11.2 on, but crashes the process before 13 if the memory of the image is foreign."""
    return int(sys.modules["PIL"].__version__.split(".")[0]) >= 13


def _own_memory(image: Any) -> np.ndarray:
    """The memory that ``image`` exports, ``(n,)`` uint8; ValueError if its rows are in several blocks."""
    _, capsule = image.__arrow_c_array__()
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    pixels = array.children[0].contents if array.n_children else array
    width = {"L": 1, "P": 1, "I;16": 2}.get(image.mode, 4)
    return Memory(capsule, pixels.buffers[1], image.width * image.height * width).bits()
