"""A run whose files cannot be written ends with the name of the file and the way out, and damages nothing."""

import re
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image

from dataproto.errors import FileNotWritten, InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.file_limits import files_of_at_most
from helpers.kept_runs import scored_batch
from recipes.commands import main
from recipes.configs.shared.run_config import RunConfig
from recipes.options.config_file import write_options
from recipes.run.run_directory import RecordedRun, recorded_run
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.metrics_file import MetricsLog, read_metrics
from recipes.watch.report import write_report
from recipes.watch.rollout_files import RolloutSample, save_image, save_rollouts
from workers.training.checkpoint import write_json

SAYS = r"could not be written: File too large; make room .*--resume"


def without_pictures():
    data = scored_batch(["x" * 900], [1.0], ["a"])
    data.pop(non_tensor_batch_keys=["multi_modal_data"])
    return data


WRITERS = {
    "metrics.jsonl.json": lambda folder: write_json(folder / "metrics.jsonl.json", ["x" * 100] * 9),
    "step_1.jsonl": lambda folder: save_rollouts(folder, 1, [RolloutSample("a", "p" * 900, "r", "1", 0.0)]),
    ".png": lambda folder: save_image(
        folder, Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    ),
    "step_2.tokens.jsonl.gz": lambda folder: KeptRollouts(folder, 8).keep(2, without_pictures()),
    "config.yaml": lambda folder: write_options(folder, RecordedRun(RunConfig())),
    "report.html": write_report,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_is_named_and_leaves_no_draft(name, tmp_path):
    with files_of_at_most(64), pytest.raises(FileNotWritten, match=rf"{name} {SAYS}"):
        WRITERS[name](tmp_path)
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []


@pytest.mark.parametrize("name", ["metrics.jsonl.json", "config.yaml"])
def test_a_file_that_cannot_be_written_again_stays_as_it_was(name, tmp_path):
    """Without its settings a run could not be resumed when there is room again."""
    (tmp_path / name).write_text("earlier")
    with files_of_at_most(64), pytest.raises(FileNotWritten):
        WRITERS[name](tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "earlier")]


def test_a_row_of_metrics_is_written_whole_or_not_at_all(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"reward": 0.25})
        size = log.path.stat().st_size
        with files_of_at_most(size + 10), pytest.raises(FileNotWritten, match=rf"metrics.jsonl {SAYS}"):
            log.log(1, {"reward": 0.5})
        assert log.path.stat().st_size == size
        log.log(1, {"reward": 0.5})  # there is room again
    assert read_metrics(log.path) == [{"step": 0, "reward": 0.25}, {"step": 1, "reward": 0.5}]


def test_a_report_that_cannot_be_written_hides_no_other_error(tmp_path):
    run = RunConfig(output_dir=tmp_path / "run")
    with pytest.raises(InvalidConfig, match="the reason") as caught, ExitStack() as limit, recorded_run(run):
        limit.enter_context(files_of_at_most(64))
        raise InvalidConfig("the reason")
    assert caught.value.__notes__[0].startswith("and FileNotWritten: ")


GIVEN = (
    "--preset any --steps 1 --batch-size 2 --algorithm.n 2 --eval-every 0 --eval-first false --eval-rows 2"
    " --max-prompt-length 500 --max-response-length 4"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--preset tiny --steps 1", "the small model could not be written"),
        (f"{GIVEN} --model-path MODEL", r"global_step_1.* could not be written: .*--resume"),
    ],
    ids=["the tiny model", "the checkpoint"],
)
def test_a_run_under_a_limit_of_file_sizes_names_the_file_and_the_way_out(given, says, tmp_path, monkeypatch, capsys):
    model = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = [*given.replace("MODEL", model).split(), "--output-dir", str(tmp_path / "run")]
    with files_of_at_most(100 * 1024):
        assert main(["grpo", *options]) == 2
    told = capsys.readouterr().err.splitlines()
    assert re.match(rf"error: .*{says}", told[-1]), told
