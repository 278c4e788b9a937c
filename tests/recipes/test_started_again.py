"""Recipes that are started again after an attempt that ended before it had measured anything."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from dataproto.errors import FileNotWritten
from helpers.easy_vqa_files import write_easy_vqa
from helpers.geo3k_runs import rows_of
from recipes import easy_vqa
from recipes.configs.episodes_config import WarmUpPhaseConfig
from recipes.data.easy_vqa_rows import open_easy_vqa
from recipes.demo.tiny_model import make_tiny_model, model_of_run, tiny_checkpoint
from recipes.run.supervised import tiny_model
from recipes.run.synthetic_environment import demonstrated_model
from recipes.walk import WALK

SMALL = "--steps 1 --batch-size 2 --algorithm.n 2 --eval-rows 2 --eval-first false --sft.steps 4 --sft.batch-size 2"


def options(wheel: Path, directory: Path, *more: str) -> list[str]:
    return [*SMALL.split(), "--data-path", str(wheel), "--output-dir", str(directory), *more]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_easy_vqa(tmp_path_factory.mktemp("data") / "small")


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on supervised training is interrupted in this step."""
    from recipes.run import supervised

    steps, take = [], supervised.sft_step

    def one(*args: object, **kwargs: object) -> object:
        steps.append(0)
        if len(steps) == step:
            raise KeyboardInterrupt
        return take(*args, **kwargs)

    monkeypatch.setattr(supervised, "sft_step", one)


@pytest.mark.slow
def test_the_supervised_phase_continues_from_its_last_checkpoint(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupted_at(4, patched)
        assert easy_vqa.main(options(wheel, run, "--save-every", "2")) == 130
    assert (run / "sft" / "global_step_2").is_dir()
    interrupted_at(3, monkeypatch)  # only steps 3 and 4 are left
    assert easy_vqa.main(["--resume", str(run)]) == 0
    assert [row["step"] for row in rows_of(run / "sft")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_new_run_does_not_take_the_supervised_phase_of_an_earlier_one(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run ended before GRPO had measured anything, so that only its supervised phase tells of it."""
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(easy_vqa, "policy_task", interrupt)
        assert easy_vqa.main(options(wheel, run)) == 130
    before = (run / "config.json").read_text()
    capsys.readouterr()
    assert easy_vqa.main(options(wheel, run, "--seed", "5")) == 2
    assert f"{run} holds an earlier run: --resume it" in capsys.readouterr().err
    assert (run / "config.json").read_text() == before  # so that it can be resumed
    monkeypatch.setattr(easy_vqa, "policy_task", interrupt)
    assert easy_vqa.main(["--resume", str(run)]) == 130
    assert easy_vqa.main(options(wheel, run, "--seed", "5", "--overwrite")) == 130
    assert json.loads((run / "sft" / "config.json").read_text())["run"]["seed"] == 5


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def damage(file: Path, kept: int | None) -> None:
    """Deletes a file, or leaves its first bytes."""
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:kept])


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "easy-vqa", "walk"])
def test_a_small_model_of_an_earlier_attempt_is_kept_by_a_resumed_run_alone(
    recipe: str, wheel: Path, tmp_path: Path
) -> None:
    make = {
        "sft": lambda seed, *more: tiny_model(tmp_path / "model", seed, *more),
        "easy-vqa": lambda seed, resumed=False: tiny_model(
            tmp_path / "model", seed, resumed, easy_vqa.TINY_MODEL, open_easy_vqa(wheel).texts()
        ),
        "walk": lambda seed, *more: demonstrated_model(
            tmp_path / "model", seed, WALK, WarmUpPhaseConfig(steps=1, batch_size=2), *more
        ),
    }[recipe]
    first = weights(make(0))
    stamp = (tmp_path / "model" / "config.json").stat().st_mtime_ns
    assert weights(make(0, True)) == first
    assert (tmp_path / "model" / "config.json").stat().st_mtime_ns == stamp
    assert weights(make(1)) != first  # another seed, although there is a model
    for damaged in ("model.safetensors", "tokenizer.json"):
        for kept in (None, 400):
            damage(tmp_path / "model" / damaged, kept)
            assert weights(make(0, True)) == first  # it is made again where a file is missing or cut
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_small_model_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make = partial(make_tiny_model, seed=0)
    with pytest.raises(FileNotWritten, match=r"small model could not be written to .*file/model.*--output-dir"):
        model_of_run(tmp_path / "file" / "model", False, make)


@pytest.mark.parametrize("kept", [None, 400])
def test_a_damaged_small_model_of_the_cache_is_made_again(
    kept: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["recipes.demo.tiny_model"], "warm_up", lambda *args: 0.0)
    path = tiny_checkpoint(0, tmp_path)
    whole = weights(path)
    damage(path / "model.safetensors", kept)
    assert tiny_checkpoint(0, tmp_path) == path
    assert weights(path) == whole
