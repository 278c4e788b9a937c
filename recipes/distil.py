"""On-policy distillation (GKD, arXiv:2306.13649; Thinking Machines, 2025): ``dataproto distil --teacher CHECKPOINT``.

The student samples, and the teacher, in the place of the reference, scores the student's tokens. The advantage of a token is
the difference of their log-probs (`recipes.algorithms.reverse_kl_advantage`). Rewards are only measured. Without
``--model-path`` the student is a small Qwen2.5-VL made on the spot, which a model that ``dataproto grpo`` has trained can teach.
"""

from dataproto import DataProto
from recipes.algorithms.options import AlgorithmConfig
from recipes.configs.distil_config import PRESETS, TINY, DistilConfig, DistilRunConfig, parse
from recipes.grpo import grpo_step
from recipes.options import training_command
from recipes.run.phases import StepState
from recipes.run.policy_gradient import run
from rollout.engine import SamplingParams
from workers import Roles

__all__ = ["PRESETS", "TINY", "DistilConfig", "DistilRunConfig", "distil_step", "main", "parse"]


def distil_step(
    roles: Roles, prompts: DataProto, config: AlgorithmConfig, sampling: SamplingParams, state: StepState | None = None
) -> tuple[DataProto, dict[str, float]]:
    """`recipes.grpo.grpo_step` with the teacher as reference; measures ``distil/reverse_kl``, in nats for each sampled token."""
    data, metrics = grpo_step(roles, prompts, config, sampling, state)
    sampled = data["advantages"][data["response_mask"].bool()]
    return data, metrics | {"distil/reverse_kl": -float(sampled.mean())}


main = training_command(parse, run, lambda _: distil_step)
