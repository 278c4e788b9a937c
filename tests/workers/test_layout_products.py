"""Sequence, tensor and expert parallelism and FSDP2 together, over four processes, against one process in float32: log-probs and
entropies within 1e-5 absolute, each parameter's gradient within 1e-4 of its norm. All cases run in one start of the processes.
"""

from functools import partial

import pytest
import torch
from torch import distributed

from helpers.batches import prompt_batch, with_responses
from helpers.layouts import (
    CPU,
    config_with_heads,
    differences,
    joined,
    mixed_rows,
    odd_rows,
    one_image,
    run_pass,
    text_rows,
    turn_rows,
)
from helpers.processes import run_ranks
from helpers.tiny_models import ALL_TYPES, MOE_TYPES, tiny_model
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

pytestmark = pytest.mark.long

LAYOUTS = {
    "sp 2 x tp 2": Layout(sp=2, tp=2),
    "dp 2 x tp 2": Layout(dp=2, tp=2),
    "dp 2 x sp 2": Layout(dp=2, sp=2),
}
WITH_EXPERTS = {
    "dp 2 x tp 2, ep 2": Layout(dp=2, tp=2, ep=2),
    "sp 2 x tp 2, ep 2": Layout(sp=2, tp=2, ep=2),
    "dp 2 x sp 2, ep 2": Layout(dp=2, sp=2, ep=2),
    "dp 2 x sp 2, ep 4": Layout(dp=2, sp=2, ep=4),
    "dp 4, ep 2, 2 replicas": Layout(dp=4, ep=2, replicas=2),
    "sp 2 x pp 2, ep 2": Layout(sp=2, pp=2, ep=2),
}
CLIPPED = OptimizerConfig(lr=1e-3, max_grad_norm=0.1)


def equals_one_process(model_type, layout, rows, key_value_heads=2, tied=False, **options):
    """What is off, on the first rank."""
    config = config_with_heads(model_type, heads=4, key_value_heads=key_value_heads, tied=tied)
    data = rows(config)
    found = run_pass(config, data, joined(layout), **options)
    return differences(found, run_pass(config, data, **options)) if distributed.get_rank() == 0 else []


def three_tokens(config):
    """Fewer than ranks."""
    return with_responses(config, prompt_batch(config, [[]], texts=[2]), lengths=[1], width=1)


def pg_loss(outputs, rows):
    return -outputs.log_probs * rows["advantages"], {"actor/mean_log_prob": outputs.log_probs}


def training_rows(config):
    data = mixed_rows(config)
    data["advantages"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(3))
    return data


def learn(path, data, ranks=None):
    """Metrics of two updates in small micro-batches, log-probs after them, and how the weights begin."""
    actor = ActorWorker(ActorConfig(path, optimizer=CLIPPED, token_budget=60), CPU, ranks)
    weights = {name: weight.clone() for name, weight in actor.named_weights()}
    metrics = [actor.update(data, pg_loss) for _ in range(2)]
    return weights, metrics, actor.log_probs(data)["old_log_probs"]


def an_actor_learns(path, layout, data):
    return learn(path, data, joined(layout))


def an_actor_is_saved(path, layout, data, folder):
    """Whether what it wrote are its weights, and how it and another that took them up go on."""
    ranks = joined(layout)
    actor, other = (ActorWorker(ActorConfig(path, optimizer=CLIPPED), CPU, ranks) for _ in range(2))
    actor.update(data, pg_loss)
    actor.save(folder)
    distributed.barrier()
    other.load(folder)
    alone = dict(ActorWorker(ActorConfig(str(folder / "huggingface")), CPU).named_weights())
    written = [torch.equal(weight, alone[name]) for name, weight in actor.named_weights()]
    metrics = [actor_metrics(worker.update(data, pg_loss)) for worker in (actor, other)]
    scores = [worker.log_probs(data)["old_log_probs"] for worker in (actor, other)]
    return all(written), metrics, scores


def actor_metrics(metrics):
    """Without times."""
    return {name: value for name, value in metrics.items() if name.startswith("actor/")}


CASES = {
    **{
        f"{model_type}, {name}": partial(equals_one_process, model_type, layout, mixed_rows)
        for model_type in ALL_TYPES
        for name, layout in LAYOUTS.items()
    },
    **{
        f"{model_type}, {name}": partial(equals_one_process, model_type, layout, mixed_rows)
        for model_type in MOE_TYPES
        for name, layout in WITH_EXPERTS.items()
    },
    **{
        f"{model_type}, images in later turns, {name}": partial(equals_one_process, model_type, layout, turn_rows)
        for model_type in ("qwen2_5_vl", "qwen3_vl", "smolvlm")
        for name, layout in LAYOUTS.items()
    },
    "key-value heads fewer than tp": partial(
        equals_one_process, "qwen3_vl", Layout(tp=4), mixed_rows, key_value_heads=2
    ),
    "key-value heads fewer than sp": partial(
        equals_one_process, "qwen2_5_vl", Layout(sp=4), mixed_rows, key_value_heads=1
    ),
    "no image, tied weights": partial(equals_one_process, "qwen2_5_vl", Layout(sp=2, tp=2), text_rows, tied=True),
    "one image for four ranks": partial(equals_one_process, "qwen3_vl", Layout(sp=2, tp=2), one_image),
    "three tokens for four ranks": partial(equals_one_process, "qwen3_vl_moe", Layout(sp=2, tp=2), three_tokens),
    "an odd number of tokens": partial(equals_one_process, "qwen3_vl", Layout(tp=4), odd_rows),
    "activations computed again": partial(
        equals_one_process, "qwen3_vl", Layout(sp=2, tp=2), mixed_rows, activation_checkpointing="full"
    ),
    "all but products computed again": partial(
        equals_one_process, "qwen2_5_vl", Layout(sp=2, tp=2), mixed_rows, activation_checkpointing="selective"
    ),
    "a frozen tower": partial(equals_one_process, "qwen3_vl", Layout(sp=2, tp=2), mixed_rows, freeze_vision=True),
    "qwen3_omni_moe_thinker, frozen towers": partial(
        equals_one_process, "qwen3_omni_moe_thinker", Layout(sp=2, tp=2), mixed_rows, freeze_vision=True
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = config_with_heads("qwen3_vl", heads=4, key_value_heads=1, tied=True)
    tiny_model("qwen3_vl", config=config).save_pretrained(path)
    return str(path), training_rows(config)


@pytest.fixture(scope="module")
def outcomes(checkpoint, tmp_path_factory):
    path, data = checkpoint
    learning = {
        "actor": partial(an_actor_learns, path, Layout(sp=2, tp=2), data),
        "saved": partial(an_actor_is_saved, path, Layout(sp=2, tp=2), data, tmp_path_factory.mktemp("saved")),
    }
    return run_ranks(4, CASES | learning, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_a_product_of_layouts_equals_one_process(outcomes, case):
    assert outcomes[case] == [[]] * 4


def test_an_actor_learns_the_same(outcomes, checkpoint):
    weights, metrics, log_probs = learn(*checkpoint)
    for outcome in outcomes["actor"]:
        assert not isinstance(outcome, str), outcome
        assert outcome[0].keys() == weights.keys()
        assert all(torch.equal(outcome[0][name], weight) for name, weight in weights.items())
        for ours, theirs in zip(outcome[1], metrics, strict=True):
            assert actor_metrics(ours) == pytest.approx(actor_metrics(theirs), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(outcome[2], log_probs, atol=1e-4, rtol=0)
    assert metrics[0]["actor/grad_norm"] > CLIPPED.max_grad_norm


def test_a_saved_actor_goes_on(outcomes):
    for outcome in outcomes["saved"]:
        assert not isinstance(outcome, str), outcome
        written, metrics, log_probs = outcome
        assert written
        assert metrics[0] == metrics[1]
        assert torch.equal(*log_probs)
