"""What each phase of a step takes, of a device that is stood in for."""

import pytest
import torch

from workers.training.memory import PhaseMemory

GIB = 2**30


@pytest.fixture
def counted(monkeypatch):
    """What a device of 140 GiB counts, in GiB."""
    found = {"peak": 0, "allocated": 80, "reserved": 80, "used": 20}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((140 - found["used"]) * GIB, 140 * GIB))
    for name, key in {
        "memory_reserved": "reserved",
        "memory_allocated": "allocated",
        "max_memory_allocated": "peak",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, key=key: found[key] * GIB)
    return found


def taken(memory):
    return {name.removeprefix("perf/memory_gb/"): value / GIB for name, value in memory.taken().items()}


def test_a_device_counts_an_engine_in_generation_alone(counted):
    """vLLM has 60 GiB in generation, which torch still counts while it sleeps; the actor has 20, and an update takes 50."""
    memory = PhaseMemory()
    for name, peak in {"gen": 80, "update_actor": 130}.items():
        with memory.phase(name):
            counted["peak"] = peak
    assert taken(memory) == {"gen": 80, "gen/left": 20, "update_actor": 70, "update_actor/left": 20}
    assert taken(memory) == {}


def test_a_phase_within_another_is_a_part_of_it_and_one_that_fails_counts(counted):
    memory = PhaseMemory()
    with memory.phase("gen"), memory.phase("inner"):
        counted["peak"] = 90
    with pytest.raises(ArithmeticError), memory.phase("gen"):
        counted["peak"] = 60
        raise ArithmeticError
    assert taken(memory) == {"gen": 90, "gen/left": 20}


def test_without_a_device_nothing_is_counted():
    memory = PhaseMemory()
    with memory.phase("gen"):
        pass
    assert taken(memory) == {}
