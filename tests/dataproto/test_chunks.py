import io

import numpy as np
import pytest
import tinker
from PIL import Image

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto.errors import InvalidChunk


def picture(kind="png", size=(16, 16)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 30)).save(buffer, format=kind.upper())
    return buffer.getvalue()


def test_the_field_names_are_those_of_the_tinker_package():
    for own, theirs in ((EncodedTextChunk, tinker.EncodedTextChunk), (ImageChunk, tinker.types.ImageChunk)):
        assert set(own.__dataclass_fields__) == set(theirs.model_fields)


def test_an_image_is_of_the_format_it_claims():
    with pytest.raises(InvalidChunk, match="not those of a png file"):
        ImageChunk(picture("jpeg"), "png")
    with pytest.raises(InvalidChunk, match="'webp' is unknown: png or jpeg"):
        ImageChunk(picture(), "webp")
    with pytest.raises(InvalidChunk, match="not str"):
        ImageChunk("iVBORw0KGgo=", "png")


@pytest.mark.parametrize("tokens", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), range(1, 4)])
def test_tokens_may_be_any_sequence_of_whole_numbers(tokens):
    ids = EncodedTextChunk(tokens).ids()
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [2**70], [[1, 2]], np.array([1.0])])
def test_other_tokens_are_refused(tokens):
    with pytest.raises(InvalidChunk):
        EncodedTextChunk(tokens).ids()
