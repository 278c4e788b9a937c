"""Episodes that `roles.rollout.play` returns, with images after their prompts, over two, four and eight processes against
Hugging Face's forward pass of each row alone, in float32: log-probs within 1e-5, gradients within 1e-4 of their norms.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.columns import media_parts
from helpers.batches import padded_log_probs
from helpers.checkpoints import write_checkpoint
from helpers.episodes import DrawnEnvironment, prompts_of
from helpers.layouts import CPU, joined, with_heads
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_model
from helpers.tiny_prompts import tiny_builder, tiny_prompt_config
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits
from workers import ActorConfig, launch
from workers.model.named_weights import full_tensor
from workers.ranks.layout import Layout
from workers.roles.actor import ActorWorker

pytestmark = pytest.mark.long

LAYOUTS = {"sp 2": Layout(sp=2), "tp 2": Layout(tp=2), "pp 2": Layout(pp=2), "dp 2": Layout(dp=2)}
EXPERTS = {"ep 2": Layout(dp=2, ep=2), "sp 2, ep 2": Layout(sp=2, ep=2)}
MOE = "qwen3_vl_moe"
PLAYED = {
    **{model_type: (model_type, None) for model_type in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "smolvlm")},
    "qwen2_5_vl, the last two pictures": ("qwen2_5_vl", 2),  # episodes have several rows
    MOE: (MOE, None),
}
PRODUCTS = {
    "sp 2 x tp 2": Layout(sp=2, tp=2),
    "pp 2 x tp 2": Layout(pp=2, tp=2),
    "pp 2 x sp 2": Layout(pp=2, sp=2),
    "dp 2 x sp 2 x tp 2": Layout(dp=2, sp=2, tp=2),
}
IN_PRODUCTS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_vl, the last two pictures", MOE)
EVERY = LAYOUTS | EXPERTS | PRODUCTS
CASES = [
    *((name, layout) for name in PLAYED for layout in (LAYOUTS | EXPERTS if name == MOE else LAYOUTS)),
    *((name, layout) for name in IN_PRODUCTS for layout in PRODUCTS),
]
TOKEN_BUDGET = 250  # several micro-batches
SAMPLING = SamplingParams(n=3, max_tokens=8, seed=3, stop_token_ids=tuple(range(0, 250, 2)))  # so that turns end


@dataclass(frozen=True)
class Episodes:
    """A checkpoint, rows that its policy played, and what they are alone."""

    path: str
    data: DataProto
    log_probs: Tensor
    gradients: dict[str, Tensor]


def weighted_loss(outputs: Any, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    return outputs.log_probs * rows["weights"], {}


def score_and_learn(path: str, data: DataProto, layout: Layout) -> tuple[np.ndarray, Tensor, dict[str, Tensor]]:
    """This rank's rows, their log-probs, and the gradients of the parameters that it holds."""
    ranks = joined(layout)
    actor = ActorWorker(ActorConfig(path, token_budget=TOKEN_BUDGET), CPU, ranks)
    mine = np.arange(ranks.rank("dp"), len(data), ranks.size("dp"))
    log_probs = actor.log_probs(data[mine])["old_log_probs"]
    actor.forward_backward(data[mine], weighted_loss)
    for transform in actor.model.transforms:
        transform.sum_gradients(actor.module)
    parameters = actor.module.model.named_parameters()
    return mine, log_probs, {name: full_tensor(each.grad).clone() for name, each in parameters if each.grad is not None}


def played(model_type: str, last_pictures: int | None, path: str) -> Episodes:
    write_checkpoint(model_type, path)
    config = with_heads(tiny_prompt_config(model_type), heads=4, key_value_heads=2)  # for products of two by two
    config.get_text_config().vocab_size += config.get_text_config().vocab_size % 2  # the words of two ranks
    model = tiny_model(model_type, config=config)
    model.save_pretrained(path)
    prompts = prompts_of(tiny_builder(model_type, max_prompt_length=300), 3)
    with launch(ActorConfig(path), reward=None) as roles:
        data = roles.rollout.play(
            prompts, DrawnEnvironment, SAMPLING, EpisodeLimits(turns=3, last_pictures=last_pictures)
        )
    behind = data["mm_token_type_ids"][:, -data["response_mask"].shape[1] :]
    assert (behind > 0).any(1).sum() > 1
    assert any(len(media_parts(media)) > 1 for media in data["multi_modal_inputs"])
    assert (len(data) > len(prompts) * SAMPLING.n) == (last_pictures is not None)
    assert data["attention_mask"].sum() > 2 * TOKEN_BUDGET
    data["weights"] = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(5))
    log_probs = padded_log_probs(model, data)
    (log_probs * data["weights"]).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Episodes(str(path), data, log_probs.detach(), gradients)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    return {name: played(*each, tmp_path_factory.mktemp("model")) for name, each in PLAYED.items()}


@pytest.fixture(scope="module")
def outcomes(episodes, tmp_path_factory):
    found = {}
    for ranks in sorted({layout.world_size for layout in EVERY.values()}):
        cases = {
            (name, layout): partial(score_and_learn, episodes[name].path, episodes[name].data, EVERY[layout])
            for name, layout in CASES
            if EVERY[layout].world_size == ranks
        }
        found |= run_ranks(ranks, cases, tmp_path_factory.mktemp("ranks"))
    return found


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_episodes_over_ranks_are_those_alone(episodes, outcomes, name, layout):
    alone, found = episodes[name], set()
    for outcome in outcomes[name, layout]:
        assert not isinstance(outcome, str), outcome
        rows, log_probs, gradients = outcome
        torch.testing.assert_close(log_probs, alone.log_probs[rows], atol=1e-5, rtol=0)
        for parameter, expected in alone.gradients.items():
            if parameter in gradients:
                error = (gradients[parameter] - expected).norm()
                assert error <= 1e-4 * expected.norm() + 2e-8, parameter  # the gradient of keys' biases is rounding
        found |= gradients.keys()
    assert found == alone.gradients.keys()
