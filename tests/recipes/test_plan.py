"""The plan: its accuracy on what was measured, its counts compared with real models and batches, what it chooses and refuses."""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from benchmarks import forecasts, simulated_steps
from benchmarks.forecasts import batch_sizes
from benchmarks.workload import TINY, make_batch, model_config
from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.tiny_models import EACH_TYPE, tiny_config, tiny_model
from recipes.configs import dpo_config, plan_config
from recipes.configs.shared.published_models import PUBLISHED, published_config
from recipes.data.loader import PromptLoader, draws
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import make_tiny_model, make_tiny_processors
from recipes.dpo import dpo_task
from recipes.plan.command import forecast_text, main
from recipes.plan.forecast import fastest_layout, forecast, possible_layouts, way_out
from recipes.plan.model_size import model_size
from recipes.plan.rows import BatchSizes, PromptSizes, measure_answers, measure_prompts, response_lengths
from recipes.plan.seconds import update_flops
from recipes.plan.setting import DEVICES, Nodes, Setting, Traffic
from recipes.run.preferences import sent
from rollout.prompts import PromptBuilder
from workers.model.lora import add_adapters
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.layout import Layout
from workers.training.accounting import required_work
from workers.training.micro_batches import micro_batches

DOCS = Path(__file__).parents[2] / "docs"
H200 = DEVICES["h200"]
COMPUTE = ModelConfig(token_budget=8192, activation_checkpointing="selective", compile=True)


def rows_of(config, prompts=8, samples=5, mean=400):
    sizes = PromptSizes((361,), (((1, 30, 30),),)).repeated(prompts)
    return BatchSizes(config, sizes, response_lengths(prompts * samples, mean, 2048), samples)


def step_of(name, **options):
    """A step of a published model with its reference and vLLM on one H200."""
    config = published_config(name)
    given = {"compute": COMPUTE, "engine": "vllm", "engine_options": {"memory_share": 0.3}, "reference": True}
    return Setting(config, rows_of(config), H200, **given | options)


# Accuracy: the tables of the pages are those of the benchmarks, and within their bounds.


def test_forecasts_are_within_20_percent_in_time_and_10_in_memory():
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    for name in forecasts.names():
        (cells,) = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", page, re.MULTILINE)
        time, memory = (cell.strip() for cell in cells.split("|")[2::3])
        assert time or memory
        assert not time or 0.8 <= float(time) <= 1.2, name
        assert not memory or 0.9 <= float(memory) <= 1.1, name


def test_whole_steps_take_what_the_page_says():
    """The cheapest rows of the benchmark, computed now; `test_the_pages_show_the_tables_of_the_benchmarks` has all."""
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    assert [line for line in forecasts.whole_step_lines(forecasts.WHOLE_STEPS[0]) if line not in page] == []
    page = (DOCS / "cluster_plan.md").read_text(encoding="utf-8")
    for name, phase, simulated, measured in simulated_steps.step_rows(simulated_steps.STEPS[-1]):
        assert f"| {name} | {phase} | {simulated:.2f} | {measured:.2f} |" in page
        assert simulated == pytest.approx(measured, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(("module", "page"), [(forecasts, "plan.md"), (simulated_steps, "cluster_plan.md")])
def test_the_pages_show_the_tables_of_the_benchmarks(module, page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [line for line in module.lines() if line not in text] == []


# Counts


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


def test_operations_tokens_and_micro_batches_are_those_of_a_real_batch():
    config = model_config("tiny")
    data = make_batch(config, TINY, prompts=6, samples=3, seed=3)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    module, sizes = PackedVLM(model, family_of(config), 1.0), batch_sizes(data, config, 3)
    work, flops = required_work(module, data), update_flops(sizes, model_size(config, ModelConfig()), ModelConfig())
    assert (flops.language, flops.vision, sizes.packed_tokens) == (work.language, work.vision, work.tokens)
    planned, real = sizes.micro_batches(600), micro_batches(data, module, 600)
    assert sorted(part.logits for part in planned) == sorted(int(part.rows["response_mask"].sum()) for part in real)


def test_pairs_are_those_of_a_real_batch(tmp_path):
    path = str(make_tiny_model(tmp_path / "model", seed=0))
    task = dpo_task(dpo_config.parse(["--batch-size", "6", "--eval-rows", "4"]), path)
    sizes, data = measure_answers(task.loader), sent(next(task.loader))
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa")
    work = required_work(PackedVLM(model, family_of(model.config), 1.0), data)
    flops = update_flops(sizes, model_size(model.config, ModelConfig()), ModelConfig())
    assert (sizes.samples, sizes.lengths.tolist()) == (2, data["attention_mask"].sum(1).tolist())
    assert (flops.language, flops.vision, sizes.packed_tokens) == (work.language, work.vision, work.tokens)


def test_the_headers_of_images_give_the_sizes_that_the_processor_makes(tmp_path):
    builder, rows = PromptBuilder.from_pretrained(make_tiny_model(tmp_path), 256), ProblemRows()
    places = [place for _, place, _ in islice(draws(rows, 0), 4)]
    loader = PromptLoader(rows, builder, batch_size=4)
    sizes = measure_prompts(loader)
    assert loader.state_dict()["drawn"] == 0
    for number, (tokens, grids) in enumerate(zip(sizes.tokens, sizes.grids, strict=True)):
        prompt = builder.prepare(rows[places[number]])
        assert tokens == len(prompt.input_ids)
        assert [list(grid) for grid in grids] == [image.inputs["image_grid_thw"][0].tolist() for image in prompt.media]


def test_sounds_count_as_grids_of_their_frames(tmp_path):
    builder = PromptBuilder.from_pretrained(make_tiny_processors(tmp_path, hears=True), 256)
    rows = ProblemRows("notes")
    sizes, prompts = measure_prompts(PromptLoader(rows, builder, batch_size=2, shuffle=False)), builder(rows[:2])
    frames = [inputs["audio_feature_lengths"].tolist() for inputs in prompts["multi_modal_inputs"]]
    assert list(sizes.grids) == [((1, 1, count),) for (count,) in frames]
    assert list(sizes.tokens) == prompts["attention_mask"].sum(1).tolist()


def test_responses_have_the_expected_mean_and_the_longest_length():
    lengths = response_lengths(1000, mean=100, longest=10**6)
    assert sum(lengths) / 1000 == pytest.approx(100, rel=0.02)
    assert max(response_lengths(1000, mean=100, longest=150)) == 150
    assert response_lengths(2, mean=8, longest=8) == (8, 8)


# Properties


def test_idle_models_leave_the_device():
    """AdamW's float32 masters and moments, the copies, and a frozen reference: 14 and 2 bytes of a parameter."""
    stays, aside = (forecast(step_of("3b", compute=replace(COMPUTE, offload_idle=idle))) for idle in (False, True))
    before, after = ({phase.name: phase.memory for phase in found.phases} for found in (stays, aside))
    assert before["gen"] - after["gen"] == 16 * stays.setting.size.total
    assert aside.host == 14 * stays.setting.size.total
    assert after["update_actor"] < before["update_actor"]


@pytest.mark.slow
def test_a_critic_adapters_and_checkpointing_change_a_step_as_they_should():
    alone = forecast(step_of("3b"))
    critic = forecast(step_of("3b", critic_epochs=1))
    adapters = forecast(step_of("3b", compute=replace(COMPUTE, lora_rank=8)))
    full = forecast(step_of("3b", compute=replace(COMPUTE, activation_checkpointing="full")))
    assert [phase.name for phase in critic.phases] == [
        "hand_over",
        "gen",
        "ref",
        "values",
        "update_critic",
        "update_actor",
    ]
    assert adapters.working < full.working < alone.working < critic.working
    assert adapters.seconds < alone.seconds < full.seconds < critic.seconds


def test_more_devices_take_less_time_and_memory():
    steps = [forecast(step_of("3b", layout=Layout(dp=devices))) for devices in (1, 2, 4)]
    assert [step.seconds for step in steps] == sorted((step.seconds for step in steps), reverse=True)
    updates = [step.phases[-1].memory for step in steps]
    assert updates == sorted(updates, reverse=True)


def test_a_slow_network_costs_what_computation_does_not_hide():
    fast, slow = (
        forecast(step_of("3b", layout=Layout(dp=16), nodes=Nodes(network=speed))).seconds for speed in (50e9, 0.1e9)
    )
    replicas = step_of("3b", layout=Layout(dp=16, replicas=2), nodes=Nodes(network=0.1e9))
    assert fast < slow
    assert forecast(replicas).seconds < slow


def test_traffic_worked_by_hand():
    nodes = Nodes(size=8)
    assert nodes.gather(1600, ranks=16) == Traffic(inside=1500.0, between=100.0)
    assert nodes.exchange(1600, ranks=16) == Traffic(inside=700.0, between=800.0)
    assert nodes.send(1600, ranks=2, stride=8) == Traffic(inside=0.0, between=800.0)


# Choices


@pytest.mark.slow
def test_what_does_not_fit_has_a_way_out():
    seven = step_of("7b")
    assert not forecast(seven).fits  # masters, moments, copies and gradients take 149 GB
    assert way_out(seven).startswith("--lora-rank 32 --token-budget 10240 --activation-checkpointing selective")
    frozen = step_of("7b", compute=replace(COMPUTE, freeze_language=True, freeze_vision=False))
    assert "--lora-rank" not in way_out(frozen)
    whole = step_of("32b", compute=replace(COMPUTE, lora_rank=8))
    chosen = re.match(r"--token-budget \d+ --activation-checkpointing \w+ .*takes ([\d.]+) GiB", way_out(whole))
    assert chosen is not None
    assert float(chosen[1]) < H200.memory / 2**30
    small = replace(step_of("32b"), device=replace(H200, memory=30 * 2**30))
    assert way_out(small) == "nothing fits into 8 such devices either: take a smaller model"


@pytest.mark.slow
def test_the_search_finds_a_layout_that_no_other_beats():
    setting = step_of("3b", engine_options={})
    best = fastest_layout(setting, 4)
    layouts = list(possible_layouts(setting, 4))
    assert {layout.world_size for layout in layouts} == {4}
    for layout in layouts:
        assert best.seconds <= fastest_layout(setting, 4, [layout]).seconds
    small = replace(setting, device=replace(H200, memory=10 * 2**30))
    with pytest.raises(InvalidConfig, match=r"nothing fits 2 x h200; nearest is --token-budget .* give more --devices"):
        fastest_layout(small, 2)


def test_heads_experts_and_layers_bound_the_degrees():
    dense, mixture = step_of("3b"), step_of("30b-a3b")
    assert max(layout.sp * layout.tp for layout in possible_layouts(dense, 16)) <= 16  # heads
    assert {layout.ep for layout in possible_layouts(dense, 16)} == {1}
    assert max(layout.ep for layout in possible_layouts(mixture, 16)) == 16
    shared = replace(dense, config=tiny_config("gemma4+per_layer"), batch=rows_of(tiny_config("gemma4+per_layer")))
    assert {layout.pp for layout in possible_layouts(shared, 4)} == {1, 2}  # of five layers, some share keys


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "billions"), [("3b", 3.75), ("7b", 8.29), ("32b", 33.5), ("72b", 73.4), ("235b-a22b", 236)]
)
def test_presets_have_the_published_numbers_of_parameters(name, billions):
    assert model_size(published_config(name), ModelConfig()).total == pytest.approx(billions * 1e9, rel=0.005)


# The command


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "sft", "classify", "dpo"])
@pytest.mark.slow
def test_the_command_prints_a_plan(recipe, capsys):
    assert main([recipe, "--device", "h200", "--batch-size", "4", "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert "\nforecast, not measured: 1 x h200" in "\n" + printed
    assert "update_actor" in printed
    assert ("update_critic" in printed) == (recipe == "ppo")
    assert bool(re.search("^ref ", printed, re.M)) == (recipe in ("grpo", "ppo", "dpo"))
    assert "run: 10 steps" in printed


@pytest.mark.slow
def test_a_preset_is_planned_without_network_and_checkpoint(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("recipes.plan.command.try_to_load_from_cache", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", "--preset", "3b", "--batch-size", "8", "--algorithm.minibatch", "8", "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert re.search("preset 3b and options: .* token-budget 8192", said)
    assert "Qwen/Qwen2.5-VL-3B-Instruct is not on this machine: its published sizes" in said
    assert "3.75 B parameters" in said


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_a_plan_reads_columns_with_other_names(recipe, tmp_path, capsys):
    row = {"question": "What is 2 + 3?", "label": "5"}
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    keys = f"--data-path {tmp_path / 'mine.jsonl'} --prompt-key question --answer-key label --steps 7"
    assert main([recipe, "--device", "h200", *keys.split()]) == 0
    assert "run: 7 steps" in capsys.readouterr().out


def test_the_command_plans_a_cluster(tmp_path, capsys):
    path = str(make_tiny_model(tmp_path / "model", seed=0))
    options = ["--devices", "2", "--model-path", path, "--layout.dp", "2", "--tensor-parallel", "1"]
    assert main([*options, "--batch-size", "2", "--minibatch", "2", "--image-patches", "16"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("forecast, not measured: 2 x h200 (dp 2)")
    for phase in ("hand_over", "gen", "ref", "update_actor", "step"):
        assert re.search(rf"^{phase} +\d", told, re.MULTILINE), phase
    assert "--layout.dp 2" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("grpo --on ray --layout.tp 3", "layout.sp=1 x layout.tp=3 = 3 must divide the 4 query heads"),
        ("reward-model", "reward-model is not planned"),
        ("dpo --algorithm.loss kto", "dpo with --algorithm.loss kto is not planned"),
        ("--devices 8 --preset 9000b", "preset '9000b' is unknown: choose one of 3b"),
        ("--devices 12", "--devices 12: must be whole nodes of --node 8"),
        ("--devices 16 --layout.dp 8", "has 8 ranks for --devices 16"),
        ("--devices 8 --minibatch 1024", "--minibatch 1024 has more prompts than --batch-size 512"),
        ("--devices 8 --network-gbit 0", "--network-gbit 0.0: must be above 0"),
        ("--devices 9 --node 9 --tensor-parallel 2", "--tensor-parallel 2 must divide --devices 9"),
    ],
)
def test_the_command_refuses_what_it_cannot_plan(options, message, capsys):
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("others", [["grpo"], ["--devices", "8"]])
@pytest.mark.parametrize("name", ["abacus", "cpu"])
def test_a_device_that_is_not_planned_is_refused_with_the_options(others, name):
    with pytest.raises(InvalidConfig, match=f"^--device '{name}' is none .* planned: h200, h100, a100-80g$"):
        plan_config.parse([*others, "--device", name])


def test_engines_of_their_own_generate_on_their_own_devices_only():
    """Two of 8 take as long as two without further ranks, and the title counts all."""
    whole = step_of("3b", layout=Layout(dp=8, rollout=2))
    two = step_of("3b", layout=Layout(dp=2))
    of_phases = [{phase.name: phase.seconds for phase in forecast(each).phases} for each in (whole, two)]
    assert of_phases[0]["gen"] == of_phases[1]["gen"]
    assert of_phases[0]["update_actor"] < of_phases[1]["update_actor"]
    assert forecast_text(forecast(whole)).startswith("forecast, not measured: 10 x h200 (dp 8, rollout 2)")


def test_every_preset_is_in_the_text_of_the_option():
    text = Path(plan_config.__file__).read_text(encoding="utf-8")
    (named,) = re.findall(r"preset: a published model: (.*)", text)
    assert named.replace(" or ", ", ").split(", ") == list(PUBLISHED)
