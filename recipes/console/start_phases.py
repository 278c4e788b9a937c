"""The phases of a run's start, named while they take their time."""

import time
from collections.abc import Callable, Iterator
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
