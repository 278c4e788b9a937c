"""Parity with TRL 1.16 on the batch of test_verl_numbers.py. The numbers are from ``scripts/trl_numbers.py``; TRL is not needed.

All numbers agree within float32's rounding: 1e-5 of their size, or 1e-6. Where a difference is meant, the test says which.
"""

import json
from pathlib import Path

import pytest
import torch

from helpers.aggregated import aggregate
from helpers.moving_page import TRL, option_names
from recipes.algorithms import advantages, kl, losses
from recipes.algorithms.correction import importance_weights
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs import grpo_config

FOLDER = Path(__file__).parent
NUMBERS = json.loads((FOLDER / "trl_numbers.json").read_text())
GIVEN = {
    name: torch.tensor(values)
    for name, values in json.loads((FOLDER / "verl_numbers.json").read_text())["inputs"].items()
}
MASK, OLD = GIVEN["response_mask"], GIVEN["old_log_probs"]
ADVANTAGES = torch.tensor(NUMBERS["advantages"])[:, None] * MASK
PAGE = (FOLDER.parents[1] / "docs" / "moving.md").read_text(encoding="utf-8")


def assert_equal(got, expected):
    torch.testing.assert_close(got.float(), torch.as_tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def of_tokens(function, **options):
    return lambda new: function(new, OLD, ADVANTAGES, **options)[0]


def of_responses(function, **options):
    return lambda new: function(new, OLD, ADVANTAGES, MASK, **options)[0]


@pytest.mark.parametrize(
    ("name", "loss", "aggregation"),
    [
        ("dapo", of_tokens(losses.clipped_policy_loss, dual_clip=None), "token-mean"),
        ("two_sided", of_tokens(losses.clipped_policy_loss, dual_clip=1.5), "token-mean"),
        ("grpo", of_tokens(losses.clipped_policy_loss, dual_clip=None), "seq-mean-token-mean"),
        ("dr_grpo", of_tokens(losses.clipped_policy_loss, dual_clip=None), "seq-mean-token-sum-norm"),
        ("bnpo", of_tokens(losses.clipped_policy_loss, dual_clip=None), "token-mean"),  # of one micro-batch
        ("cispo", of_responses(losses.clipped_weight_loss, clip=(1.0, 4.0)), "token-mean"),
        ("sapo", of_tokens(losses.gated_policy_loss), "seq-mean-token-mean"),
        ("gspo", of_responses(losses.sequence_policy_loss), "seq-mean-token-mean"),
        ("luspo", of_responses(losses.sequence_policy_loss), "seq-mean-token-sum"),
    ],
)
def test_losses_and_their_gradients(name, loss, aggregation):
    new = GIVEN["log_probs"].clone().requires_grad_()
    total = aggregate(loss(new), MASK, aggregation)
    total.backward()
    assert_equal(total.detach(), NUMBERS["losses"][name]["loss"])
    assert_equal(new.grad, NUMBERS["losses"][name]["gradient"])


def test_cispo_without_its_option_has_weights_of_at_most_the_epsilon():
    new = GIVEN["log_probs"]
    weight = (new - OLD).exp().clamp(max=NUMBERS["defaults"]["epsilon"])
    assert_equal(
        aggregate(-weight * ADVANTAGES * new, MASK, "token-mean"), NUMBERS["losses"]["cispo_by_default"]["loss"]
    )


@pytest.mark.parametrize(
    ("name", "estimator"), [("on_policy_plain", kl.k3_kl), ("on_policy_corrected", kl.unbiased_k3_kl)]
)
def test_kl_terms_on_policy(name, estimator):
    new = GIVEN["log_probs"].clone().requires_grad_()
    total = aggregate(estimator(new, GIVEN["ref_log_prob"]), MASK, "token-mean")
    total.backward()
    assert_equal(total.detach(), NUMBERS["kl"][name]["loss"])
    assert_equal(new.grad, NUMBERS["kl"][name]["gradient"])


def test_off_policy_the_corrected_term_is_k3_times_the_ratio():
    new = GIVEN["log_probs"].clone().requires_grad_()
    total = aggregate((new - OLD).exp() * kl.k3_kl(new, GIVEN["ref_log_prob"]), MASK, "token-mean")
    total.backward()
    stored = NUMBERS["kl"]["off_policy_corrected"]
    assert_equal(total.detach(), stored["loss"])
    assert_equal(new.grad, stored["gradient"])
    assert abs(stored["loss"] - NUMBERS["kl"]["off_policy_plain"]["loss"]) > 0.01


def group_advantages(stored, **options):
    rewards = torch.tensor(stored["rewards"])[:, None]
    uid = [row // stored["n"] for row in range(len(rewards))]
    return advantages.group_advantage(rewards, uid, torch.ones_like(rewards), **options).squeeze(1)


def test_group_advantages_have_another_epsilon():
    stored = NUMBERS["group_advantages"]
    assert_equal(group_advantages(stored["group"], eps=1e-4), stored["group"]["advantages"])
    assert_equal(group_advantages(stored["none"], normalise_std=False), stored["none"]["advantages"])
    assert round(stored["group"]["advantages"][1], 3) == 0.619
    assert round(float(group_advantages(stored["group"])[1]), 3) == 0.706
    assert "rewards 0 and 0.001 give 0.706 and 0.619" in PAGE


def test_the_scale_of_the_batch_is_as_the_page_says():
    stored = NUMBERS["group_advantages"]["batch"]
    scale = torch.tensor(stored["rewards"]).std() + 1e-4
    assert_equal(group_advantages(stored, normalise_std=False) / scale, stored["advantages"])


def test_the_default_correction_drops_responses():
    """``sequence_mask`` up to 3: ``--algorithm.correction sequence --algorithm.correction-limit 0 3``."""
    defaults = NUMBERS["defaults"]
    assert (defaults["vllm_importance_sampling_correction"], defaults["vllm_importance_sampling_mode"]) == (
        True,
        "sequence_mask",
    )
    assert (defaults["vllm_importance_sampling_clip_min"], defaults["vllm_importance_sampling_clip_max"]) == (None, 3.0)
    options = ["--algorithm.correction", "sequence", "--algorithm.correction-limit", "0", "3"]
    config = grpo_config.parse(options).algorithm
    old, engine = torch.tensor([[0.4, 0.9], [0.4, 0.6], [0.1, 0.1]]).log(), torch.tensor([[0.2, 0.3]] * 3).log()
    weights = importance_weights(old, engine, torch.ones(3, 2), config.correction, config.correction_limit)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1 / 6, 1 / 6]]))


def test_the_options_that_the_page_names_are_trls():
    others = {"output_dir", "report_to", "bf16"}  # their defaults depend on the machine
    assert set(option_names(TRL)) == {"k3", "accelerate", *others, *NUMBERS["arguments"], *NUMBERS["defaults"]} - {
        "vllm_importance_sampling_correction"
    }


def test_defaults_are_as_the_page_says():
    defaults, ours = NUMBERS["defaults"], AlgorithmConfig()
    same = ("temperature", "top_p", "top_k", "num_iterations", "entropy_coef", "beta")
    assert [defaults[name] for name in same] == [
        *(ours.temperature, ours.top_p, ours.top_k, ours.epochs, ours.entropy_coef, ours.kl_coef)
    ]
    assert ours.clip == (defaults["epsilon"], defaults["epsilon_high"] or defaults["epsilon"])
    assert (defaults["loss_type"], ours.aggregation) == ("dapo", "token-mean")
    assert (defaults["delta"], ours.dual_clip) == (None, 3.0)
    assert (defaults["lr_scheduler_type"], defaults["gradient_checkpointing"], defaults["eval_on_start"]) == (
        *("linear", True, False),
    )
    assert (defaults["use_bias_correction_kl"], defaults["scale_rewards"]) == (True, "group")
