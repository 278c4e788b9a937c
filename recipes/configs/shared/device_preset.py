"""What the presets of a size choose for the devices of a machine: arithmetic from published sizes. Nothing is loaded.

The first of `CANDIDATES` that fits is taken, and vLLM gets what the other roles leave of the device while it generates, which
from the second step on includes the optimizer's state. All candidates compute the same up to rounding.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from dataproto.errors import InvalidConfig

if TYPE_CHECKING:
    from recipes.configs.shared.policy_gradient_config import PolicyGradientConfig

Config = TypeVar("Config", bound="PolicyGradientConfig")
Mode = Literal["selective", "full"]

GIB = 2**30
DEVICE_MEMORY = {"h200": 150_754_820_096, "h100": 85_520_809_984, "a100-80g": 85_095_874_560}  # bytes
LOGITS = 13 * 2**28  # bytes of a chunk of logits with its gradient
ENGINE = 6 * GIB  # of vLLM besides its weights: activations, graphs and a cache for at least some rows
MOST_SHARE = 0.75  # of a device for vLLM
MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2.1, "muon": 8}  # of a trained parameter, at most
CANDIDATES: tuple[tuple[bool, int, Mode], ...] = (
    *((False, budget, "selective") for budget in (10_240, 8192, 6144)),
    *((True, budget, "selective") for budget in (10_240, 8192, 6144, 4096)),
    *((idle, budget, "full") for idle in (False, True) for budget in (8192, 4096)),
)
"""``offload_idle``, token budget and activation checkpointing, fastest first."""
NAMES_OF_A_LAYOUT = ("--on=", "--layout.", "--ray.")


@dataclass(frozen=True)
class Machine:
    """The devices that a run can have."""

    memory: int  # bytes of each
    devices: int | None = None  # None: as many as the preset's layout

    @property
    def usable(self) -> int:
        """Bytes of a device besides what the driver and its libraries take, and 8 % for the allocator and for rows that vary.

        >>> round(Machine(80 * GIB).usable / GIB, 1)
        71.1
        """
        return round(0.92 * self.memory - 2.5 * GIB)


def check_device(name: str | None) -> None:
    """Raises `InvalidConfig` for a name that is none of `DEVICE_MEMORY`."""
    if name is not None and name not in DEVICE_MEMORY:
        raise InvalidConfig(f"device={name!r} is none of the GPUs that are planned: {', '.join(DEVICE_MEMORY)}")


def this_machine() -> Machine | None:
    """The GPUs of this machine; ``None`` without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Machine(torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count())


def on_devices(default: Config, given: Sequence[str], machine: Machine) -> Config:
    """A preset in data parallelism over the devices that there are, unless a command line says where it runs."""
    if machine.devices is None or any(f"{argument}=".startswith(NAMES_OF_A_LAYOUT) for argument in given):
        return default
    layout = replace(default.layout, dp=min(default.layout.dp, machine.devices))
    return replace(default, layout=layout, on="ray" if layout.world_size > 1 else "local")


def fitting(default: Config, asked: Config, machine: Machine) -> Config:
    """A preset with the first candidate that fits the machine; as it is where one fits only without the reserve.

    Args:
        asked: the preset with the command line's options, which a choice does not change.

    Raises:
        InvalidConfig: no candidate fits into the memory of a device; the message has options with which one does.
    """
    if (fitted := _first_that_fits(default, asked, machine)) is not None:
        return fitted
    if asked.ray.address is None:  # else the run has the devices of another cluster
        _refuse_what_is_too_large(default, asked, machine)
    return default


def _refuse_what_is_too_large(default: Config, asked: Config, machine: Machine) -> None:
    tried = [replace(asked, compute=replace(asked.compute, **each)) for each in _choices(default, asked)]
    engine = engine_bytes(asked) if asked.engine == "vllm" else 0
    # The larger of what generation and an update take, by the smallest choice.
    needed = min(max(resting_bytes(each) + engine, training_bytes(each)) for each in tried)
    if needed <= machine.memory:
        return
    compute, degrees = asked.compute, [asked.layout.dp * times for times in (2, 4, 8)]
    ways: list[list[tuple[str, dict[str, Any]]]] = [
        [
            ("--lora-rank 32", {"compute": replace(compute, lora_rank=32)}),
            ("--lora-rank 32 --load-in-4bit", {"compute": replace(compute, lora_rank=32, load_in_4bit=True)}),
        ],
        [(f"--on ray --layout.dp {dp}", {"layout": replace(asked.layout, dp=dp), "on": "ray"}) for dp in degrees],
    ]
    fit = [next((text for text, changed in way if _fits(default, asked, changed, machine)), None) for way in ways]
    found = " or with ".join(filter(None, fit))
    raise InvalidConfig(
        f"preset {asked.preset} needs {needed / GIB:.1f} GiB of each device, which has {machine.memory / GIB:.1f} GiB: "
        + (f"it fits with {found}" if found else "take a smaller model or larger devices")
    )


def _fits(default: Config, asked: Config, changed: dict[str, Any], machine: Machine) -> bool:
    with suppress(InvalidConfig):  # an option that does not go with the others
        return _first_that_fits(default, replace(asked, **changed), machine) is not None
    return False


def _first_that_fits(default: Config, asked: Config, machine: Machine) -> Config | None:
    own_share = asked.engine_options.get("memory_share")
    if own_share == default.engine_options.get("memory_share"):
        own_share = None
    for chosen in _choices(default, asked):
        tried = replace(asked, compute=replace(asked.compute, **chosen))
        left = machine.usable - resting_bytes(tried)
        share = float(own_share or min(math.floor(100 * left / machine.memory) / 100, MOST_SHARE))
        has_room = engine_bytes(tried) <= share * machine.memory <= left + machine.memory // 100
        if training_bytes(tried) <= machine.usable and (has_room or tried.engine != "vllm"):
            options = {"memory_share": share} if asked.engine == "vllm" else {}
            compute = replace(default.compute, **chosen)
            return replace(default, compute=compute, engine_options={**default.engine_options, **options})
    return None


def _choices(default: "PolicyGradientConfig", asked: "PolicyGradientConfig") -> Iterator[dict[str, Any]]:
    """Options by name; those that a command line has changed stay as they are."""
    for idle, budget, mode in CANDIDATES:
        if budget <= default.compute.token_budget and not (idle and asked.compute.offload):
            chosen = {"offload_idle": idle, "token_budget": budget, "activation_checkpointing": mode}
            asked_for = {name: getattr(asked.compute, name) for name in chosen}
            yield chosen | {name: value for name, value in asked_for.items() if value != getattr(default.compute, name)}


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model, and bytes of activations for a token, with a quarter of the tokens those of images."""

    layer: int
    layers: int
    words: int  # of embedding and head
    adapters: int  # of rank 1
    token: dict[Mode, float]
    tower: int = 670_000_000  # of Qwen2.5-VL, with its merger

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.words + self.tower


MODEL_SIZES = {
    "3b": Sizes(77_070_336, 36, 311_164_928, 1_870_848, {"selective": 3_370_496, "full": 357_312}),
    "7b": Sizes(233_046_016, 28, 1_089_994_752, 2_523_136, {"selective": 4_193_792, "full": 471_488}),
}
"""From the published widths; a test holds them to the models."""


class Held(NamedTuple):
    """Bytes of all trained models of a rank, and of those that are never trained."""

    weights: int
    copies: int
    gradients: int
    moments: int
    others: int


def held(config: "PolicyGradientConfig") -> Held:
    """What the roles of a rank hold."""
    sizes, compute, shards = MODEL_SIZES[config.preset], config.compute, config.layout.world_size
    adapters = compute.lora_rank * sizes.adapters
    trained = adapters or sizes.total
    models = 2 if config.critic else 1
    frozen = 2.0 * sizes.total if adapters else 0.0
    if compute.load_in_4bit:
        frozen -= 1.48 * sizes.layers * sizes.layer
    copies = 2 * (sizes.words + 2 * sizes.layer) if shards > 1 else 2 * models * trained
    compared = config.algorithm.needs_reference and not adapters
    moments = models * MOMENT_BYTES[config.optimizer.kind] * trained / shards
    others = 2 * sizes.total / shards if compared else 0
    return Held(*map(round, (models * (4 * trained + frozen) / shards, copies, 4 * trained / shards, moments, others)))


def resting_bytes(config: "PolicyGradientConfig") -> int:
    """Bytes that all roles but the engine hold while it generates."""
    if config.compute.offload_idle or config.layout.rollout:
        return 0
    found = held(config)
    return found.weights + found.copies + found.moments + found.others


def engine_bytes(config: "PolicyGradientConfig") -> int:
    """Bytes of vLLM on a device, with a cache for at least some rows."""
    return round(2 * MODEL_SIZES[config.preset].total / int(config.engine_options.get("tensor_parallel", 1))) + ENGINE


def training_bytes(config: "PolicyGradientConfig") -> int:
    """Bytes of an update: of its passes, or of an optimizer step if the moments come only for that."""
    found, sizes, compute = held(config), MODEL_SIZES[config.preset], config.compute
    own = found.weights + found.copies + found.gradients
    own += 0 if config.engine == "vllm" else 2 * sizes.total
    longest = config.data.max_prompt_length + config.longest_response  # such a row is a micro-batch of its own
    mode: Mode = "full" if compute.activation_checkpointing == "full" else "selective"
    work = max(compute.token_budget, longest) * sizes.token[mode]
    passes = own + LOGITS + 4 * sizes.words + round(work)
    if compute.offload_idle:
        return max(passes, own + found.moments)
    return passes + found.moments + found.others
