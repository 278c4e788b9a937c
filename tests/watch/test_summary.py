import io
import json

from rich.console import Console

from recipes.watch.console import run_summary, show_summary
from recipes.watch.report import write_report


def rows():
    steps = [
        {"step": step, "critic/score/mean": step / 10, "response_length/mean": 20.0 - step} for step in range(1, 6)
    ]
    steps[-1]["val-core/geo/acc/mean@1"] = 0.75
    return [{"step": 0, "val-core/geo/acc/mean@1": 0.25}, *steps]


def test_before_and_after_by_hand():
    got = [(column.title, round(before, 6), round(after, 6)) for column, before, after in run_summary(rows())]
    # five steps: the means of the first two and of the last two
    assert got == [("held-out acc", 0.25, 0.75), ("reward", 0.15, 0.45), ("length", 18.5, 15.5)]


def test_what_was_measured_once_has_no_change():
    assert run_summary([{"step": 0, "val/loss": 4.0}, {"step": 1, "train/loss": 3.0}]) == []


def test_the_table_names_time_and_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "global_step_5").mkdir()
    file = io.StringIO()
    show_summary(tmp_path, 3661.0, Console(file=file, width=60, force_terminal=False))
    assert file.getvalue().splitlines() == [
        "",
        "                  before       after",
        "held-out acc       0.250       0.750",
        "reward             0.150       0.450",
        "length              18.5        15.5",
        "steps         5",
        "time          1:01:01",
        f"report        {tmp_path}/report.html",
        f"metrics       {tmp_path}/metrics.jsonl",
        f"checkpoint    {tmp_path}/global_step_5",
    ]


def test_what_a_step_took_and_why_nothing_is_learned_come_last(tmp_path):
    step = {"critic/score/max": 0.0, "critic/score/min": 0.0, "timing_s/step": 2.0, "timing_s/gen": 1.5}
    lines = [json.dumps({"step": number, "perf/memory_gb/gen": 3.0, **step}) + "\n" for number in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    file = io.StringIO()
    show_summary(tmp_path, 12.0, Console(file=file, force_terminal=False))
    *_, measured, warning = file.getvalue().splitlines()
    assert measured == "measured: a step takes 2 s (gen 1.5), at most 3.0 GiB of memory (gen)"
    assert warning.startswith("warning: every response of the last 5 steps has the reward 0")
    assert "has the reward 0" in write_report(tmp_path).read_text()


def test_a_run_without_metrics_has_no_table(tmp_path):
    file = io.StringIO()
    show_summary(tmp_path, 1.0, Console(file=file))
    assert file.getvalue() == ""
