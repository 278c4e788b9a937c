"""Images from all sources that data sets use: PIL objects, paths, bytes, parquet structs, data URIs.

Every image is converted to 8-bit RGB here, once, for the image processor and the rollout engine: it is rotated by its EXIF
orientation (as in ``transformers`` and ``datasets``), transparency of any kind (alpha, palette, a transparent colour) becomes
white (as in vLLM and ``qwen_vl_utils``; without this a line drawing may become black on black), 16 bits are scaled to 8, and of
an animation the first frame is taken. A PIL image in mode ``L`` or ``RGB`` that comes from no file is taken as it is. Values of
32-bit integers and floats (modes ``I`` and ``F``) must be between 0 and 255; other ranges are refused, because their black and
white are unknown.

Files are only read as images of well-known raster formats. No code in them runs, and nothing is downloaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

from dataproto.errors import InvalidMedia
from rollout.prompts.sources import Root, described, file_of, unwrapped, why_unread

MAX_IMAGE_PIXELS = 89_478_485
"""Larger images are refused before they are decoded (Pillow's limit against decompression bombs)."""

_GIVEN = Lock()
"""Held while an image that the caller has opened is read: Pillow decodes it in its own object, at its first use."""
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_ENDS = {"PNG": b"\0\0\0\0IEND\xaeB`\x82", "GIF": b";"} | dict.fromkeys(("JPEG", "MPO"), b"\xff\xd9")
"""The last bytes of a whole file."""
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")  # images that Pillow reads from these in mode "I" have 16 bits
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def load_image(source: Any, root: Root = None) -> Image.Image:
    """The decoded image as upright 8-bit RGB.

    ``source`` is a PIL image, path, ``file://`` or ``data:`` URI, base64, bytes, or a mapping that contains one of them, such as
    parquet's ``{"bytes": ..., "path": ...}`` or a part of a chat message. Relative paths start at ``root``. Raises `InvalidMedia`
    for an image that is missing, broken, too large, of an unknown format or of an unknown range.

    >>> load_image(Image.new("RGBA", (2, 1), (0, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    with _opened(source, root) as image:
        try:
            return _to_rgb(image)
        except InvalidMedia as error:
            raise InvalidMedia(f"image {described(source)}: {error}") from error
        except Exception as error:
            raise InvalidMedia(f"image {described(source)} is broken: {why_unread(error, source, root)}") from error


def encoded_image(source: Any, root: Root = None) -> bytes | None:
    """The bytes that `load_image` would decode; `None` for a PIL image. Raises `InvalidMedia` as `load_image` does.

    >>> encoded_image({"bytes": b"...", "path": None}), encoded_image(Image.new("RGB", (2, 1)))
    (b'...', None)
    """
    found = unwrapped(source, "image")
    if isinstance(found, Image.Image):
        return None
    file = file_of(found, root, "image")
    try:
        return file.read_bytes() if isinstance(file, Path) else file.getvalue()
    except OSError as error:
        raise InvalidMedia(f"image {described(source)} cannot be read: {why_unread(error, found, root)}") from error


def image_size(source: Any, root: Root = None) -> tuple[int, int]:
    """Height and width of the result of `load_image`, read from the header. Pixels are not decoded.

    >>> image_size(Image.new("RGB", (640, 480)))
    (480, 640)
    """
    with _opened(source, root) as image:
        width, height = image.size
        # Pillow turns a TIFF by itself. The method of a PNG's own class would decode its pixels.
        exif = {} if image.format == "TIFF" else Image.Image.getexif(image)
        if exif.get(ExifTags.Base.Orientation) in _SIDEWAYS:
            width, height = height, width
        return height, width


def is_named_as_image(file: Path) -> bool:
    """Whether a file's name ends as those of a format that is read.

    >>> is_named_as_image(Path("a.JPG")), is_named_as_image(Path("a.txt"))
    (True, False)
    """
    return Image.registered_extensions().get(file.suffix.lower()) in _FORMATS


def check_whole(source: Any, root: Root = None) -> None:
    """Raises `InvalidMedia` for a PNG, JPEG or GIF that is cut, as `load_image` does.

    Only a file that does not end as its format does is decoded: such a file may have bytes after its image.
    """
    with _opened(source, root) as image:
        end, file = _ENDS.get(image.format or ""), getattr(image, "fp", None)
        if end is None or file is None or isinstance(unwrapped(source, "image"), Image.Image):
            return
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - len(end), 0))
        whole = file.read(len(end)) == end
    if not whole:
        load_image(source, root)


@contextmanager
def _opened(source: Any, root: Root) -> Iterator[Image.Image]:
    """The image with its size checked, before it is decoded. Closed afterwards unless the caller passed an open image."""
    found = unwrapped(source, "image")
    image = found if isinstance(found, Image.Image) else _open(found, root, source)
    given = _GIVEN if image is found else nullcontext()
    try:
        if not image.width * image.height:
            raise InvalidMedia(f"image {described(source)} is empty: {image.width} x {image.height} pixels")
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise InvalidMedia(
                f"image {described(source)} has {image.width} x {image.height} pixels, more than {MAX_IMAGE_PIXELS}"
            )
        with given:
            yield image
    finally:
        if image is not found:
            image.close()


def _open(found: Any, root: Root, source: Any) -> Image.Image:
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    try:
        return Image.open(file_of(found, root, "image"), formats=formats)
    except InvalidMedia:
        raise
    except Exception as error:  # Pillow's plugins raise errors of any class
        raise InvalidMedia(f"image {described(source)} cannot be read: {why_unread(error, found, root)}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS)
    # Pillow leaves a transparent colour in the info of what it has converted; such a picture is already what it shows.
    transparent = image.has_transparency_data and not (image.mode in ("L", "RGB") and image.format is None)
    image = ImageOps.exif_transpose(image)
    if sixteen_bits or image.mode in ("I", "F"):
        values = np.asarray(image)
        scaled = (values >> 8).astype(np.uint8) if sixteen_bits else _eight_bits(values, image.mode)
        scaled[values == image.info.get("transparency")] = 255
        return Image.fromarray(scaled).convert("RGB")
    if transparent:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    shown = image.convert("RGB")
    shown.info.pop("transparency", None)  # a file that it is written to would be transparent again
    return shown


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Integers or floats between 0 and 255 as uint8. Raises `InvalidMedia` for other values, which Pillow would clip."""
    inside = bool((values >= 0).all() and (values <= 255).all())  # false for NaN
    if not inside or (mode == "F" and 0 < values.max() <= 1):
        raise InvalidMedia(
            f"its values (mode {mode!r}) range from {values.min():g} to {values.max():g}, so black and white are unknown: scale "
            "them to 0 to 255 and pass 8 bits, for instance Image.fromarray(array.astype('uint8'))"
        )
    return np.rint(values).astype(np.uint8)
