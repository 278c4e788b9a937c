"""Engines in processes of their own: weights come by broadcast, and rollouts may run one update ahead."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, assert_same_run, rows_of
from recipes.geo3k_grpo import main
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import running_ray

SETTINGS = (
    "--batch-size 4 --algorithm.n 2 --max-prompt-length 500 --max-response-length 6 --eval-rows 4 --eval-every 2 --steps 4"
    " --optimizer.lr 1e-3 --algorithm.minibatch 2 --token-budget 600 --save-every 2"
)
APART = ("--on", "ray", "--layout.rollout", "2")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with running_ray(RayConfig(object_store_gib=0.2), processes=4):
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "mine.py").write_text(REWARD)
    model = write_checkpoint("qwen2_5_vl", folder / "model")
    return ["--preset", "any", "--model-path", model, "--reward", f"{folder / 'mine.py'}:score", *SETTINGS.split()]


@pytest.fixture(scope="module")
def one_process(given, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "one"
    assert main([*given, "--output-dir", str(directory)]) == 0
    return directory


@pytest.mark.long
def test_they_make_the_run_of_one_process(given, one_process, tmp_path):
    """Every batch is sampled with the weights of the update before it."""
    assert main([*given, "--output-dir", str(tmp_path), *APART]) == 0
    assert_same_run(tmp_path, one_process)


@pytest.mark.long
def test_adapters_reach_them_and_a_resumed_run_makes_the_same_steps(given, tmp_path):
    """The base is sent once, and again to the engines of the resumed run."""
    adapted = [*given, "--lora-rank", "2", "--output-dir"]
    assert main([*adapted, str(tmp_path / "one")]) == 0
    assert main([*adapted, str(tmp_path / "apart"), *APART]) == 0
    assert_same_run(tmp_path / "apart", tmp_path / "one")
    shutil.copytree(tmp_path / "apart", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "global_step_4")
    assert main(["--resume", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "again", tmp_path / "apart")


@pytest.mark.long
def test_the_next_batch_is_decoded_before_the_update(given, one_process, tmp_path):
    """The second batch is sampled with the first weights, as in a run that learns nothing."""
    options = [*APART, "--rollout.staleness", "1"]
    assert main([*given, "--output-dir", str(tmp_path / "ahead"), *options]) == 0
    assert main([*given, "--output-dir", str(tmp_path / "still"), *options, "--optimizer.lr", "0"]) == 0
    ahead, still, on_policy = (rows_of(run) for run in (tmp_path / "ahead", tmp_path / "still", one_process))
    assert [row.get("training/staleness/max") for row in ahead] == [None, 0, 1, 1, 1]
    scores = [[row["critic/score/mean"] for row in rows[1:3]] for rows in (ahead, still, on_policy)]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.long
def test_samples_are_carried_over_and_a_resumed_run_makes_the_same_steps(given, tmp_path):
    """Two engines; new weights come in the middle of a step, and groups are learned from at most two updates later."""
    carrying = "--rollout.staleness 2 --eval-every 9"
    options = [*given, *APART, *carrying.split()]
    assert main([*options, "--output-dir", str(tmp_path / "run")]) == 0
    rows = rows_of(tmp_path / "run")[1:]
    assert rows[0]["training/staleness/max"] == 0
    assert 1 <= max(row["training/staleness/max"] for row in rows) <= 2
    assert any(row["training/carried_groups"] for row in rows)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "global_step_4")
    assert main(["--resume", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "again", tmp_path / "run")


def groups_of(directory: Path) -> dict[str, list[tuple[str, float]]]:
    """The responses of each group that the run has learned from, and their rewards."""
    found: dict[str, list[tuple[str, float]]] = {}
    for path in sorted((directory / "rollouts/training").glob("*.jsonl")):
        step: dict[str, list[tuple[str, float]]] = {}
        for row in map(json.loads, path.read_text().splitlines()):
            step.setdefault(row["uid"], []).append((row["response"], row["reward"]))
        assert not step.keys() & found.keys()  # each group once
        found |= step
    return found


@pytest.mark.long
def test_carried_samples_of_two_engines_are_those_of_one_process_under_equal_weights(given, tmp_path):
    options = [*given, "--optimizer.lr", "0", "--eval-every", "9"]
    carrying = "--rollout.staleness 2"
    assert main([*options, *APART, *carrying.split(), "--output-dir", str(tmp_path / "carried")]) == 0
    assert main([*options, "--steps", "6", "--output-dir", str(tmp_path / "whole")]) == 0
    carried, whole = groups_of(tmp_path / "carried"), groups_of(tmp_path / "whole")
    assert len(carried) == 16
    assert carried == {uid: whole[uid] for uid in carried}
    assert max(row.get("training/staleness/max", 0) for row in rows_of(tmp_path / "carried")) > 0


@pytest.mark.long
@pytest.mark.parametrize("minibatch", ["None", "2"])
def test_staleness_0_makes_the_run_that_waits(minibatch, given, tmp_path):
    """Two ranks score the first groups, and learn from them at once in one update, while an engine decodes the others."""
    whole = [*given, "--algorithm.minibatch", minibatch, "--steps", "2", "--eval-every", "9"]
    assert main([*whole, "--output-dir", str(tmp_path / "waits")]) == 0
    early = "--on ray --layout.dp 2 --layout.rollout 1 --rollout.staleness 0"
    assert main([*whole, *early.split(), "--output-dir", str(tmp_path / "early")]) == 0
    waits, early = (rows_of(tmp_path / name) for name in ("waits", "early"))
    assert [row["training/staleness/max"] for row in early[1:]] == [0, 0]
    for row, expected in zip(early[1:], waits[1:], strict=True):
        for name in ("actor/loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
            assert row[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-5)
