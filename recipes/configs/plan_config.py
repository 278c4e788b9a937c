"""What a run will take, before anything is loaded: ``dataproto plan RECIPE [options of the recipe]``.

Reads the checkpoint's config, tokenizer and image processor, and the headers of the data's images, and prints the memory of each
role in each phase, the operations and the time of a step, and the time of the run. Ends with status 1 if it does not fit. In
addition to its own options it takes those of the recipe, --config and --preset included (see dataproto RECIPE --help).

``dataproto plan --devices N``, without a recipe, is for a step on a cluster (see dataproto plan --devices N --help).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dataproto.errors import InvalidConfig, check_at_least
from recipes.configs import classify_config, dpo_config, grpo_config, ppo_config, sft_config
from recipes.configs.shared.device_preset import DEVICE_MEMORY, Machine, check_device, this_machine
from recipes.options import own_options, parse_config
from workers.ranks.layout import Layout

RECIPES: Mapping[str, Callable[..., Any]] = {
    "grpo": grpo_config.parse,
    "ppo": ppo_config.parse,
    "sft": sft_config.parse,
    "classify": classify_config.parse,
    "dpo": dpo_config.parse,
}
"""The recipes that can be planned, each with the function that reads its options."""

CLUSTER = """What a step takes on devices that are not at hand: ``dataproto plan --devices N``.

Computes a step of GRPO from measured parts: seconds, memory and traffic of generation, scoring, update and the hand-over of
weights, for the layout that is given or for the fastest that fits. Ends with status 2 if nothing fits. See docs/cluster_plan.md.
"""


@dataclass(frozen=True)
class PlanOptions:
    """The options of the plan alone.

    Attributes:
        device: device to plan for: h200, h100 or a100-80g; default: the machine's GPU, or h200
        mean_response: expected tokens of a response; default: half of --max-response-length
    """

    device: str | None = None
    mean_response: int | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, "mean_response")
        check_device(self.device)


@dataclass(frozen=True)
class PlanConfig:
    """A recipe, its options, and those of the plan."""

    recipe: str
    options: PlanOptions
    config: Any  # of the recipe


@dataclass(frozen=True)
class ClusterConfig:
    """The options of a step on a cluster.

    Attributes:
        devices: number of devices
        preset: a published model: 3b, 7b, 32b, 72b, 30b-a3b or 235b-a22b
        model_path: a checkpoint, or a directory with its config, instead of a preset
        device: kind of device: h200, h100 or a100-80g
        node: devices of a node
        network_gbit: gigabits per second of each device's network card
        layout: default: the fastest that fits
        tensor_parallel: devices of an engine; default: the fastest number
        batch_size: prompts of a step
        n: samples of each prompt
        minibatch: prompts of an optimizer step
        prompt_length: tokens of a prompt, its image included
        image_patches: patches of the image of a prompt; 0: no image
        mean_response: expected tokens of a response
        max_response_length: tokens of the longest response
        token_budget: tokens of a micro-batch on each rank
        activation_checkpointing: activations that the backward pass computes again
    """

    devices: int = 8
    preset: str = "72b"
    model_path: str | None = None
    device: str = "h200"
    node: int = 8
    network_gbit: float = 400.0
    layout: Layout = field(default_factory=Layout)
    tensor_parallel: int | None = None
    batch_size: int = 512
    n: int = 5
    minibatch: int = 128
    prompt_length: int = 361
    image_patches: int = 900
    mean_response: int = 400
    max_response_length: int = 2048
    token_budget: int = 16_384
    activation_checkpointing: Literal["none", "selective", "full"] = "full"

    def __post_init__(self) -> None:
        check_at_least(
            1, self, "devices", "node", "batch_size", "n", "minibatch", "prompt_length", "mean_response", "token_budget"
        )
        check_device(self.device)
        if self.network_gbit <= 0:
            raise InvalidConfig(f"network_gbit={self.network_gbit}: must be above 0")
        if self.layout.world_size not in (1, self.devices):
            raise InvalidConfig(f"{self.layout} has {self.layout.world_size} ranks for --devices {self.devices}")
        if self.devices > self.node and self.devices % self.node:
            raise InvalidConfig(f"devices={self.devices}: must be whole nodes of --node {self.node}")
        if self.tensor_parallel is not None and self.devices % self.tensor_parallel:
            raise InvalidConfig(f"tensor_parallel={self.tensor_parallel} must divide --devices {self.devices}")
        if self.minibatch > self.batch_size:
            raise InvalidConfig(f"minibatch={self.minibatch} has more prompts than --batch-size {self.batch_size}")


def parse(arguments: Sequence[str]) -> PlanConfig | ClusterConfig:
    """The plan that a command line asks for: of a recipe, or without one of a step on a cluster.

    Raises:
        InvalidConfig: the recipe is missing, or an option of it or of the plan is unknown, ill-typed or does nothing.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    if "--devices" in given and arguments[0].startswith("--"):  # and names no recipe
        return parse_config(arguments, ClusterConfig(), CLUSTER, "dataproto plan --devices N")
    options, others = own_options(arguments, PlanOptions(), __doc__, "dataproto plan RECIPE")
    if arguments[:1] and arguments[0] in ("walk", "zoom", "browse", "easy-vqa", "distil", "reward-model"):
        raise InvalidConfig(f"{arguments[0]} is not planned: its run says after the first steps what they took")
    if not arguments or arguments[0] not in RECIPES:
        raise InvalidConfig(f"plan which recipe? give one of {', '.join(RECIPES)} first, then its options")
    recipe, *others = others
    if options.mean_response is not None and recipe in ("sft", "classify", "dpo"):
        raise InvalidConfig(f"--mean-response would do nothing: {recipe} learns answers, whose length the data tell")
    fitted: dict[str, Any] = {}
    if recipe in ("grpo", "ppo"):  # whose presets of a size fit the devices
        named = Machine(DEVICE_MEMORY[options.device or "h200"])
        fitted["machine"] = (None if options.device else this_machine()) or named
    config = RECIPES[recipe](others, **fitted)
    if recipe == "dpo" and config.algorithm.unpaired:
        raise InvalidConfig(
            f"dpo with --algorithm.loss {config.algorithm.loss} is not planned: its run says after the first steps what they took"
        )
    return PlanConfig(recipe, options, config)
