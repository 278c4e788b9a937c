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
from recipes.data.loader import PromptLoader
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import make_tiny_model
from recipes.forecast import DEVICES, BatchSizes, PromptSizes, Setting, cpu_speed, forecast, forecast_lines, this_cpu
from recipes.forecast.calibration import cpu_memory
from recipes.forecast.cpu_speed import KEPT
from recipes.run.run_forecast import RunForecast, check_fits
from recipes.simulation import published_config
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


def on_80_gb(**options):
    """3B with AdamW, its reference and vLLM, in the settings that end in the second step."""
    batch = BatchSizes(published_config("3b"), PromptSizes((361,) * 8, ((),) * 8), (512,) * 40, 5)
    compute = ModelConfig(token_budget=8192, activation_checkpointing="selective", compile=True)
    given = {"compute": compute, "engine": "vllm", "engine_options": {"memory_share": 0.3}, "reference": True}
    return Setting(batch.config, batch, DEVICES["h100"], **given | options)


@pytest.mark.slow
def test_a_run_that_cannot_hold_ends_before_it_loads_anything():
    """The message has the phase, what it needs and what there is, and options with which it fits."""
    with pytest.raises(InvalidConfig, match=r"update_actor needs 9.* GiB of the 79.6 GiB of h100") as refused:
        RunForecast(on_80_gb).begin()
    assert "--offload-idle" in str(refused.value)
    way_out, memory = re.search(r": (--token-budget .*) takes ([\d.]+) GiB", str(refused.value)).groups()
    budget, mode, share = re.search(r"budget (\d+) --\S+ (\w+) .*memory_share ([\d.]+)", way_out).groups()
    compute = ModelConfig(
        token_budget=int(budget), activation_checkpointing=mode, compile=True, offload_idle="--offload-idle" in way_out
    )
    found = forecast(on_80_gb(compute=compute, engine_options={"memory_share": float(share)}))
    assert found.fits
    assert found.memory / 2**30 == pytest.approx(float(memory), abs=0.1)
    RunForecast(on_80_gb, here=False).begin()  # a cluster may have other devices


@pytest.mark.slow
def test_adapters_are_the_way_out_where_weights_do_not_fit():
    small = replace(DEVICES["h100"], memory=40 * 2**30)
    with pytest.raises(InvalidConfig, match="GiB of h100 from the second step on: --lora-rank 32 --token-budget"):
        check_fits(forecast(replace(on_80_gb(), device=small)))


@pytest.mark.slow
def test_a_forecast_within_its_error_warns(capsys):
    found = forecast(on_80_gb())
    for share, warns in ((0.92, True), (1.0, False)):
        device = replace(found.setting.device, memory=round(share * found.memory))
        check_fits(replace(found, setting=replace(found.setting, device=device)))
        said = capsys.readouterr().out
        assert ("warning: update_actor needs" in said) == warns
        assert ("wrong by 10%" in said) == warns


def test_too_little_host_memory_is_told(capsys, monkeypatch):
    found = forecast(on_80_gb(compute=ModelConfig(token_budget=4096, compile=True, offload_idle=True)))
    for host, told in ((32, "warning: 1 x 53 GiB of host memory are needed of 32 GiB\n"), (64, "")):
        monkeypatch.setattr("recipes.run.run_forecast.cpu_memory", lambda host=host: host * 2**30)
        check_fits(found)
        assert capsys.readouterr().out == told


def test_generation_beside_the_resting_trainer_is_refused_too():
    """The update fits, the engine next to weights and moments does not."""
    idle = ModelConfig(token_budget=2048, activation_checkpointing="full", compile=True)
    setting = on_80_gb(compute=idle, engine_options={"memory_share": 0.5})
    with pytest.raises(InvalidConfig, match=r"^gen needs"):
        check_fits(forecast(setting))


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
