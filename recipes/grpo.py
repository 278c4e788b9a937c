"""GRPO (DeepSeekMath, arXiv:2402.03300) as one function over roles."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.advantages import group_advantage
from recipes.algorithms.kl import k2_kl, k3_kl
from recipes.algorithms.losses import clipped_policy_loss
from recipes.metrics import timed
from rollout.engine import SamplingParams
from workers.aggregation import AggregationMode
from workers.launch import Roles
from workers.packed import Outputs
from workers.step import LossFn

KL_ESTIMATORS = {"k2": k2_kl, "k3": k3_kl}  # k1 has no gradient in expectation


@dataclass(frozen=True)
class GRPOConfig:
    """The algorithm's settings; verl's defaults where they exist."""

    n: int = 5  # samples of each prompt
    temperature: float = 1.0  # of the policy, in sampling and in the loss
    top_p: float = 1.0  # sample from the likeliest tokens that make up this share
    top_k: int = 0  # sample from so many likeliest tokens; 0: from all
    minibatch: int | None = None  # prompts for each optimizer step; all of the batch by default
    epochs: int = 1  # passes over each batch
    clip: tuple[float, float] = (0.2, 0.2)  # how far the ratio may pay below and above 1
    dual_clip: float | None = 3.0  # bound on the ratio where the advantage is negative
    normalise_std: bool = True  # divide advantages by their group's standard deviation
    kl_coef: float = 0.0  # weight of the KL term to the reference; 0 runs without a reference
    kl: Literal["k2", "k3"] = "k3"  # estimator of the KL term
    entropy_coef: float = 0.0  # weight of the entropy bonus
    entropy_anneal: bool = False  # multiply the bonus by 1 - accuracy of the batch
    aggregation: AggregationMode = "token-mean"  # how the losses of tokens become one

    def __post_init__(self) -> None:
        if self.n < 2:
            raise InvalidConfig(f"algorithm.n={self.n}: GRPO compares samples of one prompt, so it needs at least 2")
        self.sampling(max_tokens=1, seed=0)  # refuses what cannot be sampled with
        if min(self.clip) < 0 or (self.dual_clip is not None and self.dual_clip <= 1):
            raise InvalidConfig(
                f"algorithm.clip={self.clip} must not be negative, dual_clip={self.dual_clip} be above 1"
            )
        if self.epochs < 1 or (self.minibatch is not None and self.minibatch < 1):
            raise InvalidConfig(f"algorithm.epochs={self.epochs}, minibatch={self.minibatch}: must be at least 1")
        if self.temperature <= 0:
            raise InvalidConfig(
                f"algorithm.temperature={self.temperature}: GRPO samples, so it needs a temperature above 0"
            )
        if self.kl_coef < 0 or self.entropy_coef < 0:
            raise InvalidConfig("algorithm.kl_coef and algorithm.entropy_coef must be at least 0")

    def updates(self, prompts: int) -> int:
        """Optimizer steps for a batch of so many prompts."""
        return self.epochs * -(-prompts // (self.minibatch or prompts))

    def sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(self.n, self.temperature, self.top_p, self.top_k, max_tokens, seed=seed)


def policy_loss(config: GRPOConfig, entropy_coef: float) -> LossFn:
    """The clipped policy loss, with KL term and entropy bonus if their coefficients are not zero."""

    def loss_fn(outputs: Outputs, data: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        # Without old log-probs the policy has not changed since it sampled: they are the ones just computed.
        old = data["old_log_probs"] if "old_log_probs" in data else outputs.log_probs.detach()
        loss, metrics = clipped_policy_loss(
            outputs.log_probs, old, data["advantages"], clip=config.clip, dual_clip=config.dual_clip
        )
        metrics |= {"actor/pg_loss": loss, "actor/entropy": outputs.entropy}
        if entropy_coef:
            loss = loss - entropy_coef * outputs.entropy
        if config.kl_coef:
            kl = KL_ESTIMATORS[config.kl](outputs.log_probs, data["ref_log_prob"])
            loss = loss + config.kl_coef * kl
            metrics["actor/kl_loss"] = kl
        return loss, metrics

    return loss_fn


def grpo_step(
    roles: Roles, prompts: DataProto, config: GRPOConfig, sampling: SamplingParams
) -> tuple[DataProto, dict[str, float]]:
    """Samples, scores and updates once over; returns the rollout batch and the metrics of the step."""
    metrics: dict[str, float] = {}
    with timed(metrics, "gen"):
        data = roles.rollout.generate(prompts, replace(sampling, n=config.n))
    with timed(metrics, "reward"):
        data |= roles.reward.score(data)
    if config.updates(len(prompts)) > 1:
        with timed(metrics, "old_log_prob"):
            data |= roles.actor.log_probs(data, into="old_log_probs")
    if config.kl_coef:
        with timed(metrics, "ref"):
            data |= roles.reference.log_probs(data, into="ref_log_prob")
    with timed(metrics, "adv"):
        data["advantages"] = group_advantage(
            data["token_level_rewards"], data["uid"], data["response_mask"], config.normalise_std
        )
    entropy_coef = config.entropy_coef
    if config.entropy_anneal:
        entropy_coef *= 1 - accuracy(data)
    with timed(metrics, "update_actor"):
        metrics |= roles.actor.update(
            data,
            policy_loss(config, entropy_coef),
            minibatch=config.minibatch,
            epochs=config.epochs,
            aggregation=config.aggregation,
            entropy=True,
        )
    roles.sync_weights()
    return data, metrics | {"actor/entropy_coeff": entropy_coef}


def accuracy(data: DataProto) -> float:
    """Share of right answers, between 0 and 1: the mean of ``acc`` where the reward function gives one, else of the score."""
    column = data["acc"] if "acc" in data else data["score"]
    values = [float(value) for value in column if value is not None]
    return min(max(sum(values) / len(values), 0.0), 1.0) if values else 0.0
