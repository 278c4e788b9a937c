"""What a step takes on a cluster that is not at hand: ``dataproto plan --devices N``.

Simulates a step of GRPO from measured parts: seconds, memory and traffic of generation, scoring, update and the hand-over of
weights, for the layout that is given or for the fastest that fits. Ends with status 2 if nothing fits. See docs/cluster_plan.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dataproto.errors import InvalidConfig
from recipes.options import parse_config
from workers.ranks.layout import Layout


@dataclass(frozen=True)
class SimulationConfig:
    """The options of a simulated step.

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
        for name in (
            "devices",
            "node",
            "batch_size",
            "n",
            "minibatch",
            "prompt_length",
            "mean_response",
            "token_budget",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}={getattr(self, name)}: must be at least 1")
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


def asks_for_simulation(arguments: Sequence[str]) -> bool:
    """Whether a command line of ``dataproto plan`` names no recipe but a number of devices.

    >>> asks_for_simulation(["--devices", "64"]), asks_for_simulation(["grpo", "--fit", "--devices", "2"])
    (True, False)
    """
    given = {argument.partition("=")[0] for argument in arguments}
    return bool(arguments) and arguments[0].startswith("--") and "--devices" in given


def parse(arguments: Sequence[str]) -> SimulationConfig:
    """The simulation that a command line asks for.

    Raises:
        InvalidConfig: an option is unknown, ill-typed or does not fit the others.
    """
    return parse_config(arguments, SimulationConfig(), __doc__, "dataproto plan --devices N")
