"""The host's part of vLLM's decoding: seconds worked by hand, this host beside the reference, and what plans say of it."""

import platform
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import host_speed
from benchmarks.workload import model_config
from helpers.tiny_models import tiny_config
from recipes.forecast import DEVICES, BatchSizes, PromptSizes, Setting, forecast, forecast_lines, this_gpu
from recipes.forecast import host_pace as module
from recipes.forecast.calibration import with_host
from recipes.forecast.host_pace import (
    REFERENCE,
    REQUEST,
    ROW,
    STEP,
    decoding_step,
    host_pace,
    python_work,
    work_seconds,
)
from recipes.forecast.model_size import model_size
from recipes.forecast.step_time import decoding_seconds, engine_of
from workers.model.model_config import ModelConfig

H200 = DEVICES["h200"]


@pytest.fixture
def setting():
    """Two rows run for two steps, then one for a third; the device has hardly anything to do."""
    batch = BatchSizes(tiny_config("qwen2_5_vl"), PromptSizes((10, 10), ((), ())), (3, 2))
    return Setting(batch.config, batch, H200, engine="vllm")


def generation(setting):
    return forecast(setting).phases[0].seconds


def test_a_host_that_is_slower_than_the_device_decides(setting):
    host = 2 * REQUEST + 3 * STEP
    assert generation(setting) == pytest.approx(host, rel=1e-2)
    for pace in (0.5, 2.0):
        assert generation(replace(setting, device=replace(H200, host=pace))) == pytest.approx(pace * host, rel=1e-2)


def test_a_device_that_is_slower_than_the_host_decides(setting):
    """The host of a step prepares it while the device computes the one before, so only its seconds for the requests are added."""
    slow = replace(H200, bandwidth=1e6)
    assert generation(replace(setting, device=slow)) > 10 * generation(setting)
    fast_host, slow_host = (generation(replace(setting, device=replace(slow, host=pace))) for pace in (0.1, 1.0))
    assert slow_host - fast_host == pytest.approx(0.9 * 2 * REQUEST)


def test_320_rows_of_7b_take_what_benchmarks_results_reports():
    """On a host of pace 0.82, busy for 8.8 of the 13.3 ms of a step; rows have 361 tokens and half of 512 in the mean."""
    assert decoding_step(320, pace=0.82) == pytest.approx(8.8e-3, rel=0.02)
    config = model_config("7b")
    batch = BatchSizes(config, PromptSizes((361,) * 320, ((),) * 320), (512,) * 320)
    device = replace(H200, host=0.82)
    engine = engine_of(config, model_size(config, ModelConfig()), "vllm", {"max_num_seqs": 320}, device)
    assert decoding_seconds(batch, [320] * 512, engine, device) / 512 == pytest.approx(13.3e-3, rel=0.05)


def test_few_rows_and_640_take_what_benchmarks_results_reports():
    """6.6 ms of a step with 58 rows in the mean, on a host of pace 0.75; 17 to 18 ms with 640 on one of 0.79."""
    assert decoding_step(58, pace=0.75) == pytest.approx(6.6e-3, rel=0.05)
    assert decoding_step(640, pace=0.79) == pytest.approx(17.5e-3, rel=0.05)


def test_the_engine_of_hugging_face_has_its_launches_instead(setting):
    assert generation(replace(setting, engine="hf", device=replace(H200, host=100.0))) == generation(
        replace(setting, engine="hf")
    )


def test_the_pace_is_that_of_the_fastest_of_some_times(monkeypatch):
    """Of intervals of 3, 1, 2, 3, 1, ... seconds between the calls of a clock, each second one is timed."""
    clock = accumulate(cycle((3.0, 1.0, 2.0)))
    assert work_seconds(lambda: next(clock)) == 1.0
    calls = []
    monkeypatch.setattr(module, "work_seconds", lambda: calls.append(1) or 3 * REFERENCE)
    host_pace.cache_clear()
    try:
        assert [host_pace(), host_pace()] == pytest.approx([3.0, 3.0])
        assert len(calls) == 1  # once a process
    finally:
        host_pace.cache_clear()


def test_the_work_grows_with_rows_and_steps_and_takes_well_under_a_second():
    assert python_work(5, 7) == 35
    few, many = (min(_timed(rows) for _ in range(3)) for rows in (32, 320))
    assert many > 3 * few
    assert work_seconds() < 0.5


def _timed(rows):
    start = time.thread_time()
    python_work(rows, 20)
    return time.thread_time() - start


@pytest.mark.parametrize(
    ("title", "name", "measured"),
    [("NVIDIA H200", "h200", True), ("NVIDIA H200", "h100", False), (None, "h200", False)],
)
def test_a_named_device_has_this_host_if_the_machine_has_such_a_gpu(monkeypatch, title, name, measured):
    monkeypatch.setattr("recipes.forecast.calibration.host_pace", lambda: 0.7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: title is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: title)
    assert with_host(DEVICES[name]).host == (0.7 if measured else None)


def test_the_gpu_of_this_machine_has_its_host(monkeypatch):
    monkeypatch.setattr("recipes.forecast.calibration.host_pace", lambda: 0.7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=5))
    found = this_gpu()
    assert (found.name, found.memory, found.host, found.bandwidth) == ("nvidia h200", 5, 0.7, H200.bandwidth)


def test_the_table_says_whose_host_was_forecast(setting):
    def told(**changes):
        return [line for line in forecast_lines(forecast(replace(setting, **changes))) if line.startswith("host of")]

    assert told() == ["host of vLLM: the reference one, as no such GPU is here; others took 0.4 to 1.5 of its time"]
    (measured,) = told(device=replace(H200, host=0.5))
    assert "this one, which takes 0.50 of the time of the reference one (measured)" in measured
    assert told(engine="hf") == []


@pytest.mark.parametrize(("told", "name"), [("a processor", "a processor"), ("", platform.machine())])
def test_the_processor_has_a_name_without_linux(tmp_path, monkeypatch, told, name):
    monkeypatch.setattr(platform, "processor", lambda: told)
    assert host_speed.processor(tmp_path / "cpuinfo") == name


def test_the_benchmark_needs_nothing_but_numpy(tmp_path):
    """It prints the calibration and what follows from it; a torch that cannot be imported is not missed."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    program = Path(host_speed.__file__)
    ended = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("calibration: ")
    names = {"work_seconds": lambda: 2 * REFERENCE, "REFERENCE": REFERENCE, "decoding_step": decoding_step}
    found = host_speed.lines(names, rounds=3)
    assert found[1].startswith("pace: 2.00 of the time of the reference host")
    assert found[-1] == f"host of a decoding step with 640 rows: {2e3 * 640 * ROW:.2f} ms forecast"
