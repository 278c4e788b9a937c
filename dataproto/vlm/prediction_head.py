"""A head that predicts the token after the next one (MTP, as DeepSeek-V3 has it, arXiv:2412.19437).

It reads the state of a token together with the embedding of the token after it, through one decoder layer with attention, and its
output predicts the token after that.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dataproto.vlm.family import VLMFamily


class PredictionHead(nn.Module):
    """The head of a model, by the names of its weights in a checkpoint below `VLMFamily.prediction_head`."""

    def __init__(self, family: VLMFamily, model: Any) -> None:
        """A new head for a Hugging Face ``model``, of the classes of its layers."""
        super().__init__()
        text = copy.deepcopy(model.config.get_text_config())
        self.layer_number = len(text.layer_types)
        """That of its layer in a cache: the layers of the decoder come before."""
        text.layer_types = [*text.layer_types, "full_attention"]
        text.num_hidden_layers = self.layer_number + 1
        decoder = model.get_submodule(family.language_model)
        layer, norm = type(decoder.layers[0]), type(decoder.norm)
        self.fc = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
        self.pre_fc_norm_hidden = norm(text.hidden_size, eps=text.rms_norm_eps)
        self.pre_fc_norm_embedding = norm(text.hidden_size, eps=text.rms_norm_eps)
        self.layers = nn.ModuleList([layer(text, self.layer_number)])
        self.norm = norm(text.hidden_size, eps=text.rms_norm_eps)

    def forward(
        self, rotary: nn.Module, embeddings: Tensor, states: Tensor, position_ids: Tensor, **attention: Any
    ) -> Tensor:
        """Outputs ``(B, L, H)`` that predict the token after each of L tokens.

        Args:
            rotary: the decoder's module that makes angles of positions.
            embeddings: ``(B, L, H)`` of the tokens.
            states: ``(B, L, H)`` of the token before each, after the model's final norm.
            position_ids: ``(4, B, L)`` or ``(B, L)`` of the token before each.
            attention: keywords of the decoder layer, such as a mask, a cache or boundaries of packed rows.
        """
        pairs = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)], dim=-1)
        hidden = self.fc(pairs)
        angles = rotary(hidden, position_ids[1:] if position_ids.ndim == 3 else position_ids)
        output: Tensor = self.norm(self.layers[0](hidden, position_embeddings=angles, **attention))
        return output


def holds_head(model: Any, family: VLMFamily) -> bool:
    """Whether a model has its family's head, under the name of its weights."""
    return family.prediction_head is not None and hasattr(model, family.prediction_head.rstrip("."))
