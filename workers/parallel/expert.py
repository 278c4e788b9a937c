"""Expert parallelism: the experts of each sparse layer are split over ep ranks, and tokens are sent to their experts.

ep divides dp x sp, whose ranks hold different tokens. A rank holds ``experts / ep`` whole experts of each layer, as DTensors, so
that FSDP2, the norm of gradients, checkpoints and weight export treat them as any other weights. Every rank has the whole
router. It sends each of its tokens to the ranks of the experts that the router has chosen, computes the tokens that it receives,
and sends the results back (all-to-all, as in arXiv:2006.16668). So the gradient of an expert is complete within an ep group; FSDP
shards the experts over the dp x sp / ep ranks that hold the same ones, and sums over those alone. Ranks of tp hold the same
experts, and send them different tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from dataproto.errors import InvalidConfig
from workers.model.lora import expert_layers
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import hollow_parameter, replace_submodule, set_expert_count
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, all_to_all, exchange_tokens, local_part
from workers.ranks.mesh import Ranks


class ExpertParallel(Transform):
    """The experts of every sparse layer, split over ep."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return ranks.expert_mesh is not None

    def apply(self, module: PackedVLM) -> None:
        """Puts this rank's experts in the place of all.

        Raises:
            InvalidConfig: the model has no experts, or ep does not divide their number.
        """
        model, degree = module.model, self.ranks.size("ep")
        mesh: DeviceMesh = self.ranks.expert_mesh["ep"]  # type: ignore[index]
        names = expert_layers(model, module.family)
        if not names:
            raise InvalidConfig(f"layout.ep={degree}: {model.config.model_type} has no experts to split; use ep=1")
        experts = int(model.get_submodule(names[0]).num_experts)  # type: ignore[arg-type]
        if experts % degree:
            raise InvalidConfig(f"layout.ep={degree} must divide the {experts} experts of this model")
        for name in names:
            replace_submodule(model, name, SplitExperts(model.get_submodule(name), mesh))


def split_experts(module: nn.Module) -> Iterator["SplitExperts"]:
    """The modules of split experts."""
    return (part for part in module.modules() if isinstance(part, SplitExperts))


class SplitExperts(nn.Module):
    """This rank's experts in the place of all: parameters of the same names, split along the first dimension over ``mesh``."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh) -> None:
        """``experts`` has no parameters but weights ``(experts, ...)``, of adapters too; it now computes with parts of them."""
        super().__init__()
        self.scaling = getattr(experts, "scaling", None)  # of adapters
        self.peers = Peers.of(mesh.get_group())
        self.experts = int(experts.num_experts)  # type: ignore[arg-type]
        for name, weight in list(experts.named_parameters()):
            part = weight.detach().chunk(self.peers.size)[self.peers.rank].clone()
            if part.device.type != "meta":
                part = part.to(mesh.device_type)
            split = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            self.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))
            hollow_parameter(experts, name)
        self.here = self.experts // self.peers.size
        set_expert_count(experts, self.here)
        self.compute = (experts,)  # in a tuple, so that its empty parameters are not this module's

    @torch.compiler.disable  # sizes of what is exchanged are known on the host alone
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs of the chosen experts for this rank's tokens, weighted and summed.

        Args:
            hidden_states: ``(N, H)``.
            top_k_index: ``(N, k)`` of all experts; top_k_weights ``(N, k)``.

        Returns:
            ``(N, H)``.
        """
        count, choices = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)  # by expert, so by rank
        counts = torch.bincount(top_k_index.flatten(), minlength=self.experts).view(self.peers.size, -1)
        asked = all_to_all(counts, self.peers)  # (size, experts here): how many tokens each rank sends to each
        sent, received = torch.stack([counts.sum(1), asked.sum(1)]).tolist()
        tokens = exchange_tokens(hidden_states.index_select(0, order // choices), sent, received, self.peers)
        here = torch.arange(asked.shape[1], device=asked.device).repeat(self.peers.size)
        made = self._compute(tokens, here.repeat_interleave(asked.flatten(), output_size=len(tokens)))
        returned = exchange_tokens(made, received, sent, self.peers).index_select(0, order.argsort())
        weighted = returned.view(count, choices, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)

    def _compute(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """``(n, H)`` through the expert of each ``(n,)``, counted from this rank's first one."""
        weights = {name: local_part(weight) for name, weight in self.named_parameters()}
        if not len(tokens):  # others have some: a gradient of zero, and the way back for the exchange of gradients
            return tokens + 0.0 * sum(weight.sum() for weight in weights.values()).to(tokens.dtype)  # type: ignore[union-attr]
        ones = tokens.new_ones(len(tokens), 1)
        made: Tensor = functional_call(self.compute[0], weights, (tokens, experts[:, None], ones))
        return made
