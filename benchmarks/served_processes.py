"""``dataproto serve`` for benchmarks: a running server with its address, its key and the processor seconds of its processes."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MARK = "export TINKER_BASE_URL="
THREADS = "OMP_NUM_THREADS"
WAIT_SECONDS = 15.0
TAIL_BYTES = 1 << 14
PROCESSES = ("routes.application", "engine_process")


def limit_threads() -> int:
    """Gives torch as many threads as this process may use cores, unless ``OMP_NUM_THREADS`` is set; the number of these cores.

    Processes that start later have as many. Call it before torch is imported.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault(THREADS, str(cores))
    return cores


def last_line(log: Path) -> str:
    """The last line of a log that has text; of a line that a progress bar writes again and again, the last text."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "(nothing yet)")


@contextmanager
def told(waiting: str, log: Path, say: Callable[[str], None], seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Says every few seconds of the block what it waits for, with the last line of a log."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(seconds):
            say(f"{waiting}; the last line of {log.name}: {last_line(log)}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    key: str
    front: psutil.Process
    engine: psutil.Process

    def processor_seconds(self) -> tuple[float, float]:
        """Of the front process and of the engine process, since they started."""
        front, engine = (sum(each.cpu_times()[:2]) for each in (self.front, self.engine))
        return front, engine


@contextmanager
def served(log: Path, **options: object) -> Iterator[Served]:
    """A server on a free port with a state directory of its own; ``options`` are those of the command, with underscores.

    Args:
        log: gets what its processes write; the end of it is printed when the work with it fails.
    """
    with tempfile.TemporaryDirectory() as state, log.open("w") as errors:
        given = {"state": state, "port": 0, **options}
        words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-c", "from recipes.commands import main; main()", "serve", *words]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield _started(process, Path(state))
        except BaseException:
            print(f"the end of {log}:\n{log.read_text()[-6000:]}", file=sys.stderr, flush=True)
            raise
        finally:
            process.terminate()
            process.wait()


def _started(process: "subprocess.Popen[str]", state: Path) -> Served:
    assert process.stdout is not None
    url = next((line.removeprefix(MARK).strip() for line in process.stdout if line.startswith(MARK)), None)
    if url is None:
        raise RuntimeError(f"the server ended with status {process.wait()} before it said how to use it")
    children = dict[str, psutil.Process]()
    while set(children) != set(PROCESSES):  # a child has its command line a moment after it began
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} after its start")
        for child in psutil.Process(process.pid).children():
            line = " ".join(child.cmdline())
            children |= {name: child for name in PROCESSES if f"{name} import main" in line}
    key = (state / "api-key").read_text().strip()
    return Served(url, key, children["routes.application"], children["engine_process"])
