"""Images as bytes: every mode comes back, and their memory is shared where PIL can."""

import pickle
from collections.abc import Callable
from typing import Any

import PIL
import pytest
from PIL import Image

from dataproto.serialization.images import pixels_of
from dataproto.tensordict_utils import same_value
from helpers.wire_channels import channels, drawn, objects, out_of_band, sent

MODES = [
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
]


@channels
@pytest.mark.parametrize("mode", [*MODES, "I;16B"])
@pytest.mark.parametrize("size", [(37, 29), (3, 2), (0, 4)], ids=str)
def test_images_of_every_mode(send: Callable[[Any], Any], mode: str, size: tuple[int, int]) -> None:
    image = drawn(mode, size)
    image.info["dpi"] = (72, 72)
    back = send(objects({"image": [image]}))["o"][0]["image"][0]
    assert type(back) is Image.Image
    assert back == image
    assert back.tobytes() == image.tobytes()
    assert back.info == {"dpi": (72, 72)}


@channels
def test_palettes_and_transparency(send: Callable[[Any], Any]) -> None:
    coloured = drawn("RGB").quantize(16)
    with_alpha = drawn("RGBA").quantize(16)
    see_through = coloured.copy()
    see_through.info["transparency"] = 3
    assert (coloured.im.getpalettemode(), with_alpha.im.getpalettemode()) == ("RGB", "RGBA")
    for image in (coloured, with_alpha, see_through):
        back = send(objects(image))["o"][0]
        assert back == image
        assert back.convert("RGBA") == image.convert("RGBA")
        assert back.im.getpalettemode() == image.im.getpalettemode()


@channels
def test_images_that_were_files(send: Callable[[Any], Any], tmp_path: Any) -> None:
    drawn("RGB").save(tmp_path / "a.png")
    opened = Image.open(tmp_path / "a.png")
    back = send(objects(opened))["o"][0]
    assert type(back) is Image.Image
    assert back.tobytes() == drawn("RGB").tobytes()
    assert same_value(back, opened)


def test_images_are_the_same_by_what_they_show() -> None:
    image = drawn("P")
    other = image.copy()
    other.info["dpi"] = (1, 1)
    assert same_value(image, other)
    other.putpalette(bytes(range(48)))
    assert not same_value(image, other)
    clear = image.copy()
    clear.info["transparency"] = 0
    assert not same_value(image, clear)
    assert not same_value(image, image.convert("RGB"))
    assert not same_value(image, None)


EXPORTS = int(PIL.__version__.split(".")[0]) >= 13  # others crash when they export memory that they borrowed


def test_an_image_that_is_sent_is_read_in_place_where_pil_can() -> None:
    image = drawn("RGB")
    text, buffers = sent(objects(image))
    assert [buffer.nbytes for buffer in buffers] == [37 * 29 * 4]
    before = image.getpixel((0, 0))
    image.putpixel((0, 0), (1, 2, 3))
    back = pickle.loads(text, buffers=buffers)["o"][0]
    assert back.getpixel((0, 0)) == ((1, 2, 3) if EXPORTS else before)


def test_an_image_that_is_received_uses_the_memory_that_it_came_in() -> None:
    text, buffers = sent(objects(drawn("RGB")))
    received = bytearray(buffers[0])
    back = pickle.loads(text, buffers=[memoryview(received)])["o"][0]
    received[:3] = bytes((4, 5, 6))
    assert back.getpixel((0, 0)) == (4, 5, 6)
    back.putpixel((0, 0), (9, 9, 9))  # PIL copies what others may have before it writes
    assert received[:3] == bytes((4, 5, 6))


def test_pixels_in_several_pieces_of_memory_are_copied() -> None:
    before = Image.core.get_block_size()
    Image.core.set_block_size(4096)
    try:
        image = drawn("RGB", (100, 100))
        if EXPORTS:
            with pytest.raises(ValueError, match=r"contiguous|multiple"):
                image.__arrow_c_array__()
        pixels = pixels_of(image)
        assert out_of_band(objects(image))["o"][0] == image
        first = bytes(pixels[:3])
        image.putpixel((0, 0), tuple(255 - value for value in first))
        assert bytes(pixels[:3]) == first
    finally:
        Image.core.set_block_size(before)
