"""The order of requests: those of a run are carried out by their numbers, without gaps."""

import time
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from dataproto_server.ledger.journal import Entry
from dataproto_server.ledger.records import Run


@dataclass
class Lane:
    """The waiting requests of a run.

    >>> run = Run(id="r", number=1, session="s", owner="o", base_model="m", lora=None, metadata="{}", created=0, last_request=0)
    >>> lane = Lane(run)
    >>> lane.add(Entry("r:1", "r", 1, "pass", None, 10, 0.0))
    >>> lane.head() is None, lane.gap()
    (True, (0, [1]))
    >>> lane.add(Entry("r:0", "r", 0, "create", None, 10, 0.0))
    >>> lane.head().kind, lane.gap()
    ('create', None)
    """

    run: Run
    entries: dict[int, Entry] = field(default_factory=dict)
    blocked_since: float | None = None  # a request waits, but not the next one
    steps: int = 0  # updates since the last snapshot
    last_snapshot: float = field(default_factory=time.monotonic)
    last_pass: float = -inf  # when one was computed
    saving: bool = False  # a request that reads or writes files is carried out while rounds go on, or the run ends so
    resting: str = ""  # why the run could not be restored: nothing is carried out before the next start
    not_before: float = 0.0  # it rests until this time behind an error of the server
    ending: Literal["", "dropped", "kept"] = ""  # what becomes of it when nothing waits

    def add(self, entry: Entry) -> None:
        self.entries[entry.seq] = entry
        self._look()

    def head(self) -> Entry | None:
        """The request whose turn it is."""
        return self.entries.get(self.run.next_seq)

    def passes(self, most_bytes: int) -> list[Entry]:
        """The passes up to the next request of another kind, at least one if there is one."""
        found: list[Entry] = []
        size = 0
        while (entry := self.entries.get(self.run.next_seq + len(found))) is not None and entry.kind == "pass":
            size += entry.size
            if found and size > most_bytes:
                break
            found.append(entry)
        return found

    def done(self, entry: Entry) -> None:
        """Takes a request out; it is the turn of the next one."""
        done = self.entries.pop(entry.seq, None)
        if done is not None:
            done.body = None  # who waits for its result holds the request for long
        self.run.next_seq = max(self.run.next_seq, entry.seq + 1)
        self._look()

    def gap(self) -> tuple[int, list[int]] | None:
        """The number that is missing, and those that wait for it."""
        if not self.entries or self.head() is not None:
            return None
        return self.run.next_seq, sorted(self.entries)

    def _look(self) -> None:
        if self.gap() is None:
            self.blocked_since = None
        elif self.blocked_since is None:
            self.blocked_since = time.monotonic()
