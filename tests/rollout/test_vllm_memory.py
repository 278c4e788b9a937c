"""The memory of a vLLM engine on CUDA, whose calls are counted here: vLLM cannot sleep on a CPU."""

import gc
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
