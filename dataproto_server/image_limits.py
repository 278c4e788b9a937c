"""Limits of images, checked on the headers of their files: pixels are not decoded here."""

import io
import warnings
from collections.abc import Iterable

from PIL import Image

from dataproto.chunks import Chunk, ImageChunk
from dataproto_server.config import LimitsConfig
from dataproto_server.refusals import InvalidRequest

MILLION = 1_000_000


def check_images(chunks: Iterable[Chunk], limits: LimitsConfig) -> None:
    """Checks the images of a request.

    Raises:
        InvalidRequest: one is too large or damaged, or there are too many; names the image and the option.
    """
    images = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    if len(images) > limits.max_images:
        raise InvalidRequest(f"{len(images)} images in a request: at most {limits.max_images} (--max-images)")
    total = 0
    for number, image in enumerate(images):
        width, height = image_size(image, number)
        if width * height > limits.max_image_megapixels * MILLION:
            raise InvalidRequest(
                f"image {number} has {width} x {height} pixels: at most {limits.max_image_megapixels} million "
                "(--max-image-megapixels)"
            )
        total += width * height
    if total > limits.max_request_megapixels * MILLION:
        raise InvalidRequest(
            f"the images have {total} pixels in all: at most {limits.max_request_megapixels} million (--max-request-megapixels)"
        )


def image_size(image: ImageChunk, number: int) -> tuple[int, int]:
    """Width and height in pixels, from the file's header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limits here are smaller
            with Image.open(io.BytesIO(bytes(image.data)), formats=[image.format.upper()]) as opened:
                return opened.size
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"image {number} is too large (--max-image-megapixels): {error}") from error
    except Exception as error:  # Pillow raises many kinds
        raise InvalidRequest(f"image {number} is no readable {image.format} file: {error}") from error
