"""The memory of a vLLM engine on CUDA, whose calls are counted here: vLLM cannot sleep on a CPU."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapters"])
def test_garbage_is_looked_for_in_what_came_after_the_first_step_of_training(monkeypatch, adapter):
    from rollout.vllm.memory import EngineMemory

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 34))
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(slept)))
    slept = []

    def answered(method, args=(), kwargs=None):
        slept.extend([method] if method == "sleep" else [])
        return [[]] if getattr(method, "__name__", "") == "load_parameters" else [{}]

    memory = EngineMemory(SimpleNamespace(collective_rpc=answered), torch.device("cuda"), sleep_level=1)
    memory.sleep()  # after the start
    for step, new_weights in enumerate(
        (True, False, True, True)
    ):  # rollouts; the second one with the first weights again
        memory.wake()
        if new_weights and (not adapter or step == 0):
            memory.load([])
        if new_weights and adapter:
            memory.load_adapter([])
        memory.wake_kv_cache()
        memory.sleep()

    assert len(slept) == 5
    assert frozen == [4]


@pytest.mark.parametrize(("free", "emptied"), [(3, 1), (5, 0)])
def test_memory_for_an_engine_that_sleeps_is_freed_while_the_process_waits(monkeypatch, free, emptied):
    """The sleep frees 4 GiB; of them ``free`` are left once a model has trained."""
    from rollout.vllm.engine import VLLMEngine
    from rollout.vllm.memory import EngineMemory
    from workers.roles.sharding_manager import ShardingManager

    gib, calls, left = 1 << 30, [], [1]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device=None: (calls.append(device), (left[-1] * gib, 9 * gib))[1]
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))

    def answered(method, args=(), kwargs=None):
        left.extend([5] if method == "sleep" else [])
        return [{}]

    engine = object.__new__(VLLMEngine)
    engine.memory = EngineMemory(SimpleNamespace(collective_rpc=answered), torch.device("cuda"), sleep_level=1)
    shared, alone = (ShardingManager(engine, list, shares_device=shares) for shares in (True, False))
    shared.mark_stale()  # before the first sleep
    engine.memory.sleep()
    left.append(free)
    calls.clear()
    alone.mark_stale()
    assert calls == []
    shared.mark_stale()
    for thread in threading.enumerate():
        if thread.name == "make room":
            thread.join()
    assert calls == [7, *["emptied"] * emptied]
