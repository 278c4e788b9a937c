"""The first rows of a data set as the model sees them: ``dataproto show [RECIPE] DATA [options of the recipe]``.

Prints the text with its special tokens, the pictures, the truth, the columns that are read and those that are not, the number of
tokens, and what the reward gives the truth itself, a wrong answer and an empty one; of sft also what is learnt, and of dpo and
reward-model both answers. RECIPE is grpo (the default), ppo, sft, dpo or reward-model; data with the columns chosen and rejected
are shown as those of dpo. In addition to its own options it takes those of the recipe (see dataproto RECIPE --help). Loads a
tokenizer and an image processor, and no model: without --model-path those of the small model. Ends with status 1 if a row cannot
be used, or the truth does not get the best reward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataproto.errors import check_at_least
from recipes.configs import dpo_config, grpo_config, ppo_config, reward_model_config, sft_config
from recipes.options import own_options

RECIPES: Mapping[str, Callable[[Sequence[str]], Any]] = {
    "grpo": grpo_config.parse,
    "ppo": ppo_config.parse,
    "sft": sft_config.parse,
    "dpo": dpo_config.parse,
    "reward-model": reward_model_config.parse,
}
"""The recipes whose rows can be shown, each with the function that reads its options."""


@dataclass(frozen=True)
class ShowOptions:
    """The options of the command itself.

    Attributes:
        rows: number of rows of each data set to show: the first ones; the wrong answer of a row is the truth of another one
            of them, so that a single row has none
        page: file to which the rows are also written, a page for the browser with the pictures in it
    """

    rows: int = 3
    page: Path | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, "rows")


@dataclass(frozen=True)
class ShowConfig:
    """A recipe, its options, and those of the command."""

    recipe: str
    options: ShowOptions
    config: Any  # of the recipe
    others: Sequence[str] | None = None  # the options that are the recipe's, where no recipe was named


def parse(arguments: Sequence[str]) -> ShowConfig:
    """What a command line asks to be shown.

    Raises:
        InvalidConfig: an option of the recipe or of the command is unknown, ill-typed or does nothing.
    """
    rest = list(arguments)
    named = bool(rest) and rest[0] in RECIPES
    recipe = rest.pop(0) if named else "grpo"
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--data-path")
    options, others = own_options(rest, ShowOptions(), __doc__, "dataproto show [RECIPE] DATA")
    names = {each.partition("=")[0].replace("_", "-") for each in others}
    if "--model-path" in names and not names & {"--preset", "--config"}:
        others = ["--preset", "any", *others]
    return ShowConfig(recipe, options, RECIPES[recipe](others), None if named else others)
