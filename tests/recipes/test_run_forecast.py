"""The forecast that a run prints first and compares at its end, and what happens where there is none."""

import os
import re
import threading
import time
from dataclasses import replace

import pytest

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import tiny_config
from recipes import classify, grpo, plan, ppo, sft
from recipes.data.drawn_rows import ProblemRows
from recipes.data.loader import PromptLoader
from recipes.forecast import DEVICES, BatchSizes, PromptSizes, Setting, cpu_speed, forecast, forecast_lines, this_cpu
from recipes.forecast.calibration import cpu_memory
from recipes.forecast.cpu_speed import KEPT
from recipes.run.run_forecast import RunForecast
from recipes.tiny import make_tiny_model
from rollout.prompts import PromptBuilder
from workers.model.model_config import ModelConfig

CONFIG = tiny_config("qwen2_5_vl")
H200 = DEVICES["h200"]
STEP = {"timing_s/update_actor": 2.0, "timing_s/step": 3.0, "perf/total_num_tokens": 18}


def setting(device=H200, **options):
    batch = BatchSizes(CONFIG, PromptSizes((5, 7), ((), ())), (3, 3))
    return Setting(CONFIG, batch, device, steps=10, **options)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_forecast_is_printed_and_compared(capsys):
    expected = RunForecast(setting)
    expected.begin()
    assert capsys.readouterr().out.splitlines() == forecast_lines(forecast(setting()))
    rows = [{"step": number, **STEP} for number in (0, 1, 2, 3)]
    named = {name: fact for name, _, fact in expected.compared(rows)}
    assert named == {"seconds of update_actor": "2", "seconds of step": "3", "tokens of a step": "18"}
    on_cpu = RunForecast(lambda: setting(replace(H200, on_cpu=True, context=2**30)))
    on_cpu.begin()
    name, memory, peak = on_cpu.compared(rows)[-1]
    assert name == "process memory, GiB"
    assert float(memory) >= 1
    assert float(peak) > 0.1
    spread = RunForecast(lambda: setting(replace(H200, on_cpu=True)), local=False)
    spread.begin()
    assert spread.compared(rows)[-1][0] == "tokens of a step"


def test_a_forecast_that_fails_is_one_line(capsys):
    def broken():
        raise InvalidConfig("row 0 has\nno picture")

    expected = RunForecast(broken)
    expected.begin()
    assert capsys.readouterr().out == "no forecast: InvalidConfig: row 0 has no picture\n"
    assert expected.compared([{"step": 1, **STEP}]) == []
    nonsense = RunForecast(lambda: 1 // 0)
    nonsense.begin()
    assert "no forecast: ZeroDivisionError" in capsys.readouterr().out


def test_the_speed_of_a_cpu_is_measured_once_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cpu_speed, "calibrate_cpu", lambda batch, clock, tokens, dtype: replace(H200, name="cpu", memory=cpu_memory())
    )
    builder = PromptBuilder.from_pretrained(make_tiny_model(tmp_path / "model"), 256)
    loader = PromptLoader(ProblemRows(), builder, batch_size=2, shuffle=False)
    batch = BatchSizes(builder.config, PromptSizes((5, 7), ((), ())), (3, 3))
    ticks = []

    def clock():
        ticks.append(None)
        return float(len(ticks))

    def measured(dtype="auto", **options):
        ticks.clear()
        found = this_cpu(
            batch,
            PromptLoader(loader.rows, builder, 2, shuffle=False, **options),
            ModelConfig(token_budget=100, dtype=dtype),
            clock,
        )
        return found, bool(ticks)

    device, fresh = measured()
    assert fresh
    assert device.overheads.preparation == 0.5  # one tick for both rows
    assert measured() == measured("float32") == (device, False)
    assert measured("bfloat16")[1]  # other products
    for file in (tmp_path / "cache" / "dataproto" / "cpu_speed").iterdir():
        file.write_text("{")
    assert measured()[1]
    for kept in file.parent.iterdir():
        os.utime(kept, (0, kept.stat().st_mtime - KEPT - 60))
    assert measured()[1]
    apart, _ = measured(num_workers=1)  # other processes prepare the rows
    assert apart.overheads.preparation == 0.0
    assert loader.state_dict()["drawn"] == 0


def test_seconds_in_which_other_processes_run_are_not_those_of_the_cpu(tmp_path, monkeypatch):
    """While the thread waits, as it does when others have the processor, the clock stands still."""
    waited = []

    def calibrate(batch, clock, tokens, dtype):
        start, begun = clock(), time.perf_counter()
        threading.Event().wait(0.25)
        waited.append((clock() - start, time.perf_counter() - begun))
        return replace(H200, name="cpu", memory=cpu_memory())

    monkeypatch.setattr(cpu_speed, "calibrate_cpu", calibrate)
    builder = PromptBuilder.from_pretrained(make_tiny_model(tmp_path / "model"), 256)
    batch = BatchSizes(builder.config, PromptSizes((5, 7), ((), ())), (3, 3))
    this_cpu(batch, PromptLoader(ProblemRows(), builder, batch_size=2, num_workers=1), ModelConfig(token_budget=100))
    ((counted, passed),) = waited
    assert counted < 0.1 < passed


RECIPES = {"grpo": grpo, "ppo": ppo, "sft": sft, "classify": classify}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_prints_what_plan_prints_and_forecast_beside_fact_last(recipe, tmp_path, capsys):
    """The run measures the CPU, and `plan`, later, prints the same numbers."""
    given = (
        "--preset tiny --steps 3 --batch-size 4 --eval-rows 4 --eval-first false --max-response-length 4 --save-every 0"
        f" --model-path {write_checkpoint('qwen2_5_vl', tmp_path / 'model')}"
    )
    rows = " --max-prompt-length 500 --algorithm.n 2" if recipe in ("grpo", "ppo") else " --max-length 600"
    assert RECIPES[recipe].main([*(given + rows).split(), "--output-dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert plan.main([recipe, "--device", "cpu", *(given + rows).split()]) == 0
    planned = capsys.readouterr().out
    assert planned.startswith("forecast: 1 x cpu")
    assert "\ndata " in planned
    assert planned in printed
    assert printed.index(planned) < printed.index("loading the actor")
    (expected, fact) = re.search(r"seconds of step +([\d.e+-]+) +([\d.e+-]+)", printed).groups()
    assert 0 < float(expected) < 100 * float(fact)
    assert "process memory, GiB" in printed
