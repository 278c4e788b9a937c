"""The simulator of clusters: hand-worked traffic, memory as in a forecast, the search, and its error on what was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulated_steps import HAND_OVERS, ROLLOUTS, STEPS, UPDATES, lines, step_rows
from dataproto.errors import InvalidConfig
from helpers.tiny_models import tiny_config
from recipes.configs.simulation_config import SimulationConfig, parse
from recipes.demo.tiny_model import make_tiny_model
from recipes.forecast import DEVICES, BatchSizes, ModelSize, PromptSizes, Setting, forecast, response_lengths
from recipes.plan import main
from recipes.simulation import Choice, Cluster, ModelParts, Traffic, Workload, best_step, possible_layouts, simulate
from recipes.simulation.published_models import PUBLISHED, published_config
from recipes.simulation.step_traffic import LayoutTraffic
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout

H200 = DEVICES["h200"]
COMPUTE = ModelConfig(compile=True, activation_checkpointing="full", unsharded="nothing")
PAGE = Path(__file__).parents[2] / "docs" / "cluster_plan.md"
SIZE = ModelSize(0, 1280, embedding=160, head=160, rest=0, largest_layer=160, trained=1600, tower_trained=True)
PARTS = ModelParts(SIZE, experts=0, tensors=10)
MIXED = replace(PARTS, experts=1024)


def workload(size: str = "3b", prompts: int = 64, minibatch: int = 32) -> Workload:
    sizes = PromptSizes((361,), (((1, 30, 30),),)).repeated(prompts)
    batch = BatchSizes(published_config(size), sizes, response_lengths(5 * prompts, 400, 2048), 5)
    return Workload(batch, minibatch, old_log_probs=0.5)


# Traffic


def traffic(layout: Layout, parts: ModelParts = PARTS) -> LayoutTraffic:
    return LayoutTraffic(Cluster(H200, layout.world_size), published_config("7b"), parts, layout)


def test_weights_are_gathered_within_a_node_by_replicas_and_over_all_nodes_without():
    """1,600 weights of 2 bytes over 16 ranks in two nodes: each has a sixteenth, and half of them pass once into each node."""
    assert traffic(Layout(dp=16)).gathered_weights() == Traffic(3200 * 15 / 16, 3200 / 2 / 8)
    assert traffic(Layout(dp=16, replicas=2)).gathered_weights() == Traffic(3200 * 7 / 8, 0.0)


def test_replicas_sum_their_shards_between_nodes():
    """Each rank has 200 weights of 4 bytes, of which it receives half twice: to sum them and to gather the sums."""
    assert traffic(Layout(dp=16, replicas=2)).summed_over_replicas() == Traffic(0.0, 2 * 800 / 2)
    assert traffic(Layout(dp=16)).summed_over_replicas() == Traffic()


def test_experts_are_gathered_by_the_ranks_that_hold_the_same_ones():
    """1,024 of the 1,600 weights are experts: with ep 4 a rank of 16 has a quarter of them, which four ranks share."""
    found = traffic(Layout(dp=16, ep=4), MIXED).gathered_weights()
    assert found == Traffic(1152 * 15 / 16 + 512 * 3 / 4, 1152 / 2 / 8 + 512 / 2 / 2)


def test_tensor_parallelism_gathers_and_sums_the_states_of_each_layer():
    """Four collectives a layer and pass; a rank of two receives half of the tokens, of 3,584 numbers of 2 bytes, each time."""
    found = traffic(Layout(tp=2)).activations(100, learns=False)
    assert found == Traffic(4 * 28 * 100 * 3584 * 2 / 2, 0.0)
    assert traffic(Layout(tp=2)).activations(100, learns=True) == 2 * found
    assert traffic(Layout(dp=8)).activations(100, learns=True) == Traffic()


def test_sequence_parallelism_exchanges_heads_and_keys():
    """Queries and results have 28 heads, keys and values 4, of 128 numbers; each of two ranks sends half of its tokens' ones."""
    expected = 28 * 50 * 2 * 2 * (28 + 4) * 128 / 2
    assert traffic(Layout(sp=2)).activations(100, learns=False) == Traffic(expected, 0.0)


def test_stages_on_other_nodes_send_through_the_network():
    assert traffic(Layout(dp=4, pp=2)).activations(100, learns=False).between == 0
    assert traffic(Layout(dp=8, pp=2)).activations(100, learns=False) == Traffic(0.0, 100 * 3584 * 2 / 2)


def test_stages_that_share_a_node_send_to_the_next_node_too():
    """Four stages of four ranks in two nodes: one of three boundaries is between them, and half of the weights cross it."""
    assert traffic(Layout(dp=4, pp=4)).activations(100, learns=False).between == 100 * 3584 * 2 / 4
    assert traffic(Layout(dp=4, pp=4)).handed_over().between == 3200 / 2


def test_pipelines_reduce_gradients_once_where_they_stay_unsharded():
    """As without a pipeline: less traffic, for the float32 gradients of this stage's part of the model."""
    cluster, layout, found = Cluster(H200, 8), Layout(dp=4, pp=2, replicas=2), {}
    for kept in ("weights", "gradients"):
        compute = replace(COMPUTE, unsharded=kept, token_budget=4096)
        found[kept] = simulate(workload(), cluster, Choice(layout, compute)).phases[-1]
    assert found["gradients"].traffic.inside < found["weights"].traffic.inside
    assert found["gradients"].memory > found["weights"].memory


# Phases


def test_a_step_without_other_degrees_takes_the_memory_of_a_forecast():
    """The update of an actor and its reference beside an engine that sleeps, with the same functions and the same rows."""
    work = workload()
    found = simulate(work, Cluster(H200, 2), Choice(Layout(dp=2), COMPUTE)).phases[-1]
    setting = Setting(work.config, work.batch, H200, COMPUTE, Layout(dp=2), engine="vllm", minibatch=32, reference=True)
    phase = forecast(setting).phases[-1]
    assert phase.name == "update_actor"
    expected = phase.memory * 1.05 + H200.context
    assert found.memory == pytest.approx(expected, rel=0.01)
    assert found.flops == pytest.approx(phase.flops)


def of_model(model_type: str) -> Workload:
    config = tiny_config(model_type)
    return Workload(BatchSizes(config, PromptSizes((30,) * 16, ((),) * 16), (8,) * 32, 2), 16, old_log_probs=0.0)


def test_experts_of_any_family_are_exchanged():
    """Gemma 4 names the experts of a token otherwise than others. Each of two ranks takes the tokens of both."""
    work, device = of_model("gemma4+moe"), Cluster(H200, 2)
    apart, alone = (simulate(work, device, Choice(Layout(dp=2, ep=ep), COMPUTE)).phases[-1] for ep in (2, 1))
    assert apart.memory > alone.memory
    assert apart.traffic.inside > 0
    assert {layout.ep for layout in possible_layouts(work, Cluster(H200, 8))} == {1, 2, 4}  # of four experts


def test_layers_that_share_keys_are_on_one_stage():
    cluster = Cluster(H200, 4)
    assert {layout.pp for layout in possible_layouts(of_model("gemma4+per_layer"), cluster)} == {1, 2}  # of five layers
    assert {layout.pp for layout in possible_layouts(of_model("gemma4"), cluster)} == {1, 2}


def test_more_devices_take_less_time_and_memory():
    steps = [simulate(workload(), Cluster(H200, devices), Choice(Layout(dp=devices), COMPUTE)) for devices in (2, 4, 8)]
    assert [step.seconds for step in steps] == sorted((step.seconds for step in steps), reverse=True)
    updates = [step.phases[-1].memory for step in steps]
    assert updates == sorted(updates, reverse=True)


def test_a_slow_network_costs_what_computation_does_not_hide():
    choice = Choice(Layout(dp=16), COMPUTE)
    fast, slow = (simulate(workload(), Cluster(H200, 16, network=speed), choice).seconds for speed in (50e9, 0.1e9))
    replicas = replace(choice, layout=Layout(dp=16, replicas=2))
    assert slow > fast
    assert simulate(workload(), Cluster(H200, 16, network=0.1e9), replicas).seconds < slow


def test_what_two_ranks_exchange_is_in_their_speed():
    """Eight ranks of tp receive 7 / 8 of the tokens instead of 1 / 2, beside a fourth of the work of two."""
    work, tokens = workload(prompts=4, minibatch=4), 100.0
    for tp, beyond in ((1, 0.0), (2, 0.0), (8, 7 / 8 - 1 / 2 / 4)):
        cluster, layout = Cluster(H200, tp), Layout(tp=tp)
        traffic = LayoutTraffic(cluster, work.config, work.parts, layout)
        received = 4 * 36 * tokens * 2048 * 2  # collectives of a layer, layers, tokens, bytes
        assert traffic.beyond_pairs(tokens, learns=False) == pytest.approx(beyond * received / H200.link)
    assert (
        traffic_of_experts(Layout(dp=2, sp=4, ep=8)).beyond_pairs(tokens, learns=False) > 0
    )  # sp 2 would not hold ep 8


def traffic_of_experts(layout: Layout) -> LayoutTraffic:
    return LayoutTraffic(Cluster(H200, layout.world_size), published_config("30b-a3b"), MIXED, layout)


# The search


@pytest.mark.slow
def test_the_search_finds_a_layout_that_no_other_beats():
    work, cluster = workload(prompts=16, minibatch=16), Cluster(H200, 8)
    best = best_step(work, cluster, replace(COMPUTE, unsharded="auto"))
    layouts = list(possible_layouts(work, cluster))  # dp x tp x sp x pp = 8 in powers of two
    assert len(layouts) == len(set(layouts)) == 20
    assert {layout.world_size for layout in layouts} == {8}
    every = (simulate(work, cluster, replace(best.choice, layout=layout)) for layout in layouts)
    assert best.fits
    assert best.seconds <= min(step.seconds for step in every if step.fits)


def test_heads_and_experts_bound_the_degrees():
    work, cluster = workload("3b"), Cluster(H200, 16)
    assert max(layout.sp * layout.tp for layout in possible_layouts(work, cluster)) <= 16  # heads
    assert {layout.ep for layout in possible_layouts(work, cluster)} == {1}
    assert all(layout.shards * layout.tp % 8 == 0 for layout in possible_layouts(work, cluster) if layout.replicas > 1)


def test_what_does_not_fit_is_an_error_with_the_nearest_and_the_way_out():
    small = replace(H200, memory=10 * 2**30)
    with pytest.raises(
        InvalidConfig, match=r"nothing fits 2 x h200; nearest is --layout.* needs .* GiB .* more --devices"
    ):
        best_step(workload(prompts=4, minibatch=4), Cluster(small, 2), COMPUTE)


# The command


def test_the_command_prints_the_phases(capsys):
    options = ["--devices", "8", "--preset", "3b", "--layout.dp", "8", "--batch-size", "16", "--minibatch", "16"]
    assert main(options) == 0
    told = capsys.readouterr().out
    assert told.startswith("simulated, not measured: 8 x h200 in 1 node, 3.75 B parameters; 16 prompts x 5 samples")
    for phase in ("hand_over", "generation", "reference", "update", "step"):
        assert re.search(rf"^{phase} +\d", told, re.MULTILINE), phase
    assert "options: --layout.dp 8 --unsharded" in told


def test_the_command_reads_a_checkpoint(tmp_path, capsys):
    path = str(make_tiny_model(tmp_path / "model", seed=0))
    options = ["--devices", "2", "--model-path", path, "--layout.dp", "2", "--tensor-parallel", "1"]
    assert main([*options, "--batch-size", "2", "--minibatch", "2", "--image-patches", "16"]) == 0
    assert "0.639 M parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--devices 12", "devices=12: must be whole nodes of --node 8"),
        ("--devices 16 --layout.dp 8", "has 8 ranks for --devices 16"),
        ("--devices 8 --minibatch 1024", "minibatch=1024 has more prompts than --batch-size 512"),
        ("--devices 8 --fit", "fit"),
        ("--devices 8 --network-gbit 0", "network_gbit=0.0: must be above 0"),
        ("--devices 9 --node 9 --tensor-parallel 2", "tensor_parallel=2 must divide --devices 9"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(options.split())


def test_an_unknown_preset_or_device_is_named(capsys):
    assert main(["--devices", "8", "--preset", "9000b"]) == 2
    assert "preset '9000b' is unknown: choose one of 3b" in capsys.readouterr().err
    assert main(["--devices", "8", "--preset", "3b", "--device", "abacus"]) == 2
    assert "device='abacus' is unknown" in capsys.readouterr().err


def test_every_preset_is_in_the_text_of_the_option():
    text = (Path(__file__).parents[2] / "recipes/configs/simulation_config.py").read_text(encoding="utf-8")
    (named,) = re.findall(r"preset: str = .*# a published model: (.*)", text)
    assert named.replace(" or ", ", ").split(", ") == list(PUBLISHED)
    assert SimulationConfig().preset in PUBLISHED


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "billions"), [("3b", 3.75), ("7b", 8.29), ("32b", 33.5), ("72b", 73.4), ("235b-a22b", 236)]
)
def test_presets_have_the_published_numbers_of_parameters(name, billions):
    assert ModelParts.of(published_config(name)).size.total == pytest.approx(billions * 1e9, rel=0.005)


# Beside what was measured


def documented() -> dict[tuple[str, str], tuple[float, float]]:
    """Simulated and measured of each row of the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.,]+) \| ([\d.,]+) \| [\d.]+ \|$", text, re.MULTILINE)
    return {
        (name, phase): (float(simulated.replace(",", "")), float(measured.replace(",", "")))
        for name, phase, simulated, measured in found
    }


def test_the_page_has_the_error_on_every_measurement():
    """Phases within 45 % of what was measured, whole steps within 15 %."""
    rows = documented()
    phases = sum(len(step.seconds) for step in STEPS)
    assert len(rows) == phases + len(UPDATES) + len(ROLLOUTS) + len(HAND_OVERS)
    for (name, phase), (simulated, measured) in rows.items():
        bound = 0.15 if phase == "step" else 0.45
        assert abs(simulated / measured - 1) <= bound, (name, phase)


def test_the_page_shows_what_the_simulator_computes_now():
    rows = documented()
    for name, phase, simulated, measured in step_rows(STEPS[-1]):
        assert rows[name, phase] == (pytest.approx(simulated, abs=0.006), measured)


@pytest.mark.long
def test_the_whole_table_is_that_of_the_benchmark():
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in lines() if line not in page] == []
