import io
import math

from rich.console import Console

from recipes.run.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain(total, done=0, **options):
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=60, force_terminal=False)
    return Progress(total, done, console=console, clock=clock, **options), file, clock


METRICS = {"critic/score/mean": 0.25, "perf/throughput": 1234.5}


def test_plain_lines_come_at_most_every_few_seconds_and_at_the_end():
    progress, file, clock = plain(10, interval=3.0)
    with progress:
        for step in range(1, 11):
            clock.now += 1.0
            progress.update(step, METRICS)
    lines = file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["step 1/10", "step 4/10", "step 7/10", "step 10/10"]
    assert lines[0] == "step 1/10 · reward 0.250 · 1,234 tokens/s per device · 0:09 left"
    assert lines[-1] == "step 10/10 · reward 0.250 · 1,234 tokens/s per device"


def test_a_slow_first_step_is_left_out_of_the_pace():
    progress, file, clock = plain(11, interval=0.0)
    with progress:
        for seconds in (100.0, 1.0, 1.0):
            clock.now += seconds
            progress.update(round(clock.now) - 99, {})
    assert [line.split(" · ")[1] for line in file.getvalue().splitlines()] == ["16:40 left", "0:09 left", "0:08 left"]


def test_a_resumed_run_counts_its_own_steps_only():
    progress, file, clock = plain(100, done=90)
    with progress:
        clock.now += 2.0
        progress.update(91, {})
    assert file.getvalue() == "step 91/100 · 0:18 left\n"


def test_numbers_that_are_missing_or_not_finite_are_left_out():
    progress, file, _ = plain(1)
    with progress:
        progress.update(1, {"critic/score/mean": math.nan})
    assert file.getvalue() == "step 1/1\n"


def test_notes_are_printed_as_they_are():
    progress, file, _ = plain(1)
    with progress:
        progress.note("[red]reward.py:f[/red] " + "x" * 80)
    assert file.getvalue() == "[red]reward.py:f[/red] " + "x" * 80 + "\n"


def test_a_terminal_gets_one_bar():
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True)
    with Progress(3, console=console) as progress:
        progress.note("before")
        for step in (1, 2, 3):
            progress.update(step, METRICS)
    shown = file.getvalue()
    assert "before" in shown
    assert "step 3/3" in shown
    assert "reward 0.250 · 1,234 tokens/s per device" in shown
    assert "\x1b[" in shown
