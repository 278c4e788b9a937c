"""The forecast of a run: counts beside the real model and batch, hand-worked memory, the command, and what it chooses."""

import json
import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.forecasts import (
    GENERATIONS,
    ON_ONE_DEVICE,
    UPDATES,
    WHOLE_STEPS,
    batch_sizes,
    generation_row,
    lines,
    one_device_rows,
    update_row,
    whole_step_rows,
)
from benchmarks.workload import TINY, make_batch, model_config
from dataproto.errors import InvalidConfig, NonFiniteLogits
from dataproto.vlm import family_of
from helpers.tiny_models import EACH_TYPE, FURTHER_TYPES, VLM_TYPES, tiny_config, tiny_model
from recipes.configs import plan_config
from recipes.data.loader import PromptLoader, draws
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import make_tiny_model
from recipes.forecast import (
    DEVICES,
    BatchSizes,
    PromptSizes,
    RoleMemory,
    Setting,
    beside_fact,
    calibrate_cpu,
    calibration,
    forecast,
    forecast_lines,
    kept_image_bytes,
    measure_prompts,
    model_size,
    response_lengths,
)
from recipes.forecast.batch_sizes import MicroBatchSize
from recipes.forecast.calibration import step_seconds, text_rows, timed_rows
from recipes.forecast.devices import GIB, Device, Overheads
from recipes.forecast.fitting import EQUAL, choices, grown, way_out
from recipes.forecast.model_size import mlp_width
from recipes.forecast.role_memory import (
    MUON_KERNELS,
    feature_bytes,
    held,
    kv_bytes,
    route_bytes,
    scoring,
    tower_bytes,
    updating,
    whole_gradients,
)
from recipes.forecast.step_forecast import FULL, with_unsharded, working_memory
from recipes.forecast.step_time import Passes, pass_seconds, update_flops
from recipes.plan import as_options, expected_setting, fit, main
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from workers.model.kept_features import MAX_BYTES, KeptFeatures
from workers.model.lora import add_adapters
from workers.model.model_config import UNSHARDED, ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.accounting import required_work
from workers.training.forward_pass import sharing
from workers.training.memory import resident_bytes
from workers.training.micro_batches import micro_batches
from workers.weights.sharded_export import FILE_BYTES as EXPORT_FILE

H200 = DEVICES["h200"]
CPU = Device("cpu", 10**9, math.inf, math.inf, math.inf, on_cpu=True)  # an operation takes no time


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_parameters_are_those_of_the_built_model(model_type):
    model, size = tiny_model(model_type), model_size(tiny_config(model_type), ModelConfig())
    assert size.total == size.trained == sum(weight.numel() for weight in model.parameters())
    tower = [model.get_submodule(path) for path in family_of(model_type).vision_parts[:1]]
    assert size.vision >= sum(weight.numel() for part in tower for weight in part.parameters())


def test_adapters_are_counted_as_they_are_built():
    compute, model = ModelConfig(lora_rank=4), tiny_model("qwen2_5_vl")
    add_adapters(model, family_of(model.config), compute)
    size = model_size(tiny_config("qwen2_5_vl"), compute)
    assert size.total == sum(weight.numel() for weight in model.parameters())
    assert size.trained == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


@pytest.fixture(scope="module")
def tiny_batch():
    config = model_config("tiny")
    return config, make_batch(config, TINY, prompts=6, samples=3, seed=3)


def test_operations_tokens_and_micro_batches_are_those_of_a_real_batch(tiny_batch):
    config, data = tiny_batch
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    module, sizes = PackedVLM(model, family_of(config), 1.0), batch_sizes(data, config, 3)
    work, flops = required_work(module, data), update_flops(sizes, model_size(config, ModelConfig()), ModelConfig())
    assert (flops.language, flops.vision, sizes.packed_tokens) == (work.language, work.vision, work.tokens)
    planned, real = sizes.micro_batches(600), micro_batches(data, module, 600)
    assert len(planned) == len(real)
    assert sorted(part.logits for part in planned) == sorted(int(part.rows["response_mask"].sum()) for part in real)


def test_the_headers_of_images_give_the_sizes_that_the_processor_makes(tmp_path):
    builder, rows = PromptBuilder.from_pretrained(make_tiny_model(tmp_path), 256), ProblemRows(level=2)
    places = [place for _, place, _ in islice(draws(rows, 0), 4)]
    loader = PromptLoader(rows, builder, batch_size=4)
    sizes = measure_prompts(loader)
    assert loader.state_dict()["drawn"] == 0
    for number, (tokens, grids) in enumerate(zip(sizes.tokens, sizes.grids, strict=True)):
        prompt = builder.prepare(rows[places[number]])
        assert tokens == len(prompt.input_ids)
        assert [list(grid) for grid in grids] == [image.inputs["image_grid_thw"][0].tolist() for image in prompt.images]


def test_images_that_come_back_are_kept_and_counted(tmp_path):
    """Of 6 rows each row's image, 16 patches of 1,176 numbers; of drawn rows none, as a run draws none of them twice."""
    model, image = make_tiny_model(tmp_path), 16 * 1176 * 4 + 3 * 8

    def counted(loader, held_out=0):
        return kept_image_bytes(loader, measure_prompts(loader), 12, held_out)

    for rows, kept in ((ProblemRows(rows=6), 6), (ProblemRows(), 0)):
        loader = PromptLoader(rows, PromptBuilder.from_pretrained(model, 256), batch_size=4)
        list(islice(loader, 3))
        assert loader.builder.cached_bytes == kept * image
        assert counted(loader) == pytest.approx(kept * image, rel=0.01)
        assert counted(loader, held_out=2) == pytest.approx((kept + 2) * image, rel=0.01)
        assert counted(loader, held_out=2**20) == loader.builder.image_cache_bytes
    assert counted(PromptLoader(ProblemRows(rows=6), loader.builder, 4, num_workers=1)) == 0


def test_pictures_of_a_step_and_of_an_evaluation_are_memory_of_a_cpu():
    """3 prompts with 16 patches on average, and 5 held-out ones: opened, 4 bytes for each of 14 x 14 pixels; processed, 2 x 3
    float32 for each. A pass of the tower takes two states and three factors of its MLP for each patch.
    """
    config = tiny_config("qwen2_5_vl")
    vision, grid = config.vision_config, ((1, 4, 4),)
    opened, processed = 4 * vision.patch_size**2, 4 * 2 * 3 * vision.patch_size**2
    width = 4 * (2 * vision.hidden_size + max(3 * vision.intermediate_size, 5 * vision.hidden_size))
    batch = BatchSizes(config, PromptSizes((9,) * 3, (grid,) * 3), (3,) * 6, samples=2)
    setting = Setting(config, batch, CPU)
    assert setting.pictures == 16 * 3 * opened
    answered = replace(setting, answered=5)
    assert answered.pictures == pytest.approx(
        16 * (3 * opened + 5 * (opened + processed + width)), rel=0.01
    )  # and grids
    assert forecast(answered).beside - forecast(setting).beside == answered.pictures - setting.pictures
    assert replace(answered, device=H200).pictures == 0
    text = BatchSizes(config, PromptSizes((9,), ((),)), (3,))
    assert replace(answered, batch=text).pictures == 0


def test_an_evaluation_that_reads_more_prompts_than_a_step_takes_more_memory():
    """One prompt with 8 samples in a step, 64 held-out prompts at a time: 64 are read together, under the engine's budget."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((100,), ((),)), (4,) * 8, samples=8)
    step = Setting(config, batch, H200)
    more = forecast(replace(step, answered=64))
    assert not forecast(step).evaluation
    (*_, engine) = more.evaluation
    half = replace(step, answered=64, engine_options={"token_budget": 3200})
    (*_, under_budget) = forecast(half).evaluation
    assert engine.activations == 2 * under_budget.activations > 0
    assert engine.kv_cache == 6400 * kv_bytes(config.get_text_config(), 2)
    assert more.memory > forecast(step).memory
    assert "testing" in "\n".join(forecast_lines(more))
    assert not forecast(replace(step, answered=64, engine="vllm")).evaluation


def test_a_rank_of_sequence_parallelism_has_its_share_of_the_tokens():
    config, parts = tiny_config("qwen2_5_vl"), [MicroBatchSize(tokens=400, patches=0, logits=200)]
    size = model_size(config, ModelConfig())
    for work in (updating, scoring):
        alone, spread = (
            work(RoleMemory("actor"), size, config, ModelConfig(), Layout(sp=sp), H200, parts) for sp in (1, 2)
        )
        taken = [each.activations + each.logits for each in (alone, spread)]
        head = 4 * config.get_text_config().hidden_size * config.get_text_config().vocab_size if work is updating else 0
        assert taken[1] - head == pytest.approx((taken[0] - head) / 2, abs=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_checkpoint_has_the_bytes_that_are_forecast(tmp_path, behind, dtype):
    """Actor, with AdamW's moments and an export, and a reference, of which nothing is written."""
    path, compute = str(make_tiny_model(tmp_path / "model")), ModelConfig(dtype=dtype)
    config = AutoConfig.from_pretrained(path)
    actor = ActorWorker(ActorConfig(path, dtype=dtype), torch.device("cpu"))
    data = make_batch(config, TINY, prompts=2, samples=1, seed=3)
    actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
    actor.save(tmp_path / "saved", behind)
    actor.finish_save()
    written = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*") if file.is_file())
    setting = Setting(config, batch_sizes(data, config, 1), CPU, compute, reference=True, save_behind=behind)
    assert forecast(setting).checkpoint == pytest.approx(written, rel=0.1)
    total = setting.size.total
    assert forecast(setting).checkpoint == 12 * total + (4 if dtype == "float32" else 2) * total
    more = forecast(setting).beside - setting.pictures - CPU.context
    assert more == (forecast(setting).checkpoint if behind else 0)  # a copy of all, or of none


def test_a_rank_writes_its_share_of_a_checkpoint_and_a_critic_has_no_export():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((5, 7), ((), ())), (3, 3))
    alone = Setting(config, batch, H200, save_behind=True)
    assert forecast(alone).host == alone.saving == 14 * alone.size.total
    two = replace(alone, layout=Layout(dp=2))
    assert two.saving == alone.saving / 2
    critic = replace(alone, critic_epochs=1)
    assert forecast(critic).checkpoint == forecast(alone).checkpoint + 12 * critic.critic_size.total
    adapters = replace(alone, compute=ModelConfig(lora_rank=4))
    assert adapters.export_bytes == alone.export_bytes
    assert adapters.state_bytes == 12 * adapters.size.trained
    large = replace(alone, config=model_config("7b"), save_behind=False)
    assert large.saving == 2 * EXPORT_FILE < replace(large, save_behind=True).saving


def test_kept_images_are_memory_of_a_cpu_and_of_the_host_of_a_gpu():
    config = tiny_config("qwen2_5_vl")
    setting = Setting(config, BatchSizes(config, PromptSizes((5, 7), ((), ())), (3, 3)), CPU)
    more = replace(setting, kept_images=1000)
    assert forecast(more).memory == forecast(setting).memory + 1000
    on_gpu = forecast(replace(more, device=H200))
    assert on_gpu.memory == forecast(replace(setting, device=H200)).memory
    assert on_gpu.host == forecast(replace(setting, device=H200)).host + 1000


def test_memory_worked_by_hand():
    """The tiny decoder in bfloat16, compiled: 2 layers, hidden 64, MLP 96, 2 heads of 32, 1 of keys, 256 words."""
    config, compute = tiny_config("qwen2_5_vl"), ModelConfig(compile=True)
    size = model_size(config, compute)
    rest = held("actor", size, compute, Layout(), H200, trains=True)
    assert (rest.weights, rest.copies, rest.moments) == (4 * 140_704, 2 * 140_704, 8 * 140_704)
    parts = [MicroBatchSize(tokens=100, patches=0, logits=10)] * 2
    busy = updating(rest, size, config, compute, Layout(), H200, parts)
    assert busy.gradients == 4 * 140_704
    assert busy.activations == 100 * 2 * 2 * (2 * 64 + 2 * 64 + 2 * 32 + 3 * 96)  # tokens, layers, bytes, numbers
    assert busy.logits == 13 * 10 * 256 + 4 * 64 * 256
    full = replace(compute, activation_checkpointing="full")
    kept = updating(rest, size, config, full, Layout(), H200, parts).activations
    assert kept == 100 * 2 * (
        2 * 64 + (2 * 64 + 2 * 64 + 2 * 32 + 3 * 96)
    )  # inputs of both layers, and one layer again
    halves = held("actor", size, compute, Layout(dp=2), H200, trains=True)
    assert (halves.weights, halves.copies, halves.moments) == (2 * 140_704, 0, 4 * 140_704)
    offloaded = held("actor", size, replace(compute, offload=True), Layout(dp=2), H200, trains=True)
    assert (offloaded.device, offloaded.host) == (0, 8 * 140_704)
    assert held("reference", model_size(config, compute, trains=False), compute, Layout(), H200, False).moments == 0
    assert kv_bytes(config.get_text_config(), 2) == 2 * 2 * 32 * 2


@pytest.mark.parametrize("model_type", [*VLM_TYPES, *FURTHER_TYPES, "idefics3"])
def test_families_say_whether_the_towers_mlp_is_gated(model_type):
    family = family_of(tiny_config(model_type))
    blocks = tiny_model(model_type).get_submodule(family.vision_blocks)
    assert family.gated_tower == any(name.endswith("gate_proj") for name, _ in blocks.named_modules())


def test_gated_towers_keep_the_gate_and_shared_experts_are_counted():
    """A compiled block keeps 3 numbers for each feature of a gated MLP; of GLM's 2 layers the first is dense, 96 wide,
    the second sends a token to 2 experts of 32 (and 64 / 2 for its states), and one of 32 is shared.
    """
    text = tiny_config("glm4v_moe").get_text_config()
    assert (text.first_k_dense_replace, text.num_experts_per_tok, text.n_shared_experts) == (1, 2, 1)
    sparse = 2 * (text.moe_intermediate_size + text.hidden_size // 2) + text.moe_intermediate_size
    assert mlp_width(text) == math.ceil((text.intermediate_size + sparse) / 2)
    config = tiny_config("gemma4")
    vision = config.vision_config
    width, heads = vision.hidden_size, vision.num_attention_heads
    assert width // heads <= 32
    attention = 3 * width + 4 * 32 * heads
    found = tower_bytes(config, ModelConfig(compile=True), H200, trained=True).kept
    assert found == vision.num_hidden_layers * 2 * (2 * width + attention + 3 * vision.intermediate_size)


def test_a_pass_without_gradients_takes_the_highest_of_three_places():
    """The tiny decoder in bfloat16: hidden 64, MLP 96, 2 heads of 32, 1 of keys, 256 words; a tower of width 32 and MLP 48."""
    config = tiny_config("qwen2_5_vl")
    vision = config.vision_config
    assert (vision.hidden_size, vision.intermediate_size) == (32, 48)

    def found(compile=True, device=H200, **part):
        compute, sizes = ModelConfig(compile=compile), {"tokens": 10, "patches": 0, "logits": 0} | part
        size = model_size(config, compute)
        memory = scoring(RoleMemory("actor"), size, config, compute, Layout(), device, [MicroBatchSize(**sizes)])
        return memory.activations, memory.tower, memory.logits

    decoder = 2 * 64 + 3 * 64 + 2 * 2 * 32  # queries and keys outweigh the MLP's 2 * 96
    assert found(tokens=100) == (100 * 2 * decoder, 0, 0)
    assert found(patches=1000) == (0, 1000 * 2 * (2 * 32 + 5 * 32), 0)
    assert found(tokens=100, logits=100) == (0, 0, 100 * 2 * 64 + 4 * 100 * 256)
    assert found(compile=False, device=CPU, tokens=100, logits=100) == (0, 0, 100 * 4 * 64 + 8 * 100 * 256)


def test_what_stays_unsharded_is_counted():
    """The tiny model over two devices in bfloat16: 2 bytes for each whole weight, 4 for each whole gradient."""
    config, layout = tiny_config("qwen2_5_vl"), Layout(dp=2)
    parts, found = [MicroBatchSize(tokens=100, patches=0, logits=10)] * 2, {}
    for kept in UNSHARDED:
        compute = ModelConfig(unsharded=kept)
        size = model_size(config, compute)
        rest = held("actor", size, compute, layout, H200, trains=True)
        busy = updating(rest, size, config, compute, layout, H200, parts)
        found[kept] = (
            scoring(rest, size, config, compute, layout, H200, parts).copies,
            busy.gradients,
            busy.copies - whole_gradients(size, layout, H200, compute) * (busy.activations == 0),
        )
    whole = 2 * (size.total)
    assert [copies for copies, _, _ in found.values()] == [found["nothing"][0], whole, whole, whole]
    assert found["nothing"][0] < whole
    assert [gradients for _, gradients, _ in found.values()] == [2 * 140_704] * 3 + [4 * 140_704]
    assert [copies for _, _, copies in found.values()] == [found["nothing"][2]] * 2 + [whole] * 2
    reference = held("reference", model_size(config, compute, trains=False), compute, layout, H200, False)
    assert (reference.weights, reference.copies) == (140_704, 0)  # 2 bytes on two devices


def test_passes_without_gradients_have_their_own_micro_batches_and_share():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20, 10, 20), ((),) * 4), (8, 4, 7, 1, 8, 4, 7, 1), samples=2)
    compute, layout = ModelConfig(token_budget=30), Layout(dp=2)
    device = replace(H200, launch=0.0)
    setting = Setting(config, batch, device, compute, layout, None, reference=True, old_log_probs=0.75, minibatch=2)
    assert len(setting.scoring_micro_batches) < len(replace(setting, minibatch=None).micro_batches)
    found = {phase.name: phase for phase in forecast(setting).phases}
    assert found["old_log_prob"].seconds == pytest.approx(0.75 * found["ref"].seconds)
    assert found["old_log_prob"].flops == pytest.approx(0.75 * found["ref"].flops)
    narrow = forecast(replace(setting, compute=replace(setting.compute, scoring_token_budget=30)))
    taken = [
        next(role.device for role in phase.roles if role.role == "reference")
        for phase in (found["ref"], next(phase for phase in narrow.phases if phase.name == "ref"))
    ]
    assert taken[0] > taken[1]
    adapted = forecast(replace(setting, compute=ModelConfig(lora_rank=8)))
    assert next(role for role in adapted.phases[0].roles if role.role == "reference").device == 0
    assert not replace(setting, teacher=True, compute=ModelConfig(lora_rank=8)).base_is_reference


def test_the_most_that_fits_stays_unsharded():
    """By the device's memory; each choice is faster than the one before, and a CPU and a lone device keep nothing."""
    setting = seven_b(layout=Layout(dp=4), minibatch=8, compute=ModelConfig(token_budget=4096))
    each = [replace(setting, compute=replace(setting.compute, unsharded=kept)) for kept in UNSHARDED]
    seconds, memories = [forecast(one).seconds for one in each], [working_memory(one) for one in each]
    assert seconds == sorted(seconds, reverse=True)
    chosen = [
        with_unsharded(replace(setting, device=replace(H200, memory=int(memory / FULL) + 1))).compute.unsharded
        for memory in (0, *memories)
    ]
    assert chosen[0] == "nothing"
    assert chosen[-1] == "gradients"
    assert [UNSHARDED.index(one) for one in chosen] == sorted(UNSHARDED.index(one) for one in chosen)
    assert with_unsharded(replace(setting, layout=Layout())).compute.unsharded == "nothing"
    assert with_unsharded(replace(setting, device=CPU)).compute.unsharded == "nothing"


def test_seconds_of_starting_operations_worked_by_hand():
    """Two prompts with two samples each, in two micro-batches; an operation takes no time, only starting them does."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (3, 1, 2, 2), samples=2)
    overheads = Overheads(decoded_row=1e-3, learning=0.2, scoring=0.05, optimizer=0.01, preparation=0.125)
    device = replace(CPU, decode_overhead=0.5, overheads=overheads)
    compute = ModelConfig(token_budget=30, scoring_token_budget=30)
    setting = Setting(config, batch, device, compute, reference=True)
    assert len(setting.micro_batches) == 2
    found = {phase.name: phase.seconds for phase in forecast(setting).phases}
    assert found == pytest.approx(
        {
            "data": 2 * 0.125,
            "gen": 0.05 + (0.5 + 0.004) + (0.5 + 0.004) + (0.5 + 0.001),  # 4, 3 and 1 rows run: one of 4 is not removed
            "ref": 2 * 0.05,
            "update_actor": 2 * 0.2 + 0.01,
        }
    )


def test_the_fullest_stage_of_a_pipeline_takes_all_micro_batches():
    """Two stages of one layer each: 5 s for 150 tokens, filled up to 2 x 100; the tower's 4 s come first, the head's 2 s last."""
    config, device = tiny_config("qwen2_5_vl"), replace(CPU, language=1.0, vision=1.0)
    passes, parts = Passes(12.0, 4.0, head=2.0), [MicroBatchSize(100, 0, 0), MicroBatchSize(50, 0, 0)]
    first, last = 5 * 200 / 150 + 4, 5 * 200 / 150 + 2
    for pp, seconds in ((1, 16.0), (2, (2 * first + last) / 2)):
        assert pass_seconds(passes, ModelConfig(), Layout(pp=pp), device, config, parts) == pytest.approx(seconds)


def test_seconds_of_decoding_grow_with_the_keys_in_the_cache():
    """Prompts of 10 tokens; 4, 4, 2 and 2 rows are computed, and the mean token reads 140 / 12 keys."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10,) * 4, ((),) * 4), (4, 4, 2, 2))
    device = replace(CPU, decode_overhead=0.5, overheads=Overheads(decoded_row=1e-3, decoded_key=1e-4, scoring=0.05))
    mean_keys = (2 * 4 * (10 + 2) + 2 * 2 * (10 + 1)) / 12
    found = {phase.name: phase.seconds for phase in forecast(Setting(config, batch, device)).phases}
    assert found["gen"] == pytest.approx(0.05 + 4 * 0.5 + (4 + 4 + 2 + 2) * (1e-3 + mean_keys * 1e-4))


def test_a_cpu_is_timed_in_the_numbers_of_the_run(monkeypatch):
    """In bfloat16 the weights are copies while passes are timed, and the kernels of other lengths are compiled as well."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (3, 1, 2, 2), samples=2)
    seen = []
    compiled = calibration._compile_kernels
    monkeypatch.setattr(
        calibration,
        "_compile_kernels",
        lambda module, batch: (seen.append(module.model.lm_head.weight.dtype), compiled(module, batch)),
    )
    clock = iter(range(10**6))
    for dtype in ("float32", "auto", "bfloat16"):
        assert calibrate_cpu(batch, lambda: float(next(clock)), dtype=dtype).overheads.learning == 1.0
    assert seen == [torch.bfloat16]


def test_the_process_keeps_kernels_of_muon_on_a_cpu():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (3, 1))
    for device, kernels in ((CPU, MUON_KERNELS), (H200, 0)):
        adamw = forecast(Setting(config, batch, device))
        for name in ("optimizer", "critic_optimizer"):
            assert forecast(Setting(config, batch, device, **{name: "muon"})).beside == adamw.beside + kernels


def test_steps_of_a_padded_batch_are_timed_to_their_end():
    """With and without padding, on a clock that counts its calls; an engine that refuses the prompts says why."""
    engine = HFEngine.of_model(tiny_model("qwen2_5_vl"))
    for padded in (False, True):
        clock = iter(range(10**6))
        assert step_seconds(engine, 3, 5, padded, lambda clock=clock: float(next(clock))) == 1.0
        assert not engine.unfinished
    for weight in engine.weights.values():
        if weight.is_floating_point():
            weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits, match="request"):
        step_seconds(engine, 3, 5, False, lambda: 0.0)


def test_a_cpu_is_timed_on_rows_like_those_of_the_batch():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (3, 1, 2, 2), samples=2)
    assert timed_rows(batch).lengths.tolist() == [13, 11, 22, 22]
    module = PackedVLM(tiny_model("qwen2_5_vl"), family_of(config), 1.0)
    rows = text_rows(module, batch)
    assert rows["attention_mask"].sum(1).tolist() == [13, 11, 22, 22]
    assert rows["response_mask"].sum(1).tolist() == [3, 1, 2, 2]
    assert sharing(module, rows).tolist() == [False, True, False, True]
    (part,) = batch.micro_batches(1000)
    assert (part.tokens, part.keys) == (38, 68 + 30)  # the prompts are keys of their samples and of themselves
    clock = iter(range(10**6))
    device = calibrate_cpu(batch, lambda: float(next(clock)))  # each call takes a second
    assert device.on_cpu
    assert device.overheads.learning == device.overheads.scoring == 1.0
    assert device.context > 50 * 2**20  # of this process
    assert device.context < resident_bytes() + 32 * 2**20  # the copies of 64 MiB that are timed are no part of a run
    large = replace(batch, prompts=PromptSizes((10**5, 10**5), ((), ())))
    assert len(timed_rows(large).lengths) == 1


def test_fewer_tokens_can_take_more_memory():
    """64 rows of 33 tokens are two micro-batches of a budget of 2,000, and a tenth fewer tokens are one."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((1,) * 64, ((),) * 64), (32,) * 64)
    assert [part.tokens for part in batch.micro_batches(2000)] == [1056, 1056]
    assert [part.tokens for part in batch.fullest_micro_batches(2000)] == [round(0.9 * 2112)]
    assert [part.tokens for part in batch.fullest_micro_batches(2000, variation=0)] == [1056, 1056]
    setting = Setting(config, batch, H200, ModelConfig(token_budget=2000), engine=None, reference=True)
    sure = replace(setting, variation=0)
    assert len(setting.micro_batches) == 2  # the time is that of the expected rows
    assert [phase.seconds for phase in forecast(setting).phases] == [phase.seconds for phase in forecast(sure).phases]
    (ref, update), (sure_ref, sure_update) = (forecast(each).phases for each in (setting, sure))
    assert update.roles[0].activations == pytest.approx(1.8 * sure_update.roles[0].activations, rel=1e-3)
    assert ref.roles[1].activations == pytest.approx(1.1 * sure_ref.roles[1].activations, rel=1e-3)  # all rows at once


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_features_of_a_frozen_tower_are_those_that_a_pass_keeps(model_type):
    """The count, from patches alone, equals what `KeptFeatures` holds for the same images."""
    config, family = tiny_config(model_type), family_of(tiny_config(model_type))
    media = family.dummy_media(config)
    grids = tuple(map(tuple, family.grids(media, config).tolist()))
    kept = KeptFeatures(family, config, torch.float32)
    count = int(family.media_layout.feature_counts("image", media, config).sum())
    batch = BatchSizes(config, PromptSizes((50, 50), (grids, grids)), (3, 4, 5, 6), samples=2)
    compute = ModelConfig(freeze_vision=True)
    size = model_size(config, compute)
    assert feature_bytes(batch, size, compute, Layout(), CPU) == 2 * count * kept.bytes_of_one
    assert feature_bytes(batch, size, compute, Layout(), H200) == count * kept.bytes_of_one
    trained = model_size(config, ModelConfig())
    assert feature_bytes(batch, trained, ModelConfig(), Layout(), H200) == 0


def test_kept_features_count_until_the_update_and_spare_the_tower():
    """Two images of 4 features, 64 wide, in float32. The reference reads what the actor keeps; a teacher reads all itself."""
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 10), (((1, 4, 4),), ((1, 4, 4),))), (3, 4))
    setting = Setting(config, batch, CPU, ModelConfig(freeze_vision=True), old_log_probs=1.0, reference=True)
    kept = 2 * 4 * 64 * 4
    found = {phase.name: phase for phase in forecast(setting).phases}
    features = {name: [role.features for role in phase.roles] for name, phase in found.items()}
    assert features == {
        "gen": [0, 0, 0],
        "old_log_prob": [kept, 0, 0],
        "ref": [kept, 0, 0],
        "update_actor": [kept, 0, 0],
    }
    language, vision = batch.language_flops, batch.tower_flops
    assert {name: phase.flops for name, phase in found.items()} == pytest.approx(
        {"gen": language + vision, "old_log_prob": language + vision, "ref": language, "update_actor": 3 * language}
    )
    taught = {phase.name: phase for phase in forecast(replace(setting, teacher=True)).phases}
    assert taught["ref"].flops == pytest.approx(language + vision)
    few = replace(setting, old_log_probs=0.5)  # the reference's pass keeps the other half
    assert [next(role.features for role in phase.roles) for phase in forecast(few).phases] == [0, kept // 2, kept, kept]
    adapters = forecast(replace(setting, compute=ModelConfig(lora_rank=4)))
    assert {role.features for role in adapters.phases[-1].roles} == {kept, 0}
    critic = forecast(replace(setting, critic_epochs=1)).phases
    assert [sum(role.features for role in phase.roles) // kept for phase in critic] == [0, 1, 1, 2, 2, 1]


def test_at_most_a_gibibyte_of_features_is_kept():
    setting = seven_b(compute=ModelConfig(freeze_vision=True), engine=None, reference=False)
    many = replace(
        setting, batch=replace(setting.batch, prompts=PromptSizes((361,), (((1, 30, 30),) * 200,)).repeated(16))
    )
    assert many.feature_bytes == 16 * 200 * 225 * 3584 * 2
    (update,) = forecast(many).phases
    assert update.roles[0].features == pytest.approx(MAX_BYTES, rel=1e-9)
    again = forecast(replace(many, epochs=2)).phases[0]
    assert 1.0 < again.flops / update.flops < 2.0  # the second epoch reads the images that are not kept


def test_recorded_experts_are_counted_where_they_lie():
    """The tiny mixture: one byte for each layer with experts and choice; vLLM keeps them for each token of its cache."""
    config = tiny_config("qwen3_vl_moe")
    text, size = config.get_text_config(), model_size(config, ModelConfig())
    bytes_of_token = len(family_of(config).expert_layers(tiny_model("qwen3_vl_moe"))) * text.num_experts_per_tok
    assert route_bytes(config, size) == bytes_of_token > 0
    assert route_bytes(tiny_config("qwen2_5_vl"), model_size(tiny_config("qwen2_5_vl"), ModelConfig())) == 0
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (8, 4, 7, 1), samples=2)
    setting = Setting(config, batch, H200, engine="vllm", reference=True, replays_routing=True)
    gen, ref, update = forecast(setting).phases
    engine = gen.roles[-1]
    assert engine.routes == engine.kv_cache // kv_bytes(text, 2) * bytes_of_token
    assert engine.host == batch.packed_tokens * bytes_of_token
    assert [role.routes for role in update.roles] == [round(1.1 * 50) * bytes_of_token, 0, 0]
    assert not any(role.routes for role in ref.roles)  # it chooses for itself
    assert not any(
        role.routes for phase in forecast(replace(setting, replays_routing=False)).phases for role in phase.roles
    )
    here = forecast(replace(setting, device=CPU, engine="hf")).phases[0].roles[-1]
    assert (here.routes, here.host) == (50 * bytes_of_token, 0)


def seven_b(**options) -> Setting:
    config = model_config("7b")
    prompts = PromptSizes((361,), (((1, 30, 30),),)).repeated(16)
    batch = BatchSizes(config, prompts, response_lengths(16 * 5, 400, 2048), 5)
    values = {"engine": "vllm", "reference": True, "longest": 4096, "compute": ModelConfig(compile=True)} | options
    return Setting(config, batch, H200, **values)


@pytest.mark.slow
def test_a_7b_model_with_adapters_over_4_bits_trains_within_24_gib():
    """Beside the same adapters over bfloat16, and with moments of all kinds."""
    adapters = ModelConfig(compile=True, lora_rank=16, token_budget=4096, activation_checkpointing="full")
    peaks = {}
    for four in (False, True):
        setting = seven_b(engine=None, compute=replace(adapters, load_in_4bit=four))
        found = forecast(setting)
        peaks[four] = found.memory / GIB
    rounded = setting.size.four_bit
    assert rounded == 28 * (3584 * 3584 * 2 + 2 * 512 * 3584 + 3 * 3584 * 18_944)  # seven matrices of each layer
    role = held("actor", setting.size, setting.compute, Layout(), H200, trains=True)
    others = setting.size.total - setting.size.trained - rounded
    assert role.weights == round(4 * setting.size.trained + 2 * others + rounded * (1 / 2 + 1 / 64 + 1 / 4096))
    assert role.copies == 2 * setting.size.trained
    assert peaks[True] < 20 < 24 < peaks[False]
    moments = [
        held("actor", setting.size, setting.compute, Layout(), H200, True, kind).moments / setting.size.trained
        for kind in ("adamw", "adamw8bit", "muon")
    ]
    assert moments == pytest.approx([8, 2.03, 4], abs=0.01)


def test_what_is_idle_in_host_memory_leaves_the_device_to_the_phase():
    """A 3B model, its reference and vLLM on one H200: generation has no other role beside it, and scores no moments."""
    config = model_config("3b")
    batch = BatchSizes(config, PromptSizes((361,) * 8, ((),) * 8), (400,) * 8)
    setting = Setting(config, batch, H200, ModelConfig(), engine="vllm", reference=True, old_log_probs=1.0)
    stays, idle = forecast(setting), forecast(replace(setting, compute=ModelConfig(offload_idle=True)))
    before, after = ({phase.name: phase for phase in found.phases} for found in (stays, idle))
    trained, reference = setting.size.total, 2 * setting.reference_size.total
    assert before["gen"].memory - after["gen"].memory == (4 + 2 + 8) * trained + reference
    assert before["ref"].memory - after["ref"].memory == (4 + 2 + 8) * trained
    assert before["old_log_prob"].memory - after["old_log_prob"].memory == 8 * trained + reference
    step = (4 + 2 + 4 + 8) * trained  # without activations: moments come only for it
    assert after["update_actor"].memory - 2**30 == pytest.approx(step, rel=1e-6)
    assert idle.host - stays.host == 12 * trained + reference


@pytest.mark.slow
def test_a_run_that_does_not_fit_says_what_does():
    found = forecast(seven_b())
    assert not found.fits
    assert re.match(r"update_actor needs \d+\.\d GiB of the 140.4 GiB of h200$", found.problems[0])
    assert way_out(found.setting).startswith("--lora-rank 32 --token-budget")
    assert any("does not fit" in line for line in forecast_lines(found))


def test_activations_and_moments_do_not_count_together_where_moments_are_idle():
    config = model_config("3b")
    batch = BatchSizes(config, PromptSizes((361,) * 8, ((),) * 8), (400,) * 40, 5)
    heights = []
    for budget in (8192, 16_384):
        for idle in (False, True):
            setting = Setting(config, batch, H200, ModelConfig(token_budget=budget, offload_idle=idle), engine=None)
            heights.append(forecast(setting).phases[-1].memory / setting.size.total)
    short, short_idle, long, long_idle = heights
    assert short - short_idle == pytest.approx(8, abs=1e-6)  # bytes of a parameter
    assert long - long_idle == pytest.approx(8, abs=1e-6)
    assert long > short


def test_a_preset_is_planned_without_network_and_checkpoint(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("recipes.plan.try_to_load_from_cache", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", "--preset", "3b", "--batch-size", "8", "--algorithm.minibatch", "8", "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert "preset 3b on 1 x 79.6 GiB: --token-budget 8192" in said
    assert "Qwen/Qwen2.5-VL-3B-Instruct is not on this machine: its published sizes" in said
    assert "3.75 B parameters" in said


@pytest.mark.slow
def test_fit_chooses_what_fits():
    with pytest.raises(InvalidConfig, match="nothing fits into 1 x h200"):
        fit(seven_b(), devices=1)  # masters, moments, copies and gradients alone take 149 GB
    found = fit(seven_b(), devices=4)
    assert found.fits
    assert found.memory <= H200.memory
    assert found.setting.layout == Layout(dp=4)
    options = as_options(found.setting)
    assert "--layout.dp 4" in options
    assert "--unsharded" in options
    assert "memory_share" in options
    assert found.seconds <= (1 + EQUAL) * forecast(seven_b(layout=Layout(dp=4))).seconds


def test_fit_leaves_room_for_longer_responses():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((10, 20), ((), ())), (8, 4, 7, 1), samples=2)
    setting = Setting(config, batch, H200, longest=29)
    assert grown(setting).batch.responses == (10, 5, 9, 2)
    assert grown(replace(setting, longest=28)).batch.responses == (10, 5, 8, 2)  # a prompt of 20 tokens, and 8
    assert max(each.compute.token_budget for each in choices(setting)) == 30 + 26  # all rows at once, even then
    found = [fit(setting), *map(forecast, choices(setting))]
    as_fast = [each for each in found if each.seconds <= (1 + EQUAL) * min(one.seconds for one in found)]
    assert found[0].phases[-1].memory == min(each.phases[-1].memory for each in as_fast)


@pytest.mark.long
@pytest.mark.parametrize("measured", UPDATES, ids=lambda each: each.name)
def test_updates_on_h200_take_what_benchmarks_results_reports(measured):
    """Figures of benchmarks/RESULTS.md, "A training step"."""
    seconds, gib = update_row(measured)
    assert measured.gib is None or gib == pytest.approx(measured.gib, rel=0.1)
    assert seconds == pytest.approx(measured.seconds, rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize("measured", ON_ONE_DEVICE, ids=lambda each: f"{each.size} {each.budget}")
def test_log_probs_and_updates_on_one_h200_take_what_benchmarks_results_reports(measured):
    for (seconds, gib), fact in zip(one_device_rows(measured), (measured.scoring, measured.update), strict=True):
        assert seconds == pytest.approx(fact[0], rel=0.2)
        assert gib == pytest.approx(fact[1], rel=0.1)


@pytest.mark.parametrize("measured", GENERATIONS, ids=lambda each: f"{each.size} {each.prompt[0]} {each.parallel}")
def test_generation_on_h200_takes_what_benchmarks_results_reports(measured):
    """Figures of benchmarks/RESULTS.md, "Rollouts with vLLM"."""
    rate, awake, asleep = generation_row(measured)
    assert rate == pytest.approx(measured.tokens_per_second, rel=0.2)
    for gib, fact in ((awake, measured.gib), (asleep, measured.asleep)):
        assert fact is None or gib == pytest.approx(fact, rel=0.1)


@pytest.mark.parametrize("step", WHOLE_STEPS, ids=lambda each: each.name)
def test_a_whole_step_on_h200_takes_what_benchmarks_results_reports(step):
    found, memory = whole_step_rows(step), {"update_actor": step.updating_gib}
    for phase, (seconds, gib) in found.items():
        assert seconds == pytest.approx(getattr(step, phase), rel=0.2), phase
        assert phase == "gen" or gib == pytest.approx(memory.get(phase, step.scoring_gib), rel=0.1), phase
    measured = sum(getattr(step, phase) for phase in found)
    assert sum(seconds for seconds, _ in found.values()) == pytest.approx(measured, rel=0.2)


@pytest.mark.long
def test_the_page_shows_the_table_of_the_benchmark():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [line for line in lines() if line not in page] == []


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "sft", "classify", "walk", "zoom"])
@pytest.mark.slow
def test_the_command_prints_a_plan(recipe, capsys):
    assert main([recipe, "--device", "h200", "--batch-size", "4", "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("forecast: 1 x h200")
    assert "update_actor" in printed
    assert ("update_critic" in printed) == (recipe == "ppo")
    assert "run: 10 steps" in printed


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_a_plan_reads_columns_with_other_names(recipe, tmp_path, capsys):
    row = {"question": "What is 2 + 3?", "label": "5"}
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    keys = f"--data-path {tmp_path / 'mine.jsonl'} --prompt-key question --answer-key label --steps 7"
    assert main([recipe, "--device", "h200", *keys.split()]) == 0
    assert "run: 7 steps" in capsys.readouterr().out


def test_the_forecast_counts_the_rows_that_a_single_file_holds_out(tmp_path):
    """256 are asked for; of a file of 10 rows a fifth is held out. The answers of a step are more than those."""
    (tmp_path / "mine.jsonl").write_text((json.dumps({"question": "What is 2 + 3?", "label": "5"}) + "\n") * 10)
    keys = f"--data-path {tmp_path / 'mine.jsonl'} --prompt-key question --answer-key label --steps 7 --device h200"
    setting = expected_setting(plan_config.parse(["grpo", *keys.split()]), str(make_tiny_model(tmp_path / "model")))
    assert (setting.eval_rows, setting.answered) == (2, 2)


def test_the_command_refuses_what_it_does_not_know(capsys):
    assert main(["grpo", "--device", "abacus"]) == 2
    assert "device='abacus' is unknown: choose one of h200, h100, a100-80g, cpu" in capsys.readouterr().err
    assert main(["parity"]) == 2
    assert "one of grpo, ppo, sft" in capsys.readouterr().err
    assert main(["grpo", "--no-such-option"]) == 2


def test_forecast_beside_fact():
    config = tiny_config("qwen2_5_vl")
    batch = BatchSizes(config, PromptSizes((5, 7), ((), ())), (3, 3))
    found = forecast(Setting(config, batch, H200, engine=None))
    rows = [{"step": 0}, {"step": 1, "timing_s/step": 9.0, "perf/total_num_tokens": 18}]
    lines = beside_fact(found, rows)
    assert [line.split()[0] for line in lines] == ["forecast", "timing_s/step", "perf/total_num_tokens"]
    assert lines[-1].split()[1:] == ["18", "18", "1.00"]
    assert beside_fact(found, []) == []
    memory = "perf/memory_gb/update_actor"  # the most counts, without the first step
    peaks = [{"step": step, memory: peak} for step, peak in ((1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0))]
    assert beside_fact(found, peaks)[-1].split()[2] == "3"
    assert torch.equal(batch.lengths, torch.tensor([8, 10]))
