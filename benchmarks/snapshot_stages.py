"""Where the time from a snapshot's request to its first sample goes, by the log of `dataproto serve`."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) .*?\b(?:snapshot|sampler|adapter) \S+: (.* \d+\.\d{3} s)$")
STAGE = re.compile(r"(\w+) (\d+\.\d{3}) s")
STAGES = {
    "waited": "until its turn",
    "written": "in the engine, until its files are written",
    "copied": "of these until the engine has a copy of its own",
    "filed": "then until the copy is in its files",
    "named": "until they have their name",
    "opened": "until the engine has opened the sampler",
    "loaded": "until vLLM has its adapter",
}
"""What the server logs of each snapshot until its first sample; a sampler that is part of the engine loads nothing."""


@dataclass(frozen=True)
class Stage:
    """A stage of the snapshots of a phase: the mean seconds that it took, and when the last snapshot had passed it, in seconds
    from the beginning of the phase.
    """

    took: float
    last: float


class StageLog:
    """Reads the stages of a phase from a server's log."""

    def __init__(self, log: Path) -> None:
        """``log``: of a running server; what it holds already belongs to no phase."""
        self.log = log
        self.begin()

    def begin(self) -> None:
        """A phase begins now."""
        self._place, self._began = self.log.stat().st_size, time.time()

    def stages(self) -> dict[str, Stage]:
        """The stages since the phase began, of the snapshots that have passed them."""
        with self.log.open("rb") as file:
            file.seek(self._place)
            return read_stages(file.read().decode(errors="replace").splitlines(), self._began)


def read_stages(lines: Sequence[str], began: float) -> dict[str, Stage]:
    """The stages of a phase that began at a time, from the lines of a log.

    >>> line = "2026-01-02 03:04:05,600 snapshot runs/1/sampler-2: waited 0.100 s, written 0.200 s, named 0.300 s"
    >>> list(read_stages([line], began=0.0))
    ['waited', 'written', 'named']
    """
    took: dict[str, list[float]] = {}
    last: dict[str, float] = {}
    for line in lines:
        if (match := LINE.match(line)) is None:
            continue
        moment, thousandths, rest = match.groups()
        end = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S")) + int(thousandths) / 1000 - began
        for name, seconds in reversed(STAGE.findall(rest)):
            took.setdefault(name, []).append(float(seconds))
            last[name] = max(end, last.get(name, end))
            end -= float(seconds)
    return {name: Stage(mean(took[name]), last[name]) for name in STAGES if name in took}


def stages_table(
    phases: Mapping[str, Mapping[str, Stage]], acknowledged: Mapping[str, float], first: Mapping[str, float]
) -> str:
    """A table of the stages of phases by their names.

    Args:
        acknowledged: seconds from the beginning of a phase until the last client had its sampler.
        first: the same until the last client had a sample.
    """
    lines = ["| stage | " + " | ".join(f"{name}: mean s | last passed, s" for name in phases) + " |"]
    lines.append("| --- |" + " ---: | ---: |" * len(phases))

    def row(text: str, cells: Sequence[str]) -> None:
        lines.append(f"| {text} | " + " | ".join(cells) + " |")

    for stage, text in STAGES.items():
        if any(stage in each for each in phases.values()):
            found = [each.get(stage) for each in phases.values()]
            row(text, ["|".join([" ", " "]) if one is None else f"{one.took:.3f} | {one.last:.3f}" for one in found])
        if stage == "named":
            row("until the client has its sampler", [f" | {acknowledged[name]:.3f}" for name in phases])
    row("until the client has a sample", [f" | {first[name]:.3f}" for name in phases])
    return "\n".join(lines)
