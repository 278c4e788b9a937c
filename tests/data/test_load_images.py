import base64
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFile

from dataproto.errors import InvalidMedia
from rollout.prompts import images as media
from rollout.prompts.images import check_whole, image_size, load_image
from rollout.prompts.messages import read_conversation
from rollout.prompts.videos import read_video


def picture(width=6, height=4, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def same(one, other):
    return one.mode == other.mode == "RGB" and np.array_equal(np.asarray(one), np.asarray(other))


def test_every_source_gives_the_same_picture(tmp_path):
    image = picture()
    data = encoded(image)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [
        image,
        data,
        bytearray(data),
        memoryview(data),
        path,
        str(path),
        path.as_uri(),
        uri,
        "data:image/png;base64," + base64.encodebytes(data).decode(),
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        {"bytes": data, "path": "gone.png"},
        {"type": "image", "image": image},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "url": str(path)},
    ]
    for source in sources:
        assert same(load_image(source), image), source
        assert image_size(source) == (4, 6)


def test_relative_paths_start_at_the_root(tmp_path):
    (tmp_path / "images").mkdir()
    picture().save(tmp_path / "images" / "a.png")
    assert same(load_image("images/a.png", root=tmp_path), picture())
    with pytest.raises(InvalidMedia, match=r"images/b\.png"):
        load_image("images/b.png", root=tmp_path)


def test_transparency_is_laid_on_white():
    drawing = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    drawing.putpixel((1, 0), (0, 0, 0, 255))
    assert np.asarray(load_image(drawing)).tolist() == [[[255, 255, 255], [0, 0, 0]]]
    half = Image.new("LA", (1, 1), (0, 128))
    assert load_image(half).getpixel((0, 0)) == (127, 127, 127)


def test_a_palette_with_a_transparent_colour_is_laid_on_white():
    image = Image.new("P", (1, 1), 0)
    image.putpalette([10, 20, 30])
    assert load_image(image).getpixel((0, 0)) == (10, 20, 30)
    assert load_image(encoded(image, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_palette_picture_that_was_converted_keeps_its_black_lines(mode):
    """Pillow leaves the transparent colour, here black, in the info of what it converts."""
    drawing = Image.new("P", (3, 1), 0)
    drawing.putpalette([255, 255, 255, 0, 0, 0, 0, 0, 0])
    drawing.putpixel((1, 0), 1)  # a black line; index 2 is transparent, and black too
    converted = Image.open(io.BytesIO(encoded(drawing, transparency=2))).convert(mode)
    assert "transparency" in converted.info
    shown = load_image(converted)
    assert np.asarray(shown)[0, :, 0].tolist() == [255, 0, 255]
    again = load_image(encoded(shown))  # as from a file of it
    assert np.asarray(again)[0, :, 0].tolist() == [255, 0, 255]


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    assert np.asarray(load_image(encoded(Image.fromarray(values))))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_sixteen_bits_of_any_format_are_scaled():
    pgm = b"P5 3 1 65535\n" + np.array([0, 32768, 65535], dtype=">u2").tobytes()
    assert np.asarray(load_image(pgm))[0, :, 0].tolist() == [0, 128, 255]
    values = np.array([[0, 32768, 65535]], dtype=np.uint16)
    assert np.asarray(load_image(encoded(Image.fromarray(values), "TIFF")))[0, :, 0].tolist() == [0, 128, 255]
    swapped = Image.frombytes("I;16B", (3, 1), values.astype(">u2").tobytes())
    assert np.asarray(load_image(swapped))[0, :, 0].tolist() == [0, 128, 255]


def test_transparency_of_every_kind_is_laid_on_white():
    black = np.zeros((1, 2), dtype=np.uint8)
    gray = encoded(Image.fromarray(black), transparency=0)
    deep = encoded(Image.fromarray(np.array([[0, 32768]], dtype=np.uint16)), transparency=0)
    colour = encoded(Image.fromarray(np.zeros((1, 2, 3), dtype=np.uint8)), transparency=(0, 0, 0))
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    shades = encoded(palette, transparency=bytes([0, 128]))
    premultiplied = [Image.new("RGBA", (2, 1)).convert("RGBa"), Image.new("LA", (2, 1)).convert("La")]
    for source in (gray, colour, shades, *premultiplied, Image.new("PA", (2, 1)), Image.new("LA", (2, 1))):
        assert load_image(source).getpixel((0, 0)) == (255, 255, 255)
    assert np.asarray(load_image(deep))[0].tolist() == [[255] * 3, [128] * 3]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_from_0_to_255_are_taken_as_they_are(dtype):
    values = np.array([[0, 1, 128, 255]], dtype=dtype)
    assert np.asarray(load_image(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert load_image(Image.fromarray(values * 0)).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.array([[0, 300]], dtype=np.int32), r"mode 'I'\) range from 0 to 300"),
        (np.array([[0, 65535]], dtype=np.int32), "from 0 to 65535"),
        (np.array([[-1, 3]], dtype=np.int32), "from -1 to 3"),
        (np.array([[0, 0.5]], dtype=np.float32), r"mode 'F'\) range from 0 to 0.5"),
        (np.array([[0, 1]], dtype=np.float32), "from 0 to 1"),
        (np.array([[-3, 256]], dtype=np.float32), "from -3 to 256"),
        (np.array([[0, np.nan]], dtype=np.float32), "nan"),
    ],
)
def test_numbers_of_an_unknown_range_are_refused(values, says):
    """They would turn black or white."""
    with pytest.raises(InvalidMedia, match=says):
        load_image(Image.fromarray(values))
    with pytest.raises(InvalidMedia, match=says):
        load_image(encoded(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "F", "I", "RGB", "RGBA", "LA", "HSV", "YCbCr"])
def test_every_mode_becomes_rgb(mode):
    assert load_image(Image.new(mode, (3, 2))).mode == "RGB"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF"]))
@settings(max_examples=40)
def test_the_size_from_the_header_is_the_size_of_the_upright_picture(width, height, orientation, kind):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture(width, height), kind, exif=exif)
    loaded = load_image(data)
    assert image_size(data) == (loaded.height, loaded.width)
    assert sorted(loaded.size) == sorted((width, height))


def test_the_size_is_that_of_a_picture_which_xmp_turns():
    """Some editors write the orientation into XMP only; what turns the picture reads it there too."""
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(picture(), "JPEG", xmp=xmp)
    assert image_size(data) == load_image(data).size[::-1] == (6, 4)


def test_orientation_turns_the_picture():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # the camera was turned: rows are columns
    assert same(load_image(encoded(picture(), exif=exif)), picture().transpose(Image.Transpose.ROTATE_270))


def test_the_header_is_read_without_decoding(monkeypatch):
    data = encoded(picture())

    def refuse(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert image_size(data) == (4, 6)


def test_the_callers_image_stays_open():
    image = Image.open(io.BytesIO(encoded(picture())))
    assert image_size(image) == (4, 6)
    load_image(image)
    assert same(image.convert("RGB"), picture())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "missing"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({}, "neither bytes nor a path"),
        (b"", "cannot be read"),
        (b"not a picture", "cannot be read"),
        ("/nowhere/a.png", "No such file"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null"),
        ("https://example.com/a.png", "not downloaded"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,@@@", "broken"),
        (3.5, "neither a PIL image"),
        (encoded(picture(64, 64))[:200], "broken"),
    ],
)
def test_bad_images_are_refused_with_the_reason(source, says):
    with pytest.raises(InvalidMedia, match=says) as caught:
        load_image(source)
    assert len(str(caught.value)) < 400


def test_a_directory_is_not_an_image(tmp_path):
    with pytest.raises(InvalidMedia, match="directory"):
        load_image(tmp_path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_from_its_header(monkeypatch):
    big = encoded(Image.new("1", (9500, 9500)))  # 90 million pixels in 11 kB
    assert len(big) < 20_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InvalidMedia, match=f"9500 x 9500 pixels, more than {media.MAX_IMAGE_PIXELS}"):
        load_image(big)
    with pytest.raises(InvalidMedia, match="9500 x 9500"):
        image_size(big)


def test_postscript_is_not_run():
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(eps)).format == "EPS"  # Pillow alone would hand it to Ghostscript
    with pytest.raises(InvalidMedia, match="cannot be read"):
        load_image(eps)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_cut_file_is_told_by_its_end_without_decoding_whole_ones(kind, in_file, tmp_path, monkeypatch):
    whole = encoded(picture(60, 40), kind)

    def source(content: bytes):
        (tmp_path / "image").write_bytes(content)
        return tmp_path / "image" if in_file else {"bytes": content, "path": None}

    assert image_size(source(whole[: len(whole) // 2])) == (40, 60)  # the header is good
    with pytest.raises(InvalidMedia, match="is broken"):
        check_whole(source(whole[: len(whole) // 2]))
    check_whole(source(whole + b"a comment"))  # which Pillow reads
    monkeypatch.setattr(media, "load_image", lambda *_: pytest.fail("decoded"))
    check_whole(source(whole))


def test_images_of_other_formats_and_open_ones_are_not_checked_for_their_end():
    check_whole(encoded(picture(60, 40), "BMP")[:500])
    check_whole(Image.open(io.BytesIO(encoded(picture(60, 40))[:500])))


def test_sizes_that_a_row_asks_for_are_refused_where_they_are_not_read():
    for size in ({"max_pixels": 3136}, {"resized_height": 56, "resized_width": 56}):
        with pytest.raises(InvalidMedia, match=f"has its own {', '.join(size)}, which are not read here: resize it"):
            load_image({"image": picture(), **size})
    assert same(load_image({"image": picture(), "max_pixels": None}), picture())
    frames = [picture(seed=seed) for seed in range(4)]
    with pytest.raises(InvalidMedia, match="a video of given frames has its own nframes"):
        read_video({"video": frames, "nframes": 2})
    assert len(read_video({"video": frames, "fps": 2.0})[0]) == 4


def test_parts_may_hold_base64_under_either_name():
    data = base64.b64encode(encoded(picture())).decode()
    parts = [{"type": "image", name: data} for name in ("base64", "data")]
    chat = read_conversation([{"role": "user", "content": parts}])
    assert all(same(load_image(medium), picture()) for medium in chat.media)
