import json
import math
import os
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dataproto.errors import FileFormatError
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.report import environment, held_out_accuracy, write_report
from recipes.watch.rollout_files import RolloutSample, save_rollouts

ACCURACY = "val-core/synthetic/angles/acc/mean@1"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags do not nest."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag, kind=None):
        return [
            got for name, got in self.tags if name == tag and (kind is None or kind in got.get("class", "").split())
        ]


def sample(key, step, right, **changes):
    fields = {
        "prompt": f"Find {key}.",
        "response": f"{key} at {step}",
        "ground_truth": "30",
        "reward": 0.1 + 0.9 * right,
        "accuracy": float(right),
    }
    picture = (Image.new("RGB", (20, 20), "white"),)
    return RolloutSample(key=key, **({"images": picture} | fields | changes))


def make_run(folder, steps=3):
    with MetricsLog(folder) as log:
        for step in range(steps):
            log.log(
                step,
                {
                    "critic/score/mean": 0.1 * step,
                    "timing_s/step": 2.0,
                    "timing_s/gen": 1.0,
                    ACCURACY: 0.25 + 0.1 * step,
                },
            )
    return folder


def page_of(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    return Page(text), text


def test_a_whole_run(tmp_path):
    run = make_run(tmp_path / "my run")
    save_rollouts(run, 0, [sample("a", 0, False), sample("b", 0, True), sample("c", 0, True)])
    save_rollouts(run, 1, [sample("a", 1, False)])
    save_rollouts(run, 2, [sample("b", 2, False), sample("a", 2, True), sample("c", 2, True)])
    (run / "config.json").write_text(json.dumps({"algorithm": {"clip": [0.2, 0.28]}, "model_path": None}))
    (run / "environment.json").write_text(json.dumps({"torch": "9.9.9"}))
    page, text = page_of(run)
    shown = "".join(page.text)
    assert "<title>my run</title>" in text
    assert "25.0% → 45.0% +20.0" in shown
    assert "0.00 → 0.20" in shown
    assert "0:06 2.00 s each" in shown
    assert len(page.all("svg")) == 3  # accuracy, reward, time
    assert len(page.all("article")) == 3
    assert (len(page.all("span", "good")), len(page.all("span", "bad"))) == (4, 2)
    assert shown.index("a at 0") < shown.index("a at 2") < shown.index("b at 0") < shown.index("b at 2")
    assert "a at 1" not in shown  # neither the first evaluation nor the last
    assert "1 went from wrong to right and 1 from right to wrong" in shown
    assert len(page.all("img")) == 3
    assert "algorithm.clip" in shown
    assert "[0.2, 0.28]" in shown
    assert "9.9.9" in shown
    assert ACCURACY in shown


def test_each_number_of_a_reward_has_a_chart_in_training_and_of_each_held_out_set(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(3):
            parts = {f"reward/{name}": 0.1 for name in ("near", "short", "equal_groups_ratio")}
            held_out = {f"val-aux/{name}/near/mean@1": 0.2 for name in ("easy", "hard")}
            log.log(step, parts | held_out)
    page, _ = page_of(tmp_path)
    assert [svg["aria-label"] for svg in page.all("svg")] == ["Reward: near", "Reward: short"]
    shown = "".join(page.text)
    assert shown.index("Reward: near") < shown.index("easy") < shown.index("hard") < shown.index("Reward: short")


def test_controls_engine_staleness_and_ends_of_episodes_have_charts(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 4):
            metrics = {"training/staleness/mean": 0.5, "training/staleness/max": 1.0, "episode/turns/mean": 2.0 + step}
            metrics |= {f"training/rollout_probs_diff_log_{name}": 0.01 * step for name in ("mean", "p99", "max")}
            metrics |= {"episode/ended/done": 0.75, "episode/ended/turns": 0.25}
            log.log(step, metrics | {"val-aux/walk_other_pictures/acc/mean@1": 0.125})
    page, _ = page_of(tmp_path)
    assert len(page.all("svg")) == 5
    shown = "".join(page.text)
    assert "walk_other_pictures 12.5%" in shown
    assert "mean 0.03" in shown
    assert "largest 1" in shown
    assert "done 75.0%" in shown


def test_the_page_is_self_contained(tmp_path):
    run = make_run(tmp_path)
    save_rollouts(run, 0, [sample("a", 0, True)])
    page, text = page_of(run)
    assert not page.all("script")
    assert not page.all("link")
    for _, attributes in page.tags:
        assert attributes.keys().isdisjoint({"href", "srcset", "onload", "onerror"})
        assert attributes.get("src", "data:image/png").startswith("data:image/png")
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


HOSTILE = "</pre></style><script>alert(1)</script><img src=x onerror=alert(1)> & \"' $title ${body} \x00\x1b[31m\ud800"


def test_text_of_models_and_data_is_escaped(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {f"val-core/{HOSTILE}/acc/mean@1": 0.5, HOSTILE: 1.0, "timing_s/<b>": 1.0})
    fields = dict.fromkeys(("prompt", "response", "ground_truth"), HOSTILE)
    save_rollouts(tmp_path, 0, [sample(HOSTILE, 0, True, **fields)])
    (tmp_path / "config.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    page, text = page_of(tmp_path)
    assert not page.all("script")
    assert "&lt;b&gt;" in text
    assert "<b><" not in text
    assert len(page.all("img")) == 1
    shown = "".join(page.text)
    assert shown.count("<script>alert(1)</script>") >= 7
    assert "$title ${body}" in shown
    assert "\x00" not in text
    assert "\x1b" not in text


def test_long_text_is_cut_and_says_so(tmp_path):
    save_rollouts(tmp_path, 0, [sample("a", 0, True, response="x" * 10_000)])
    _, text = page_of(tmp_path)
    assert "x" * 4000 in text
    assert "x" * 4001 not in text
    assert "6,000 more characters" in text


@pytest.mark.parametrize("steps", [0, 1])
def test_runs_that_have_hardly_begun(tmp_path, steps):
    page, _ = page_of(make_run(tmp_path, steps))
    assert ("No step has been recorded yet." in "".join(page.text)) == (steps == 0)
    assert len(page.all("svg")) == 3 * steps


def test_an_empty_directory_and_a_directory_that_is_not_there(tmp_path):
    page, _ = page_of(tmp_path)
    assert "No step has been recorded yet." in "".join(page.text)
    with pytest.raises(FileFormatError, match="not the directory of a run"):
        write_report(tmp_path / "absent")


def test_metrics_that_come_and_go_or_are_never_finite(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"critic/score/mean": math.nan, "actor/entropy": math.nan})
        log.log(1, {"critic/score/mean": 0.5})
        log.log(2, {"response_length/mean": math.inf, "actor/grad_norm": 3.0})
    page, _ = page_of(tmp_path)
    assert [got["aria-label"] for got in page.all("svg")] == ["Reward", "Gradient norm"]


def test_episodes_are_strips_of_pictures(tmp_path):
    pictures = tuple(Image.new("RGB", (20, 20), colour) for colour in ("red", "green"))
    for step, actions in ((0, ["left", "<up>"]), (4, ["right"])):  # at step 4 a turn shows two pictures
        save_rollouts(tmp_path, step, [sample("a", step, step > 0, images=pictures, actions=actions)])
    page, text = page_of(tmp_path)
    assert len(page.all("div", "strip")) == 2
    assert len(page.all("figure")) == 3
    assert len(page.all("img")) == 4  # none next to the question
    assert "".join(page.text).count("<up>") == 1
    assert "<up>" not in text


def test_one_evaluation_has_no_before_and_after(tmp_path):
    save_rollouts(tmp_path, 4, [sample("a", 4, True), sample("b", 4, False, accuracy=None, response="")])
    page, _ = page_of(tmp_path)
    shown = "".join(page.text)
    assert "Before" not in shown
    assert "answered at step 4" in shown
    assert "(empty)" in shown
    assert len(page.all("span", "good")) + len(page.all("span", "bad")) == 1  # no verdict where there is none to give


def test_held_out_accuracy_is_the_first_and_the_last_evaluation(tmp_path):
    rows = [{"step": 0, ACCURACY: 0.2, "val-core/b/acc/mean@4": 0.5}, {"step": 1}, {"step": 2, ACCURACY: 0.6}]
    assert held_out_accuracy(rows) == {"synthetic/angles": (0.2, 0.6), "b": (0.5, 0.5)}


def test_a_report_can_be_written_again_and_damage_is_told(tmp_path):
    run = make_run(tmp_path)
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    (run / "config.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"config.json: not JSON"):
        write_report(run)
    assert (run / "report.html").read_bytes() == first


def test_environment_names_versions_only():
    found = environment()
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "numpy"} <= found.keys()
    assert not any(os.sep in value for value in found.values())


@pytest.mark.slow
def test_pictures_for_the_readme(tmp_path, monkeypatch):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "readme_pictures.py"))
    run = make_run(tmp_path)

    def draw(*arguments):
        monkeypatch.setattr(sys, "argv", ["readme_pictures.py", *map(str, arguments)])
        script["main"]()

    save_rollouts(run, 0, [sample(key, 0, False, prompt="cost $5 and $x^{$ \\boxed{", response="") for key in "abc"])
    save_rollouts(run, 2, [sample("b", 9, True)])
    draw(run, "--folder", tmp_path)
    with Image.open(tmp_path / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(image.width * image.height)}
    assert {(0x2F, 0x6F, 0xDE), (0xE0, 0x76, 0x2F)} <= colours  # both lines are there
    with Image.open(tmp_path / "rollouts.png") as image:
        assert len(image.convert("RGB").getcolors(image.width * image.height)) > 2  # not a white page
    draw(run, run, "--curves", tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1000
