"""Each distinct picture of a run is decoded and processed once, also one of a row that its environment shows again."""

import io
import pickle

import pytest
import torch
from PIL import Image, PngImagePlugin

from dataproto.vlm.media import PatchGrids
from helpers.checkpoints import write_checkpoint
from helpers.episodes import picture
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.prompts import PromptBuilder
from rollout.prompts.image_processing import inputs_key
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

SAMPLING = SamplingParams(n=2, max_tokens=4, seed=3, stop_token_ids=tuple(range(0, 250, 2)))


class Looking:
    """Shows the first picture of its row, then a part of it and the picture again, then another part."""

    def reset(self, row, seed):
        self.shown = next(part["image"] for part in row["raw_prompt"][0]["content"] if part["type"] == "image")
        self.turn = 0
        return Observation(["look:", self.shown])

    def step(self, action):
        self.turn += 1
        part = self.shown.crop((0, 0, 16, 8 * self.turn))
        return Observation([part, "again:", self.shown], reward=1.0, done=self.turn == 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def rollout(checkpoint):
    actor = ActorWorker(ActorConfig(checkpoint), torch.device("cpu"))
    return lambda **prompts: RolloutWorker(
        RolloutConfig(checkpoint, prompts=prompts), lambda dtype: actor.named_weights()
    )


@pytest.fixture
def processed(checkpoint, monkeypatch):
    """The pictures that image processors were called with."""
    seen = []
    kind = type(PromptBuilder.from_pretrained(checkpoint, 300).image_processor)
    call = kind.__call__

    def counted(self, *args, images, **options):
        seen.extend((image.size, image.tobytes()) for image in images)
        return call(self, *args, images=images, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    return seen


@pytest.fixture
def decoded(monkeypatch):
    """The number of PNG files that were decoded."""
    count, end = [], PngImagePlugin.PngImageFile.load_end
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_end", lambda image: count.append(1) or end(image))
    return count


def encoded(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def rows():
    """Three rows with two files; one has both."""
    one, other = (encoded(picture(32, 24, seed)) for seed in (1, 2))
    return [
        {"prompt": "<image>What?", "images": [one], "uid": "a"},
        {"prompt": "<image>Where, then?", "images": [one], "uid": "b"},
        {"prompt": "<image>and<image>How?", "images": [other, one], "uid": "c"},
    ]


def shown_in(data):
    return {(image.size, image.tobytes()) for media in data["multi_modal_data"] for image in media["image"]}


def same(batch):
    return batch


def sent(batch):
    """The batch in another process."""
    return pickle.loads(pickle.dumps(batch))


@pytest.mark.parametrize("way", [same, sent])
@pytest.mark.parametrize("bytes_", [0, 1 << 30])
def test_pictures_that_a_row_and_its_environment_show_are_processed_once(
    rollout, checkpoint, processed, decoded, way, bytes_
):
    builder = PromptBuilder.from_pretrained(checkpoint, 300, image_cache_bytes=bytes_)
    data = rollout(image_cache_bytes=bytes_).play(way(builder(rows())), Looking, SAMPLING, EpisodeLimits(turns=3))
    shown = shown_in(data)
    assert max(data["turns"]) > 1
    assert len(shown) > 3
    assert len(processed) == len(set(processed)) == len(shown)
    assert set(processed) == shown
    assert len(decoded) == 2


def test_inputs_that_a_batch_has_are_those_that_the_rollout_would_make(rollout, checkpoint):
    prompts = PromptBuilder.from_pretrained(checkpoint, 300)(rows())
    known = rollout().play(prompts, Looking, SAMPLING, EpisodeLimits(turns=3))
    prompts.pop(non_tensor_batch_keys=["image_keys"])
    made = rollout().play(prompts, Looking, SAMPLING, EpisodeLimits(turns=3))
    assert known["responses"].equal(made["responses"])
    assert known["states"].tolist() == made["states"].tolist()
    for one, other in zip(known["multi_modal_inputs"], made["multi_modal_inputs"], strict=True):
        assert len(one) == len(other) > 0
        for part, again in zip(one, other, strict=True):
            assert part.keys() == again.keys()
            assert all(torch.equal(tensor, again[name]) for name, tensor in part.items())


def test_a_rollout_with_other_limits_processes_pictures_itself(rollout, checkpoint, processed):
    prompts = PromptBuilder.from_pretrained(checkpoint, 300)(rows())
    before = len(processed)
    data = rollout(max_pixels=16 * 16).play(prompts, Looking, SAMPLING, EpisodeLimits(turns=1))
    assert len(processed) - before == len(shown_in(data)) == 2
    first = data["multi_modal_inputs"][0]
    assert (
        first["image_grid_thw"].prod(1).tolist()
        < prompts["multi_modal_inputs"][0]["image_grid_thw"].prod(1).tolist() * 2
    )


def test_replaced_inputs_are_not_taken_for_those_of_the_pictures(rollout, checkpoint, processed):
    prompts = PromptBuilder.from_pretrained(checkpoint, 300)(rows())
    del processed[:]
    swapped = prompts[:]
    swapped["multi_modal_inputs"] = prompts["multi_modal_inputs"][[2, 2, 0]]
    rollout().play(swapped, Looking, SAMPLING, EpisodeLimits(turns=1))
    assert len(processed) == 2


class Asking:
    def reset(self, row, seed):
        return Observation(["and?"])

    def step(self, action):
        return Observation(done=True)


def test_inputs_that_were_changed_in_one_row_are_not_those_of_others(rollout, checkpoint):
    """Rows "a" and "b" have one picture; the tensors of "b" alone are replaced."""
    prompts = PromptBuilder.from_pretrained(checkpoint, 300)(rows()[:2])
    inputs = prompts["multi_modal_inputs"]
    inputs[1] = inputs[1] | {"pixel_values": torch.zeros_like(inputs[1]["pixel_values"])}
    prompts["multi_modal_inputs"] = inputs
    played = rollout().play(prompts, Asking, SAMPLING, EpisodeLimits(turns=1))
    for row in played["multi_modal_inputs"]:
        assert torch.equal(row["pixel_values"], inputs[0]["pixel_values"])


def test_a_picture_of_several_rows_is_decoded_once_a_batch(checkpoint, decoded):
    builder = PromptBuilder.from_pretrained(checkpoint, 300)
    batch = builder(rows())
    assert len(decoded) == 2
    assert batch["multi_modal_data"][0]["image"][0] is batch["multi_modal_data"][2]["image"][1]


def test_the_key_of_inputs_holds_all_that_they_depend_on(checkpoint):
    def key(color=(0, 0, 0), mean=None, **options):
        builder = PromptBuilder.from_pretrained(checkpoint, 300, **options)
        builder.image_processor.image_mean = mean or builder.image_processor.image_mean
        prompts = builder([{"prompt": "<image>", "images": [Image.new("RGB", (32, 32), color)]}])
        return prompts["image_keys"][0][0][0]

    class Other(PatchGrids):
        pass

    assert key() == key()
    assert len({key(), key((0, 0, 1)), key(mean=[0.1, 0.2, 0.3]), key(max_pixels=16 * 16)}) == 4
    assert inputs_key(b"", PatchGrids()) == inputs_key(b"", PatchGrids()) != inputs_key(b"", Other())
