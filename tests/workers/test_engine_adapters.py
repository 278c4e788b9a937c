"""Adapters of the actor in the engine: the base is sent once, then only adapters, and samples are those of merged weights."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from benchmarks.engine_weights import differing_of_worker
from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from helpers.engines import SAMPLED
from helpers.lora_rollouts import CPU, bytes_of, largest_difference, lora_actor, of_actor, rollout_for, take
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_model
from rollout.hf.engine import HFEngine
from workers.model.model_config import ModelConfig
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, why_merged


class Forgetful(HFEngine):
    """Drops its weights in sleep."""

    def sleep(self):
        super().sleep()
        for weight in self.model.parameters():
            weight.zero_()
        self._has_weights = False


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return lora_actor("qwen2_5_vl", tmp_path_factory.mktemp("adapted"))


def test_adapters_give_the_samples_of_merged_weights_and_the_base_is_sent_once(setup):
    """Tokens are equal, log-probs within 1e-5, and each change costs A and B of each layer and nothing else."""
    adapted, merged = rollout_for(setup), rollout_for(setup, lora_rank=0)
    assert adapted.how_lora() == "the engine hf gets the base once, then adapters"
    assert merged.how_lora().endswith("at each change: its option lora_rank is 0")
    base, adapter = bytes_of(setup.actor.base_weights()), bytes_of(setup.actor.adapter_weights())
    assert adapter == 4 * sum(each.numel() for each in setup.actor.module.parameters() if each.requires_grad)
    assert base == bytes_of(setup.actor.named_weights())
    before = None
    for sent in ({"base_weights": base, "adapter_weights": adapter}, {"adapter_weights": adapter}):
        ours, theirs = (each.generate(setup.prompts, SAMPLED) for each in (adapted, merged))
        assert take(adapted.sent) == sent
        assert take(merged.sent) == {"named_weights": base}
        assert torch.equal(ours["responses"], theirs["responses"])
        torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-5, rtol=0)
        assert largest_difference(setup, ours) < 1e-5
        assert before is None or not torch.equal(before, ours["rollout_log_probs"])
        adapted.generate(setup.prompts, SAMPLED)
        assert take(adapted.sent) == {}
        before = ours["rollout_log_probs"]
        setup.change()
        for each in (adapted, merged):
            each.mark_stale()
    assert differing_of_worker(adapted) == []
    setup.change()
    assert len(differing_of_worker(adapted)) == 2 * 7  # linear layers
    assert adapted.sharding.version == 3


def test_an_engine_that_has_dropped_the_base_gets_it_again(setup):
    worker = rollout_for(setup, f"{__name__}:Forgetful")
    for _ in range(2):
        assert largest_difference(setup, worker.generate(setup.prompts, SAMPLED)) < 1e-5
        assert take(worker.sent).keys() == {"base_weights", "adapter_weights"}


@pytest.mark.torchao
def test_a_base_of_4_bits_is_sent_as_the_numbers_that_the_actor_computes_with(tmp_path):
    setup = lora_actor("qwen2_5_vl", tmp_path, load_in_4bit=True)
    worker = rollout_for(setup)
    for _ in range(2):
        assert largest_difference(setup, worker.generate(setup.prompts, SAMPLED)) < 1e-5
        setup.change()
        worker.mark_stale()


def test_adapters_that_an_engine_cannot_hold_are_merged():
    dense, sparse = (family_of(tiny_model(each)) for each in ("qwen2_5_vl", "qwen3_vl_moe"))
    adapted, engine = ModelConfig(lora_rank=2), RolloutConfig("")
    assert why_merged(engine, adapted, dense) is None
    assert why_merged(engine, adapted, sparse) == "experts have some"
    tower = ModelConfig(lora_rank=2, lora_vision=True)
    assert why_merged(engine, tower, dense) == "the vision tower has some (lora_vision)"
    plain = RolloutConfig("", f"{__name__}:Plain")
    assert why_merged(plain, adapted, dense) == "it has no option lora_rank"


class Plain:
    """An engine of a user's."""

    def __init__(self, path):
        pass


def test_an_adapter_that_does_not_fit_is_refused_by_name(setup):
    engine = HFEngine(setup.actor.config.model_path, device=CPU, lora_rank=2)
    with pytest.raises(InvalidConfig, match=r"q_proj' has a matrix \(3, 64\), and the engine has room for \(2, 64\)"):
        engine.load_adapter(setup.actor.adapter_weights())
    name = "model.visual.patch_embed.proj"
    pair = [(f"{name}.lora_A.weight", torch.zeros(2, 3)), (f"{name}.lora_B.weight", torch.zeros(4, 2))]
    with pytest.raises(InvalidConfig, match=f"no linear layer '{name}'"):
        engine.load_adapter(pair)
    with pytest.raises(InvalidConfig, match=f"{name}.lora_B.weight is missing"):
        engine.load_adapter(pair[:1])
    with pytest.raises(InvalidConfig, match="start it with lora_rank=N"):
        HFEngine(setup.actor.config.model_path, device=CPU).load_adapter(pair)


def hand_over(path, layout):
    """The log-probs that an engine next to each rank and the actor give to the same rows, and the adapters."""
    ranks = init_ranks(layout, CPU)
    actor = ActorWorker(ActorConfig(path, lora_rank=3, temperature=SAMPLED.temperature), CPU, ranks)
    with torch.no_grad():
        for number, (_, weight) in enumerate(actor.module.named_parameters()):
            if weight.requires_grad:
                weight.fill_(0.001 * (number % 7 - 3))
    setup, reduced = of_actor(actor, changed=False), []
    worker = rollout_for(setup, ranks=ranks)
    data = worker.generate(setup.prompts, SAMPLED)
    difference = largest_difference(setup, data)
    with pytest.MonkeyPatch.context() as patch:
        reduce = _fsdp_param_group.foreach_reduce
        patch.setattr(
            _fsdp_param_group,
            "foreach_reduce",
            lambda weights, grads, *rest, **options: (
                reduced.extend(each.numel() for each in grads) or reduce(weights, grads, *rest, **options)
            ),
        )
        actor.update(data, lambda outputs, _: (-outputs.log_probs, {}))
    return difference, dict(worker.sent), sum(reduced)


@pytest.mark.long
def test_ranks_gather_adapters_together(setup, tmp_path):
    layouts = {"dp": Layout(dp=2), "pp": Layout(pp=2)}
    path = setup.actor.config.model_path
    found = run_ranks(2, {name: partial(hand_over, path, each) for name, each in layouts.items()}, tmp_path)
    adapter = bytes_of(setup.actor.adapter_weights())
    for name, outcomes in found.items():
        for outcome in outcomes:
            assert not isinstance(outcome, str), outcome
            difference, sent, reduced = outcome
            assert reduced == (adapter // 4 if name == "dp" else 0)  # none of the frozen weights'
            assert difference < 1e-5, name
            assert sent["adapter_weights"] == adapter
