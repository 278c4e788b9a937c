"""The run around a step function: options, data, evaluation, checkpoints, resume, metrics and report.

`run` trains by a policy-gradient algorithm with the options of `recipes.grpo`. `train` is the loop alone, for roles, rows and
rewards of your own; see docs/custom_recipe.py.
"""

from recipes.run.evaluation import evaluate_answers
from recipes.run.loop import RunConfig, StepFunction, attempts, measure_rollouts, train
from recipes.run.phases import Progression
from recipes.run.policy_gradient import PolicyGradientConfig, run
from recipes.run.run_directory import recorded_run
from recipes.run.supervised import SupervisedConfig, SupervisedTask, launch_supervised, next_token_loss, run_supervised

__all__ = [
    "PolicyGradientConfig",
    "Progression",
    "RunConfig",
    "StepFunction",
    "SupervisedConfig",
    "SupervisedTask",
    "attempts",
    "evaluate_answers",
    "launch_supervised",
    "measure_rollouts",
    "next_token_loss",
    "recorded_run",
    "run",
    "run_supervised",
    "train",
]
