"""After the warm-up the tiny model gives random answers in the right format; GRPO teaches it to read the pictures."""

from pathlib import Path

import numpy as np
import pytest

from dataproto import DataProto
from helpers.option_files import in_files
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import tiny_checkpoint
from recipes.geo3k_grpo import main
from recipes.rewards import geo3k_reward
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import launch
from workers.roles.actor import ActorConfig

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoint(cache: Path) -> Path:
    return tiny_checkpoint(seed=5, cache=cache)


def prompts_of(checkpoint: Path, rows: int) -> DataProto:
    """Held-out problems."""
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=128)
    return builder(ProblemRows(1, seed=0, split="test")[:rows])


def scores(checkpoint: Path, prompts: DataProto) -> dict[str, float]:
    """Mean accuracy and format of greedy answers."""
    with launch(ActorConfig(str(checkpoint)), reward=geo3k_reward) as roles:
        answered = roles.rollout.generate(prompts, GREEDY)
        scored = roles.reward.score(answered)
    return {name: float(np.mean([float(value) for value in scored[name]])) for name in ("acc", "format")}


def shuffled(prompts: DataProto, seed: int = 0) -> DataProto:
    """Each row with the picture of another row with the same question."""
    order, random = np.arange(len(prompts)), np.random.default_rng(seed)
    texts = np.array([messages[0]["content"][-1]["text"] for messages in prompts["raw_prompt"]])
    for text in set(texts):
        places = np.flatnonzero(texts == text)
        mixed = random.permutation(places)
        order[mixed] = np.roll(mixed, 1)
    data = prompts[:]
    for name in ("multi_modal_inputs", "multi_modal_data"):
        data[name] = prompts[name][order]
    return data


def test_second_call_finds_the_checkpoint(checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    files = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    assert tiny_checkpoint(seed=5, cache=cache) == checkpoint
    assert {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == files
    assert "found in" in capsys.readouterr().out
    assert [path.name for path in cache.iterdir()] == [checkpoint.name]  # no temporary directory is left


def test_the_warmed_up_model_knows_the_format_but_not_the_answers(checkpoint: Path) -> None:
    made = scores(checkpoint, prompts_of(checkpoint, 64))
    assert made["format"] >= 0.9
    assert made["acc"] < 0.35


def test_shuffled_pictures_come_from_other_rows_of_the_same_question(checkpoint: Path) -> None:
    prompts = prompts_of(checkpoint, 32)
    mixed = shuffled(prompts)
    owner = {id(media["pixel_values"]): row for row, media in enumerate(prompts["multi_modal_inputs"])}
    order = [owner[id(media["pixel_values"])] for media in mixed["multi_modal_inputs"]]
    assert sorted(order) == list(range(32))
    assert all(came_from != row for row, came_from in enumerate(order))
    for row, came_from in enumerate(order):
        assert prompts["raw_prompt_ids"][row] == prompts["raw_prompt_ids"][came_from]
    assert list(mixed["reward_model"]) == list(prompts["reward_model"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_grpo_learns_is_in_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 steps of the default run; then the same questions with the pictures of other rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    settings = ["--steps", "200", "--optimizer.total-steps", "400", "--eval-every", "0", "--save-every", "0"]
    assert main(in_files([*settings, "--output-dir", str(run)], tmp_path)) == 0
    trained = run / "global_step_200" / "actor" / "huggingface"
    prompts = prompts_of(trained, 256)
    true, mixed = scores(trained, prompts), scores(trained, shuffled(prompts))
    print(f"accuracy {true['acc']:.3f} with the true pictures, {mixed['acc']:.3f} with those of other rows")
    assert true["acc"] >= 0.35
    assert mixed["acc"] < 0.25
    assert mixed["format"] >= 0.9
