"""What a run will take, before anything is loaded: ``dataproto plan RECIPE [options of the recipe]``.

Reads the checkpoint's config, tokenizer and image processor, and the headers of the data's images, and prints the memory of each
role in each phase, the operations and the time of a step, and the time and disk of the run. Ends with status 1 if it does not
fit. In addition to its own options it takes those of the recipe, --config and --preset included (see dataproto RECIPE --help).

``dataproto plan --devices N``, without a recipe, simulates a step on a cluster (see dataproto plan --devices N --help).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataproto.errors import InvalidConfig
from recipes.configs import (
    classify_config,
    grpo_config,
    ppo_config,
    sft_config,
    simulation_config,
    walk_config,
    zoom_config,
)
from recipes.configs.shared.device_preset import Machine, this_machine
from recipes.options import asks_for_help, divided, options_of, over, print_help

RECIPES: Mapping[str, Callable[..., Any]] = {
    "grpo": grpo_config.parse,
    "ppo": ppo_config.parse,
    "sft": sft_config.parse,
    "classify": classify_config.parse,
    "walk": walk_config.parse,
    "zoom": zoom_config.parse,
}
"""The recipes that can be planned, each with the function that reads its options."""

CHOSEN_BY_FIT = ("--token-budget", "--activation-checkpointing")


@dataclass(frozen=True)
class PlanOptions:
    """The options of the plan alone.

    Attributes:
        device: device to plan for: h200, h100, a100-80g, or cpu, which is measured; default: the machine's GPU, or h200
        mean_response: expected tokens of a response, or of a turn; default: half of --max-response-length
        fit: choose layout, token budget, checkpointing and the engine's share of memory: the fastest that fits
        devices: how many devices --fit may use; default: those of the layout
    """

    device: str | None = None
    mean_response: int | None = None
    fit: bool = False
    devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("mean_response", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name}={value}: must be at least 1")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (not self.fit, "devices", "the layout says how many there are: add --fit"),
        ]


@dataclass(frozen=True)
class PlanConfig:
    """A recipe, its options, and those of the plan."""

    recipe: str
    options: PlanOptions
    config: Any  # of the recipe
    machine: Machine | None = None  # to which a preset of a size was fitted


def parse(arguments: Sequence[str]) -> PlanConfig | simulation_config.SimulationConfig:
    """The plan that a command line asks for: of a recipe, or without one of a step on a cluster.

    Raises:
        InvalidConfig: the recipe is missing, or an option of it or of the plan is unknown, ill-typed or does nothing.
    """
    if simulation_config.asks_for_simulation(arguments):
        return simulation_config.parse(arguments)
    if asks_for_help(arguments):
        print_help(arguments, options_of(PlanOptions()), __doc__, "dataproto plan RECIPE")
    if not arguments or arguments[0] not in RECIPES:
        raise InvalidConfig(f"plan which recipe? give one of {', '.join(RECIPES)} first, then its options")
    recipe, *rest = arguments
    own, others = divided(rest, options_of(PlanOptions()))
    options = over(PlanOptions(), own)
    if options.fit:
        _refuse_chosen(others, options.devices is not None)
    if options.mean_response is not None and recipe in ("sft", "classify"):
        raise InvalidConfig(f"--mean-response would do nothing: {recipe} learns answers, whose length the data tell")
    machine = _machine(options) if recipe in ("grpo", "ppo") else None
    config = RECIPES[recipe](others, machine) if machine else RECIPES[recipe](others)
    return PlanConfig(recipe, options, config, machine)


def _machine(options: PlanOptions) -> Machine | None:
    """The devices that are planned for; none on a CPU."""
    from recipes.forecast.devices import device_named

    if options.device == "cpu":
        return None
    here = None if options.device else this_machine()
    return here or Machine(device_named(options.device or "h200").memory)


def _refuse_chosen(arguments: Sequence[str], devices: bool) -> None:
    """Raises `InvalidConfig` for an option that ``--fit`` chooses itself; the layout too if the number of devices is given."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in CHOSEN_BY_FIT or (devices and name.startswith("--layout.")):
            raise InvalidConfig(f"{name} would do nothing: --fit chooses it; leave out one of them")
