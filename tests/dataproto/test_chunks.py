import io
import subprocess
import sys

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataproto.chunks import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    read_datum,
    read_model_input,
)
from dataproto.errors import InvalidChunk, InvalidColumn


def picture(kind="png", size=(16, 16)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 10, 30)).save(buffer, format=kind.upper())
    return buffer.getvalue()


def test_the_field_names_are_those_of_the_tinker_package():
    for own, theirs in (
        (EncodedTextChunk, tinker.EncodedTextChunk),
        (ImageChunk, tinker.types.ImageChunk),
        (ImageAssetPointerChunk, tinker.types.ImageAssetPointerChunk),
        (ModelInput, tinker.ModelInput),
    ):
        assert set(own.__dataclass_fields__) == set(theirs.model_fields)
    assert set(Datum.__dataclass_fields__) <= set(tinker.Datum.__dataclass_fields__)


def test_a_model_input_behaves_like_that_of_the_tinker_package():
    for kind in (ModelInput, tinker.ModelInput):
        assert kind.from_ints([5, 6]).length == 2
        assert len(kind.from_ints([5]).chunks) == 1


@given(st.lists(st.lists(st.integers(0, 300), max_size=4), max_size=4), st.sampled_from(["png", "jpeg"]))
def test_tinker_objects_are_read_as_they_are(texts, kind):
    chunks = [tinker.EncodedTextChunk(tokens=tokens) for tokens in texts]
    image = tinker.types.ImageChunk(data=picture(kind), format=kind, expected_tokens=4)
    pointer = tinker.types.ImageAssetPointerChunk(format=kind, location="a", expected_tokens=5)
    given_input = tinker.ModelInput(chunks=[*chunks, image, pointer])
    read = read_model_input(given_input)
    assert [chunk.type for chunk in read.chunks] == [chunk.type for chunk in given_input.chunks]
    assert read.length == given_input.length
    assert [list(chunk.tokens) for chunk in read.chunks[:-2]] == texts
    assert read.chunks[-2] == ImageChunk(picture(kind), kind, 4)
    assert read.chunks[-1] == ImageAssetPointerChunk(kind, "a", 5)


def test_our_own_objects_pass_unchanged():
    own = ModelInput([EncodedTextChunk([1]), ImageChunk(picture(), "png")])
    assert read_model_input(own) is own


def test_an_unknown_chunk_is_refused_not_dropped():
    text = tinker.EncodedTextChunk(tokens=[1, 2])
    sound = tinker.types.DmelChunk(dmel=b"x")
    with pytest.raises(InvalidChunk, match=r"chunk 1 is of type 'dmel'"):
        read_model_input(tinker.ModelInput(chunks=[text, sound]))
    with pytest.raises(InvalidChunk, match=r"chunk 0 is of type 'dict'"):
        read_model_input(ModelInput([{"tokens": [1]}]))
    with pytest.raises(InvalidChunk, match="not list"):
        read_model_input([1, 2, 3])


def test_an_image_is_of_the_format_it_claims():
    with pytest.raises(InvalidChunk, match="not those of a png file"):
        ImageChunk(picture("jpeg"), "png")
    with pytest.raises(InvalidChunk, match=r"chunk 1 .image.: its data are not those of a jpeg file"):
        chunk = tinker.types.ImageChunk(data=picture("png"), format="jpeg")
        read_model_input(tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1]), chunk]))
    with pytest.raises(InvalidChunk, match="'webp' is unknown: png or jpeg"):
        ImageAssetPointerChunk("webp", "a.webp")
    with pytest.raises(InvalidChunk, match="not str"):
        ImageChunk("iVBORw0KGgo=", "png")


def test_an_image_without_expected_tokens_has_no_length():
    with pytest.raises(InvalidChunk, match="expected_tokens"):
        ModelInput([ImageChunk(picture(), "png")]).length  # noqa: B018
    assert ModelInput([ImageChunk(picture(), "png", 4), EncodedTextChunk([1])]).length == 5


@pytest.mark.parametrize("tokens", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), range(1, 4)])
def test_tokens_may_be_any_sequence_of_whole_numbers(tokens):
    ids = EncodedTextChunk(tokens).ids()
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [2**70], [[1, 2]], np.array([1.0])])
def test_other_tokens_are_refused(tokens):
    with pytest.raises(InvalidChunk):
        EncodedTextChunk(tokens).ids()


@pytest.mark.parametrize("wrap", [list, np.array, torch.tensor, lambda v: tinker.TensorData.from_numpy(np.array(v))])
def test_loss_inputs_come_in_every_form(wrap):
    inputs = {"target_tokens": wrap([6, 7]), "weights": wrap([0.0, 1.5]), "mask": wrap([0, 1])}
    read = read_datum(Datum(ModelInput.from_ints([5, 6]), inputs)).loss_fn_inputs
    assert read["target_tokens"].dtype == np.int64
    assert read["target_tokens"].tolist() == [6, 7]
    assert read["weights"].dtype == np.float32
    assert read["weights"].tolist() == [0.0, 1.5]
    assert read["mask"].dtype == np.float32


def test_a_tinker_datum_is_read_as_it_is():
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6]),
        loss_fn_inputs={"target_tokens": [6, 7], "logprobs": [0.0, -0.5], "advantages": [0.0, 2.0]},
    )
    read = read_datum(datum)
    assert read.model_input == ModelInput.from_ints([5, 6])
    assert {name: values.tolist() for name, values in read.loss_fn_inputs.items()} == {
        "target_tokens": [6, 7],
        "logprobs": [0.0, -0.5],
        "advantages": [0.0, 2.0],
    }


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"wights": [1.0]}, "'wights'.* is unknown: there may be target_tokens, weights"),
        ({"weights": [1.0, float("nan")]}, r"'weights'\]\[1\] is not finite"),
        ({"advantages": np.array([1.0, 1e300])}, r"'advantages'\]\[1\] is not finite"),  # as a float32
        ({"target_tokens": [[1, 2]]}, r"one number of int64 a token, not int64 of shape \(1, 2\)"),
        ({"target_tokens": [1.5]}, "not float64"),
        ({"weights": ["a"]}, "not <U1"),
        ({"weights": [[1], [2, 3]]}, "holds no numbers"),
    ],
)
def test_other_loss_inputs_are_refused_by_name(inputs, message):
    with pytest.raises(InvalidColumn, match=message):
        read_datum(Datum(ModelInput.from_ints([1]), inputs))


def test_a_datum_is_a_datum():
    with pytest.raises(InvalidColumn, match="not int"):
        read_datum(5)


def test_the_library_does_not_import_tinker():
    code = "import sys, dataproto.chunks, rollout.prompts; assert not {'tinker', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
