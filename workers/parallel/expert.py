"""Expert parallelism: the experts of each sparse layer are split over ep x tp ranks, and tokens go to all of these ranks.

ep divides dp x sp; its ranks, and those of tp, hold different tokens of one layer. A rank holds ``experts / (ep x tp)`` whole
experts of each layer, as DTensors, so that FSDP2, the norm of gradients, checkpoints and weight export treat them as any other
weights. Every rank has the whole router. Ranks gather each other's tokens with their choices, compute the choices that are for
their own experts, and sum the results, of which each rank keeps its own tokens' (the all-gather dispatcher of Megatron-Core). So
the gradient of an expert is complete within such a group; FSDP shards the experts over the dp x sp / ep ranks that hold the same
ones, and sums only over those.

All sizes are known on the host: no rank waits for its device to learn how many tokens come. What that costs: a rank receives
``ep x tp - 1`` times its N tokens, where an all-to-all would receive about k times for k choices, so it is cheaper up to groups
of about k ranks; and a layer allocates rows for ``ep x tp x N x k`` pairs, as many as could be for one rank's experts, although
it computes only those that are. Full activation checkpointing keeps none of them. All ranks have the same N: micro-batches are
filled up to the longest one, with tokens that are sent to no expert.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from dataproto.errors import InvalidConfig
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import hollow_parameter, replace_submodule, set_on_module
from workers.parallel.transform import Transform
from workers.ranks.autograd_collectives import Peers, all_gather_tensor, gather_split, local_part, sum_and_split
from workers.ranks.mesh import Ranks


class ExpertParallel(Transform):
    """The experts of every sparse layer, split over ep x tp."""

    @classmethod
    def is_due(cls, ranks: Ranks, options: ModelConfig) -> bool:
        return ranks.expert_mesh is not None

    def apply(self, module: PackedVLM) -> None:
        """Puts this rank's experts in the place of all; a model without experts stays as it is unless ep is above 1.

        Raises:
            InvalidConfig: the model has no experts, or ep x tp does not divide their number.
        """
        model, degree, tp = module.model, self.ranks.size("ep"), self.ranks.size("tp")
        mesh: DeviceMesh = self.ranks.expert_mesh["ep"]  # type: ignore[index]
        names = module.family.expert_layers(model)
        if module.family.experts is None and degree > 1:  # a pipeline stage may have only dense layers
            raise InvalidConfig(f"layout.ep={degree}: {model.config.model_type} has no experts to split; use ep=1")
        experts = int(model.get_submodule(names[0]).num_experts) if names else 0  # type: ignore[arg-type]
        if names and experts % (degree * tp):
            degrees = f"layout.ep={degree}" + (f" x layout.tp={tp}" if tp > 1 else "")
            raise InvalidConfig(f"{degrees} must divide the {experts} experts of this model")
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
        whole = int(experts.num_experts)  # type: ignore[arg-type]
        for name, weight in list(experts.named_parameters()):
            part = weight.detach().chunk(self.peers.size)[self.peers.rank].clone()
            if part.device.type != "meta":
                part = part.to(mesh.device_type)
            split = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            self.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))
            hollow_parameter(experts, name)
        self.here = whole // self.peers.size
        set_on_module(experts, "num_experts", self.here)
        self.compute = (experts,)  # in a tuple, so that its empty parameters are not this module's

    @torch.compiler.disable  # FSDP gathers the weights in hooks; what computes is compiled by itself
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs of the chosen experts for this rank's tokens, weighted and summed.

        Args:
            hidden_states: ``(N, H)``, with the same N on all ranks of the group.
            top_k_index: ``(N, k)`` of all experts, or their number for none; top_k_weights ``(N, k)``.

        Returns:
            ``(N, H)``.
        """
        peers = self.peers
        tokens, gates = gather_split(hidden_states, peers), gather_split(top_k_weights, peers)
        chosen = all_gather_tensor(top_k_index.int(), peers) - peers.rank * self.here
        mine = torch.where((chosen >= 0) & (chosen < self.here), chosen, self.here)
        weights = {name: local_part(weight) for name, weight in self.named_parameters()}
        made: Tensor = functional_call(self.compute[0], weights, (tokens, mine, gates))
        return sum_and_split(made, peers)
