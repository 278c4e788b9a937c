"""Requests that continue a finished one: their prompts begin with its prompt and response, and their experts with its experts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_parts
from dataproto.errors import InvalidPrompt
from rollout.engine import Request

Media = Mapping[str, Tensor]
"""``multi_modal_inputs`` of a part of a prompt."""


def shown_media(inputs: RowMedia) -> tuple[Media, ...]:
    """The mappings of `Request.multi_modal_inputs` that are not empty."""
    return tuple(part for part in media_parts(inputs) if part)


def check_continues(request: Request, input_ids: Tensor, media: Sequence[Media]) -> None:
    """Raises `InvalidPrompt` unless the request's prompt begins with these tokens and media of a finished request."""
    length = len(input_ids)
    if len(request.input_ids) < length or not torch.equal(request.input_ids[:length], input_ids):
        pairs = zip(request.input_ids.tolist(), input_ids.tolist(), strict=False)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), len(request.input_ids))
        raise InvalidPrompt(
            f"its prompt differs from token {first} on from the {length} tokens of the request that it continues"
        )
    parts = shown_media(request.multi_modal_inputs)
    if len(parts) < len(media) or not all(map(_equal, parts, media)):
        raise InvalidPrompt(
            "its media do not begin with those of the request that it continues; multi_modal_inputs of several turns are a "
            "sequence with one mapping for each turn that shows media"
        )


def continued_experts(known: Tensor | None, found: Tensor | None) -> Tensor | None:
    """The experts ``(n, M, k)`` of a row's first tokens, from those ``known`` and those ``found`` when the row was read again.

    Both begin with the first token. What is known stays: the tokens that follow were sampled behind it.

    >>> continued_experts(torch.tensor([[[3]], [[1]]]), torch.tensor([[[3]], [[0]], [[2]]])).flatten().tolist()
    [3, 1, 2]
    """
    if known is None or found is None:
        return found if known is None else known
    return torch.cat([known, found[len(known) :]])


def _equal(one: Media, other: Media) -> bool:
    return one.keys() == other.keys() and all(
        one[name] is other[name] or torch.equal(one[name], other[name]) for name in one
    )
