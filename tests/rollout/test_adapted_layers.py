"""Layers whose rows have different adapters against a loop over rows, files of adapters, and what is kept of images."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dataproto.errors import CheckpointError, InvalidConfig, InvalidPrompt, RowCountMismatch
from dataproto.vlm import family_of
from helpers.tiny_models import tiny_model
from helpers.turns import finish
from rollout.adapter_layers import AdapterRouter, Groups, Segment, low_rank_linear, stacked
from rollout.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterRequest,
    new_adapter,
    read_adapter,
    write_adapter,
)
from rollout.engine import SamplingParams
from rollout.hf.adapter_engine import AdapterEngine
from rollout.image_features import ImageFeatures
from rollout.prompts import ProcessedImage, images_by_content
from rollout.sampling import sample

CPU = torch.device("cpu")
SEGMENTS = [Segment(0, 3, 2.0, 0), Segment(3, 4), Segment(4, 9, 0.5, 1), Segment(9, 11, 2.0, 0)]


def leaf(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("grouped", [False, True])
def test_segments_equal_a_loop_over_rows(grouped):
    x, weight, bias = leaf(11, 16, seed=0), leaf(32, 16, seed=1).detach(), leaf(32, seed=2).detach()
    matrices = [leaf(4, 16, seed=3), leaf(32, 4, seed=4), leaf(8, 16, seed=5), leaf(32, 8, seed=6)]
    rows = []
    for each in SEGMENTS:
        for row in range(each.start, each.stop):
            out = weight @ x[row] + bias
            if each.place is not None:
                down, up = matrices[2 * each.place : 2 * each.place + 2]
                out = out + each.scaling * up @ (down @ x[row])
            rows.append(out)
    expected, slope = torch.stack(rows), leaf(11, 32, seed=7).detach()
    ends = torch.tensor([each.stop for each in SEGMENTS], dtype=torch.int32)
    groups = Groups(*stacked(SEGMENTS, matrices, x.dtype), ends) if grouped else None
    found = low_rank_linear(x, weight, bias, SEGMENTS, matrices, groups)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    of_loop = torch.autograd.grad((expected * slope).sum(), [x, *matrices])
    of_segments = torch.autograd.grad((found * slope).sum(), [x, *matrices])
    for one, other in zip(of_segments, of_loop, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2_5_vl")


def adapter_of(model, seed=0, **options):
    adapter = new_adapter(model, family_of(model.config), AdapterConfig(2, **options), seed)
    for number, (_, matrix) in enumerate(adapter.named_parameters()):
        matrix.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    return adapter


def test_a_seed_gives_a_layer_the_same_adapter_whatever_else_is_adapted(model):
    every, fewer = (
        new_adapter(model, family_of(model.config), AdapterConfig(2, mlp=mlp), seed=5).pairs for mlp in (True, False)
    )
    assert fewer.keys() == {name for name in every if ".mlp." not in name}
    assert all(torch.equal(every[name][0], fewer[name][0]) and not every[name][1].any() for name in fewer)
    other = new_adapter(model, family_of(model.config), AdapterConfig(2), seed=6).pairs
    assert not any(torch.equal(every[name][0], other[name][0]) for name in every)
    assert sorted(name for name in every if "layers" not in name) == ["lm_head"]
    with pytest.raises(InvalidConfig, match="nothing would be trained"):
        AdapterConfig(2, attention=False, mlp=False, head=False)


def test_fused_experts_are_refused_by_name():
    moe = tiny_model("qwen3_vl_moe")
    with pytest.raises(InvalidConfig, match=r"fused experts.*train_mlp=False"):
        new_adapter(moe, family_of(moe.config), AdapterConfig(2), seed=0)
    assert len(new_adapter(moe, family_of(moe.config), AdapterConfig(2, mlp=False), seed=0).pairs) == 2 * 4 + 1


def test_a_model_computes_as_before_outside_of_a_route():
    model = tiny_model("qwen3")
    adapter, x = adapter_of(model), torch.arange(6)[None]
    before = model(x).logits
    router = AdapterRouter(model, family_of(model.config))
    with router.routed([(adapter, 6)]):
        inside = model.model(x).last_hidden_state
    assert (inside - model.model(x).last_hidden_state).abs().max() > 1e-3
    assert torch.equal(model(x).logits, before)
    with router.routed([(adapter, 5)]), pytest.raises(RowCountMismatch, match="count 5 tokens, but the layer got 6"):
        model(x)


def test_grouped_products_of_a_model_equal_slices(monkeypatch):
    """As on CUDA: matrices of snapshots are stacked once for the same adapters, those that are trained in every pass."""
    model, x = tiny_model("qwen3"), torch.arange(12)[None]
    one, two = adapter_of(model), adapter_of(model, mlp=False)
    router = AdapterRouter(model, family_of(model.config))
    runs = [(one, 5), (None, 2), (two, 5)]
    with router.routed(runs):
        expected = model.model(x).last_hidden_state
    monkeypatch.setattr(
        "rollout.adapter_layers.low_rank_linear",
        lambda x, weight, bias, segments, matrices, _: low_rank_linear(
            x, weight, bias, segments, matrices, router._groups(names[id(weight)], segments, matrices, x)
        ),
    )
    names = {id(layer.weight): name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    for snapshot in (False, True):
        for matrix in [m for adapter in (one, two) for _, m in adapter.named_parameters()] if snapshot else []:
            matrix.requires_grad_(False)
        for _ in range(2):
            with router.routed(runs):
                found = model.model(x).last_hidden_state
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert bool(router._stacks) == snapshot


def test_an_adapter_is_read_as_it_was_written(model, tmp_path):
    adapter = adapter_of(model, mlp=False)
    write_adapter(adapter, tmp_path, "a base model")
    read = read_adapter(tmp_path, model, family_of(model.config), CPU)
    assert read.config == adapter.config
    assert not read.trained
    assert adapter.trained
    for (name, one), (other_name, other) in zip(read.named_parameters(), adapter.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)


def test_a_snapshot_is_read_as_it_was_written_in_its_precision(model, tmp_path):
    adapter = adapter_of(model)
    snapshot = adapter.snapshot(torch.bfloat16)
    expected = [matrix.detach().bfloat16().float() for _, matrix in adapter.named_parameters()]
    with torch.no_grad():
        for _, matrix in adapter.named_parameters():
            matrix.add_(1)  # which the snapshot does not follow
    write_adapter(snapshot, tmp_path, "a base model", torch.bfloat16)
    assert {each.dtype for each in load_file(tmp_path / WEIGHTS_FILE).values()} == {torch.bfloat16}
    read = read_adapter(tmp_path, model, family_of(model.config), CPU)
    for (_, one), (_, other), rounded in zip(
        read.named_parameters(), snapshot.named_parameters(), expected, strict=True
    ):
        assert torch.equal(one, other.float())
        assert torch.equal(one, rounded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / CONFIG_FILE).unlink(), f"{CONFIG_FILE} cannot be read"),
        (lambda path: (path / WEIGHTS_FILE).unlink(), f"{WEIGHTS_FILE} cannot be read"),
        (lambda path: (path / WEIGHTS_FILE).write_bytes(b"x"), "cannot be read"),
        (lambda path: (path / CONFIG_FILE).write_text("[]"), "settings of an adapter"),
    ],
)
def test_a_damaged_adapter_is_refused_by_name(model, tmp_path, change, message):
    write_adapter(adapter_of(model), tmp_path, "a base model")
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, model, family_of(model.config), CPU)


def test_an_adapter_of_another_model_is_refused(model, tmp_path):
    write_adapter(adapter_of(model), tmp_path, "a base model")
    other = tiny_model("qwen3")
    with pytest.raises(CheckpointError, match="of another model: they differ in "):
        read_adapter(tmp_path, other, family_of(other.config), CPU)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(
        CheckpointError, match=r"lora_A.weight is torch.float32 of shape \(2, 64\), but the model needs"
    ):
        read_adapter(tmp_path, model, family_of(model.config), CPU)


@pytest.fixture
def adapted(model, tmp_path):
    """An engine, and requests of one prompt for the base model and for two adapters."""
    model.save_pretrained(tmp_path)
    engine = AdapterEngine(str(tmp_path), ImageFeatures(model, family_of(model.config), CPU))
    adapters = None, adapter_of(model), new_adapter(model, engine.family, AdapterConfig(2), seed=1)
    ids = torch.arange(5, 15)
    return engine, [replace(request_of(ids), adapter=each) for each in adapters]


def request_of(ids):
    types, positions = torch.zeros(len(ids), dtype=torch.int8), torch.arange(len(ids)).expand(4, -1)
    return AdapterRequest(ids.tolist(), ids, types, positions)


SAMPLED = SamplingParams(max_tokens=3)


def test_adapters_read_a_prompt_that_they_share_each_on_its_own(adapted):
    engine, requests = adapted
    alone = [next(iter(engine.generate([each], SAMPLED))) for each in requests]
    together = sorted(engine.generate([*requests, *requests], SAMPLED), key=lambda each: each.request)
    assert alone[0].log_probs != alone[1].log_probs
    for found, expected in zip(together, [*alone, *alone], strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)


def test_an_adapter_that_continues_the_request_of_another_reads_its_prompt_again(adapted):
    engine, requests = adapted
    first = engine.submit(requests[0], SAMPLED, keep=True)
    (begun,) = finish(engine, first)
    longer = request_of(torch.cat([requests[0].input_ids, torch.tensor(begun.token_ids)]))
    for each in (replace(longer, adapter=request.adapter) for request in requests):
        expected = next(iter(engine.generate([each], SAMPLED)))
        (found,) = finish(engine, engine.fork(first, each, SAMPLED))
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    with pytest.raises(InvalidPrompt, match="differs from token 0 on"):
        engine.fork(first, request_of(torch.arange(6, 30)), SAMPLED)


def test_an_id_that_is_never_drawn_keeps_its_probability():
    logits, numbers = torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([0.9], dtype=torch.float64)
    for sampling in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1)):
        token, log_prob = sample(logits, sampling, numbers, banned_ids=[], undrawn_ids=[2])
        assert token.item() in (0, 1)
        torch.testing.assert_close(log_prob, logits.log_softmax(-1)[:, 0])


def processed(value, size=2):
    return ProcessedImage(
        bytes([value]), Image.new("RGB", (size, size)), {"pixel_values": torch.full((4,), float(value))}
    )


def test_images_are_kept_by_their_content_up_to_a_size():
    store = images_by_content(max_bytes=2 * (4 * 3 + 16))
    for value in range(3):
        store[value] = processed(value)
        assert store.get(0).key == b"\0"  # used last
    assert [store.get(value) is not None for value in range(3)] == [True, False, True]
    assert store.bytes == store.max_bytes
    store["large"] = processed(3, size=100)
    assert store.get("large") is None
    assert store.bytes == store.max_bytes


def test_the_tower_reads_each_image_once(model):
    grids = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    images = [
        ProcessedImage(bytes([key]), Image.new("RGB", (1, 1)), {"pixel_values": torch.randn(16, 3 * 2 * 16), **grids})
        for key in range(2)
    ]
    features = ImageFeatures(model, family_of(model.config), CPU)
    types = torch.tensor([[0, *[1] * 8, 0], [*[1] * 4, *[0] * 6]])
    joined, spans = features.placed(types, [images, [images[1]]])
    assert features.computed == 2
    assert joined.shape == (8, 1, 64)
    assert spans.positions.tolist() == [*range(1, 9), *range(10, 14)]
    assert spans.features.tolist() == [*range(8), *range(4, 8)]
    np.testing.assert_array_equal(joined[4:], features.of(images[1]))
    small = ImageFeatures(model, family_of(model.config), CPU, max_bytes=10)
    assert torch.equal(small.of(images[0]), joined[:4])
    assert small.kept.bytes == 0
