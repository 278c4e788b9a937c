"""Every change that this package makes to modules of transformers and torch, and why no official way does the same.

All such changes go through the functions of this file; nothing else in `workers` assigns to such a module, replaces one of its
methods or registers a hook on it. Classes stay as they are: only instances are changed.

Who makes such changes, and why:

- `workers.model.attention`: The attention function is chosen by name in each part's config. transformers checks names that
  contain 'flash' for an installed package, and only under such names does a vision tower make one variable-length call a
  layer.
- `workers.model.lora`: Fused experts have no linear layers that peft could wrap, and peft's own way to adapt parameters uses
  one matrix for all experts, which cannot be split by expert. peft's own way to turn adapters off also changes which are
  trained. Its linear layers scale and add outputs by operators of their own, which take time, and memory for the backward pass.
- `workers.model.mixture`: transformers' functions for experts scatter gradients in any order, and compute the tokens that only
  fill up a sequence. Layers of transformers hand their routers nothing but states: neither recorded experts, nor which tokens
  are padding.
- `workers.model.packed_model`: Decoders of transformers take a mask of media tokens, not their places. Vision towers embed
  patches by a convolution; no option of theirs computes it as a matrix product.
- `workers.model.precision`: Layers read their weights as attributes. Autocast casts a weight at each use, and sums in float32
  between layers; copies in bfloat16 have to take the parameters' places.
- `workers.model.gated_delta_net`: transformers' recurrent layers keep packed rows apart by kernels for CUDA only, and know no
  rows that share a prompt.
- `workers.parallel.activation_checkpointing`: transformers checkpoints layers only in training mode and without a selection of
  operators, and outside of the hooks of FSDP2.
- `workers.parallel.compiling`: `nn.Module.compile` compiles hooks too, those of FSDP2 among them, and marks no dynamic sizes.
  torch's limit of recompilations is too low for the variants of a layer. Without settings torch 2.11 and 2.12 compile no
  checkpointed function that sets an attribute, as the layers of a mixture do for their routers, and torch takes an integer for
  a constant until a second value comes.
- `workers.parallel.expert`: transformers splits experts only together with its own tensor parallelism; this rank's experts
  take the place of all.
- `workers.parallel.fsdp`: FSDP2 has no function before torch 2.12 that drops gradients which it has not reduced yet, and none
  that drops those which it has not summed over replicas.
- `workers.parallel.pipeline`: Models of transformers have no stages: a rank keeps some layers under their names, only the last
  stage runs the final norm, and only the first one makes the inputs that Gemma 4 has for each layer.
- `workers.parallel.tensor`: transformers' tensor parallelism replicates the tokens and the vision tower; split layers take the
  place of whole ones, and gather the tokens before.
- `workers.training.loading`: A weight that is never trained is stored in the dtype of the computation, but not all of a model
  are: `Module.to` casts all of them. A weight of 4 bits is made when it is read, after the model has been spread over ranks.
- `workers.weights.hollow_model`: transformers fills models before they are spread over ranks; buffers and adapters need their
  values, and weights none, before that.
- `workers.weights.sharded_export`: transformers reverts the conversions of a checkpoint's weights by those that the model was
  loaded with, or looks them up in each call; here there is one call for each file.
- `workers.roles.critic`: No class of transformers has a vision tower and a value head, so the head for logits is removed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def route_attention(part: nn.Module, name: str) -> None:
    """Makes ``part``, if it has a config that names an attention function, use the one that is registered as ``name``."""
    config = getattr(part, "config", None)
    if config is not None and hasattr(config, "_attn_implementation"):
        config._attn_implementation_internal = name


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes this instance compute with ``forward``; its parameters, their names and its hooks stay."""
    module.forward = forward


def set_on_module(module: nn.Module, name: str, value: object) -> None:
    """Gives this instance an attribute: a function in the place of its class's method, which gets only the arguments; a switch;
    or a value for a forward that replaces its own. A method of the instance finds it there, and unlike an object around the
    instance it lets ``torch.compile`` use one code for all layers.
    """
    setattr(module, name, value)


def replace_submodule(model: nn.Module, path: str, part: nn.Module) -> None:
    """Puts ``part`` at ``path``, which may hold a module already; the path up to its last name has to exist."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, part)


def remove_submodule(model: nn.Module, path: str) -> None:
    """Takes the module at ``path`` out of the model."""
    parent, _, name = path.rpartition(".")
    delattr(model.get_submodule(parent), name)


def hollow_parameter(module: nn.Module, name: str) -> None:
    """Leaves a parameter of ``module`` without storage; `torch.func.functional_call` then gives it a value in each call."""
    shape = torch.empty_like(module.get_parameter(name), device="meta")
    setattr(module, name, nn.Parameter(shape, requires_grad=False))


def cast_parameter(weight: nn.Parameter, dtype: torch.dtype) -> None:
    """Keeps a parameter in another dtype, in its place, also where it is tied."""
    weight.data = weight.data.to(dtype)


def end_backward_pass(module: Any) -> None:
    """Has the root of FSDP's modules reduce what it reduces at the end of a backward pass."""
    state = module._get_fsdp_state()
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # torch 2.15 forgets it after each pass
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def drop_unreduced_gradient(weight: Any) -> None:
    """Drops the gradient that FSDP has added up for one of its parameters without reducing it.

    torch before 2.15 may keep it in an attribute of its own; from 2.15 on it is the gradient of the unsharded parameter.
    """
    if "unsharded_accumulated_grad" in vars(weight):
        weight.unsharded_accumulated_grad = None
    if hasattr(weight, "_unsharded_param"):
        weight._unsharded_param.grad = None


def drop_sum_within_replica(group: Any) -> None:
    """Drops the gradients of a group of weights that FSDP has summed within a replica, and not yet over replicas."""
    group._partial_reduce_output = None


def parameter_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter with the modules that hold it, and its names there."""
    return [
        (owner, name, weight)
        for owner in model.modules()
        for name, weight in owner._parameters.items()
        if weight is not None
    ]


def place_parameter(owner: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Lets ``owner`` find ``weight`` under ``name``, without the checks of a registration."""
    owner._parameters[name] = weight


def place_buffer(owner: nn.Module, name: str, value: Tensor) -> None:
    """Lets ``owner`` find ``value`` under ``name``, which holds a buffer."""
    owner._buffers[name] = value


def keep_value(value: Tensor | nn.Module) -> None:
    """Tells transformers' initialisation to leave a parameter, a buffer or a module as it is."""
    value._is_hf_initialized = True  # type: ignore[union-attr]


def call_after_gradient(weight: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Calls ``hook`` with ``weight`` each time that a backward pass has added to its gradient."""
    weight.register_post_accumulate_grad_hook(hook)


def call_before_forward(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Lets ``hook(module, args, kwargs)`` change the arguments of each call."""
    module.register_forward_pre_hook(hook, with_kwargs=True)


def prepare_compilation(variants: int, sizes: str) -> None:
    """Sets what torch compiles, for all modules of the process:

    - one function at least ``variants`` times;
    - a checkpointed function that sets attributes of its objects. Compiled code reads what was set in the same call, in the
      forward pass and where the backward pass computes it again; the backward pass does not set the attributes;
    - code for any value of the integers whose names match the pattern ``sizes``.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, variants)
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    known = torch.compiler.config.dynamic_sources
    if sizes not in known.split(","):
        torch.compiler.config.dynamic_sources = f"{known},{sizes}".removeprefix(",")
