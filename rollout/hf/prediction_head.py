"""Drafts by the head of a model that predicts the token after the next one; see `dataproto.vlm.prediction_head`.

Its own predictions draft one token after another. Its keys and values are one more layer of the cache: those of a token and the
state before it lie in the column of the token.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from dataproto.vlm.prediction_head import PredictionHead
from rollout.pretrained import stored_tensors

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_head(family: VLMFamily, model: Any, model_path: str) -> PredictionHead | None:
    """The head of a checkpoint, or ``None`` if its family or its files have none.

    Raises:
        InvalidConfig: some of its weights are missing, or do not fit the model.
    """
    if family.prediction_head is None:
        return None
    tensors = joined_experts(stored_tensors(model_path, family.prediction_head))
    if not tensors:
        return None
    with torch.device("meta"):
        head = PredictionHead(family, model)
    wanted = {name: weight.shape for name, weight in head.state_dict().items()}
    found = {name: weight.shape for name, weight in tensors.items()}
    if wrong := sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)):
        raise InvalidConfig(f"the weights mtp.* of {model_path} are not those of one layer of its model: {wrong[:5]}")
    head.load_state_dict(dict(tensors), assign=True)
    return head.to(model.get_submodule(family.embedding).weight).eval().requires_grad_(False)


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of experts in one tensor each, ``gate_up_proj (E, 2 I, H)`` and ``down_proj (E, H, I)``, as the model has them.

    >>> list(joined_experts({"a.mlp.experts.0.down_proj.weight": torch.zeros(2, 3), "b": torch.zeros(1)}))
    ['b', 'a.mlp.experts.down_proj']
    """
    parts = {match[0]: match for match in map(EXPERT.fullmatch, tensors) if match is not None}
    joined = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for place in {match[1] for match in parts.values()}:
        count = 1 + max(int(match[2]) for match in parts.values() if match[1] == place)
        for name, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            each = [[tensors.get(f"{place}.{number}.{kind}_proj.weight") for kind in kinds] for number in range(count)]
            if all(tensor is not None for expert in each for tensor in expert):
                joined[f"{place}.{name}"] = torch.stack([torch.cat(expert) for expert in each])  # type: ignore[arg-type]
    return joined


def states_before(first: Tensor | None, states: Tensor) -> Tensor:
    """The states of the tokens before those of ``states (W, L, H)``: ``first (W, H)``, or zero, then all but the last."""
    if first is None:
        return pad(states[:, :-1], (0, 0, 1, 0))
    return torch.cat([first[:, None], states[:, :-1]], dim=1)
