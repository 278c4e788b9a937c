"""Forecasts beside what processes on this machine take: memory within 10 %, CPU time within 20 %."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def beside_measured(mode: str, budget: int) -> dict[str, float]:
    """In a process of its own: forecast and fact of an update of a model of 50 M parameters."""
    import torch
    import transformers

    from benchmarks.forecasts import batch_sizes
    from benchmarks.workload import Shape, make_batch, model_config
    from recipes.algorithms.losses import clipped_policy_loss
    from recipes.forecast import Setting, calibrate_cpu, forecast
    from workers.model.model_config import ModelConfig
    from workers.roles.actor import ActorConfig, ActorWorker

    torch.set_num_threads(1)
    config = model_config("tiny")
    config.text_config.update(
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "layer_types": ["full_attention"] * 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 12_288,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        }
    )
    config.vision_config.update({"hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "out_hidden_size": 512})
    shape = Shape(text=(20, 60), images=(1, 1), side=(4, 8), response=(60, 200), typical_response=120, total=700)
    data = make_batch(config, shape, prompts=8, samples=1, seed=1)
    compute = ModelConfig(token_budget=budget, activation_checkpointing=mode)
    batch = batch_sizes(data, config, 1)
    device = calibrate_cpu(batch, time.process_time)
    expected = forecast(Setting(config, batch, device, compute, engine=None, variation=0)).phases[-1]

    def policy_loss(outputs, rows):
        return clipped_policy_loss(outputs.log_probs, rows["old_log_probs"], rows["advantages"])

    before = resident("VmRSS")
    with tempfile.TemporaryDirectory() as path:
        transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(path)
        actor = ActorWorker(ActorConfig(path, **vars(compute)), torch.device("cpu"))
    actor.update(data, policy_loss)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = time.process_time()
    actor.update(data, policy_loss)
    seconds = time.process_time() - start
    peak = resident("VmHWM") - before
    return {"memory": expected.memory / peak, "seconds": expected.seconds / seconds, "peak_mib": peak / 2**20}


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.long
@pytest.mark.timeout(1800)  # CPU seconds count, so a busy machine may take its time
@pytest.mark.parametrize(("mode", "budget"), [("none", 16_384), ("none", 700), ("selective", 16_384), ("full", 16_384)])
def test_an_update_takes_what_was_forecast(mode, budget):
    env = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",  # a freed tensor returns its memory
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, __file__, mode, str(budget)], env=env, capture_output=True, text=True, timeout=1750
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = json.loads(done.stdout.splitlines()[-1])
    print(mode, budget, ratios)
    assert 0.9 < ratios["memory"] < 1.1
    assert 0.8 < ratios["seconds"] < 1.2


if __name__ == "__main__":
    print(json.dumps(beside_measured(sys.argv[1], int(sys.argv[2]))))
