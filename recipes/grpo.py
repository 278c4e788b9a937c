"""GRPO (DeepSeekMath, arXiv:2402.03300) and its relatives without a critic, as one function over roles."""

from dataclasses import dataclass

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from recipes.algorithms.options import AlgorithmConfig, outcome_advantage, policy_loss
from recipes.run.dynamic_sampling import More
from recipes.run.metrics import timed
from recipes.run.phases import (
    Progression,
    accuracy,
    add_log_probs,
    entropy_coefficient,
    roll_out,
    rows_to_learn,
    shape_rewards,
    update_actor,
)
from rollout.engine import SamplingParams
from workers import Roles

__all__ = ["GRPOConfig", "accuracy", "grpo_step", "policy_loss"]


@dataclass(frozen=True)
class GRPOConfig(AlgorithmConfig):
    """The algorithm's settings; verl's defaults where they exist."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings.advantage == "gae":
            raise InvalidConfig("algorithm.advantage=gae needs the values of a critic: run recipes.geo3k_ppo")


def grpo_step(
    roles: Roles,
    prompts: DataProto,
    config: GRPOConfig,
    sampling: SamplingParams,
    progression: Progression | None = None,
    more: More | None = None,
) -> tuple[DataProto, dict[str, float]]:
    """Samples, scores and updates once over; returns the rollout batch and the metrics of the step.

    Args:
        progression: what goes on from step to step; needed by a KL weight that adapts.
        more: gives further prompts; needed by dynamic sampling.
    """
    progression = progression or Progression(config.kl_controller())
    metrics: dict[str, float] = {}
    data = roll_out(roles, prompts, config, sampling, more, metrics)
    add_log_probs(roles, data, config, config.updates(len(prompts)), metrics)
    with timed(metrics, "adv"):
        shape_rewards(data, config, progression.kl, sampling.max_tokens, metrics)
        data["advantages"] = outcome_advantage(config, data)
        learned = rows_to_learn(data, config, (sampling.seed, progression.steps), metrics)
    update_actor(roles, learned, config, entropy_coefficient(data, config), metrics)
    progression.steps += 1
    return data, metrics
