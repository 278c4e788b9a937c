import io
import logging
import math
import sys
import warnings

import pytest
from rich.console import Console

from recipes.watch.console import Progress, StepTable, start_phase
from workers.cluster.host import libraries_aside


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain(total, done=0, **options):
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=60, force_terminal=False)
    return Progress(total, done, console=console, clock=clock, **options), file, clock


METRICS = {
    "actor/loss": -0.03,
    "actor/lr": 1.25e-4,
    "critic/score/mean": 0.25,
    "actor/kl_loss": 0.0123,
    "response_length/mean": 17.25,
    "perf/throughput": 1234.5,
}


def test_a_plain_log_has_aligned_columns_at_most_every_few_seconds_and_at_the_end():
    progress, file, clock = plain(10, interval=3.0)
    with progress:
        for step in range(1, 11):
            clock.now += 1.0
            progress.update(step, METRICS)
    assert file.getvalue().splitlines() == [
        " step    loss  reward      KL      lr  length tokens/s    left",
        " 1/10  -0.030   0.250  0.0123 1.3e-04    17.2    1,234    0:09",
        " 4/10  -0.030   0.250  0.0123 1.3e-04    17.2    1,234    0:06",
        " 7/10  -0.030   0.250  0.0123 1.3e-04    17.2    1,234    0:03",
        "10/10  -0.030   0.250  0.0123 1.3e-04    17.2    1,234",
    ]


def test_an_evaluation_is_always_shown_and_adds_its_column():
    progress, file, clock = plain(4, interval=100.0)
    with progress:
        for step in range(1, 4):
            clock.now += 1.0
            progress.update(step, METRICS | ({"val-core/geo/acc/mean@1": 0.5} if step == 3 else {}))
    assert file.getvalue().splitlines() == [
        "step    loss  reward      KL      lr  length tokens/s    left",
        " 1/4  -0.030   0.250  0.0123 1.3e-04    17.2    1,234    0:03",
        "step held-out acc    loss  reward      KL      lr  length tokens/s    left",
        " 3/4        0.500  -0.030   0.250  0.0123 1.3e-04    17.2    1,234    0:01",
    ]


@pytest.mark.parametrize(("found", "title"), [({"acc": 0.5, "reward": 0.4}, "acc"), ({"reward": 0.4}, "reward")])
def test_an_evaluation_without_accuracy_shows_its_reward(found, title):
    progress, file, _ = plain(4)
    progress.update(0, {f"val-core/geo/{name}/mean@1": value for name, value in found.items()})
    header, row = file.getvalue().splitlines()
    assert header == f"step held-out {title}    left"
    assert row.split() == ["0/4", f"{found[title]:.3f}"]


def test_the_evaluation_before_the_first_step_does_not_enter_the_pace():
    progress, file, clock = plain(11, interval=0.0)
    progress.update(0, {"val/loss": 4.0})
    clock.now = 50.0
    with progress:
        clock.now += 10.0
        progress.update(1, {})
    assert file.getvalue().splitlines() == [
        " step held-out loss    left",
        " 0/11         4.000",
        " 1/11                  1:40",
    ]


def test_a_mean_says_of_how_many_it_is_and_named_metrics_have_columns():
    progress, file, _ = plain(4, further=("reward/near", "reward/far"))
    sets = {"val-core/easy/acc/mean@1": 1.0, "val-core/hard/acc/mean@1": 0.5}
    with progress:
        progress.update(1, {"reward/near": 0.25} | sets)
        progress.update(4, {"reward/near": 0.5})
    assert file.getvalue().splitlines() == [
        "step held-out acc (mean of 2) reward/near    left",
        " 1/4                    0.750       0.250    0:00",
        "console-columns: the steps measure no reward/far, but reward/near, val-core/easy/acc/mean@1, "
        "val-core/hard/acc/mean@1",
        " 4/4                                0.500",
    ]


def test_the_header_comes_again():
    table = StepTable(100, repeat=3)
    heights = [len(table.lines(step, METRICS)) for step in range(1, 9)]
    assert heights == [2, 1, 1, 2, 1, 1, 2, 1]


def test_a_slow_first_step_is_left_out_of_the_pace():
    progress, file, clock = plain(11, interval=0.0)
    with progress:
        for seconds in (100.0, 1.0, 1.0):
            clock.now += seconds
            progress.update(round(clock.now) - 99, {})
    assert [line.split()[-1] for line in file.getvalue().splitlines()] == ["left", "16:40", "0:09", "0:08"]


def test_a_resumed_run_counts_its_own_steps_only():
    progress, file, clock = plain(100, done=90)
    with progress:
        clock.now += 2.0
        progress.update(91, {})
    assert file.getvalue().splitlines() == ["   step    left", " 91/100    0:18"]


def test_numbers_that_are_missing_or_not_finite_are_left_out():
    progress, file, _ = plain(1)
    with progress:
        progress.update(1, {"critic/score/mean": math.nan})
    assert file.getvalue().splitlines() == ["step    left", " 1/1"]


def test_notes_are_printed_as_they_are():
    progress, file, _ = plain(1)
    with progress:
        progress.note("[red]reward.py:f[/red] " + "x" * 80)
    assert file.getvalue() == "[red]reward.py:f[/red] " + "x" * 80 + "\n"


def test_a_terminal_gets_the_rows_and_one_bar():
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True)
    with Progress(3, console=console) as progress:
        progress.note("before")
        for step in (1, 2, 3):
            progress.update(step, METRICS)
    shown = file.getvalue()
    assert "before" in shown
    assert "step 3/3" in shown
    assert " 3/3  -0.030   0.250  0.0123 1.3e-04    17.2    1,234" in shown
    assert "\x1b[" in shown


def test_what_libraries_warn_of_is_in_a_file_and_their_errors_on_the_console(tmp_path, capsys):
    library, handler = logging.getLogger("some.library"), logging.StreamHandler(sys.stderr)
    library.addHandler(handler)
    with warnings.catch_warnings(), libraries_aside(tmp_path / "libraries.log"):
        warnings.simplefilter("always")
        library.warning("slow path")
        warnings.warn("old argument", FutureWarning, stacklevel=1)
        library.error("broken")
    library.warning("again")
    library.removeHandler(handler)
    said, kept = capsys.readouterr().err, (tmp_path / "libraries.log").read_text()
    assert said.splitlines() == ["broken", "again"]
    assert "some.library: slow path" in kept
    assert kept.count("FutureWarning: old argument") == 1


def test_a_phase_is_named_before_it_ends_and_timed_after():
    file, clock = io.StringIO(), Clock()
    with start_phase("starting [vllm]", Console(file=file, width=60, force_terminal=False), clock):
        assert file.getvalue() == "starting [vllm] ...\n"
        clock.now = 61.26
    assert file.getvalue() == "starting [vllm] ...\nstarting [vllm]: 61.3 s\n"


def test_a_phase_on_a_terminal_leaves_one_line():
    file = io.StringIO()
    with start_phase("reading data", Console(file=file, width=60, force_terminal=True), Clock()):
        pass
    assert file.getvalue().splitlines()[-1].endswith("reading data: 0.0 s")
