"""``--overwrite`` deletes an earlier run only once the new one has loaded, and never what the new one starts from."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dataproto.errors import InvalidConfig, WorkerFailed
from recipes import classify, distil, easy_vqa, geo3k_grpo, geo3k_ppo, grpo, ppo, sft, walk, zoom
from recipes.demo.tiny_model import make_tiny_model
from recipes.directory_lock import LOCK_FILE
from recipes.options.config_file import CONFIG_FILE
from recipes.run import RunConfig, recorded_run
from recipes.run.run_directory import (
    DISCARDED,
    EARLIER,
    RecordedRun,
    forget_earlier,
    held_directory,
    open_run_directory,
)
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
    """It has been read when the directory is set aside."""
    (run / "config.yaml").write_text("steps: 3\n")
    config = grpo.parse(["--config", str(run / "config.yaml"), "--output-dir", str(run), "--overwrite"])
    with held_directory(config):
        open_run_directory(config.run, config)
    assert not (run / "metrics.jsonl").exists()
    assert (run / "config.yaml").read_text().startswith("#")


def test_checkpoints_without_metrics_are_an_earlier_run_as_well(run: Path) -> None:
    """Its checkpoints would be pruned, or restored by a resumed run, among those of the new one."""
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InvalidConfig, match="holds an earlier run: --resume it, --overwrite it, or choose another"):
        open_run_directory(RunConfig(output_dir=run))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerFailed, RuntimeError])
@pytest.mark.parametrize(
    ("recipe", "launch"), [(sft, "supervised.launch_supervised"), (grpo, "policy_gradient.launch_roles")]
)
def test_the_earlier_run_stays_if_the_new_one_does_not_load(
    recipe, launch: str, error: type[BaseException], run: Path, model: str, monkeypatch, capsys
) -> None:
    def fail(*args: object, **options: object) -> None:
        assert not (run / "metrics.jsonl").exists()  # in its own directory, not among what is left of the earlier run
        raise error("no memory")

    before = content(run)
    module, _, name = launch.partition(".")
    monkeypatch.setattr(sys.modules[f"recipes.run.{module}"], name, fail)
    given = f"--preset tiny --model-path {model} --steps 1 --batch-size 2 --eval-rows 2 --output-dir {run} --overwrite".split()
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="no memory") as caught:
            recipe.main(given)
        assert caught.value.__notes__ == [f"and the earlier run in {run} stays: the new one had not begun"]
    else:
        assert recipe.main(given) == (130 if error is KeyboardInterrupt else 2)
        told = capsys.readouterr().err
        assert f"the earlier run in {run} stays: the new one had not begun" in told
        assert "--resume" not in told.rpartition("interrupted")[2]  # it would resume the earlier one
    assert content(run) == before


class Killed(BaseException):
    """A process that ends between two steps of its work."""


@pytest.mark.parametrize("when", ["setting aside", "loading", "putting back"])
def test_the_earlier_run_survives_a_process_that_is_killed_at_any_moment(
    when: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RecordedRun(RunConfig(output_dir=run, overwrite=True))
    resumed = RecordedRun(RunConfig(output_dir=run, resume=True))
    before, rename = content(run), Path.rename

    def killed_after(renames: int) -> None:
        left = [None] * renames

        def once(path: Path, target: Path) -> Path:
            if not left:
                raise Killed
            left.pop()
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", once)

    for renames in range(len([*run.iterdir()]) + 1):
        if when != "setting aside":
            open_run_directory(config.run, config)  # and then it is killed
            (run / "model").mkdir()
        if when != "loading":
            killed_after(renames)
            with pytest.raises(Killed), held_directory(resumed if when == "putting back" else config):
                open_run_directory(config.run, config)
            monkeypatch.setattr(Path, "rename", rename)
        with held_directory(resumed):
            assert {name: text for name, text in content(run).items() if name != LOCK_FILE} == before


def test_a_new_run_that_has_measured_something_is_not_undone(run: Path) -> None:
    """It was killed before the earlier run was deleted; or it is in the phase before its own steps, as easy-VQA's."""
    for metrics in (run / "metrics.jsonl", run / "sft" / "metrics.jsonl"):
        config = RecordedRun(RunConfig(output_dir=run, overwrite=True))
        with pytest.raises(RuntimeError), held_directory(config):
            open_run_directory(config.run, config)
            metrics.parent.mkdir(exist_ok=True)
            metrics.write_text('{"step": 7}\n')
            raise RuntimeError
        assert metrics.read_text() == '{"step": 7}\n'
        assert not [path for path in run.iterdir() if path.name.startswith(".")]
        assert not (run / "mine.py").exists()


def test_the_earlier_run_is_gone_once_the_new_one_has_loaded(run: Path) -> None:
    config = RunConfig(output_dir=run, overwrite=True)
    with pytest.raises(RuntimeError), recorded_run(config):
        forget_earlier(run)  # as `train` does
        assert {path.name for path in run.iterdir()} == {LOCK_FILE, CONFIG_FILE, "config.yaml", ENVIRONMENT_FILE}
        raise RuntimeError
    assert not (run / "mine.py").exists()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with recorded_run(replace(config)):
        pass  # a loop of the user's own
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    assert not (run / "metrics.jsonl").exists()


def test_an_earlier_run_whose_deletion_was_killed_does_not_stop_the_next_overwrite(tmp_path):
    for folder in (DISCARDED, EARLIER):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "metrics.jsonl").write_text("{}\n")
    forget_earlier(tmp_path)
    assert not list(tmp_path.iterdir())
