import errno
import json
import time
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataproto.errors import FileNotWritten, InvalidConfig, MissingPackage
from recipes.run import RunConfig
from recipes.watch.loggers import LoggedRun, check_loggers, open_loggers
from recipes.watch.metrics_file import read_metrics
from recipes.watch.rollout_files import RolloutSample, save_rollouts

OWN = """
import json
from pathlib import Path

class Lines:
    def __init__(self, run):
        if "broken" in run.name:
            raise RuntimeError("no\\nserver")
        self.path = run.directory / "lines.txt"
        self.write("open", run.name, run.resume_after, run.config)

    def write(self, *words):
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\\n")

    def log(self, step, metrics):
        self.write("log", step, dict(metrics))

    def log_rollouts(self, step, rows):
        self.write("rollouts", step, [[row.key, [image.size for image in row.images]] for row in rows])

    def close(self):
        self.write("close")

class Failing(Lines):
    def log(self, step, metrics):
        if step == 2:
            raise OSError("disk\\nfull")
        super().log(step, metrics)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def rollouts():
    pictures = [Image.new("RGB", (8, 6), "red"), Image.new("RGB", (5, 9), "blue")]
    return [
        RolloutSample("geo 0", "Find x.", "x = 4", "4", 1.0, 1.0, tuple(pictures)),
        RolloutSample("geo 1", "Find y.", "<b>5</b>", "6", 0.1, None, (pictures[1],)),
    ]


def words(directory):
    return [json.loads(line) for line in (directory / "lines.txt").read_text().splitlines()]


def test_a_users_class_gets_everything_next_to_the_file(tmp_path, own):
    run = LoggedRun(tmp_path / "run")
    run.directory.mkdir()
    (run.directory / "config.json").write_text('{"run": {"steps": 2}}')
    save_rollouts(run.directory, 1, rollouts())
    with open_loggers([f"{own}:Lines", "jsonl"], run) as loggers:
        loggers.log(0, {"a": 0.5})
        loggers.log_saved_rollouts(0)  # there are none
        loggers.log_saved_rollouts(1)
    assert words(run.directory) == [
        ["open", "run", None, {"run": {"steps": 2}}],
        ["log", 0, {"a": 0.5}],
        ["rollouts", 1, [["geo 0", [[8, 6], [5, 9]]], ["geo 1", [[5, 9]]]]],
        ["close"],
    ]
    assert read_metrics(run.directory / "metrics.jsonl") == [{"step": 0, "a": 0.5}]


def test_a_logger_that_fails_is_told_once_and_the_others_go_on(tmp_path, own, capsys):
    with open_loggers([f"{own}:Failing", "tensorboard"], LoggedRun(tmp_path / "run")) as loggers:
        for step in range(5):
            loggers.log(step, {"a": float(step)})
    told = capsys.readouterr().err.splitlines()
    line = OWN[: OWN.index('raise OSError("disk')].count("\n") + 1
    assert told == [
        f"warning: logger {own}:Failing failed at step 2 and gets nothing more: OSError: disk full "
        f"({own}:{line}, in log)"
    ]
    assert [line[0] for line in words(tmp_path / "run")] == ["open", "log", "log"]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5
    assert [event.step for event in tensorboard(tmp_path / "run").Scalars("a")] == [0, 1, 2, 3, 4]


def test_a_logger_that_cannot_start_ends_the_run_with_one_line(tmp_path, own):
    loggers = open_loggers(["tensorboard", f"{own}:Lines"], LoggedRun(tmp_path / "broken"))
    with pytest.raises(InvalidConfig) as raised, loggers:
        pass
    line = OWN[: OWN.index("raise RuntimeError")].count("\n") + 1
    assert (
        str(raised.value) == f"logger '{own}:Lines' cannot start: RuntimeError: no server ({own}:{line}, in __init__)"
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wandbb"], "logger 'wandbb' is unknown: choose from jsonl, tensorboard, wandb"),
        (["tensorboard", "tensorboard"], "given twice"),
    ],
)
def test_a_wrong_name_is_refused_with_the_options(names, message):
    with pytest.raises(InvalidConfig, match=message):
        RunConfig(loggers=tuple(names))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:Nothing", "has no function 'Nothing'"),
        ("nowhere.py:Lines", "there is no file .*nowhere.py"),
        ("own:Lines", "there is no file .*own"),
        ("halved.py:Lines", r"cannot be imported: ZeroDivisionError: division by zero \(.*halved.py:2, in <module>\)"),
    ],
)
def test_a_class_that_is_not_there_is_one_line(tmp_path, own, name, message):
    (own.parent / "halved.py").write_text("x = 1\ny = x / 0\n")
    with (
        pytest.raises(InvalidConfig, match=message),
        open_loggers([f"{own.parent}/{name}"], LoggedRun(tmp_path / "run")),
    ):
        pass


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "swanlab"])
def test_a_tracker_that_is_not_installed_names_its_extra(monkeypatch, name):
    monkeypatch.setattr("dataproto.extras.find_spec", lambda name: None)
    extra = "loggers" if name == "tensorboard" else name
    with pytest.raises(MissingPackage, match=rf"logger '{name}' needs {name}: pip install 'dataproto-vlm\[{extra}\]'"):
        check_loggers([name])


def tensorboard(directory):
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


@pytest.mark.slow
def test_tensorboard_events_follow_the_rows(tmp_path):
    with open_loggers(None, LoggedRun(tmp_path)) as loggers:
        for step in range(4):
            loggers.log(step, {"critic/score/mean": step / 10, "nan": float("nan")})
    time.sleep(1.1)  # TensorBoard orders files by their second
    with open_loggers(None, LoggedRun(tmp_path, resume_after=1)) as loggers:
        loggers.log(2, {"critic/score/mean": 0.9})
    events = tensorboard(tmp_path)
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    scalars = events.Scalars("critic/score/mean")
    assert [(event.step, round(event.value, 4)) for event in scalars] == [(0, 0.0), (1, 0.1), (2, 0.9)]


def test_tensorboard_has_every_picture_and_text_of_the_rollouts(tmp_path):
    with open_loggers(["tensorboard"], LoggedRun(tmp_path)) as loggers:
        loggers.log_rollouts(3, rollouts())
    events = tensorboard(tmp_path)
    sizes = {
        tag: [(image.step, image.width, image.height) for image in events.Images(tag)] for tag in events.images.Keys()
    }
    assert sizes == {
        "rollouts/00/image_0": [(3, 8, 6)],
        "rollouts/00/image_1": [(3, 5, 9)],
        "rollouts/01/image_0": [(3, 5, 9)],
    }
    text = events.Tensors("rollouts/01/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    <b>5</b>" in text
    assert "**reward** 0.1" in text


def test_a_write_that_is_cut_short_keeps_the_names_that_trackers_have(tmp_path, monkeypatch):
    run = LoggedRun(tmp_path)
    run.save_id("one", "first")
    own = Path.write_bytes

    def cut(path, content):
        own(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", cut)
    with pytest.raises(FileNotWritten, match="No space left"):
        run.save_id("two", "second")
    monkeypatch.undo()
    assert (run.saved_id("one"), run.saved_id("two")) == ("first", None)
    run.save_id("two", "second")
    assert (run.saved_id("one"), run.saved_id("two")) == ("first", "second")
