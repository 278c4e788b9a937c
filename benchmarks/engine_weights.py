"""Whether an engine holds the weights that it was given: a check of tests and benchmarks."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollout.low_rank import pairs_of
from rollout.vllm.low_rank import JOINED_LAYERS, LOW_RANK, decoder_linears, wanted_part
from rollout.vllm.low_rank import _matrices as matrices_of
from rollout.vllm.memory import model_state
from rollout.vllm.running_engine import model_of
from rollout.vllm.weights import Weights, given_parameters, is_packed, is_quantized, renamed


def differing_of_worker(worker: Any) -> list[str]:
    """Names of weights of a `RolloutWorker`'s engine that differ from the actor's, those of adapters too."""
    with worker.sharding as sharding:
        differing = differing_weights(worker.engine, sharding.weights())
        return differing + ([] if sharding.adapter is None else differing_adapter(worker.engine, sharding.adapter()))


def differing_weights(engine: Any, weights: Weights) -> list[str]:
    """Names of the engine's weights that are not equal, in its dtype, to the given ones, and of buffers that a sleep changed."""
    if hasattr(engine, "llm"):
        given = engine._checkpoint_weights(weights)
        (differing,) = engine.llm.collective_rpc(differing_parameters, args=(given,))
        (buffers,) = engine.llm.collective_rpc(differing_buffers, args=(engine.memory._state,))
        return [*differing, *buffers]
    left, found = {id(parameter): name for name, parameter in engine.model.named_parameters()}, []
    head = engine.family.prediction_head
    for name, weight in weights:
        if head is not None and name.startswith(head):
            continue
        target = engine.weights[name]
        left.pop(id(target), None)
        if not torch.equal(target, weight.to(target)):
            found.append(name)
    return found + list(left.values())


def differing_adapter(engine: Any, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of layers whose adapter is not equal, in the engine's dtype, to the given one."""
    if hasattr(engine, "llm"):
        (differing,) = engine.llm.collective_rpc(differing_low_rank, args=(tensors,))
        return list(differing)
    layers = engine.adapter.layers
    return [
        name
        for name, (down, up) in pairs_of(tensors).items()
        if not (
            torch.equal(layers[name].low_rank_down, down.to(layers[name].low_rank_down))
            and torch.equal(layers[name].low_rank_up, up.to(layers[name].low_rank_up))
        )
    ]


@torch.no_grad()
def differing_low_rank(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the layers whose adapter is not equal to the given one."""
    layers = decoder_linears(worker)
    return [
        name
        for name, matrices in matrices_of(worker, tensors)
        if not all(
            torch.equal(place[: matrix.shape[0], : matrix.shape[1]], matrix.to(place))
            for place, matrix in zip(getattr(layers[name], LOW_RANK), matrices, strict=True)
        )
    ]


def differing_buffers(worker: Any, copies: dict[str, Tensor | None]) -> list[str]:
    """Names of the registered buffers that are not equal to their copies. Other tensors may change from step to step."""
    registered = {name for name, _ in model_of(worker).named_buffers()}
    state = {name: tensor for name, tensor in model_state(worker).items() if name in registered & copies.keys()}
    return sorted(name for name, tensor in state.items() if not _equal(tensor, copies[name]))


def _equal(tensor: Tensor, copy: Tensor | None) -> bool:
    held = tensor.detach().reshape(-1).view(torch.uint8)  # NaN included
    if copy is None:
        return not bool(held.any())
    return torch.equal(held, copy.to(tensor.device).reshape(-1).view(torch.uint8))


EXPERT_WEIGHTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Weights of experts: names in checkpoints, and in vLLM."""


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


def takes_transposed(model: nn.Module, name: str) -> bool:
    """Whether checkpoints hold the fused weights of experts as ``(experts, in, out)``; the parameter ``name`` is ``(experts, out,
    in)``. Before 0.30 vLLM's models did not say so, and only those of Qwen3-VL were fused.
    """
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_fused_checkpoint_transposed", True))


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
        vocabulary = getattr(module, "shard_indices", None)
        if of_experts:
            wanted = _of_experts(parts[0], name)
        elif vocabulary is not None:
            wanted = parts[0][vocabulary.org_vocab_start_index : vocabulary.org_vocab_end_index]
        else:
            wanted = wanted_part(module, parts, held)
        wanted = wanted.to(held.dtype)
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
        for target, sources in (JOINED_LAYERS | {"qkv": ("q", "k", "v")}).items()
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
    method = layer.quant_method
    apply = type(method).__mro__[1].apply if hasattr(layer, LOW_RANK) else type(method).apply  # without an adapter
    found: Tensor = apply(method, layer, identity, None)
    return found.T


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
