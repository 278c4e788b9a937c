"""The weights of vLLM's model, their names and layouts: loading them in place and comparing them.

Functions of a worker run in this process.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from dataproto.errors import ending
from rollout.vllm.running_engine import model_of

JOINED_WEIGHTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Layers that vLLM fuses, in its order."""

EXPERTS_MODULE = ".routed_experts"
"""The module that holds experts from 0.29 on. 0.30 omits it in the names of the weights that it has loaded."""

COMPUTED_WEIGHTS = (".W_UK_T", ".W_UV")
"""Ends of the names of parameters that vLLM computes from others when weights have been loaded: those of latent attention."""

EXPERT_WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Weights of experts: names in checkpoints, and in vLLM."""

LATENT_EPS = 1e-6
"""Of the norms of compressed queries, keys and values in DeepSeek-V3's code, whatever ``rms_norm_eps`` is."""


def renamed(model: Any, name: str) -> list[str]:
    """A checkpoint's name of a weight under the names of the modules of vLLM's model, none if that model leaves it out.

    From 0.30 on the mapper of a language model also names the fused layer that the weight is a part of; `JOINED_WEIGHTS` does
    that here. Before, some language models have no mapper.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return [name]
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    names: list[str] = mapper.apply_list([name])
    return names


def takes_transposed(model: nn.Module, name: str) -> bool:
    """Whether checkpoints hold the fused weights of experts as ``(experts, in, out)``; the parameter ``name`` is ``(experts, out,
    in)``. Before 0.30 vLLM's models did not say so, and only those of Qwen3-VL were fused.
    """
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_fused_checkpoint_transposed", True))


def match_latent_attention(model: nn.Module) -> None:
    """Has multi-head latent attention (`LATENT_EPS`) computed as in Hugging Face's model.

    vLLM's gives the norms of compressed queries, keys and values the epsilon of the others. On a CPU its kernel for plain rotary
    angles takes queries for contiguous, and here they are parts of heads; other kinds of angles do not use that kernel.
    """
    for module in model.modules():
        norms = [getattr(module, f"{name}_a_layernorm", None) for name in ("q", "kv")]
        if norms[1] is None:
            continue
        for norm in norms:
            if norm is not None:
                norm.variance_epsilon = LATENT_EPS
        rotary: Any = module.rotary_emb
        if next(module.parameters()).device.type == "cpu":
            rotary._forward_method = rotary.forward_native


@contextmanager
def loading(worker: Any) -> Iterator[nn.Module]:
    """The worker's model, prepared to load weights in place under their checkpoint names.

    Dense layers on CUDA keep their weights as loaded, so vLLM's loaders write into them. On a CPU, and for experts, vLLM packs
    weights for its kernels; there each layer is loaded into new memory and packed again when it is complete. After an error the
    model is still usable.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = model_of(worker)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        if not is_packed(model):
            yield model
            return
        if next(model.parameters()).device.type == "cpu":
            _pack_experts_anew(model)
        initialize_layerwise_reload(model)
        with ending(lambda: finalize_layerwise_reload(model, worker.model_config)):
            yield model


def _pack_experts_anew(model: nn.Module) -> None:
    """Sets up vLLM's CPU kernels for experts again, because they pack weights only in their setup."""
    for module in model.modules():
        if hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
            method: Any = module.quant_method
            method.moe_kernel = None


def is_packed(model: nn.Module) -> bool:
    """Whether vLLM stores some weights in another form than it loads them."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu or any(hasattr(module, "w13_weight") or is_quantized(module) for module in model.modules())


def is_quantized(module: nn.Module) -> bool:
    """Whether vLLM quantises the weight of a layer when it loads it, into ``weight (in, out)`` and ``weight_scale (out, 1)``."""
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
Weights = Iterable[tuple[str, Tensor]]  # checkpoint names, full tensors


def load_parameters(worker: Any, weights: Weights) -> set[str]:
    """Loads the weights into the running model. Returns the names of the parameters that none of them filled."""
    parameters = given_parameters(model_of(worker))
    with loading(worker) as model:
        loader: Any = model
        filled = set(loader.load_weights(weights))
    return unfilled(parameters, filled)


def given_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that are in checkpoints: all but the scales of weights that vLLM quantises itself, and the parts of
    others that it computes with.
    """
    modules = dict(model.named_modules())
    return {
        name
        for name, _ in model.named_parameters()
        if not name.endswith(COMPUTED_WEIGHTS)
        and not (name.endswith("weight_scale") and is_quantized(modules[name.rpartition(".")[0]]))
    }


def unfilled(parameters: set[str], filled: set[str]) -> set[str]:
    """The parameters that vLLM does not report as filled.

    >>> unfilled({"experts.routed_experts.w2_weight", "norm.weight"}, {"experts.w2_weight"})
    {'norm.weight'}
    """
    return {name for name in parameters - filled if name.replace(EXPERTS_MODULE, "") not in filled}


@torch.no_grad()
def differing_parameters(worker: Any, weights: Weights) -> list[str]:
    """Names of parameters that differ from this rank's part of the weights, or that have no weight. Quantised ones differ by more
    than rounding.
    """
    model: Any = model_of(worker)
    left = given_parameters(model)
    differing = []
    for name, parts in by_parameter(model, weights):
        left.discard(name)
        module = model.get_submodule(name.rpartition(".")[0])
        held = _held(module, name)
        of_experts = name.endswith(tuple(EXPERT_WEIGHTS.values()))
        wanted = (_of_experts(parts[0], name) if of_experts else wanted_part(module, parts, held)).to(held.dtype)
        same = equal_in_fp8 if is_quantized(module) else torch.equal
        if of_experts:
            if not same_experts(held, wanted, same, reorders_experts(module)):
                differing.append(name)
            continue
        if wanted.ndim:
            held = held[: len(wanted)].reshape(wanted.shape)  # vocabularies are padded
        if is_packed(model) and name.endswith(".conv1d.weight"):  # across channels
            held, wanted = held.flatten().sort().values, wanted.flatten().sort().values
        if not same(held, wanted):
            differing.append(name)
    return differing + sorted(left)


def equal_in_fp8(held: Tensor, wanted: Tensor) -> bool:
    """Whether weights ``(out, in)`` are ``wanted``, rounded to 3 bits after the first one, with a scale for each output channel.

    >>> weight = torch.tensor([[448.0, 17.0, 0.0009]])
    >>> equal_in_fp8(torch.tensor([[448.0, 18.0, 0.0]]), weight), equal_in_fp8(torch.tensor([[448.0, 20.0, 0.0]]), weight)
    (True, False)
    """
    held, wanted = held.float(), wanted.float()
    smallest = wanted.abs().amax(-1, keepdim=True) / 448 * 2**-9  # of e4m3, whose largest number is 448
    return bool(((held - wanted).abs() <= (wanted.abs() * 2**-4).maximum(smallest / 2) * 1.01).all())


def by_parameter(model: Any, weights: Weights) -> Iterator[tuple[str, list[Tensor]]]:
    """Names of parameters of vLLM's model, each with the weights that are fused in it, in order."""
    places = {
        source: (target, number, len(sources))
        for target, sources in JOINED_WEIGHTS.items()
        for number, source in enumerate(sources)
    }
    waiting: dict[str, dict[int, Tensor]] = defaultdict(dict)
    experts: dict[str, dict[tuple[int, str], Tensor]] = defaultdict(dict)  # of checkpoints that hold them apart
    modules = {name for name, _ in model.named_modules()}
    for source_name, weight in weights:
        for name in renamed(model, source_name):
            path, _, kind = name.rpartition(".")
            if (expert := EXPERT.fullmatch(path)) is not None:
                experts[expert[1]][int(expert[2]), expert[3]] = weight
                continue
            if kind in EXPERT_WEIGHTS:
                held = _within(model, path, EXPERT_WEIGHTS[kind])
                yield held, [weight.transpose(1, 2) if takes_transposed(model, held) else weight]
                continue
            parent, dot, leaf = path.rpartition(".")
            alone = (leaf, 0, 1)
            target, number, count = alone if path in modules else places.get(leaf, alone)  # not fused in every tower
            joined = f"{parent}{dot}{target}.{kind}"
            waiting[joined][number] = weight
            if len(waiting[joined]) == count:
                parts = waiting.pop(joined)
                yield joined, [parts[number] for number in range(count)]
    for path, apart in experts.items():
        count = 1 + max(each for each, _ in apart)
        for kind, leaves in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            stacked = [torch.cat([apart[each, leaf] for leaf in leaves]) for each in range(count)]
            yield _within(model, path, EXPERT_WEIGHTS[kind]), [torch.stack(stacked)]
    for joined, parts in waiting.items():
        if ".qkv_proj." in joined and parts.keys() == {0, 1}:  # keys are values too, as in Gemma 4
            yield joined, [parts[0], parts[1], parts[1]]


def _within(model: nn.Module, path: str, kind: str) -> str:
    """Name of the parameter of this kind in the module at ``path`` or in its submodules."""
    (name,) = (name for name, _ in model.get_submodule(path).named_parameters() if name.endswith(kind))
    return f"{path}.{name}"


def _held(module: nn.Module, name: str) -> Tensor:
    """The weight that the module computes with. If it is only stored packed, it is computed as the product with the identity."""
    leaf = name.rpartition(".")[2]
    parameter = getattr(module, leaf)
    if is_quantized(module) and leaf in EXPERT_WEIGHTS.values():  # (experts, out, in)
        return parameter.float() * cast(Tensor, getattr(module, f"{leaf}_scale")).reshape(len(parameter), -1, 1)
    if is_quantized(module) and name.endswith("weight"):
        return (parameter.float() * cast(Tensor, module.weight_scale).reshape(1, -1)).t()
    if parameter.numel():
        return parameter.detach()
    layer: Any = module
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)  # the latter if the layer is not split
    identity = torch.eye(inputs, dtype=parameter.dtype, device=parameter.device)
    method = getattr(
        layer.quant_method, "of_weight", layer.quant_method
    )  # without an adapter, see `rollout.vllm.low_rank`
    return method.apply(layer, identity, None).T


def wanted_part(module: Any, parts: list[Tensor], held: Tensor) -> Tensor:
    """This rank's part of the weights that are fused in a parameter."""
    vocabulary = getattr(module, "shard_indices", None)
    if vocabulary is not None:
        return parts[0][vocabulary.org_vocab_start_index : vocabulary.org_vocab_end_index]
    sizes = getattr(module, "output_partition_sizes", [])
    if len(sizes) > 1 and len(parts) != len(sizes):  # some are fused already in the checkpoint
        whole = torch.cat(parts)
        scale = len(whole) // sum(sizes)
        parts = list(whole.split([size * scale for size in sizes]))
    if len(parts) == 1:
        return part_of_rank(parts[0], tuple(held.shape))
    return torch.cat([part_of_rank(part, (size, *held.shape[1:])) for part, size in zip(parts, sizes, strict=True)])


def _of_experts(whole: Tensor, name: str) -> Tensor:
    """This rank's part of the weights ``(experts, out, in)`` of all experts; those of gate and up are split each."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if name.endswith(EXPERT_WEIGHTS["down_proj"]):
        return whole.chunk(ranks, 2)[rank]
    return torch.cat([each.chunk(ranks, 1)[rank] for each in whole.chunk(2, 1)], 1)


def reorders_experts(layer: nn.Module) -> bool:
    """Whether the kernel of a layer of experts takes elements in another order than they are loaded: those for a CPU do, and
    FlashInfer's, one of which has up before gate.
    """
    method = getattr(layer, "quant_method", None)
    kernels = (getattr(method, name, None) for name in ("unquantized_backend", "fp8_backend"))
    of_flashinfer = any(getattr(kernel, "name", "").startswith("FLASHINFER") for kernel in kernels)
    return of_flashinfer or next(layer.parameters()).device.type == "cpu"


def same_experts(held: Tensor, wanted: Tensor, same: Callable[[Tensor, Tensor], bool], reordered: bool) -> bool:
    """Whether the weights of all experts are the ``same``. If the kernel takes them ``reordered``, or fills up narrow layers with
    zeros, the elements of each expert are sorted: where they lie is not compared then.

    >>> held, wanted = torch.tensor([[[3.0, 0.0], [1.0, 0.0]]]), torch.tensor([[[1.0], [3.0]]])
    >>> same_experts(held, wanted, torch.equal, reordered=False)
    True
    >>> same_experts(wanted.flip(1), wanted, torch.equal, reordered=False)
    False
    """
    if held.shape == wanted.shape and same(held, wanted):
        return True
    if held.shape == wanted.shape and not reordered:
        return False
    if len(held) != len(wanted) or held[0].numel() < wanted[0].numel():
        return False
    return all(same(*_in_order(*each)) for each in zip(held, wanted, strict=True))


def _in_order(held: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The sorted elements of an expert, as many zeros more as are held."""
    filled = torch.nn.functional.pad(wanted.flatten(), (0, held.numel() - wanted.numel()))
    return held.flatten().sort().values, filled.sort().values


def part_of_rank(whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rank's slice of this shape. If there are more ranks than slices, neighbours hold equal slices."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if whole.ndim != len(shape):
        return whole
    for axis, (size, wanted) in enumerate(zip(whole.shape, shape)):
        if wanted < size:
            start = rank * (size // wanted) // ranks * wanted
            whole = whole.narrow(axis, start, wanted)
    return whole
