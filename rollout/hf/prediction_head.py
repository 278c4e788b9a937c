"""A head that predicts the token after the next one (MTP, as DeepSeek-V3 has it, arXiv:2412.19437), for drafts.

Such a head reads the state of a token together with the embedding of the token after it, through one decoder layer, and its
output predicts the token after that. So its own predictions draft one token after another. Its keys and values are one more layer
of the cache: those of the pair (state of a token, next token) lie in the column of the next token, at the position of the former.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from dataproto.vlm.family import cache_argument
from rollout.pretrained import stored_tensors

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class PredictionHead(nn.Module):
    """The head of a model, by names of its checkpoint below ``mtp.``: one decoder layer between norms and a projection."""

    def __init__(self, family: VLMFamily, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """``tensors`` of all weights by name. Raises `InvalidConfig` if some are missing, or do not fit."""
        super().__init__()
        text = copy.deepcopy(model.config.get_text_config())
        self.layer_number = len(text.layer_types)
        text.layer_types = [*text.layer_types, "full_attention"]
        text.num_hidden_layers = self.layer_number + 1
        decoder = model.get_submodule(family.language_model)
        layer, norm = type(decoder.layers[0]), type(decoder.norm)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
            self.pre_fc_norm_hidden = norm(text.hidden_size, eps=text.rms_norm_eps)
            self.pre_fc_norm_embedding = norm(text.hidden_size, eps=text.rms_norm_eps)
            self.layers = nn.ModuleList([layer(text, self.layer_number)])
            self.norm = norm(text.hidden_size, eps=text.rms_norm_eps)
        wanted = {name: weight.shape for name, weight in self.state_dict().items()}
        found = {name: weight.shape for name, weight in tensors.items()}
        if wanted != found:
            wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
            raise InvalidConfig(
                f"the weights mtp.* of the checkpoint are not those of one layer of the model: {wrong[:5]}"
            )
        self.load_state_dict(dict(tensors), assign=True)
        self.to(decoder.norm.weight).eval().requires_grad_(False)

    def forward(
        self,
        rotary: nn.Module,
        embeddings: Tensor,
        states: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        """Outputs ``(W, L, H)`` that predict the token after each of L tokens, and their keys and values in ``cache``.

        Args:
            embeddings: ``(W, L, H)`` of the tokens.
            states: ``(W, L, H)`` of the token before each, after the model's final norm.
            position_ids: ``(4, W, L)`` or ``(W, L)`` of the token before each.
            mask: ``(W, T)`` of all tokens, of which these are the last.
        """
        hidden = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)], dim=-1))
        axes = position_ids[1:] if position_ids.ndim == 3 else position_ids
        seen = (mask & (mask.cumsum(1) > 1)).bool()  # no token comes before the first one
        length, total = embeddings.shape[1], mask.shape[1]
        columns = torch.arange(total, device=mask.device)
        own = columns[-length:, None]
        visible = (seen[:, None] & (columns <= own)) | (columns == own)  # a row that sees nothing would be NaN
        (layer,) = self.layers
        output = layer(
            hidden,
            position_embeddings=rotary(hidden, axes),
            attention_mask=visible[:, None],
            **{cache_argument(type(layer).forward): cache},
        )
        return self.norm(output)


def load_head(family: VLMFamily, model: Any, model_path: str) -> PredictionHead | None:
    """The head of a checkpoint, or ``None`` if its family or its files have none."""
    if family.prediction_head is None:
        return None
    tensors = stored_tensors(model_path, family.prediction_head)
    return PredictionHead(family, model, joined_experts(tensors)) if tensors else None


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


def add_layer(cache: DynamicCache) -> DynamicCache:
    """Adds to a new cache the layer of a head."""
    cache.layers.append(DynamicLayer())
    return cache


def states_before(first: Tensor | None, states: Tensor) -> Tensor:
    """The states of the tokens before those of ``states (W, L, H)``: ``first (W, H)``, or zero, then all but the last."""
    if first is None:
        return pad(states[:, :-1], (0, 0, 1, 0))
    return torch.cat([first[:, None], states[:, :-1]], dim=1)
