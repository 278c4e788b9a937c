"""Experts dealt out over two and four processes against one process in float32: log-probs and entropies within 1e-5 absolute,
each parameter's gradient within 1e-4 of its norm. All cases of a number of processes run in one start of them.
"""

import logging
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.layouts import CPU, config_with_heads, differences, joined, mixed_rows, run_pass, text_rows
from helpers.processes import run_ranks
from helpers.routes import with_routes
from helpers.tiny_models import MOE_TYPES, tiny_config, tiny_model
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import compiling, expert, parallelize
from workers.ranks.autograd_collectives import local_part
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import ReferenceWorker
from workers.roles.reference import reference_worker
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig

MOE = "qwen3_vl_moe"


# What all ranks run


def equals_one_process(layout, rows=mixed_rows, prepare=None, model_type=MOE, **options):
    config = config_with_heads(model_type, heads=4, key_value_heads=2)
    data = rows(config)
    found = run_pass(config, data, joined(layout), prepare, **options)
    return differences(found, run_pass(config, data, prepare=prepare)) if distributed.get_rank() == 0 else []


def send_all_to(favourites, module):
    """Makes the routers send every token to these two experts."""
    for layer in module.model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(partial(choose, favourites))


def choose(favourites, gate, args, output):
    logits, weights, index = output
    return logits, weights, torch.tensor(favourites).expand_as(index)


def recorded_rows(config):
    return with_routes(config, mixed_rows(config))


def replay(module):
    module.replays_routing = True


def a_rank_holds_its_experts():
    config = config_with_heads(MOE, heads=2, key_value_heads=1)
    ranks = joined(Layout(dp=2, ep=2))
    module = PackedVLM(tiny_model(MOE, config=config), family_of(config), 1.0)
    parallelize(module, ranks, ModelConfig())
    experts = module.model.model.language_model.layers[0].mlp.experts
    assert [name for name, _ in experts.named_parameters()] == ["gate_up_proj", "down_proj"]
    weight = experts.down_proj
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] == weight.shape[0] // 2 == 2


def refusals():
    said = []
    for model_type, layout in (("qwen3_vl", Layout(dp=2, ep=2)), (MOE, Layout(dp=2, ep=2))):
        config = tiny_config(model_type)
        if model_type == MOE:
            config.text_config.num_experts = 3
        module = PackedVLM(tiny_model(model_type, config=config), family_of(config), 1.0)
        try:
            parallelize(module, joined(layout), ModelConfig())
        except InvalidConfig as error:
            said.append(str(error))
    return said


def compiled_graphs(mode):
    """What differs from one process in a pass over text with compiled layers, how many graphs there are, how often tokens were
    gathered, the warnings, and the bytes kept for the backward pass.

    The graphs run as they are: to translate them to C++ takes a minute. Only what is kept of a checkpoint depends on the backend.
    """
    kept, gathered, said = [], [], []
    gather = expert.gather_split

    def counted(*arguments):
        gathered.append(1)
        return gather(*arguments)

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(compiling.__name__).addHandler(handler)
    torch._dynamo.reset()
    counters.clear()
    compile_, backend = torch.compile, "eager" if mode == "none" else "aot_eager"
    with (
        patch.object(torch, "compile", lambda forward, options=None, **kw: compile_(forward, backend=backend, **kw)),
        patch.object(expert, "gather_split", counted),
        torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x),
    ):
        config = config_with_heads(MOE, heads=4, key_value_heads=2)
        data = text_rows(config)
        found = run_pass(config, data, joined(Layout(dp=2, ep=2)), activation_checkpointing=mode, compile=True)
    graphs = counters["stats"]["unique_graphs"]
    wrong = differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []
    return wrong, graphs, len(gathered), said, sum(kept)


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {}


def learn(path, data, layout=None, folder=None, resume=None):
    """Gradient norms and losses of five updates with clipping, and log-probs and weights after them."""
    ranks = Ranks() if layout is None else joined(layout)
    config = ActorConfig(path, optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.1), token_budget=60)
    actor = ActorWorker(config, CPU, ranks)
    if resume is not None:
        actor.load(resume)
    data_here = share_out(data, ranks.size("dp"))[ranks.rank("dp")]
    metrics = [actor.update(data_here, pg_loss) for _ in range(5)]
    curve = [(step["actor/loss"], step["actor/grad_norm"]) for step in metrics]
    scores = actor.log_probs(data)["old_log_probs"]
    weights = {name: weight.clone() for name, weight in actor.named_weights()}
    if folder is None:
        return curve, scores, weights
    actor.save(folder)
    distributed.barrier()
    actor.update(data_here, pg_loss)
    actor.load(folder)
    restored = all(torch.equal(weight, weights[name]) for name, weight in actor.named_weights())
    return curve, scores, weights, restored


def base_and_adapted(path, data, layout=None):
    """Log-probs of the reference and of the actor, whose adapters have moved."""
    config = ActorConfig(path, lora_rank=2)
    actor = ActorWorker(config, CPU, Ranks() if layout is None else joined(layout))
    for weight in actor.model.optimizer.parameters:
        local_part(weight.data).add_(0.1)
    reference = reference_worker(config.frozen(), actor)
    assert reference.module is actor.module
    return reference.log_probs(data)["ref_log_prob"], actor.log_probs(data)["old_log_probs"]


TWO = {
    "dp 2": partial(equals_one_process, Layout(dp=2, ep=2)),
    "sp 2": partial(equals_one_process, Layout(sp=2, ep=2)),
    "computed again": partial(equals_one_process, Layout(dp=2, ep=2), activation_checkpointing="full"),
    "all but products computed again": partial(
        equals_one_process, Layout(sp=2, ep=2), activation_checkpointing="selective"
    ),
    "text": partial(equals_one_process, Layout(dp=2, ep=2), text_rows),
    "tp 2": partial(equals_one_process, Layout(tp=2)),
    "recorded, dp 2": partial(equals_one_process, Layout(dp=2, ep=2), recorded_rows, replay),
    "recorded, tp 2": partial(equals_one_process, Layout(tp=2), recorded_rows, replay),
    "recorded, sp 2, computed again": partial(
        equals_one_process, Layout(sp=2, ep=2), recorded_rows, replay, activation_checkpointing="full"
    ),
    "a rank without tokens": partial(equals_one_process, Layout(dp=2, ep=2), prepare=partial(send_all_to, [3, 2])),
}
AGAIN = {
    (model_type, mode): partial(
        equals_one_process, Layout(dp=2, ep=2), model_type=model_type, activation_checkpointing=mode
    )
    for model_type in MOE_TYPES
    for mode in ("selective", "full")
}
BEHIND = [("kimi_k25", "selective"), ("gemma4+moe", "selective")]
"""Whose layers go on after their experts, so that a layer is computed again before FSDP's backward pass reaches them."""
FOUR = {
    "dp 4, ep 2": partial(equals_one_process, Layout(dp=4, ep=2)),
    "sp 2 x dp 2, ep 2": partial(equals_one_process, Layout(sp=2, dp=2, ep=2)),
    "ep 4": partial(equals_one_process, Layout(sp=2, dp=2, ep=4)),
    "tp 2 x dp 2, ep 2": partial(equals_one_process, Layout(dp=2, tp=2, ep=2)),
    "ranks without tokens": partial(equals_one_process, Layout(dp=4, ep=2), prepare=partial(send_all_to, [0, 1])),
}
UNEVEN = Layout(dp=2, sp=2, ep=2)  # three experts on a rank, which two ranks share
CHECKS = {"shares": a_rank_holds_its_experts}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = config_with_heads(MOE, heads=4, key_value_heads=2)
    config.text_config.num_experts = 6
    tiny_model(MOE, config=config).save_pretrained(path)
    data = mixed_rows(config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return str(path), data


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where four ranks leave their state."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(checkpoint):
    return learn(*checkpoint)


@pytest.fixture(scope="module")
def outcomes(checkpoint, tmp_path_factory):
    # Ranks along sp share their rows, so that both are given all of them.
    learning = partial(learn, *checkpoint, Layout(sp=2, ep=2), tmp_path_factory.mktemp("saved"))
    cases = TWO | CHECKS | {each: AGAIN[each] for each in BEHIND} | {"refusals": refusals, "learning": learning}
    cases["reference"] = partial(base_and_adapted, *checkpoint, Layout(dp=2, ep=2))
    return run_ranks(2, cases, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def outcomes_of_four(checkpoint, saved, tmp_path_factory):
    return run_ranks(
        4, FOUR | {"learning": partial(learn, *checkpoint, UNEVEN, saved)}, tmp_path_factory.mktemp("four")
    )


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_equal_one_process(outcomes, case):
    assert outcomes[case] == [[]] * 2


@pytest.mark.parametrize("case", BEHIND)
def test_layers_that_go_on_behind_their_experts_are_computed_again(outcomes, case):
    assert outcomes[case] == [[]] * 2


@pytest.mark.long
def test_every_family_is_computed_again(tmp_path):
    outcomes = run_ranks(2, AGAIN, tmp_path)
    assert outcomes == {case: [[]] * 2 for case in AGAIN}


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_equal_one_process(outcomes_of_four, case):
    assert outcomes_of_four[case] == [[]] * 4


@pytest.mark.parametrize("check", CHECKS)
def test_between_two_ranks(outcomes, check):
    assert outcomes[check] == [None, None]


def test_what_cannot_be_dealt_out_is_named(outcomes):
    for said in outcomes["refusals"]:
        assert len(said) == 2, said
        assert "qwen3_vl has no experts" in said[0]
        assert "layout.ep=2 must divide the 3 experts" in said[1]


@pytest.mark.parametrize("size", [2, 4])
def test_five_steps_are_those_of_one_process(outcomes, outcomes_of_four, alone, size):
    curve, scores, weights = alone
    assert all(norm > 0.1 for _, norm in curve)  # clipped
    for outcome in (outcomes if size == 2 else outcomes_of_four)["learning"]:
        assert not isinstance(outcome, str), outcome
        torch.testing.assert_close(torch.tensor(outcome[0]), torch.tensor(curve), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(outcome[1], scores, atol=1e-3, rtol=0)
        assert outcome[2].keys() == weights.keys()
        for name, weight in outcome[2].items():
            assert (weight - weights[name]).abs().mean() < 1e-4, name
        assert outcome[3]  # what was saved came back


def test_the_reference_of_split_experts_has_no_adapters(outcomes, checkpoint):
    path, data = checkpoint
    base = ReferenceWorker(ActorConfig(path).frozen(), CPU).log_probs(data)["ref_log_prob"]
    _, adapted = base_and_adapted(path, data)
    assert (adapted - base).abs().max() > 0.1
    for outcome in outcomes["reference"]:
        assert not isinstance(outcome, str), outcome
        torch.testing.assert_close(outcome[0], base, atol=1e-5, rtol=0)
        torch.testing.assert_close(outcome[1], adapted, atol=1e-5, rtol=0)


def test_one_process_goes_on_from_four(outcomes_of_four, checkpoint, saved):
    before = outcomes_of_four["learning"][0][0]
    curve, _, _ = learn(*checkpoint, resume=saved)
    assert curve[0][0] < before[-1][0]  # it goes down where it stood
    whole = dict(ActorWorker(ActorConfig(str(saved / "huggingface")), CPU).named_weights())
    assert all(torch.equal(weight, whole[name]) for name, weight in outcomes_of_four["learning"][0][2].items())


@pytest.mark.long
def test_compiled_layers_with_split_experts_equal_one_process(tmp_path):
    compiled = partial(equals_one_process, Layout(dp=2, ep=2), recorded_rows, replay, compile=True)
    cases = {mode: partial(compiled, activation_checkpointing=mode) for mode in ("none", "selective", "full")}
    assert run_ranks(2, cases, tmp_path) == {mode: [[]] * 2 for mode in cases}


def test_layers_with_split_experts_are_compiled_in_parts_and_computed_again(tmp_path):
    modes = {"none": 4, "full": 8}  # two layers gather states and weights, once or again
    found = run_ranks(2, {mode: partial(compiled_graphs, mode) for mode in modes}, tmp_path)
    for mode, gathers in modes.items():
        for wrong, graphs, gathered, said, _ in found[mode]:
            assert wrong == [] == said
            assert graphs == found["none"][0][1] > 6  # those of scores only are fewer: each layer is compiled in parts
            assert gathered == gathers
    none, full = (found[mode][0][-1] for mode in modes)
    assert full < none
