"""The options that all policy-gradient recipes share, and the loss and advantages that they select."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.advantages import (
    group_advantage,
    leave_one_out_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from recipes.algorithms.correction import Correction, importance_weights
from recipes.algorithms.kl import KLController, k1_kl, k2_kl, k3_kl
from recipes.algorithms.losses import clipped_policy_loss, clipped_weight_loss, sequence_policy_loss
from rollout.engine import SamplingParams
from workers.aggregation import AggregationMode
from workers.packed import Outputs
from workers.step import LossFn

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
PolicyLoss = Literal["ppo", "gspo", "cispo"]

WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
DISCOUNTED = ("reinforce_plus_plus", "gae")
KL_ESTIMATORS = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
DEFAULT_CLIP = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
DUAL_CLIP = 3.0


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is sampled, and what is learned from it; verl's defaults where they exist. See docs/algorithms.md."""

    n: int = 5  # samples of each prompt
    temperature: float = 1.0  # of the policy, in sampling and in the loss
    top_p: float = 1.0  # sample from the likeliest tokens that make up this share
    top_k: int = 0  # sample from so many likeliest tokens; 0: from all
    minibatch: int | None = None  # prompts for each optimizer step; all of the batch by default
    epochs: int = 1  # passes over each batch
    advantage: Advantage = "grpo"  # what a response, or a token of it, is compared with
    gamma: float = 1.0  # discount of rewards to come, for reinforce_plus_plus and gae
    loss: PolicyLoss = "ppo"  # ratio and clip per token, per sequence (gspo), or of a weight (cispo)
    # how far the ratio may pay below and above 1; default: 0.2 0.2 for ppo, 3e-4 4e-4 for gspo, 1 4 for cispo
    clip: tuple[float, float] | None = None
    dual_clip: float | None = DUAL_CLIP  # of ppo: bound on the ratio where the advantage is negative
    kl_coef: float = 0.0  # weight of the KL term to the reference; 0 runs without a reference
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL term stands
    kl: Literal["k1", "k2", "k3"] | None = None  # its estimator; default: k3 in the loss, k1 in the reward
    kl_target: float | None = None  # in the reward: adapt the weight so that the KL stays near this
    kl_horizon: int = 10_000  # rows in which the adapted weight follows
    entropy_coef: float = 0.0  # weight of the entropy bonus
    entropy_anneal: bool = False  # multiply the bonus by 1 - accuracy of the batch
    aggregation: AggregationMode = "token-mean"  # how the losses of tokens become one
    # drop groups of equal scores and sample others, in at most so many generations a step; 0: keep all groups
    dynamic_sampling: int = 0
    overlong_buffer: int = 0  # tokens before the longest response in which length costs reward; 0: none
    overlong_penalty: float = 1.0  # what a response of full length costs
    # weigh tokens or responses by how likely the actor, and not the engine, would have sampled them; or leave responses out
    correction: Correction = "none"
    correction_limit: float = 2.0  # the largest weight; of mask: how far the ratio of a response may be from 1
    # take the engine's log-probs for the actor's old ones: right while the actor has not changed since, and the two agree
    skip_old_log_probs: bool = False

    def __post_init__(self) -> None:
        self.sampling(max_tokens=1, seed=0)  # refuses what cannot be sampled with
        self._check_ranges()
        self._check_advantage()
        self._check_loss()
        self._check_kl()
        self._check_correction()

    def _check_ranges(self) -> None:
        if self.temperature <= 0:
            raise InvalidConfig(
                f"algorithm.temperature={self.temperature}: policy gradients need samples, so a temperature above 0"
            )
        if self.epochs < 1 or (self.minibatch is not None and self.minibatch < 1):
            raise InvalidConfig(f"algorithm.epochs={self.epochs}, minibatch={self.minibatch}: must be at least 1")
        if self.entropy_coef < 0 or self.overlong_buffer < 0 or self.overlong_penalty < 0:
            raise InvalidConfig("algorithm.entropy_coef, overlong_buffer and overlong_penalty must be at least 0")
        if self.dynamic_sampling < 0 or self.dynamic_sampling == 1:
            raise InvalidConfig(
                f"algorithm.dynamic_sampling={self.dynamic_sampling}: refilling takes at least 2 generations; 0 is off"
            )

    def _check_advantage(self) -> None:
        if self.n < 2 and self.advantage in WITHIN_GROUPS:
            raise InvalidConfig(
                f"algorithm.n={self.n}: {self.advantage} compares samples of one prompt, so it needs at least 2"
            )
        if self.n < 2 and self.dynamic_sampling:
            raise InvalidConfig(f"algorithm.n={self.n}: dynamic sampling drops groups of equal scores, so needs groups")
        if not 0 <= self.gamma <= 1:
            raise InvalidConfig(f"algorithm.gamma={self.gamma}: must be from 0 to 1")
        if self.gamma != 1 and self.advantage not in DISCOUNTED:
            raise InvalidConfig(
                f"algorithm.gamma={self.gamma}: {self.advantage} gives all tokens of a response the same advantage; "
                f"a discount is for {' and '.join(DISCOUNTED)}"
            )

    def _check_loss(self) -> None:
        if min(self.clip_range) < 0:
            raise InvalidConfig(f"algorithm.clip={self.clip_range} must not be negative")
        if self.loss != "ppo" and self.dual_clip not in (None, DUAL_CLIP):
            raise InvalidConfig(f"algorithm.dual_clip={self.dual_clip}: {self.loss} has none, it is a part of ppo")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise InvalidConfig(f"algorithm.dual_clip={self.dual_clip} must be above 1")

    def _check_kl(self) -> None:
        if self.kl_coef < 0:
            raise InvalidConfig(f"algorithm.kl_coef={self.kl_coef} must be at least 0")
        if self.kl_in == "loss" and self.kl == "k1":
            raise InvalidConfig("algorithm.kl=k1 has no gradient in expectation: use k2 or k3, or put it in the reward")
        if self.kl_target is not None and (self.kl_in != "reward" or not self.kl_coef):
            raise InvalidConfig("algorithm.kl_target adapts a penalty in the reward: set kl_in=reward and kl_coef")
        self.kl_controller()  # refuses an impossible target or horizon

    def _check_correction(self) -> None:
        if self.correction_limit <= 1:
            raise InvalidConfig(f"algorithm.correction_limit={self.correction_limit}: must be above 1")
        if self.skip_old_log_probs and self.correction != "none":
            raise InvalidConfig(
                f"algorithm.correction={self.correction} compares the actor's old log-probs with the engine's, which "
                "skip_old_log_probs takes for equal: choose one"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip, or the loss's own default."""
        return DEFAULT_CLIP[self.loss] if self.clip is None else self.clip

    @property
    def kl_estimator(self) -> str:
        """The estimator, or the default of the place where the term stands."""
        return self.kl or ("k3" if self.kl_in == "loss" else "k1")

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    def kl_controller(self) -> KLController:
        return KLController(self.kl_coef, self.kl_target, self.kl_horizon)

    def updates(self, prompts: int) -> int:
        """Optimizer steps for a batch of so many prompts."""
        return self.epochs * -(-prompts // (self.minibatch or prompts))

    def sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(self.n, self.temperature, self.top_p, self.top_k, max_tokens, seed=seed)


def outcome_advantage(config: AlgorithmConfig, data: DataProto) -> Tensor:
    """Advantages (B, R) of the algorithms that need rewards alone."""
    rewards, uid, mask = data["token_level_rewards"], data["uid"], data["response_mask"]
    match config.advantage:
        case "grpo":
            return group_advantage(rewards, uid, mask)
        case "dr_grpo":
            return group_advantage(rewards, uid, mask, normalise_std=False)
        case "rloo":
            return leave_one_out_advantage(rewards, uid, mask)
        case "reinforce_plus_plus":
            return reinforce_plus_plus(rewards, mask, config.gamma)
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline(rewards, uid, mask)
        case "gae":
            raise InvalidConfig("gae needs the values of a critic")


def policy_loss(config: AlgorithmConfig, entropy_coef: float) -> LossFn:
    """The chosen policy loss, with KL term and entropy bonus if their coefficients are not zero."""

    def loss_fn(outputs: Outputs, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        # Without old log-probs the policy has not changed since it sampled: they are the ones just computed.
        old = data["old_log_probs"] if "old_log_probs" in data else outputs.log_probs.detach()
        new, advantages, clip = outputs.log_probs, data["advantages"], config.clip_range
        match config.loss:
            case "ppo":
                loss, metrics = clipped_policy_loss(new, old, advantages, clip, config.dual_clip)
            case "gspo":
                loss, metrics = sequence_policy_loss(new, old, advantages, data["response_mask"], clip)
            case "cispo":
                loss, metrics = clipped_weight_loss(new, old, advantages, data["response_mask"], clip)
        if config.correction != "none" and "rollout_log_probs" in data:
            rollout, mask = data["rollout_log_probs"], data["response_mask"]
            weights = importance_weights(old, rollout, mask, config.correction, config.correction_limit)
            loss = loss * weights
            metrics |= {"rollout_corr/rollout_is_mean": weights, "rollout_corr/rollout_is_max": weights}
        metrics |= {"actor/pg_loss": loss, "actor/entropy": outputs.entropy}
        if entropy_coef:
            loss = loss - entropy_coef * outputs.entropy
        if config.kl_in_loss:
            kl = KL_ESTIMATORS[config.kl_estimator](new, data["ref_log_prob"])
            loss = loss + config.kl_coef * kl
            metrics["actor/kl_loss"] = kl
        return loss, metrics

    return loss_fn
