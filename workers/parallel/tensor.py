"""Tensor parallelism (arXiv:1909.08053) by the family's plan, over the ranks of a tp group, which get the same rows; between
split layers each rank has only a part of the tokens (arXiv:2205.05198, "sequence parallelism").

An attention or MLP first gathers the tokens of all ranks and computes this rank's part of the heads or features for them. The
results of the ranks are summed, and each rank keeps the sums of its own tokens. So residual stream, norms, deep vision features
and routers are computed, and kept for the backward pass, once for each token in a tp group
(`workers.parallel.tokens`).

Split weights are DTensors over tp, so that FSDP2, checkpoints and weight export treat them as any other weights; a layer computes
with the part that it holds. Embedding and head are split over the vocabulary. Key-value projections with fewer heads than ranks
stay whole and compute the heads that a rank's queries use. Experts are split by their number (`workers.parallel.expert`). Norms
stay whole, as does the vision tower, whose images are split instead (`workers.parallel.vision_split`).

Each weight that stays whole takes part in a share of the work, of tokens, heads or images, and gets a part of its gradient on
each rank: `TensorParallel.sum_gradients` adds the parts, once for each optimizer step.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, groupby
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import embedding, linear

from dataproto.errors import InvalidConfig
from dataproto.planning import split_by_size
from workers.model.gated_delta_net import HeadShare, channels
from workers.model.logprobs import token_log_probs
from workers.model.packed_model import PackedVLM
from workers.model.patches import call_before_forward, replace_submodule, set_on_module
from workers.model.precision import in_autocast_dtype
from workers.parallel.transform import Transform
from workers.parallel.ulysses import check_heads, key_value_share
from workers.ranks.autograd_collectives import Peers, gather_split, local_part, sum_and_split

BUCKET_ELEMENTS = 2**26
"""Gradients summed at a time."""


class TensorParallel(Transform):
    """The language model, split over tp."""

    axes = ("tp",)

    def apply(self, module: PackedVLM) -> None:
        """Puts split layers in the places of whole ones, on the mesh's device.

        Raises:
            InvalidConfig: sizes of the model do not divide by the layout, or the model has adapters.
        """
        ranks, mesh = self.ranks, self.mesh
        if self.options.lora_rank:
            raise InvalidConfig(
                f"lora with layout.tp={ranks.size('tp')}: adapters are not split; use dp or sp instead of tp"
            )
        model, family, peers = module.model, module.family, Peers.of(mesh.get_group())
        text = model.config.get_text_config()
        check_heads(text, family.recurrent_mixers is not None, ranks.size("sp"), ranks.size("tp"))
        split = _Split(mesh, peers, text)
        names = [name for name, _ in model.named_modules()]
        parents: dict[int, nn.Module] = {}  # of layers split by column, which need all tokens
        for pattern, style in ((family.embedding, "vocabulary"), *family.tensor_plan):
            for name in (name for name in names if fnmatchcase(name, pattern)):
                parent = model.get_submodule(name.rpartition(".")[0])
                replace_submodule(model, name, split.layer(name, model.get_submodule(name), style, parent))
                if style.endswith("colwise") and name != family.head:
                    parents[id(parent)] = parent
        for parent in parents.values():
            call_before_forward(parent, partial(_gather_input, peers=peers))
        module.score = partial(token_log_probs, peers=peers)

    def sum_gradients(self, module: PackedVLM) -> None:
        """Adds up the gradients of parameters that every rank of tp holds whole."""
        mesh = self.mesh
        sum_gradients(partial_parameters(module), mesh.get_group(), mesh.device_type)


def partial_parameters(module: PackedVLM) -> list[nn.Parameter]:
    """Parameters that every rank of a tp group holds whole, with a part of their gradient: all that are not split over tp, as
    experts are along ep.

    A critic's head is none of them: it reads the states of all tokens.
    """
    return [parameter for parameter in module.model.parameters() if not {"tp", "ep"} & {*_axes(parameter)}]


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of the mesh's dimensions that a parameter is spread over."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def sum_gradients(parameters: Sequence[nn.Parameter], group: distributed.ProcessGroup, device_type: str) -> None:
    """Adds up gradients over ``group``, in place; every rank holds the same shards and has gradients for the same ones."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    sized = ((gradient, gradient.numel()) for gradient in gradients if gradient.numel())
    alike = (split_by_size(group, BUCKET_ELEMENTS) for _, group in groupby(sized, lambda each: each[0].dtype))
    for bucket in chain.from_iterable(alike):
        total = torch.cat([gradient.flatten() for gradient in bucket]).to(device_type)  # offloaded ones lie on the host
        distributed.all_reduce(total, group=group)
        for gradient, summed in zip(bucket, total.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


# Layers


class ColumnLinear(nn.Module):
    """A part of the output features: ``weight (out, in)`` and ``bias (out,)`` split along ``out``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, local_part(self.weight), None if self.bias is None else local_part(self.bias))


class RowLinear(nn.Module):
    """A part of the input features: ``weight (out, in)`` split along ``in``. Outputs are summed, each rank keeps its tokens'
    ``(1, S / tp, out)``, then comes the bias.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, peers: Peers) -> None:
        super().__init__()
        self.weight, self.bias, self.peers = weight, bias, peers

    def forward(self, x: Tensor) -> Tensor:
        out = _sum_tokens(linear(x, local_part(self.weight)), self.peers)
        return out if self.bias is None else out + self.bias


class HeadsLinear(nn.Module):
    """A whole projection of which this rank computes some rows, by heads of ``head_dim``: key-value heads that are fewer than
    ranks, or the rank's part of each of two layers in one weight.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, heads: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.heads, self.head_dim = tuple(heads), head_dim

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._rows(self.weight), None if self.bias is None else self._rows(self.bias))

    def _rows(self, whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(0, head * self.head_dim, self.head_dim) for head in self.heads])


class VocabularyEmbedding(nn.Module):
    """A part of the vocabulary: ``weight (V, H)`` split along ``V``; ranks add zero for tokens of other parts.

    From all ids ``(1, S)`` to the embeddings of this rank's part of them, ``(1, S / tp, H)``, with the scale and the norm that
    Hugging Face's ``layer`` may have. The scale is rounded to the dtype that the model computes in, as there.
    """

    def __init__(self, weight: nn.Parameter, layer: Any, peers: Peers) -> None:
        super().__init__()
        self.weight, self.padding_idx, self.peers = weight, layer.padding_idx, peers
        self.scale, self.norm = getattr(layer, "scalar_embed_scale", 1.0), getattr(layer, "embed_norm", None)

    def forward(self, ids: Tensor) -> Tensor:
        weight = local_part(self.weight)
        first = self.peers.rank * len(weight)
        inside = (ids >= first) & (ids < first + len(weight))
        found = embedding(torch.where(inside, ids - first, 0), weight)
        if self.padding_idx is not None:  # its embedding is not learnt
            frozen = inside & (ids == self.padding_idx)
            found = torch.where(frozen[..., None], found.detach(), found)
        embeddings = _sum_tokens(torch.where(inside[..., None], found, 0.0), self.peers)
        if self.scale == 1.0:
            return embeddings if self.norm is None else cast(Tensor, self.norm(embeddings))
        scale = torch.full((), self.scale, dtype=embeddings.dtype, device=embeddings.device)
        return embeddings * in_autocast_dtype(scale).to(embeddings.dtype)


def _gather_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], peers: Peers
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All tokens' hidden states for a module that hands them to layers split by column: gathered once for all of them."""
    if args:
        return (_gather_tokens(args[0], peers), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise InvalidConfig(
            f"{type(module).__name__} is split over tp, so it takes the tokens' states first or as hidden_states; "
            f"it was called with {sorted(kwargs)}"
        )
    return args, kwargs | {"hidden_states": _gather_tokens(kwargs["hidden_states"], peers)}


def _gather_tokens(x: Tensor, peers: Peers) -> Tensor:
    """``(1, n, H)`` or ``(n, H)`` of every rank joined ``(1, size * n, H)``; gradients are summed, a rank gets its tokens'."""
    x = in_autocast_dtype(x)  # as split layers would cast it, which are all that see it: half the traffic
    return gather_split(x.reshape(-1, x.shape[-1]), peers).unsqueeze(0)


def _sum_tokens(x: Tensor, peers: Peers) -> Tensor:
    """``(1, size * n, H)`` summed over ranks, of which each gets its tokens ``(1, n, H)``."""
    return sum_and_split(x.squeeze(0), peers).unsqueeze(0)


# From whole layers to split ones


class _Split:
    """Splits layers over a mesh; a parameter that two layers share stays shared."""

    def __init__(self, mesh: DeviceMesh, peers: Peers, text: Any) -> None:
        self.mesh, self.peers, self.text = mesh, peers, text
        # The whole one is kept, so that its id stays its own.
        self.done: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def layer(self, name: str, layer: Any, style: str, parent: Any) -> nn.Module:
        """The split layer that replaces ``layer``, a child of ``parent``."""
        if style == "vocabulary":
            return VocabularyEmbedding(self._parameter(name, layer.weight, 0), layer, self.peers)
        if style == "recurrent":
            return self._recurrent(layer)
        if style == "rowwise":
            return RowLinear(self._parameter(name, layer.weight, 1), layer.bias, self.peers)
        if style == "packed_colwise":
            part, rest = divmod(layer.out_features, 2 * self.peers.size)
            if rest:
                raise InvalidConfig(f"layout.tp={self.peers.size} does not divide the two layers fused in {name}")
            return HeadsLinear(layer.weight, layer.bias, (self.peers.rank, self.peers.size + self.peers.rank), part)
        if style != "colwise":
            raise InvalidConfig(f"tensor plan: {name} has the unknown style {style!r}")
        heads = self.text.num_attention_heads
        head_dim = getattr(parent, "head_dim", None)  # of an attention module
        key_value_heads = layer.out_features // head_dim if head_dim else 0
        if head_dim and key_value_heads % self.peers.size:  # those of queries divide
            mine = key_value_share(heads, key_value_heads, self.peers.size, self.peers.rank)
            return HeadsLinear(layer.weight, layer.bias, mine, head_dim)
        bias = None if layer.bias is None else self._parameter(name, layer.bias, 0)
        return ColumnLinear(self._parameter(name, layer.weight, 0), bias)

    def _recurrent(self, mixer: Any) -> nn.Module:
        """A recurrent mixer that computes this rank's part of the heads; the other layers of it are split by the plan."""
        set_on_module(mixer, "head_share", HeadShare(self.peers.rank, self.peers.size))
        block = gcd(mixer.head_k_dim, mixer.head_v_dim)
        places = torch.arange(mixer.in_proj_qkv.out_features // block)[:, None].expand(-1, block).reshape(-1, 1)
        mine = channels(mixer, places, mixer.head_share)[::block, 0].tolist()
        whole = mixer.in_proj_qkv
        replace_submodule(mixer, "in_proj_qkv", HeadsLinear(whole.weight, whole.bias, mine, block))
        return cast(nn.Module, mixer)

    def _parameter(self, name: str, whole: nn.Parameter, dim: int) -> nn.Parameter:
        if whole.shape[dim] % self.peers.size:
            raise InvalidConfig(
                f"layout.tp={self.peers.size} does not divide dimension {dim} of the parameter {tuple(whole.shape)} of {name}"
            )
        if id(whole) not in self.done:
            part = distribute_tensor(whole.detach(), self.mesh, [Shard(dim)], src_data_rank=None)
            self.done[id(whole)] = whole, nn.Parameter(part, requires_grad=whole.requires_grad)
        return self.done[id(whole)][1]
