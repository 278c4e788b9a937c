"""Recipes in two real Ray processes: each makes the run of one process."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, assert_same_run, rows_of
from recipes import classify, geo3k_ppo, sft, walk
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.run.supervised import SupervisedConfig, launch_supervised, next_token_loss
from recipes.run.synthetic_environment import demonstrated_model
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import Roles
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
    warning = REWARD.replace("    return", "    warnings.warn('slow')\n    return")
    (tmp_path / "mine.py").write_text(f"import warnings\n{warning}")
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
    assert "UserWarning: slow" in (tmp_path / "two" / "libraries.log").read_text()  # of the process that scores


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


def program(roles: Roles, path: str, directory: Path) -> list[float]:
    """Numbers that every call has its part in."""
    pictures = [Image.new("RGB", size, (200, 10, 30)) for size in ((16, 16), (24, 16), (40, 32))]
    asked = [("two of them", pictures[:2]), ("one", pictures[2:]), ("none at all", [])]
    given = [{"prompt": "<image>" * len(shown) + text, "images": shown} for text, shown in asked]
    turns = [[{"role": "user", "content": each["prompt"]}, {"role": "assistant", "content": "yes"}] for each in given]
    rows = SupervisedBuilder.from_pretrained(path, 512)([each | {"prompt": t} for each, t in zip(given, turns)])
    rows.pop(non_tensor_batch_keys=["multi_modal_data"])
    found = []
    for at in range(2):
        passed = roles.actor.forward_backward(rows, next_token_loss)
        found += [passed.metrics["loss:sum"], *passed.log_probs.sum(1).tolist()]
        found.append(roles.actor.optim_step(AdamParams(learning_rate=1e-3, eps=1e-3))["actor/grad_norm"])
        if at == 0:
            directory.mkdir()
            roles.actor.save(directory)
    roles.actor.load(directory)
    found += roles.actor.log_probs(rows[1:2])["old_log_probs"][0].tolist()  # a single row
    roles.save_weights_for_sampler()
    prompts = PromptBuilder.from_pretrained(path, 512)(given[:1])
    prompts["uid"] = np.array(["prompt"], dtype=object)  # the samples depend on the seed only
    sampled = roles.sample(prompts, SamplingParams(n=2, temperature=1.0, max_tokens=4, seed=3))
    found.append(roles.actor.forward(rows[:1], next_token_loss).metrics["loss:sum"])
    return [*found, *sampled["rollout_log_probs"].flatten().tolist()]


def test_step_by_step(model, tmp_path):
    """In a pipeline, and over ranks of which some have no row in a call."""

    def numbers(name: str, **place) -> list[float]:
        config = SupervisedConfig(model_path=model, compute=ModelConfig(token_budget=120), **place)
        with launch_supervised(config, model) as roles:
            return program(roles, model, tmp_path / name)

    expected = numbers("alone")
    for layout in (Layout(pp=2), Layout(dp=2)):
        assert numbers(str(layout), on="ray", layout=layout) == pytest.approx(expected, rel=2e-4, abs=1e-4), layout
