"""GRPO or PPO over episodes in which the policy looks closer and then answers: ``dataproto zoom``.

With no arguments it draws pictures of 448 pixels that are shown at 56, makes a small Qwen2.5-VL, shows it looks at random places
and what is read there, and lets it find out by itself where to look, on the CPU within minutes. With ``--preset any`` and
``--model-path`` it trains any checkpoint of a known family: with ``--crop-tool`` by calls of a tool, with
``--environment FILE.py:NAME`` in an environment of your own, with the rows of ``--data-path``.

Each evaluation answers greedily about pictures that are drawn for it, and measures two controls: other pictures, and white crops.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.configs.episodes_config import EpisodeRunConfig, EpisodesConfig, WarmUpPhaseConfig
from recipes.configs.ppo_config import ActorCriticConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, parse_with_defaults
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

OUTPUT_DIR = Path("outputs/zoom")


@dataclass(frozen=True)
class ZoomConfig(EpisodeRunConfig):
    """A run of looks and answers.

    Attributes:
        crop_tool: look by calls of the tool crop, described by the chat template, in place of words
    """

    crop_tool: bool = False
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_tool and self.model_path is None:
            raise InvalidConfig("--crop-tool needs --model-path: the small model answers in words and calls no tools")
        if self.crop_tool and (self.episodes.environment or self.episodes.agent):
            raise InvalidConfig(
                "--crop-tool belongs to the recipe's pictures: an environment or agent has tools of its own"
            )


# For a model of under a million parameters, on two cores.
TINY = ZoomConfig(
    preset="tiny",
    episodes=EpisodesConfig(turns=2),
    warm_up=WarmUpPhaseConfig(steps=100, batch_size=64),
    data=DataConfig(batch_size=64, eval_rows=128, max_prompt_length=64, max_response_length=3, instruction=""),
    algorithm=ActorCriticConfig(n=4, kl_coef=0.0, entropy_coef=0.01),
    optimizer=OptimizerConfig(lr=5e-4, betas=(0.9, 0.95), schedule="linear", warmup_steps=5),
    critic_optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=5),
    run=RunConfig(steps=150, eval_every=25, save_every=50, output_dir=OUTPUT_DIR),
)
ANY = ZoomConfig(data=DataConfig(batch_size=64, eval_rows=256, max_prompt_length=2048, max_response_length=512))
PRESETS = {"tiny": TINY, "any": ANY}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto zoom")
