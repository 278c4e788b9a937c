"""The weights of vLLM's model, and their names: loading them in place.

Functions of a worker run in this process.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.errors import ending
from rollout.vllm.running_engine import model_of

EXPERTS_MODULE = ".routed_experts"
"""The module that holds experts from 0.29 on. 0.30 omits it in the names of the weights that it has loaded."""

COMPUTED_WEIGHTS = (".W_UK_T", ".W_UV")
"""Ends of the names of parameters that vLLM computes from others when weights have been loaded: those of latent attention."""

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
    return mapper.apply_list([name])


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
def loading(worker: Any, model: nn.Module) -> Iterator[nn.Module]:
    """A model of the worker, prepared to load weights in place under their checkpoint names.

    Dense layers on CUDA keep their weights as loaded, so vLLM's loaders write into them. On a CPU, and for experts, vLLM packs
    weights for its kernels; there each layer is loaded into new memory and packed again when it is complete. After an error the
    model is still usable.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

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


Weights = Iterable[tuple[str, Tensor]]  # checkpoint names, full tensors


def load_parameters(worker: Any, weights: Weights) -> set[str]:
    """Loads the weights into the running model. Returns the names of the parameters that none of them filled."""
    parameters = given_parameters(model_of(worker))
    with loading(worker, model_of(worker)) as model:
        loader: Any = model
        filled = set(loader.load_weights(weights))
    return unfilled(parameters, filled)


def load_head(worker: Any, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Loads the weights of the head into the model that drafts by it, if there is one. It shares embeddings and output projection
    with the other, which has been loaded before.
    """
    model = getattr(getattr(worker.model_runner, "speculator", None), "model", None)
    if weights and model is not None:
        with loading(worker, model) as drafter:
            loader: Any = drafter
            loader.load_weights(weights)
    worker.policy_sampler.take_weights()


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
