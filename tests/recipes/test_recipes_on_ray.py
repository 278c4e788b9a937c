"""Recipes in two real Ray processes: each makes the run of one process."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from dataproto.chunks import Datum, EncodedTextChunk, ImageChunk, ModelInput
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, assert_same_run, rows_of
from helpers.step_by_step import Program
from recipes import classify, geo3k_ppo, sft, walk
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.run.drawn_environment import demonstrated_model
from recipes.run.supervised import SupervisedConfig, launch_supervised
from rollout.engine import SamplingParams
from rollout.prompts import ChunkRenderer, PromptBuilder
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import running_ray
from workers.model.model_config import AdamParams, ModelConfig
from workers.ranks.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.long]

TWO = ("--on", "ray", "--layout.dp", "2")


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with running_ray(RayConfig(object_store_gib=0.2), processes=3):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def test_ppo_with_its_critic(model, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    settings = (
        "--batch-size 4 --algorithm.n 2 --max-prompt-length 500 --max-response-length 6 --eval-rows 4 --optimizer.lr 1e-3"
        " --critic-optimizer.lr 1e-3 --algorithm.minibatch 2 --algorithm.critic-epochs 2 --token-budget 600 --steps 2"
        " --save-every 0 --algorithm.kl-coef 0.05 --algorithm.kl-in reward"
    )
    paths = ["--preset", "any", "--model-path", model, "--reward", f"{tmp_path / 'mine.py'}:score"]
    for name, place in (("one", ()), ("two", TWO)):
        given = [*paths, "--output-dir", str(tmp_path / name), *settings.split(), *place]
        assert geo3k_ppo.main(given) == 0
    assert rows_of(tmp_path / "one")[2]["critic/values/mean"] != 0
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("recipe", [sft, classify])
def test_supervised_training(recipe, model, tmp_path):
    settings = (
        "--batch-size 7 --eval-rows 5 --max-response-length 5 --optimizer.lr 1e-3 --token-budget 200 --steps 3"
        " --save-every 0 --eval-every 2"
    )
    for name, place in (("one", ()), ("two", TWO)):
        given = [
            "--preset",
            "any",
            "--model-path",
            model,
            "--output-dir",
            str(tmp_path / name),
            *settings.split(),
            *place,
        ]
        assert recipe.main(given) == 0
    assert rows_of(tmp_path / "one")[-1]["val/loss"] < rows_of(tmp_path / "one")[0]["val/loss"]
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_episodes(tmp_path):
    walker = demonstrated_model(tmp_path / "walker", 0, walk.WALK, WarmUpPhaseConfig(steps=16, batch_size=16))
    settings = (
        "--batch-size 4 --algorithm.n 2 --max-prompt-length 64 --max-response-length 3 --eval-rows 3 --optimizer.lr 1e-3"
        " --optimizer.warmup-steps 0 --steps 2 --save-every 0 --keep-rollouts 0"
    )
    for name, place in (("one", ()), ("two", TWO)):
        given = [
            "--preset",
            "any",
            "--model-path",
            str(walker),
            "--output-dir",
            str(tmp_path / name),
            *settings.split(),
            *place,
        ]
        assert walk.main(given) == 0
    assert rows_of(tmp_path / "one")[1]["episode/turns/mean"] > 1
    assert_same_run(tmp_path / "two", tmp_path / "one")


def picture(width: int, height: int) -> ImageChunk:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 30)).save(buffer, format="PNG")
    return ImageChunk(buffer.getvalue(), "png")


def conversation(client: Program, text: str, *pictures: ImageChunk) -> ModelInput:
    encode = client.renderer.builder.encode_text
    chunks: list[object] = []
    for chunk in pictures:
        chunks += [EncodedTextChunk(encode("<|vision_start|>")), chunk, EncodedTextChunk(encode("<|vision_end|>"))]
    return ModelInput([*chunks, EncodedTextChunk(encode(text))])


def program(client: Program, directory: Path) -> list[float]:
    """Numbers that every call has its part in."""
    inputs = [
        conversation(client, "two of them", picture(16, 16), picture(24, 16)),
        conversation(client, "one", picture(40, 32)),
        conversation(client, "none at all"),
    ]
    data = []
    for each in inputs:
        ids = client.renderer.token_ids(each)
        learnt = [0.0] * (len(ids) - 3) + [1.0, 1.0, 0.0]
        data.append(Datum(each, {"target_tokens": [*ids[1:], 0], "weights": learnt}))
    found = []
    for at in range(2):
        passed = client.forward_backward(data)
        found += [passed.loss, *(float(values.sum()) for values in passed.log_probs)]
        found.append(client.optim_step(AdamParams(learning_rate=1e-3, eps=1e-3))["actor/grad_norm"])
        if at == 0:
            client.save_state(directory)
    client.load_state(directory)
    found += [value for value in client.compute_logprobs(inputs[1]) if value is not None]  # a single row
    client.roles.save_weights_for_sampler()
    sampled = client.sample(inputs[0], SamplingParams(n=2, temperature=1.0, max_tokens=4, seed=3))
    return [*found, client.forward(data[:1]).loss, *(number for each in sampled for number in each.logprobs)]


def test_step_by_step(model, tmp_path):
    """In a pipeline, and over ranks of which some have no row in a call."""
    renderer = ChunkRenderer(PromptBuilder.from_pretrained(model, 512))

    def numbers(name: str, **place) -> list[float]:
        with launch_supervised(
            SupervisedConfig(model_path=model, compute=ModelConfig(token_budget=120), **place), model
        ) as roles:
            return program(Program(roles, renderer), tmp_path / name)

    expected = numbers("alone")
    for layout in (Layout(pp=2), Layout(dp=2)):
        assert numbers(str(layout), on="ray", layout=layout) == pytest.approx(expected, rel=2e-4, abs=1e-4), layout
