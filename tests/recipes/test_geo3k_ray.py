"""The recipe on Ray: the run of one process, whatever the layout, through a worker's death and in another layout after it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import geometry3k as geometry3k_rows
from helpers.geo3k_files import write_geometry3k
from helpers.geo3k_runs import REWARD, arguments, assert_same_run
from helpers.option_files import in_files
from recipes.geo3k_grpo import main

pytestmark = pytest.mark.slow

RAY = ("--on", "ray", "--layout.dp", "2", "--ray.object-store-gib", "0.2", "--save-in-background")
SETTINGS = ("--steps", "4", "--save-every", "1", "--keep-checkpoints", "9", "--algorithm.kl-coef", "0.1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Model, data and reward."""
    folder = tmp_path_factory.mktemp("files")
    for split, count in (("train", 12), ("test", 5)):
        write_geometry3k(folder / "data" / f"{split}-00000-of-00001.parquet", geometry3k_rows(count))
    (folder / "mine.py").write_text(REWARD)
    return write_checkpoint("qwen2_5_vl", folder / "model"), str(folder / "data"), f"{folder / 'mine.py'}:score"


@pytest.fixture(scope="module")
def one_process(files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "one_process"
    assert main(arguments(*files, directory, *SETTINGS)) == 0
    return directory


def kill_a_worker_after(directory: Path, step: int, mark: str) -> threading.Thread:
    """Kills a process of the actor once the run has written the checkpoint of a step."""

    def watch() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not (directory / f"global_step_{step}").exists():
            time.sleep(0.02)
        os.kill(processes_of(mark, "ray::RayHost")[0], signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def processes_of(mark: str, text: str = "") -> list[int]:
    """Processes that were started with ``mark`` in their environment, and have ``text`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:  # it has ended
                continue
            if text.encode() in command and f"RUN_MARK={mark}\0".encode() in environment:
                found.append(int(entry.name))
    return found


@pytest.mark.long
def test_two_processes_of_which_one_is_killed_make_the_run_of_one(files, one_process, tmp_path, capsys, monkeypatch):
    directory = tmp_path / "two"
    monkeypatch.setenv("RUN_MARK", str(directory))
    killer = kill_a_worker_after(directory, step=2, mark=str(directory))
    assert main(arguments(*files, directory, *SETTINGS, *in_files(RAY, tmp_path), "--max-restarts", "1")) == 0
    killer.join()
    told = capsys.readouterr().err
    assert "rank" in told
    assert "died in" in told
    assert "starting again from the last checkpoint" in told
    assert_same_run(directory, one_process)


@pytest.mark.long
def test_a_run_goes_on_in_another_layout(files, one_process, tmp_path):
    directory = tmp_path / "half"
    shutil.copytree(one_process, directory)
    for step in (3, 4):
        shutil.rmtree(directory / f"global_step_{step}")
    assert main(arguments(*files, directory, *SETTINGS, *in_files(RAY, tmp_path), "--resume")) == 0
    assert_same_run(directory, one_process)
    shutil.rmtree(directory / "global_step_4")  # what two processes wrote at step 3 is read by one
    assert main(arguments(*files, directory, *SETTINGS, "--resume")) == 0
    assert_same_run(directory, one_process)


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_driver_leaves_no_process(files, tmp_path, sign):
    directory = tmp_path / "interrupted"
    command = [
        sys.executable,
        "-m",
        "recipes.geo3k_grpo",
        *arguments(*files, directory, *SETTINGS, *in_files(RAY, tmp_path)),
    ]
    process = subprocess.Popen(
        [*command, "--steps", "500"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RUN_MARK": str(directory)},
    )
    deadline = time.monotonic() + 200
    while not (directory / "global_step_1").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert processes_of(str(directory), "ray::RayHost")
    process.send_signal(sign)
    process.wait(60)
    while (left := processes_of(str(directory))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
