"""Work and time against numbers worked by hand."""

import copy
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from dataproto import DataProto
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_model
from workers.model.lora import add_adapters
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training import accounting
from workers.training.accounting import Accounting, Figures, Work, joined_metrics, peak_flops, required_work
from workers.training.memory import DeviceMemory, real_peak
from workers.training.mini_batches import share_out

CPU = torch.device("cpu")
# The tiny decoder: 2 layers, hidden 64, MLP 96, 2 heads of 32 with 1 for keys and values, 256 words.
LAYER = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
HEAD = 64 * 256


@pytest.fixture(scope="module")
def module():
    model = tiny_model("qwen2_5_vl")
    return PackedVLM(model, family_of(model.config), 1.0)


def forward_flops(tokens, pairs, logits):
    return 2 * 2 * LAYER * tokens + 4 * 64 * 2 * pairs + 2 * HEAD * logits


def test_text_rows(module):
    prompts = prompt_batch(module.model.config, [[], []], texts=[5, 3])
    data = with_responses(module.model.config, prompts, lengths=[2, 4], width=4)
    work = required_work(module, data)
    pairs = 7 * 8 // 2 + 7 * 8 // 2  # rows of 7 tokens each, causal
    assert work == Work(vision=0, language=3 * forward_flops(14, pairs, logits=6), tokens=14)


def test_a_prompt_and_its_image_count_once(module):
    config = module.model.config
    prompts = prompt_batch(config, [[(4, 6)]], texts=[5]).repeat(3)
    data = with_responses(config, prompts, lengths=[2, 4, 1], width=4)
    prompt = 5 + 2 + 6  # words, two marks, 2 x 3 merged patches
    work = required_work(module, data)
    assert work.tokens == prompt + 2 + 4 + 1
    own = [(n + prompt) * (n + prompt + 1) // 2 for n in (2, 4, 1)]
    pairs = sum(own) - 2 * prompt * (prompt + 1) // 2  # the second and third rows see the prompt but do not compute it
    assert work.language == 3 * forward_flops(work.tokens, pairs, logits=7)
    one = required_work(module, data[:1])
    assert work.vision == one.vision == 3 * module.family.flops(config, [], torch.tensor([[1, 4, 6]])).vision
    assert required_work(module, DataProto.concat([data, data])).vision == work.vision


def test_what_is_frozen_takes_less():
    model = tiny_model("qwen2_5_vl")
    prompts = prompt_batch(model.config, [[(4, 6)]], texts=[5])
    data = with_responses(model.config, prompts, lengths=[2], width=2)
    whole = required_work(PackedVLM(copy.deepcopy(model), family_of(model.config), 1.0), data)
    add_adapters(model, family_of(model.config), ModelConfig(lora_rank=16))  # the tower is frozen then
    adapted = required_work(PackedVLM(model, family_of(model.config), 1.0), data)
    assert adapted.vision == whole.vision / 3
    assert adapted.language == whole.language * 2 / 3


def test_figures_of_one_rank_from_work_and_time(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 13.0, 13.5, 14.0])
    monkeypatch.setattr(accounting.time, "perf_counter", lambda: next(now))
    figures = Accounting(CPU)
    figures.peak = 1e12
    with figures.recording():  # from 10.0 to 14.0
        with figures.phase("forward"):  # 2 s
            figures.add(Work(vision=1e12, language=3e12, tokens=100))
        with figures.phase("forward"):  # half a second more
            figures.add(Work(language=1e12, tokens=60))
        found = figures.metrics("actor")
    assert found["timing_s/update_actor/forward"] == 2.5
    assert found["perf/throughput/actor"] == 160 / 4
    assert found["perf/mfu/actor"] == 5e12 / (4 * 1e12)
    assert found["perf/mfu/actor/language"] == 4e12 / (4 * 1e12)


def test_figures_of_ranks_are_joined():
    """Two dp positions of two ranks each: their work adds up, and the slowest and the fullest of the four counts."""
    gib = 2**30
    allocated, reserved = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
    ranks = [
        Figures(Work(2e12, 6e12, 100), 4.0, {"forward": 1.0}, 1e12, {allocated: 3 * gib, reserved: 7 * gib}),
        Figures(Work(), 4.5, {"forward": 2.0}, 1e12, {allocated: 5 * gib, reserved: 6 * gib}),
        Figures(Work(0.0, 2e12, 60), 5.0, {"forward": 1.5, "optimizer": 0.5}, 1e12, {allocated: gib, reserved: gib}),
        Figures(Work(), 3.0, {}, 2e12, {allocated: gib, reserved: gib}),
    ]
    assert joined_metrics(ranks, "actor") == {
        "timing_s/update_actor/forward": 2.0,
        "timing_s/update_actor/optimizer": 0.5,
        "perf/throughput/actor": 160 / 5 / 4,
        "perf/mfu/actor": 10e12 / (5 * 5e12),
        "perf/mfu/actor/language": 8e12 / (5 * 5e12),
        allocated: 5.0,
        reserved: 7.0,
    }
    unknown = [*ranks[:3], Figures(Work(), 3.0, {}, None, {allocated: gib, reserved: gib})]
    assert "perf/mfu/actor" not in joined_metrics(unknown, "actor")


class Clock:
    """Stands for a CUDA event, which keeps memory for as long as it is kept."""

    def __init__(self, enable_timing):
        self.recorded = False

    def record(self):
        self.recorded = True


def test_nothing_is_kept_of_what_no_update_asks_for(monkeypatch):
    """Passes and steps by single calls are timed by nobody: thousands of them leave as little as one."""
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    figures = Accounting(torch.device("cuda"))
    for _ in range(1000):
        with figures.phase("forward"):
            pass
    assert not figures.events
    with pytest.raises(OverflowError), figures.recording():  # an update that fails in its midst
        with figures.phase("forward"):
            pass
        assert len(figures.events) == 1
        raise OverflowError
    with figures.phase("forward"):
        pass
    assert not figures.events


def test_memory_that_an_engine_asleep_gave_back_is_not_counted():
    gib = 2**30
    # vLLM keeps 56 of 140 GiB in its sleep, for torch; training takes 100 more, where the device held 20 before.
    asleep = DeviceMemory(reserved=(56 + 18) * gib, used=20 * gib, total=140 * gib)
    assert real_peak((56 + 15 + 95) * gib, asleep) == 112 * gib
    alone = DeviceMemory(reserved=18 * gib, used=20 * gib, total=140 * gib)
    assert real_peak(100 * gib, alone) == 100 * gib  # no engine: torch's own figure
    # Other memory of the device hides it at the beginning, and no longer at the end.
    hidden = DeviceMemory(reserved=(56 + 18) * gib, used=(20 + 50) * gib, total=140 * gib)
    assert real_peak((56 + 15 + 95) * gib, hidden) == 140 * gib  # never more than there is
    assert real_peak((56 + 15 + 95) * gib, hidden, asleep) == 112 * gib


def test_a_cpu_has_no_peak_and_names_are_told_apart(monkeypatch):
    assert peak_flops(CPU) is None
    names = {"NVIDIA H200": 989e12, "NVIDIA H20": 148e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA GeForce RTX 2080": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak


def updated(path, layout):
    """What this rank tells of an update that took a second, or two on rank 1."""
    ranks = init_ranks(layout, CPU)
    actor = ActorWorker(ActorConfig(path, token_budget=40), CPU, ranks)
    actor.model.accounting.peak = 1e12
    seconds = iter([0.0] + [1.0 + distributed.get_rank()] * 1000)
    accounting.time = SimpleNamespace(perf_counter=lambda: next(seconds))
    try:
        data = share_out(rows(actor.module.model.config), layout.dp)[ranks.rank("dp")]
        found = actor.update(data, lambda outputs, data: (-outputs.log_probs, {}))
    finally:
        accounting.time = time
    return {name: value for name, value in found.items() if name.startswith("perf/")}


def rows(config):
    prompts = prompt_batch(config, [[(4, 6)], []], texts=[5, 3])
    return with_responses(config, prompts, lengths=[2, 4], width=4)


LAYOUTS = {"dp": Layout(dp=2), "pp": Layout(pp=2), "sp": Layout(sp=2), "tp": Layout(tp=2)}


def test_an_updates_figures_are_those_of_all_ranks(module, tmp_path):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path / "model")
    work = required_work(module, rows(module.model.config))  # of the whole batch
    cases = {name: partial(updated, str(tmp_path / "model"), layout) for name, layout in LAYOUTS.items()}
    for name, (first, second) in run_ranks(2, cases, tmp_path).items():
        assert not isinstance(first, str), first
        assert first == second
        assert first == {
            "perf/throughput/actor": pytest.approx(work.tokens / 2.0 / 2),  # two seconds, two devices
            "perf/mfu/actor": pytest.approx(work.total / (2.0 * 2e12)),
            "perf/mfu/actor/language": pytest.approx(work.language / (2.0 * 2e12)),
            "perf/compilations": 0,
        }, name
