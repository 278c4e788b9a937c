"""What each phase of a step takes, of a process and of a device that is stood in for."""

from mmap import mmap

import pytest
import torch

from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import tiny_config, tiny_model
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reference import reference_worker
from workers.training.memory import PHASES, PhaseMemory, resident_bytes

MIB = 2**20


def test_a_phase_on_a_cpu_has_the_peak_of_the_process_and_what_it_leaves():
    memory = PhaseMemory()
    with memory.phase("gen"), mmap(-1, 96 * MIB) as pages:  # malloc may give memory that the process has used before
        for _ in range(96):
            pages.write(bytes([1]) * MIB)
    with memory.phase("ref"), memory.phase("inner"):  # is part of the other
        pass
    found = memory.taken()
    assert [name for name in found if not name.endswith("/left")] == ["perf/memory_gb/gen", "perf/memory_gb/ref"]
    assert found["perf/memory_gb/gen"] > found["perf/memory_gb/gen/left"] + 64 * MIB
    assert found["perf/memory_gb/ref"] < found["perf/memory_gb/gen"] - 64 * MIB
    assert resident_bytes(peak=True) >= found["perf/memory_gb/gen"]  # counted before another phase began
    assert not memory.taken()


def test_a_phase_that_fails_is_counted_too():
    memory = PhaseMemory()
    with pytest.raises(ArithmeticError), memory.phase("gen"):
        raise ArithmeticError
    with memory.phase("gen"):
        pass
    assert "perf/memory_gb/gen" in memory.taken()


def test_a_device_counts_an_engine_in_generation_alone(monkeypatch):
    """vLLM takes 60 GiB in generation, which torch goes on counting while it sleeps; 20 are the actor's, and 50 an update's."""
    gib = 2**30
    counted = {"peak": 0, "allocated": 80, "reserved": 80, "used": 20}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((140 - counted["used"]) * gib, 140 * gib))
    for name, key in {
        "memory_reserved": "reserved",
        "memory_allocated": "allocated",
        "max_memory_allocated": "peak",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, key=key: counted[key] * gib)
    memory = PhaseMemory()
    for name, peak in {"gen": 80, "update_actor": 130}.items():
        with memory.phase(name):
            counted["peak"] = peak
    found = {name.removeprefix("perf/memory_gb/"): value / gib for name, value in memory.taken().items()}
    assert found == {"gen": 80, "gen/left": 20, "update_actor": 70, "update_actor/left": 20}


def test_an_update_reports_the_phases_since_the_last_one(tmp_path):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    config = tiny_config("qwen2_5_vl")
    data = with_responses(config, prompt_batch(config, [[(4, 6)], []], texts=[4, 5]), lengths=[2, 3], width=4)
    actor = ActorWorker(ActorConfig(str(tmp_path), lora_rank=2), torch.device("cpu"))
    reference = reference_worker(actor.config.frozen(), actor)
    PHASES.taken()
    phases = []
    for _ in range(2):
        actor.log_probs(data)
        reference.log_probs(data)
        metrics = actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
        phases.append({name.removeprefix("perf/memory_gb/") for name in metrics if name.startswith("perf/memory_gb/")})
    first = {"old_log_prob", "old_log_prob/left", "ref", "ref/left"}
    assert phases == [first, first | {"update_actor", "update_actor/left"}]
    assert 0.05 < metrics["perf/memory_gb/ref"] < 64  # GiB of this process
