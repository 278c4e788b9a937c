"""The options of an agent with a browser: ``dataproto browse``.

With no arguments it makes a small Qwen2.5-VL, shows it the form of an answer by random clicks, and lets it find out by itself
where the button of a page is, on the CPU within minutes; with ``--preset any`` and ``--model-path`` it trains any checkpoint of a
known family. It needs openai, playwright and Chromium.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from recipes.configs.grpo_config import GRPOConfig, GRPORunConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, parse_with_defaults
from recipes.configs.shared.rollout_options import AgentsConfig
from recipes.configs.shared.run_config import RunConfig
from workers.model.model_config import OptimizerConfig

OUTPUT_DIR = Path("outputs/browse")


@dataclass(frozen=True)
class BrowseConfig(GRPORunConfig):
    """A run of the agent `recipes.browse.press`."""

    agent: str | None = "recipes.browse:press"
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        others = "agent reward reward-weights data-path eval-data-path level instruction"
        return [
            *super().idle_options(),
            (True, others, "pages are made, and the agent rewards a press: run dataproto grpo"),
        ]


# For a model of under a million parameters, on two cores.
TINY = BrowseConfig(
    preset="tiny",
    data=DataConfig(batch_size=16, eval_rows=64, max_prompt_length=64, max_response_length=6, instruction=""),
    # A press counts for its own click, and less with each token that was sampled before it.
    algorithm=GRPOConfig(n=8, advantage="reinforce_plus_plus", gamma=0.8, kl_coef=0.0, entropy_coef=0.02),
    optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup_steps=5),
    agents=AgentsConfig(turns=2, seconds=600.0),
    run=RunConfig(steps=80, eval_every=20, save_every=40, output_dir=OUTPUT_DIR),
)
PRESETS = {"tiny": TINY, "any": BrowseConfig(agents=AgentsConfig(turns=4, seconds=600.0))}
"""The defaults of ``--preset``."""
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="dataproto browse")
