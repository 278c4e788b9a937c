"""One process at a time writes into a run's directory, and its lock ends with it."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataproto.errors import FileNotWritten, InvalidConfig
from dataproto_server.command import Supervisor
from helpers.file_limits import files_of_at_most
from recipes import (
    classify,
    directory_lock,
    distil,
    easy_vqa,
    export,
    geo3k_grpo,
    geo3k_ppo,
    grpo,
    ppo,
    sft,
    walk,
    zoom,
)
from recipes.directory_lock import LOCK_FILE, locked
from recipes.export import main as export_main
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.report import write_report
from recipes.watch.viewer import overview

HOLDS = """
import os, subprocess, sys
from pathlib import Path
from recipes.directory_lock import locked
with locked(Path(sys.argv[1]), inside=sys.argv[2] == "inside"):
    children = []
    if sys.argv[3] == "with-children":
        begun, begins = os.pipe()
        forked = os.fork()
        if not forked:
            os.write(begins, b".")
            os.execlp("sleep", "sleep", "60") if sys.argv[4] == "exec" else __import__("time").sleep(60)
        os.read(begun, 1)  # a child gives the lock up as it begins, which may be long after the fork
        children.append(forked)
    print(os.getpid(), *children, flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(directory: Path, *more: str) -> Iterator[list[int]]:
    """Another process that holds a directory; its id, and those of its children."""
    command = [sys.executable, "-c", HOLDS, str(directory), *(more or ("inside", "alone"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [int(each) for each in process.stdout.readline().split()]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The directory of a run of another process, and the number of that process."""
    directory = tmp_path_factory.mktemp("taken") / "run"
    with held(directory) as (process,):
        with MetricsLog(directory) as log:
            log.log(1, {"reward": 0.5})
        yield directory, process


RUNS = [grpo, ppo, distil, sft, classify, easy_vqa, walk, zoom, geo3k_grpo, geo3k_ppo]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNS, ids=lambda recipe: recipe.__name__)
def test_a_second_process_is_kept_out_and_told_of_the_first(
    recipe, taken: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, process = taken
    before = sorted(directory.iterdir())
    given = {grpo: ["--resume"], sft: ["--overwrite"]}.get(recipe, [])
    assert recipe.main(["--output-dir", str(directory), *given]) == 2
    told = capsys.readouterr()
    assert f"error: {directory} is in use by process {process} on " in told.err
    assert "wait until that ends, stop it, or choose another --output-dir\n" in told.err
    assert sorted(directory.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export", "serve"])
def test_other_commands_that_fill_a_directory_keep_a_second_one_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step" / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "step" / "actor" / "huggingface" / "config.json").write_text("{}")
    out = tmp_path / "out"
    with held(out, "inside" if name == "serve" else "beside", "alone") as (process,):
        message = f"{out} is in use by process {process} on "
        if name == "serve":
            with pytest.raises(InvalidConfig, match=f"{message}.* or give another --state"):
                Supervisor(out, "127.0.0.1", 0, [], "", "")
        else:
            assert export_main([str(tmp_path / "step"), str(out)]) == 2
            assert message in capsys.readouterr().err
    assert out.exists() == (name == "serve")


def test_a_full_disk_leaves_the_lock_without_a_name(tmp_path: Path) -> None:
    """What the process writes next tells which file it is."""
    refused = pytest.raises(InvalidConfig, match="in use by another process")
    with files_of_at_most(0), locked(tmp_path), refused, locked(tmp_path):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.slow
def test_what_only_reads_a_run_needs_no_lock(taken: tuple[Path, int], tmp_path: Path) -> None:
    directory, _ = taken
    write_report(directory)
    assert overview(directory)["metrics"] is not None
    with pytest.raises(Exception, match="no checkpoint of an actor"):
        export.export_model(export.ModelExportConfig(directory, tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("children", ["exec", "fork"])
def test_a_lock_ends_with_a_killed_process_though_its_children_live(tmp_path: Path, children: str) -> None:
    with held(tmp_path, "inside", "with-children", children) as (process, child):
        with pytest.raises(InvalidConfig, match=f"process {process} "), locked(tmp_path):
            pass
        os.kill(process, signal.SIGKILL)
        try:
            wait_for_end_of(process)
            os.kill(child, 0)  # it lives
            assert (tmp_path / LOCK_FILE).exists()  # what is left tells nothing
            with locked(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def wait_for_end_of(process: int) -> None:
    """Until the killed process has closed its files; it is a zombie then."""
    while "State:\tZ" not in Path(f"/proc/{process}/status").read_text():
        time.sleep(0.01)


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    with locked(tmp_path / "c", inside=False):
        assert not (tmp_path / "c").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_at_most_one_of_many_holds_a_directory(tmp_path: Path) -> None:
    """Also where a holder deletes the file of the lock while others open it."""
    inside, most, entered = 0, 0, 0

    def enter() -> None:
        nonlocal inside, most, entered
        for _ in range(100):
            try:
                with locked(tmp_path / "run"):
                    inside += 1
                    time.sleep(0)
                    most, entered = max(most, inside), entered + 1
                    inside -= 1
            except (InvalidConfig, FileNotWritten):
                pass

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(enter) for _ in range(4)]:
            each.result()
    assert (most, entered > 0) == (1, True)


def test_a_file_system_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory_lock.fcntl, "flock", refuse)
    with locked(tmp_path):
        pass
    assert f"no lock in {tmp_path} (No locks available): start one process" in capsys.readouterr().err


def test_a_lock_that_cannot_be_made_is_named_with_the_way_out_of_its_command(tmp_path):
    (tmp_path / "file").touch()
    into = locked(tmp_path / "file" / "model", "choose another output", inside=False)
    with pytest.raises(FileNotWritten, match=r"; make room there, or choose another output$"), into:
        raise AssertionError("it was made")
