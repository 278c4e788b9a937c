"""Models without memory for their weights, which are spread over ranks first and then filled, each rank with its own parts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, PreTrainedModel

from dataproto.errors import CheckpointError, InvalidConfig
from dataproto.vlm import VLMFamily
from dataproto.vlm.prediction_head import PredictionHead
from rollout.pretrained import check_not_quantized, generation_config, quantized
from workers.model.lora import base_name
from workers.model.patches import keep_value, parameter_places, place_buffer, place_parameter
from workers.weights.stored_tensors import PLAIN_NUMBERS, CheckpointFiles, Range, StoredTensor, whole
from workers.weights.weight_sources import WeightSources

log = logging.getLogger(__name__)

ROWS_COMPARED = 4096  # at a time, of two weights that should be one


def hollow_model(
    model_path: str, family: VLMFamily, with_head: bool = False
) -> tuple[PreTrainedModel, CheckpointFiles, WeightSources]:
    """The model of a checkpoint with its weights on the meta device, and where they come from.

    With ``with_head`` its attribute ``mtp`` is the head that predicts the token after the next one.

    What the checkpoint does not hold has its value: buffers, and weights that are absent, which are initialised from a fixed
    seed, so they are equal on all ranks.

    Raises:
        CheckpointError: the checkpoint has no weights, or they are of another model, or some of the head are missing.
        InvalidConfig: the weights are quantized, or there is no such head.
    """
    config = AutoConfig.from_pretrained(model_path)
    check_not_quantized(model_path, config)
    files = CheckpointFiles(model_path)
    if not files.names:
        raise CheckpointError(
            f"{model_path} holds no weights in safetensors files: save_pretrained of transformers writes them"
        )
    with torch.device("meta"):
        model: PreTrainedModel = family.new_model(config)
        if with_head:
            _add_head(model, family, files)
    if model.can_generate():
        model.generation_config = generation_config(model_path, config)
    sources = WeightSources.of(model, family, files)
    _check_numbers(model, files, sources)
    _untie_different(model, files, sources)
    absent = absent_weights(model, sources)
    if with_head and any(name.startswith(str(family.prediction_head)) for name in absent):
        raise CheckpointError(
            f"{model_path} lacks weights of its head that predicts further tokens: {', '.join(absent)}"
        )
    if absent:
        log.warning("%s lacks weights, which are initialised: %s", model_path, ", ".join(absent))
    if sources.unexpected:
        log.warning("%s has weights that are not used: %s", model_path, ", ".join(sources.unexpected))
    initialise(model, absent)
    return model.eval(), files, sources


def _add_head(model: PreTrainedModel, family: VLMFamily, files: CheckpointFiles) -> None:
    """Adds the head under its name in the checkpoint. Raises `InvalidConfig` if there is none."""
    prefix = family.prediction_head
    if prefix is None or not any(name.startswith(prefix) for name in files.names):
        raise InvalidConfig(
            f"mtp_coef: {files.source} has no head that predicts further tokens (weights mtp.* of Qwen3.5 and its successors); "
            "leave it at 0"
        )
    head = PredictionHead(family, model)
    for module in head.modules():
        keep_value(module)
    model.add_module(prefix.rstrip("."), head)


def _check_numbers(model: PreTrainedModel, files: CheckpointFiles, sources: WeightSources) -> None:
    """Raises `InvalidConfig` for weights in float8 or whole numbers: their scales, which have other names, would be left out."""
    shown = model.state_dict()
    with files.opened():
        for name, stored in sources.stored.items():
            for each in stored.names if shown[name].is_floating_point() else ():
                if (kind := files.kind(each)) not in PLAIN_NUMBERS.values():
                    raise quantized(files.source, each, kind)


def _untie_different(model: PreTrainedModel, files: CheckpointFiles, sources: WeightSources) -> None:
    """Separates weights that the config ties if the checkpoint holds both, with different values, as ``from_pretrained`` does."""
    for tied, source in list(model.all_tied_weights_keys.items()):
        pair = sources.stored.get(tied), sources.stored.get(source)
        if pair[0] is None or pair[1] is None or _equal(pair[0], pair[1], files):
            continue
        log.warning("%s ties %s to %s, but holds different values: they are not tied", files.source, tied, source)
        owner, _, name = tied.rpartition(".")
        shape = torch.empty_like(model.get_parameter(tied), device="meta")
        place_parameter(model.get_submodule(owner), name, nn.Parameter(shape))


def _equal(one: StoredTensor, other: StoredTensor, files: CheckpointFiles) -> bool:
    for begin in range(0, one.shape[0], ROWS_COMPARED):
        part = (slice(begin, min(begin + ROWS_COMPARED, one.shape[0])), *whole(one.shape[1:]))
        with files.opened():
            if not torch.equal(one.read(part), other.read(part)):
                return False
    return True


def absent_weights(model: PreTrainedModel, sources: WeightSources) -> list[str]:
    """Names of weights that the checkpoint lacks, without those that are the same as one that it holds."""
    same = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    held = {number for name, number in same.items() if name in sources.stored}
    return [name for name in sources.absent if same.get(name) not in held]


def initialise(model: PreTrainedModel, absent: Sequence[str] = ()) -> None:
    """Gives buffers and the weights ``absent`` their first values on the CPU, as the model's class initialises them."""
    computed = {name for name, _ in model.named_non_persistent_buffers()} | set(absent)
    placed: dict[int, Any] = {}
    for full_name, value in list(all_tensors(model)):
        if full_name not in computed:
            keep_value(value)
            continue
        owner, _, name = full_name.rpartition(".")
        if id(value) not in placed:
            empty = torch.empty_like(value, device="cpu")
            placed[id(value)] = nn.Parameter(empty) if isinstance(value, nn.Parameter) else empty
        place = place_parameter if isinstance(value, nn.Parameter) else place_buffer
        place(model.get_submodule(owner), name, placed[id(value)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.initialize_weights()


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """In here parameters on the meta device have the device CPU and one number as the value of all elements.

    What is added to a model, such as adapters, is made on the device of the weights that it belongs to; so it has its value.
    """
    by_weight: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, weight in parameter_places(model):
        if weight.is_meta:
            if weight not in by_weight:
                value = torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)
                by_weight[weight] = nn.Parameter(value, requires_grad=weight.requires_grad)
            place_parameter(owner, name, by_weight[weight])
    yield
    hollow = {id(stand_in): weight for weight, stand_in in by_weight.items()}
    for owner, name, stand_in in parameter_places(model):
        if id(stand_in) in hollow:
            hollow[id(stand_in)].requires_grad_(stand_in.requires_grad)
            place_parameter(owner, name, hollow[id(stand_in)])


def make_room(module: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Allocates memory for parameters and buffers on the meta device, and moves the others; tied parameters stay tied."""

    def place(tensor: Tensor) -> Tensor:
        home = parameters_on if isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=home) if tensor.device.type == "meta" else tensor.to(home)

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the objects that they are
    try:
        module._apply(place)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def fill(module: nn.Module, prefix: str, files: CheckpointFiles, sources: WeightSources, hollow: set[str]) -> None:
    """Reads this rank's part of each parameter and buffer from the checkpoint; one at a time is in host memory.

    Args:
        module: has room for its parameters, whole ones or DTensors.
        prefix: of names in ``module`` before those of the model.
        hollow: names in ``module`` of those without a value; what a checkpoint does not hold has one.

    Raises:
        CheckpointError: a file is damaged.
    """
    todo: dict[int, tuple[Tensor, StoredTensor]] = {}
    for name, tensor in all_tensors(module):
        stored = sources.stored.get((base_name(name) or name).removeprefix(prefix))
        if name in hollow and stored is not None:
            todo.setdefault(id(tensor), (tensor.detach(), stored))
    for tensor, stored in todo.values():
        local, part = local_part(tensor)
        if local.numel():
            with files.opened():
                local.copy_(stored.read(part).to(local.device))


def all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def local_part(tensor: Tensor) -> tuple[Tensor, Range]:
    """This rank's part of a tensor that may be a DTensor, and its place in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
    return tensor.to_local(), place
