"""The forecast that a run prints first and compares at its end, and what happens where there is none."""

import re
from dataclasses import replace

import pytest

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import tiny_config
from recipes import classify, grpo, ppo, sft
from recipes.forecast import (
    DEVICES,
    BatchSizes,
    PromptSizes,
    Setting,
    cpu_from_step,
    forecast,
    forecast_lines,
    keep_cpu,
    known_cpu,
    unknown_cpu,
)
from recipes.run.carried_rollouts import LookAhead
from recipes.run.run_forecast import RunForecast
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout

CONFIG = tiny_config("qwen2_5_vl")


class Numbers:
    """A loader of numbers, some of which cannot be read."""

    skipped: dict[int, str] = {}

    def __init__(self, bad=()):
        self.bad, self.place = bad, 0

    def __next__(self):
        self.place += 1
        if self.place - 1 in self.bad:
            raise InvalidConfig(f"row {self.place - 1} has no picture")
        return self.place - 1

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def setting(batch, device):
    return Setting(CONFIG, BatchSizes(CONFIG, PromptSizes((5, 7), ((), ())), (3, 3)), device, steps=10)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


STEP = {"timing_s/gen": 0.9, "timing_s/update_actor": 2.0, "timing_s/step": 3.0, "perf/total_num_tokens": 18}


def test_the_second_step_tells_the_speed_of_a_cpu_and_the_next_run_knows_it(capsys):
    first = RunForecast(LookAhead(Numbers()), setting, CONFIG)
    first.begin()
    first.begin()  # prints once
    assert capsys.readouterr().out.count("run: 10 steps (time: a step on this CPU will tell)") == 1
    assert first.observe({}) == []
    assert first.observe(STEP) == ["forecast from this step: 2.9 s a step, 10 steps in 29 s"]
    assert first.observe(STEP) == []
    rows = [{"step": number, **STEP} for number in (1, 2, 3)]
    named = {name: (float(expected), float(fact)) for name, expected, fact in first.compared(rows)}
    assert named["seconds of update_actor"] == pytest.approx((2.0, 2.0), rel=1e-3)
    assert named["seconds of gen"] == pytest.approx((0.9, 0.9), rel=1e-2)
    assert named["tokens of a step"] == (18, 18)
    assert named["process memory, GiB"][0] > 0.1
    second = RunForecast(LookAhead(Numbers()), setting, CONFIG)
    second.begin()
    assert "run: 10 steps in 29 s" in capsys.readouterr().out
    assert second.found.setting.device == known_cpu(CONFIG)
    assert second.observe(STEP) == second.observe(STEP) == []
    slower = STEP | {"timing_s/update_actor": 4.0}
    second.compared([{"step": 0}, *({"step": number, **slower} for number in (1, 2, 3))])
    assert known_cpu(CONFIG).language == pytest.approx(
        second.found.setting.device.language / 2
    )  # the median of all steps


def test_what_stays_unsharded_is_chosen_where_a_gpu_is_known(monkeypatch):
    """The option that a user sets stays; so does an open one on a CPU, alone, and without a forecast."""
    found = RunForecast(LookAhead(Numbers()), on_two, CONFIG)
    open_, two = ModelConfig(), Layout(dp=2)
    assert found.resolved(open_, two) == open_
    assert found.found is None  # nothing was drawn for it
    monkeypatch.setattr(RunForecast, "_device", lambda self: DEVICES["h200"])
    assert found.resolved(open_, two).unsharded == "gradients"
    assert found.resolved(open_, Layout(tp=2)) == open_
    assert found.resolved(ModelConfig(unsharded="weights"), two).unsharded == "weights"
    assert found.loader.state_dict() == {"place": 0}
    broken = RunForecast(LookAhead(Numbers(bad=[0])), on_two, CONFIG)
    assert broken.resolved(open_, two) == open_


def on_two(batch, device):
    return replace(setting(batch, device), layout=Layout(dp=2), engine=None)


def test_the_position_of_the_loader_stays():
    numbers = Numbers()
    ahead = LookAhead(numbers)
    RunForecast(ahead, setting, CONFIG).begin()
    assert ahead.state_dict() == {"place": 0}
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]


def test_a_forecast_that_fails_is_one_line(capsys):
    ahead = LookAhead(Numbers(bad={0}))
    broken = RunForecast(ahead, setting, CONFIG)
    broken.begin()
    broken.begin()
    assert capsys.readouterr().out == "no forecast: InvalidConfig: row 0 has no picture\n"
    assert broken.observe(STEP) == broken.observe(STEP) == broken.compared([{"step": 1, **STEP}]) == []
    with pytest.raises(InvalidConfig, match="row 0"):  # the run meets the row itself
        next(ahead)
    assert next(ahead) == 1
    nonsense = RunForecast(LookAhead(Numbers()), lambda batch, device: 1 // 0, CONFIG)
    nonsense.begin()
    assert "no forecast: ZeroDivisionError" in capsys.readouterr().out


def test_a_step_that_computes_nothing_and_a_damaged_file_tell_no_speed(tmp_path):
    found = forecast(setting(None, unknown_cpu()))
    assert cpu_from_step(found, {"timing_s/gen": 1.0}) is None
    assert "?" in forecast_lines(found)[-2]
    device = cpu_from_step(found, STEP)
    keep_cpu(device, CONFIG)
    assert known_cpu(CONFIG) == replace(device, memory=known_cpu(CONFIG).memory)
    (file,) = (tmp_path / "cache" / "dataproto" / "cpu_speed").iterdir()
    file.write_text("{")
    assert known_cpu(CONFIG) is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [grpo, ppo, sft, classify], ids=lambda recipe: recipe.__name__)
def test_a_run_prints_its_forecast_first_and_forecast_beside_fact_last(recipe, tmp_path, capsys):
    given = (
        "--preset tiny --steps 3 --batch-size 4 --eval-rows 4 --eval-first false --max-response-length 4 --save-every 0"
        f" --model-path {write_checkpoint('qwen2_5_vl', tmp_path / 'model')} --output-dir {tmp_path / 'run'}"
    )
    rows = " --max-prompt-length 500 --algorithm.n 2" if recipe in (grpo, ppo) else " --max-length 600"
    assert recipe.main((given + rows).split()) == 0
    printed = capsys.readouterr().out
    places = [
        printed.find(text) for text in ("forecast: 1 x ", "loading the actor", "forecast from this step", "forecast ")
    ]
    assert -1 not in places
    assert places[0] < places[1] < places[2]
    (forecast_of, fact) = re.search(r"seconds of step +([\d.e+-]+) +([\d.e+-]+)", printed).groups()
    assert 0 < float(forecast_of) < 100 * float(fact)
    assert "process memory, GiB" in printed
