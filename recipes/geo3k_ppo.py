"""PPO with a critic on geometry problems: ``python -m recipes.geo3k_ppo``.

Data, model, reward and report are those of `recipes.geo3k_grpo`; beside the policy a critic of the same kind learns what each
token is worth.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from recipes.geo3k_grpo import DataConfig, Geo3KConfig, tiny_default
from recipes.geo3k_grpo import run as run_geo3k
from recipes.ppo import PPOConfig, ppo_step
from recipes.run.command_line import names_a_model, parse_config, run_from_command_line
from recipes.run.loop import RunConfig
from recipes.run.run_directory import with_schedules
from workers.training.optimizer import OptimizerConfig

OUTPUT_DIR = Path("outputs/geo3k_ppo")


@dataclass(frozen=True)
class Geo3KPPOConfig(Geo3KConfig):
    """A run of PPO."""

    algorithm: PPOConfig = field(default_factory=PPOConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))  # verl's rate


# What a model of under a million parameters learns from drawn problems within minutes on two cores.
TINY = Geo3KPPOConfig(
    data=DataConfig(batch_size=16, max_prompt_length=256, max_response_length=24, instruction=""),
    algorithm=PPOConfig(n=16, kl_coef=0.1),
    optimizer=OptimizerConfig(lr=5e-4, schedule="linear", warmup_steps=10),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=10),
    run=RunConfig(steps=500, eval_every=50, save_every=100, output_dir=OUTPUT_DIR),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    return run_from_command_line(run, parse, sys.argv[1:] if arguments is None else arguments)


def parse(arguments: Sequence[str]) -> Geo3KPPOConfig:
    """The configuration of a command line. Defaults are the tiny model's, or with ``--model-path`` those for real ones.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    default = Geo3KPPOConfig() if names_a_model(arguments) else tiny_default(TINY, arguments)
    return parse_config(arguments, default, __doc__, "recipes.geo3k_ppo")


def run(config: Geo3KPPOConfig) -> Path:
    """Runs the recipe and returns the path of its report, which an interrupted run leaves too."""
    updates = config.algorithm.updates(config.data.batch_size)
    critic_updates = config.algorithm.critic_epochs * updates // config.algorithm.epochs
    config = with_schedules(config.run, config, optimizer=updates, critic_optimizer=critic_updates)
    return run_geo3k(config, ppo_step, config.critic_optimizer)


if __name__ == "__main__":
    sys.exit(main())
