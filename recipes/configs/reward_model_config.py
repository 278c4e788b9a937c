"""A reward model that learns from preferred answers: ``dataproto reward-model``.

With no arguments it makes pairs of answers about synthetic pictures and a small Qwen2.5-VL, and trains it on the CPU within
minutes. With ``--preset any``, ``--model-path`` and ``--data-path`` it trains any checkpoint of a known family on data sets in
the schemas of TRL and LLaMA-Factory (see `recipes.data.preferences`). ``--reward classifier:CHECKPOINT`` loads what it writes.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import RunConfig
from recipes.configs.shared.supervised_config import PreferenceDataConfig, SupervisedConfig, tiny_preferences
from recipes.options import parse_recipe

OUTPUT_DIR = Path("outputs/reward_model")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.pp > 1:
            raise InvalidConfig(
                "layout.pp: a reward model has no pipeline stages; take --layout.dp, --layout.sp or --layout.tp"
            )
        if self.compute.mtp_coef:
            raise InvalidConfig("mtp_coef: a reward model predicts no tokens; leave it out")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [*super().idle_options(), (True, "keep-rows", "the viewer shows the loss of tokens: leave it out")]


TINY = RewardModelConfig(preset="tiny", **tiny_preferences(OUTPUT_DIR))
PRESETS = {"tiny": TINY, "any": RewardModelConfig()}
"""The defaults of ``--preset``."""
parse = partial(parse_recipe, presets=PRESETS, description=__doc__, prog="dataproto reward-model")
