"""The phases of a run's start, named while they take their time, and their table."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def start_phase(
    name: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Names what the block does, and prints the seconds that it took.

    On a terminal the name stands beside a spinner and the time so far. Elsewhere (a log file, a CI job) it is a line before the
    block, so that the last line of the log names the phase that still runs.

    >>> import sys
    >>> ticks = iter([0.0, 2.5])
    >>> with start_phase("reading data", Console(file=sys.stdout, width=80), lambda: next(ticks)):
    ...     pass
    reading data ...
    reading data: 2.5 s
    """
    console = console or Console()
    start = clock()
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as spinner:
            spinner.add_task(name, total=None)
            yield
    else:
        console.print(f"{name} ...", markup=False, highlight=False, soft_wrap=True)
        yield
    console.print(f"{name}: {clock() - start:.1f} s", markup=False, highlight=False, soft_wrap=True)


def start_lines(seconds: Mapping[str, float]) -> list[str]:
    """A table of the phases of a start, those within another one indented below it, and their sum.

    Args:
        seconds: of `workers.Roles.start_seconds`.

    >>> for line in start_lines({"loading the actor": 24.0, "starting the engine": 60.0, "starting the engine/model": 41.5}):
    ...     print(line)
    start                        s
    loading the actor         24.0
    starting the engine       60.0
      model                   41.5
    all                       84.0
    """
    outer = [name for name in seconds if "/" not in name]
    lines = [("start", "s")]
    for name in outer:
        lines.append((name, f"{seconds[name]:.1f}"))
        inner = [other for other in seconds if other.startswith(f"{name}/")]
        lines += [(f"  {other.partition('/')[2]}", f"{seconds[other]:.1f}") for other in inner]
    lines.append(("all", f"{sum(seconds[name] for name in outer):.1f}"))
    width = max(len(name) for name, _ in lines)
    return [f"{name:{width}}  {value:>9}" for name, value in lines]


def start_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases of a start as metrics.

    >>> start_metrics({"loading the actor": 24.0, "starting the engine (graphs)/KV cache": 1.5})
    {'perf/start_s/loading_the_actor': 24.0, 'perf/start_s/starting_the_engine/KV_cache': 1.5}
    """
    short = {re.sub(r" \(.*?\)", "", name).replace(" ", "_"): each for name, each in seconds.items()}
    return {f"perf/start_s/{name}": each for name, each in short.items()}


def announce_start(seconds: Mapping[str, float], console: Console | None = None) -> None:
    """Prints `start_lines`, if a phase has further ones within it: the others have been printed as they ended."""
    if any("/" in name for name in seconds):
        (console or Console()).print("\n".join(start_lines(seconds)), markup=False, highlight=False, soft_wrap=True)
