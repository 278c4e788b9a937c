"""What we take from Pillow, tensordict, peft, datasets and mathruler; see docs/neighbours.md."""

import io
import json

import numpy as np
import peft
import PIL
import pytest
import torch
from datasets import Dataset, Features, load_dataset
from datasets import Image as ImageFeature
from mathruler.grader import extract_boxed_content, grade_answer
from PIL import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import nn

from dataproto.serialization.images import image_of, pixels_of
from helpers.neighbours import relied_on
from rollout.prompts.images import load_image
from workers.model.lora import ADAPTERS_OFF, BASE_LAYER


@relied_on(
    "tensordict", "0.15.3", "`DataProto.from_tensordict` makes a column of an array that has one string for each row."
)
def test_an_array_of_strings_is_one_value_that_no_index_cuts():
    table = TensorDict({"array": np.array(["a", "b"]), "list": ["a", "b"]}, batch_size=[2])
    values = dict(table[1:].items())
    assert isinstance(values["array"], NonTensorData)
    assert values["array"].data.tolist() == ["a", "b"]
    assert isinstance(values["list"], NonTensorStack)
    assert len(values["list"]) == 1


@relied_on("Pillow", "13.0.0", "The wire sends pictures as their own memory, and reads them over received memory.")
def test_pictures_share_their_memory():
    image = Image.new("RGB", (8, 4), "red")
    pixels = pixels_of(image)
    again = image_of(pixels, image.mode, image.size, None)
    image.putpixel((0, 0), (1, 2, 3))
    read_in_place = int(PIL.__version__.split(".")[0]) >= 13  # before, an image's memory is copied once
    assert again.getpixel((0, 0)) == ((1, 2, 3) if read_in_place else (255, 0, 0))
    pixels[:3] = (4, 5, 6)
    assert again.getpixel((0, 0)) == (4, 5, 6)


@relied_on(
    "Pillow", "13.0.0", "`rollout.prompts.images` takes a picture in mode RGB without a file format as what it shows."
)
def test_a_conversion_leaves_the_transparent_colour_and_no_format():
    file = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(file, "PNG", transparency=(255, 0, 0))
    opened = Image.open(file)
    converted = opened.convert("RGB")
    assert (opened.format, converted.format) == ("PNG", None)
    assert converted.info["transparency"] == (255, 0, 0)
    assert load_image(converted).getpixel((0, 0)) == (255, 0, 0)
    assert load_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)


@relied_on("datasets", "5.2.0", "`rollout.prompts.images` takes what `Image(mode='RGB')` decodes as what it shows.")
def test_decoded_pictures_keep_the_transparent_colour():
    file = io.BytesIO()
    Image.new("P", (2, 2)).save(file, "PNG", transparency=0)
    rows = Dataset.from_dict({"image": [{"bytes": file.getvalue(), "path": None}]}, Features({"image": ImageFeature()}))
    (image,) = rows.cast_column("image", ImageFeature(mode="RGB"))["image"][:]
    assert (image.mode, image.format, "transparency" in image.info) == ("RGB", None, True)
    assert load_image(image).getpixel((0, 0)) == (0, 0, 0)


@relied_on(
    "datasets", "5.2.0", "`recipes.data.tables` reads JSON by itself, so that texts in the form of dates stay texts."
)
def test_texts_that_look_like_dates_become_dates(tmp_path):
    file = tmp_path / "dates.jsonl"
    file.write_text(json.dumps({"answer": "2024-01-05"}) + "\n")
    found = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))["answer"][0]
    assert type(found).__name__ == "datetime"


@relied_on(
    "peft", "0.21.2", "`workers.model.lora` names base weights, turns adapters off and scales them by these names."
)
def test_adapted_layers_have_these_names():
    plain = nn.ModuleDict({"layer": nn.Linear(4, 4, bias=False)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["layer"]), plain, adapter_name="default")
    assert {name for name, _ in plain.named_parameters()} == {
        f"layer{BASE_LAYER}.weight",
        "layer.lora_A.default.weight",
        "layer.lora_B.default.weight",
    }
    layer, seen = plain["layer"], torch.ones(1, 4)
    nn.init.ones_(layer.lora_B["default"].weight)
    adapted = layer(seen)
    setattr(layer, ADAPTERS_OFF, True)
    assert not torch.equal(layer(seen), adapted)
    assert torch.equal(layer(seen), layer.base_layer(seen))


@relied_on("mathruler", "0.1.0", "`dataproto show` and the check of truths tell users which answers are graded wrong.")
@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        ("0.5", "1/2", True),
        ("2/4", "1/2", False),
        ("6/2", "3", False),
        (r"\sqrt{4}", "2", False),
        ("1 2", "12", True),
        ("no", "on", True),
    ],
)
def test_answers_are_compared_as_this(given, truth, equal):
    assert grade_answer(given, truth) is equal


@relied_on(
    "mathruler",
    "0.1.0",
    "`recipes.rewards.geometry3k` reads boxes with braces only, as EasyR1's and verl's rewards do.",
)
def test_a_box_without_braces_is_none():
    assert extract_boxed_content(r"\boxed{5}") == "5"
    assert extract_boxed_content(r"\boxed 5") == "None"
