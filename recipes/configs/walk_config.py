"""GRPO or PPO over episodes of several turns, each with a new picture: ``dataproto walk``.

With no arguments it draws grids, makes a small Qwen2.5-VL, shows it the form of an answer, and lets it find out by itself how to
walk to the goal, on the CPU within minutes. With ``--preset any``, ``--model-path`` and ``--environment FILE.py:NAME``
the same loop trains any checkpoint of a known family in an environment of your own, with the rows of ``--data-path``.

Each evaluation walks greedily in grids that are drawn for it, and measures two controls: pictures of other grids, and white ones.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from recipes.configs.episodes_config import EpisodeRunConfig
from recipes.configs.ppo_config import ActorCriticConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

OUTPUT_DIR = Path("outputs/walk")


@dataclass(frozen=True)
class WalkConfig(EpisodeRunConfig):
    """A run of walks."""

    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))


# For a model of under a million parameters, on two cores.
TINY = WalkConfig(
    preset="tiny",
    data=DataConfig(batch_size=16, eval_rows=64, max_prompt_length=64, max_response_length=3, instruction=""),
    # The reward of a move counts for that move, and half as much with each token that was sampled before it.
    algorithm=ActorCriticConfig(n=8, advantage="reinforce_plus_plus", gamma=0.5, kl_coef=0.0, entropy_coef=0.02),
    optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup_steps=5),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=5),
    run=RunConfig(steps=150, eval_every=25, save_every=75, output_dir=OUTPUT_DIR),
)
ANY = WalkConfig(data=DataConfig(batch_size=64, eval_rows=256, max_prompt_length=2048, max_response_length=512))
PRESETS = {"tiny": TINY, "any": ANY}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto walk")
