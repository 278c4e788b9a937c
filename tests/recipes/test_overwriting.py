"""``--overwrite`` deletes an earlier run once the new one has read its data, and never what the new one starts from."""

import json
from contextlib import suppress
from pathlib import Path

import pytest

from dataproto.errors import InvalidConfig
from recipes import classify, distil, easy_vqa, geo3k_grpo, geo3k_ppo, grpo, ppo, sft, walk, zoom
from recipes.directory_lock import LOCK_FILE
from recipes.options.config_file import CONFIG_FILE
from recipes.run import RunConfig, recorded_run
from recipes.run.run_directory import RecordedRun, held_directory, open_run_directory
from recipes.watch.report import ENVIRONMENT_FILE

RUNS = [grpo, ppo, distil, sft, classify, easy_vqa, walk, zoom, geo3k_grpo, geo3k_ppo]
INPUT = "and {} is in it: choose another --output-dir"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of an earlier run, with weights, data and a function of the user's."""
    directory = tmp_path / "outputs" / "grpo"
    weights = directory / "global_step_1" / "actor" / "huggingface"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    (directory / ENVIRONMENT_FILE).write_text("{}")
    (directory / CONFIG_FILE).write_text('{"run": {}}')
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "rows.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    (directory / "mine.py").write_text("def score(completions): ...\n")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """The files, except what Python has compiled of a user's."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("recipe", RUNS, ids=lambda recipe: recipe.__name__)
def test_weights_in_the_directory_that_is_overwritten_are_refused(
    recipe, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, before = str(run / "global_step_1" / "actor" / "huggingface"), content(run)
    given = ["--preset", "any", "--model-path", weights, "--output-dir", str(run)]
    assert recipe.main(given) == 2
    told = capsys.readouterr().err
    assert f"{run} holds an earlier run: and --model-path {weights} is in it: choose another --output-dir" in told
    assert "--overwrite" not in told
    assert recipe.main([*given, "--overwrite"]) == 2
    refused = f"--model-path {weights} is in {run}, which --overwrite deletes: choose another --output-dir"
    assert refused in capsys.readouterr().err
    assert content(run) == before


def test_every_other_option_that_names_a_file_there_is_refused_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a link, from another working directory, from the home directory, as one of several, and with a name in it."""
    monkeypatch.chdir(run)
    monkeypatch.setenv("HOME", str(run.parent))
    (tmp_path / "link").symlink_to(run / "rows.jsonl")
    (tmp_path / "whole").symlink_to(run)
    given = ["--output-dir", str(tmp_path / "whole"), "--overwrite"]
    model = ["--preset", "any", "--model-path", "mine"]
    refused = {
        "--data-path": (grpo, [*model, "--data-path", str(tmp_path / "link")]),
        "--eval-data-path": (sft, [*model, "--data-path", "x.jsonl", "--eval-data-path", "rows.jsonl"]),
        "--reward": (grpo, ["--reward", "~/grpo/mine.py:score"]),
        "--algorithm.loss": (grpo, ["--algorithm.loss", f"{run}/mine.py:score"]),
        "--teacher": (distil, ["--teacher", str(run / "global_step_1")]),
        "--engine-options": (grpo, ["--engine-options", "dtype", str(run / "rows.jsonl")]),
        "--episodes.environment": (walk, [*model, "--data-path", "x.jsonl", "--environment", "mine.py:Mine"]),
    }
    before = content(run)
    for name, (recipe, more) in refused.items():
        with suppress(SystemExit):
            recipe.main([*more, *given])
        assert "which --overwrite deletes" in (told := capsys.readouterr().err), (name, told)
    assert content(run) == before


def test_a_run_is_overwritten_by_its_own_file_of_options(run: Path) -> None:
    """It has been read when the directory is emptied."""
    (run / "config.yaml").write_text("steps: 3\n")
    config = grpo.parse(["--config", str(run / "config.yaml"), "--output-dir", str(run), "--overwrite"])
    with held_directory(config):
        open_run_directory(config)
    assert not (run / "metrics.jsonl").exists()
    assert (run / "config.yaml").read_text().startswith("#")


def test_checkpoints_without_metrics_are_an_earlier_run_as_well(run: Path) -> None:
    """Its checkpoints would be pruned, or restored by a resumed run, among those of the new one."""
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InvalidConfig, match="holds an earlier run: --resume it, --overwrite it, or choose another"):
        open_run_directory(RecordedRun(RunConfig(output_dir=run)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [sft, grpo], ids=lambda recipe: recipe.__name__)
def test_the_earlier_run_stays_if_the_new_one_cannot_be_read(recipe, run: Path, tmp_path: Path, capsys) -> None:
    """A mistake in data that are read, after all options have been checked."""
    before = content(run)
    (tmp_path / "bad.jsonl").write_text('{"nothing": 1}\n' * 10)
    given = ["--preset", "tiny", "--data-path", str(tmp_path / "bad.jsonl"), "--output-dir", str(run), "--overwrite"]
    assert recipe.main(given) == 2
    assert "row 0" in capsys.readouterr().err
    assert {name: text for name, text in content(run).items() if name != LOCK_FILE} == before


def test_a_deletion_that_was_killed_can_be_repeated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows that the directory holds a run goes last, so it is not taken for another one."""
    config, unlink = RecordedRun(RunConfig(output_dir=run, overwrite=True)), Path.unlink

    def killed(path: Path, *_: object) -> None:
        unlink(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        open_run_directory(config)
    monkeypatch.setattr(Path, "unlink", unlink)
    with recorded_run(config.run):
        assert {path.name for path in run.iterdir()} == {LOCK_FILE, CONFIG_FILE, "config.yaml", ENVIRONMENT_FILE}
