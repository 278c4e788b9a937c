"""Work and time against numbers worked by hand."""

import copy

import pytest
import torch

from dataproto import DataProto
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import tiny_model
from workers import accounting
from workers.accounting import Accounting, Work, peak_flops, required_work
from workers.engine_config import EngineConfig
from workers.lora import add_adapters
from workers.packed import PackedVLM

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
    add_adapters(model, family_of(model.config), EngineConfig(lora_rank=16))  # the tower is frozen then
    adapted = required_work(PackedVLM(model, family_of(model.config), 1.0), data)
    assert adapted.vision == whole.vision / 3
    assert adapted.language == whole.language * 2 / 3


def test_figures_from_work_and_time(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 13.0, 13.5, 14.0])
    monkeypatch.setattr(accounting.time, "perf_counter", lambda: next(now))
    figures = Accounting(CPU, devices=2)  # from 10.0 to 14.0
    figures.peak = 1e12
    with figures.phase("forward"):  # 2 s
        figures.add(Work(vision=1e12, language=3e12, tokens=100))
    with figures.phase("forward"):  # half a second more
        figures.add(Work(language=1e12, tokens=60))
    found = figures.metrics("actor")
    assert found["timing_s/update_actor/forward"] == 2.5
    assert found["perf/throughput/actor"] == 160 / 4 / 2
    assert found["perf/mfu/actor"] == 5e12 / (4 * 2 * 1e12)
    assert found["perf/mfu/actor/language"] == 4e12 / (4 * 2 * 1e12)


def test_a_cpu_has_no_peak_and_names_are_told_apart(monkeypatch):
    assert peak_flops(CPU) is None
    assert "perf/mfu/actor" not in Accounting(CPU).metrics("actor")
    names = {"NVIDIA H200": 989e12, "NVIDIA H20": 148e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA GeForce RTX 2080": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
