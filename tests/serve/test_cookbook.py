"""Recipes of the Tinker cookbook, unmodified, on a server of the tiny model, offline."""

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

from helpers.cookbook import TEXT_NAME, VISION_NAME, make_working_directory
from helpers.servers import Server, serving


def recipes() -> list:
    try:
        return [each for each in files("tinker-cookbook") or [] if each.suffix == ".py" and each.hash]
    except PackageNotFoundError:
        return []


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not recipes(), reason="needs tinker-cookbook 0.6.1 (docs/serve.md says how to install it)"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("cookbook") / "work"


@pytest.fixture(scope="module")
def server(work):
    options = json.dumps({"models": make_working_directory(work)})
    with serving(
        work.parent / "state", options_of_engine=options, factory="dataproto_server.engine:engine_from_json"
    ) as server:
        yield server


def run(server: Server, work: Path, recipe: str, log: str, **options) -> list[dict]:
    """The rows of ``metrics.jsonl`` of a recipe that ran to its end."""
    environment = os.environ | {
        "TINKER_API_KEY": server.key,
        "TINKER_BASE_URL": server.url,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hub"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    given = {"experiment_dir" if recipe.startswith("vlm") else "log_path": str(work / log)} | options
    words = [f"{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *words]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (metrics,) = (work / log).rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def values(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_the_recipes_are_those_of_the_wheel():
    changed = []
    for file in recipes():
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.locate().read_bytes()).digest()).rstrip(b"=").decode()
        changed += [str(file)] if digest != file.hash.value else []
    assert changed == []


def test_supervised_training_learns_and_resumes_where_it_was(server, work):
    options = {
        "model_name": TEXT_NAME,
        "batch_size": 8,
        "max_length": 256,
        "lora_rank": 8,
        "max_steps": 24,
        "save_every": 10,
    }
    options["learning_rate"] = 3e-3
    whole = values(run(server, work, "sl_loop", "whole", **options), "train_mean_nll")
    assert whole[-1] < 0.7 * whole[0]
    resumed = work / "resumed"
    resumed.mkdir()
    first = (work / "whole" / "checkpoints.jsonl").read_text().splitlines()[0]
    (resumed / "checkpoints.jsonl").write_text(first + "\n")
    again = values(run(server, work, "sl_loop", "resumed", **options), "train_mean_nll")
    assert again == pytest.approx(whole[10:], abs=1e-5)


def test_reinforcement_learning_samples_from_the_weights_that_it_trains(server, work):
    rows = run(
        server,
        work,
        "math_rl.train",
        "math",
        env="arithmetic",
        model_name=TEXT_NAME,
        loss_fn="importance_sampling",
        group_size=8,
        groups_per_batch=16,
        max_tokens=5,
        eval_every=0,
        compute_post_kl=True,
        lora_rank=8,
        learning_rate=1e-3,
        max_steps=15,
    )
    rewards = values(rows, "env/all/reward/total")
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert max(map(abs, values(rows, "optim/kl_sample_train_v1"))) < 1e-4


def test_preferences_are_learned_with_a_custom_loss_and_a_reference(server, work):
    rows = run(
        server,
        work,
        "preference.dpo.train",
        "dpo",
        dataset="hhh",
        model_name=TEXT_NAME,
        renderer_name="qwen3_instruct",
        batch_size=4,
        max_length=128,
        learning_rate=1e-3,
        max_steps=12,
    )
    margins = values(rows, "margin")
    assert abs(margins[0]) < 1e-4  # the policy is its own reference
    assert margins[-1] > 0.2
    assert all(map(math.isfinite, values(rows, "test/nll")))


def test_a_vision_language_model_learns_to_classify_pictures(server, work):
    rows = run(
        server,
        work,
        "vlm_classifier.train",
        "vlm",
        dataset="caltech101",
        model_name=VISION_NAME,
        renderer_name="qwen3_vl_instruct",
        lora_rank=16,
        learning_rate=5e-3,
        batch_size=16,
        num_epochs=8,
        n_eval=64,
        eval_every=35,
        save_every=70,
    )
    assert max(values(rows, "accuracy")) >= 0.90
    losses = values(rows, "test/nll")
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
