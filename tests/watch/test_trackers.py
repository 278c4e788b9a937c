"""Trackers as they are: what each has stored is read back by its own reader."""

import io
import json
import math
import time
from pathlib import Path

import pytest
from PIL import Image

from recipes.watch.loggers import LoggedRun, open_loggers
from recipes.watch.rollout_files import RolloutSample

PICTURES = (Image.new("RGB", (8, 6), "red"), Image.new("RGB", (5, 9), "blue"))
ROLLOUTS = [
    RolloutSample("geo 0", "Find x.", "x = 4", "4", 1.0, 1.0, PICTURES),
    RolloutSample("geo 1", "Find y.", "5", "6", 0.1, None, PICTURES[1:]),
]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "my_run"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"run": {"steps": 3}, "optimizer": {"lr": 0.5}}))
    return path


def log_and_resume(name, directory):
    """A run that logs steps 0 to 2 and a table, and its resumption after step 1, which makes step 2 again."""
    with open_loggers([name], LoggedRun(directory)) as loggers:
        for step in range(3):
            loggers.log(step, {"val-core/geo/acc/mean@1": step / 4, "nan": math.nan})
        loggers.log_rollouts(2, ROLLOUTS)
        assert list(loggers.trackers) == [name]  # none has failed
    time.sleep(1.1)  # W&B names files by their second
    with open_loggers([name], LoggedRun(directory, resume_after=1)) as loggers:
        loggers.log(2, {"val-core/geo/acc/mean@1": 0.75})
        assert list(loggers.trackers) == [name]


def wandb_records(content):
    """The records of a ``.wandb`` file: LevelDB's log format (blocks of 32 KiB, a header of 7 bytes before each piece)."""
    from wandb.proto import wandb_internal_pb2

    block, place, whole = 2**15, 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # padding at the end of a block
            place += block - place % block
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def all_wandb_records(path):
    """The records of a file, once W&B's own process has written the last one, which may be after `finish` returns."""
    for _ in range(100):
        records = list(wandb_records(path.read_bytes()))
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    return records


@pytest.mark.tracker("wandb")
@pytest.mark.slow
def test_wandb_writes_offline_runs_of_one_id_with_a_table_of_all_pictures(directory, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")  # the logger sets it, and this removes it after the test
    log_and_resume("wandb", directory)
    rows, ids, options, artifacts = [], [], {}, []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in all_wandb_records(path):
            if record.WhichOneof("record_type") == "run" and record.run.run_id not in ids:
                ids.append(record.run.run_id)
                options = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "artifact":
                contents = record.artifact.manifest.contents
                assert all(Path(item.local_path).is_relative_to(directory) for item in contents)
                artifacts.append({item.path: Path(item.local_path).read_bytes() for item in contents})
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
                )
    assert ids == [json.loads((directory / "trackers.json").read_text())["wandb"]]
    assert options["optimizer"] == {"lr": 0.5}
    curve = [(row["step"], row["val-core/geo/acc/mean@1"]) for row in rows if "val-core/geo/acc/mean@1" in row]
    assert curve == [(0, 0.0), (1, 0.25), (2, 0.5), (2, 0.75)]
    assert all("nan" not in row for row in rows)
    (table,) = [files for files in artifacts if "rollouts.table.json" in files]
    stored = json.loads(table.pop("rollouts.table.json"))
    assert stored["columns"][6:] == ["image_0", "image_1"]
    assert [row[:6] for row in stored["data"]] == [
        ["geo 0", "Find x.", "x = 4", "4", 1.0, 1.0],
        ["geo 1", "Find y.", "5", "6", 0.1, None],
    ]
    paths = [[cell and cell["path"] for cell in row[6:]] for row in stored["data"]]
    sizes = [[path and Image.open(io.BytesIO(table[path])).size for path in row] for row in paths]
    assert sizes == [[(8, 6), (5, 9)], [(5, 9), None]]


@pytest.mark.tracker("trackio")
@pytest.mark.slow
def test_trackio_keeps_one_run_with_a_table_of_all_pictures(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    log_and_resume("trackio", directory)
    (name,) = SQLiteStorage.get_runs("dataproto")
    assert name == json.loads((directory / "trackers.json").read_text())["trackio"]
    rows = SQLiteStorage.get_logs("dataproto", name)
    curve = [(row["step"], row["val-core/geo/acc/mean@1"]) for row in rows if "val-core/geo/acc/mean@1" in row]
    assert curve == [(0, 0.0), (1, 0.25), (2, 0.5), (2, 0.75)]
    (table,) = [row["rollouts"]["_value"] for row in rows if "rollouts" in row]
    assert [[row["key"], row["response"], row["reward"]] for row in table] == [
        ["geo 0", "x = 4", 1.0],
        ["geo 1", "5", 0.1],
    ]
    sizes = sorted(Image.open(path).size for path in (tmp_path / "trackio").rglob("*.png"))
    assert sizes == [(5, 9), (5, 9), (8, 6)]


@pytest.mark.tracker("swanlab")
@pytest.mark.slow
def test_swanlab_writes_offline_runs_with_all_pictures(directory, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(directory / "settings"))
    log_and_resume("swanlab", directory)
    files = [path for path in (directory / "swanlog").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"val-core/geo/acc/mean@1" in content
    sizes = sorted(Image.open(path).size for path in files if path.suffix == ".png")
    assert sizes == [(5, 9), (8, 6)] or sizes == [(5, 9), (5, 9), (8, 6)]


TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab")
NAMES = ("timing_s/step", "timing_s/step/read", "perf/memory_gb/gen/left", "perf/memory_gb/gen")
"""Metrics of a run: some have others within them."""


OWN = """
class Own:
    def __init__(self, run):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append((step, metrics))

    def log_rollouts(self, step, rows):
        self.calls.append((step, [len(row.images) for row in rows]))

    def close(self):
        self.calls.append("closed")
"""


@pytest.mark.tracker("wandb")
@pytest.mark.tracker("trackio")
@pytest.mark.tracker("swanlab")
@pytest.mark.slow
def test_all_trackers_take_all_metrics_of_a_run_at_once(directory, tmp_path, monkeypatch, capsys):
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("SWANLAB_MODE", "offline")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")  # the logger sets it, and this removes it after the test
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(directory / "settings"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    own_file = tmp_path / "own.py"
    own_file.write_text(OWN)
    for first in (0, 2):
        names = [*TRACKERS, f"{own_file}:Own"]
        with open_loggers(names, LoggedRun(directory, resume_after=first - 1 if first else None)) as loggers:
            own = list(loggers.trackers.values())[-1]
            for step in (first, first + 1):
                loggers.log(
                    step, {name: step + place / 10 for place, name in enumerate(NAMES)} if step else {NAMES[2]: 0.2}
                )
                loggers.log_rollouts(step, ROLLOUTS)
            assert len(loggers.trackers) == len(TRACKERS) + 1, capsys.readouterr().out
        assert own.calls[-2:] == [(first + 1, [2, 1]), "closed"]
