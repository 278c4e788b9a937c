"""Writes tests/algorithms/verl_numbers.json: what verl 0.9.1 computes on a small ragged batch with holes.

    pip install --no-deps --target /tmp/verl verl==0.9.1 omegaconf hydra-core antlr4-python3-runtime==4.9.3 \\
        codetiming dill torchdata
    PYTHONPATH=/tmp/verl:tests python scripts/verl_numbers.py

Inputs and results are in the file, so that the tests that compare with it need no verl.
"""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as core
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from helpers.moving_page import VERL, option_names

FILE = Path(__file__).parents[1] / "tests" / "algorithms" / "verl_numbers.json"
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
UIDS = ["a", "b", "a", "b", "a", "c", "c"]
MASK = [
    [1, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 1, 1, 0, 0],
    [1, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 0, 1, 1, 0, 1, 1],
    [1, 1, 1, 1, 0, 0, 0, 1],
    [1, 1, 1, 1, 1, 0, 0, 0],
]


def draw_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(20)
    mask = torch.tensor(MASK)
    rows, width = mask.shape

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator)

    old = -torch.rand(rows, width, generator=generator) * 3 - 0.05
    last = (mask * torch.arange(1, width + 1)).argmax(1)
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), last] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.1, 0.9])
    return {
        "response_mask": mask,
        "old_log_probs": old,
        "log_probs": old + normal(0.4),
        "near_log_probs": old + normal(0.02),
        "ref_log_prob": old + normal(0.5),
        "rollout_log_probs": old + normal(0.35),
        "advantages": normal(1.0) * mask,
        "token_level_rewards": rewards,
        "dense_rewards": (rewards + normal(0.05)) * mask,
        "values": normal(0.5),
        "new_values": normal(0.5),
        "returns": normal(0.7),
        "reward_baselines": torch.rand(rows, generator=generator),
        "loss": normal(1.0),
    }


def advantages_of(given: dict[str, Tensor]) -> dict[str, Any]:
    mask, index, gamma, lam = given["response_mask"], np.array(UIDS, dtype=object), 0.9, 0.8

    def outcome(function: Any, **options: Any) -> list[Any]:
        return function(given["token_level_rewards"].clone(), response_mask=mask, index=index, **options)[0].tolist()

    config = AlgoConfig(gamma=gamma)
    dense = given["dense_rewards"].clone()
    advantages, returns = core.compute_gae_advantage_return(dense, given["values"], mask, gamma, lam)
    plus_plus = core.compute_reinforce_plus_plus_outcome_advantage(dense, mask, config=config)[0]
    remax = core.compute_remax_outcome_advantage(dense, given["reward_baselines"], mask)[0]
    return {
        "grpo": outcome(core.compute_grpo_outcome_advantage),
        "dr_grpo": outcome(core.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        "rloo": outcome(core.compute_rloo_outcome_advantage),
        "opo": outcome(core.compute_opo_outcome_advantage),
        "reinforce_plus_plus_baseline": outcome(core.compute_reinforce_plus_plus_baseline_outcome_advantage),
        "reinforce_plus_plus": plus_plus.tolist(),
        "remax": remax.tolist(),
        "gae": advantages.tolist(),
        "gae_returns": returns.tolist(),
    }


LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: log-probs, actor options, policy_loss options
    "vanilla": ("log_probs", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}, {}),
    "gspo": ("log_probs", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}, {}),
    "cispo": ("log_probs", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}, {}),
    "sapo": ("log_probs", {"tau_pos": 1.0, "tau_neg": 1.05}, {}),
    # As large a share as there are tokens, so that nothing is drawn; log-probs so near that nothing is clipped before.
    "clip_cov": (
        "near_log_probs",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 1.5},
    ),
    "kl_cov": ("log_probs", {}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
}


def losses_of(given: dict[str, Tensor]) -> dict[str, Any]:
    """Loss, gradient with respect to log-probs, and metrics."""
    found = {}
    for name, (log_probs, options, of_loss) in LOSSES.items():
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)
        for option, value in of_loss.items():
            object.__setattr__(config.policy_loss, option, value)
        new = given[log_probs].clone().requires_grad_()
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        loss, metrics = core.get_policy_loss_fn(name)(
            given["old_log_probs"], new, given["advantages"].clone(), given["response_mask"], mode, config
        )
        loss.backward()
        found[name] = {
            "log_probs": log_probs,
            "mode": mode,
            "options": options | of_loss,
            "loss": loss.item(),
            "gradient": new.grad.tolist(),
            "metrics": metrics,
        }
    return found


def kl_of(given: dict[str, Tensor]) -> dict[str, Any]:
    found = {}
    for name in ("k1", "k2", "k3", "k3+"):
        new = given["log_probs"].clone().requires_grad_()
        value = core.kl_penalty(new, given["ref_log_prob"], name)
        value.sum().backward()
        found[name] = {"value": value.tolist(), "gradient": new.grad.tolist()}
    return found


CORRECTIONS: list[dict[str, Any]] = [
    {"rollout_is": "token", "rollout_is_threshold": 1.3},
    {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.5"},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.85_1.1"},
    {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.5 * float(np.log(1.8)) ** 2},
    {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_sum_k1",
        "rollout_rs_threshold": "0.5_2.0",
    },
    {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.9_1.2",
    },
]


def corrections_of(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    found = []
    for options in CORRECTIONS:
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            given["old_log_probs"], given["rollout_log_probs"], given["response_mask"], **options
        )
        chosen = None if weights is None else weights.batch["rollout_is_weights"].tolist()
        found.append({"options": options, "weights": chosen, "mask": mask.tolist(), "metrics": metrics})
    return found


OTHERS = (
    "actor.clip_ratio_c algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam trainer.critic_warmup "
    "critic.cliprange_value algorithm.filter_groups.max_num_gen_batches"
)
"""Options with defaults of which docs/algorithms.md speaks, and docs/moving.md does not."""


def defaults() -> dict[str, Any]:
    """The options of a run that names none, those of docs/moving.md and `OTHERS`; an error for a name that is none of verl's."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    found = {}
    for name in dict.fromkeys([*option_names(VERL), *OTHERS.split()]):
        group = "" if name.split(".")[0] in config else "actor_rollout_ref."
        parent, _, last = f"{group}{name}".rpartition(".")
        if last not in list(OmegaConf.select(config, parent)):  # a key without a value is not "in" the config
            raise KeyError(name)
        value = OmegaConf.select(config, f"{group}{name}")
        found[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


def differences() -> dict[str, Any]:
    """What docs/algorithms.md says of verl and this library does not: a group of one row, and a large ratio of a response."""
    one = torch.tensor([[0.5]])
    alone = core.compute_grpo_outcome_advantage(one, torch.ones(1, 1), np.array(["a"], dtype=object))[0]
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    ratio, _ = core.get_policy_loss_fn("gspo")(
        torch.tensor([[-15.0]]), torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), "seq-mean-token-mean", config
    )
    return {"advantage_of_one_row": alone.item(), "gspo_of_log_ratio_15": ratio.item()}


def main() -> None:
    given = draw_inputs()
    mask = given["response_mask"]
    value_loss, clipfrac = core.compute_value_loss(given["new_values"], given["returns"], given["values"], mask, 0.3)
    scores = SimpleNamespace(reward=given["token_level_rewards"], old=given["old_log_probs"], ref=given["ref_log_prob"])
    numbers = {
        "made_by": f"scripts/verl_numbers.py with verl {version('verl')}, torch {torch.__version__.split('+')[0]}",
        "uid": UIDS,
        "inputs": {name: values.tolist() for name, values in given.items()},
        "advantages": {"gamma": 0.9, "lam": 0.8} | advantages_of(given),
        "losses": losses_of(given),
        "kl": kl_of(given),
        "aggregation": {mode: core.agg_loss(given["loss"], mask, mode).item() for mode in MODES},
        "value_loss": {"clip": 0.3, "loss": value_loss.item(), "clipfrac": clipfrac.item()},
        "penalised_rewards": core.compute_rewards(scores.reward, scores.old, scores.ref, 0.1).tolist(),
        "corrections": corrections_of(given),
        "differences": differences(),
        "defaults": defaults(),
    }
    text = json.dumps(numbers, allow_nan=False, indent=None, separators=(",", ":"))
    FILE.write_text(text.replace('],"', '],\n"').replace('},"', '},\n"') + "\n")
    print(f"{FILE}: {len(text):,} characters")


if __name__ == "__main__":
    main()
