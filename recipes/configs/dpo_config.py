"""Training on preferred answers without a reward: ``dataproto dpo``.

With no arguments it makes pairs of answers about synthetic pictures and a small Qwen2.5-VL, and trains it on the CPU within
minutes. With ``--preset any``, ``--model-path`` and ``--data-path`` it trains any checkpoint of a known family on data sets in
the schemas of TRL and LLaMA-Factory (see `recipes.data.preferences`).
"""

from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.algorithms.registry import PREFERENCES
from recipes.configs.shared.run_config import RunConfig
from recipes.configs.shared.supervised_config import PreferenceDataConfig, SupervisedConfig, tiny_preferences
from recipes.options import parse_recipe
from workers.model.model_config import OptimizerConfig

OUTPUT_DIR = Path("outputs/dpo")


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss of preferred answers.

    Attributes:
        loss: loss of a pair: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm (normalised by length); of answers without a
            partner: kto; or FILE.py:FUNCTION
        beta: how strongly the policy is held to the reference; of ipo: tau
        label_smoothing: share of pairs whose labels are assumed to be wrong
        desirable_weight: weight of desirable answers in kto
        undesirable_weight: weight of undesirable answers in kto
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        PREFERENCES.find(self.loss)  # raises for an unknown name
        if not 0 < self.beta < inf:
            raise InvalidConfig(f"algorithm.beta={self.beta}: must be a number above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise InvalidConfig(f"algorithm.label_smoothing={self.label_smoothing}: must be at least 0 and below 0.5")
        if not (0 < self.desirable_weight < inf and 0 < self.undesirable_weight < inf):
            raise InvalidConfig("algorithm.desirable_weight and undesirable_weight must be numbers above 0")

    @property
    def unpaired(self) -> bool:
        """Whether the loss is of answers without a partner."""
        found = PREFERENCES.find(self.loss)
        return "kl" in found.arguments if isinstance(found.source, str) else found.takes("kl")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        smooths = self.loss in ("sigmoid", "robust", "sigmoid_norm") or ":" in self.loss
        return [
            (not smooths, "label-smoothing", "sigmoid, robust and sigmoid_norm have it"),
            (not self.unpaired, "desirable-weight undesirable-weight", "kto has it: add --algorithm.loss kto"),
        ]


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    algorithm: PreferenceConfig = field(default_factory=PreferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="cosine"))
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.unpaired and self.data.batch_size < 2:
            raise InvalidConfig(
                f"batch_size=1 with --algorithm.loss {self.algorithm.loss}: its KL is that of answers to another prompt of the "
                "batch: take at least 2"
            )


TINY = DPOConfig(preset="tiny", **tiny_preferences(OUTPUT_DIR))
PRESETS = {"tiny": TINY, "any": DPOConfig()}
"""The defaults of ``--preset``."""
parse = partial(parse_recipe, presets=PRESETS, description=__doc__, prog="dataproto dpo")
