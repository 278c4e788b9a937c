"""What the calls of a step put into Ray's object store, and the most memory that the driver and its workers have meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

MIB = 2**20
INTERVAL_S = 0.01  # between samples of the memory


def store_bytes() -> tuple[int, int]:
    """All bytes that any process has put into the object store of this machine, and those in it now."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    found = get_memory_info_reply(state).store_stats
    return int(found.cumulative_created_bytes), int(found.object_store_bytes_used)


def resident(process: int | str = "self") -> int:
    """Resident bytes of a process, without pages mapped from the object store; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Traffic:
    """Measures a step call by call; prints a line for each."""

    HEADER = (
        "| call | sent, MiB | put meanwhile, MiB | store, MiB | driver, MiB | fullest worker, MiB |\n"
        "|---|---|---|---|---|---|"
    )

    def __init__(self, workers: str) -> None:
        """``workers`` is in the names of their processes. Their memory is told over that of now, when they have loaded."""
        found = [process for process in psutil.Process().children(recursive=True) if workers in process.name()]
        self.workers = [process.pid for process in found]
        self.start, self.driver_start = {pid: resident(pid) for pid in self.workers}, resident()
        self.calls: dict[str, list[int]] = {}  # sent, put meanwhile, store, driver, fullest worker

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within the block memory is sampled and belongs to the call that began last."""
        self.begin("preparation")
        over = threading.Event()

        def watch() -> None:
            while not over.wait(INTERVAL_S):
                self._sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._end()

    def begin(self, name: str) -> None:
        """A call begins, and takes over what is measured from the call before."""
        if self.calls:
            self._end()
        self.put = store_bytes()[0]
        self.current = self.calls.setdefault(name, [0, 0, 0, 0, 0])

    def sent(self) -> None:
        """What was put since the call began are its arguments."""
        self.current[0] += store_bytes()[0] - self.put
        self.put = store_bytes()[0]

    def _end(self) -> None:
        self._sample()
        put, used = store_bytes()
        self.current[1] += put - self.put
        self.current[2] = max(self.current[2], used)

    def _sample(self) -> None:
        call = self.current
        call[3] = max(call[3], resident() - self.driver_start)
        call[4] = max(call[4], *(resident(pid) - self.start[pid] for pid in self.workers))

    def __str__(self) -> str:
        lines = (
            f"| {name} | {' | '.join(f'{each / MIB:.0f}' for each in call)} |" for name, call in self.calls.items()
        )
        return "\n".join([self.HEADER, *lines])
