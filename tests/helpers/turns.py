"""Requests of later turns: what was sampled, then an observation of text and images."""

from dataclasses import replace

import torch

from dataproto.vlm import family_of, media_grids
from helpers.tiny_models import expand, image_inputs, placeholder
from rollout.hf.kept_prefixes import media_parts
from rollout.sampling import turn_seed


def next_turn(config, request, completion, words, *grids, turn=1):
    """The request after ``completion`` of ``request``, with ``words`` and one image for each grid as observation."""
    seen = [*words[:1], *placeholder(config.model_type) * len(grids), *words[1:]]
    ids, types = expand(config, seen, *grids)
    sampled = torch.tensor(completion.token_ids)
    media = (*media_parts(request.multi_modal_inputs), *([image_inputs(config, *grids, seed=turn)] if grids else []))
    input_ids = torch.cat([request.input_ids, sampled, torch.from_numpy(ids)])
    old = request.token_types
    token_types = torch.cat([old, old.new_zeros(len(sampled)), torch.from_numpy(types).to(old.dtype)])
    positions = family_of(config).position_ids(
        token_types[None], torch.ones_like(input_ids)[None], **media_grids(media), config=config
    )[0]
    return replace(
        request,
        prompt_ids=(),
        input_ids=input_ids,
        token_types=token_types,
        position_ids=positions,
        multi_modal_inputs=tuple(part for part in media if part),
        seed=turn_seed(request.seed, turn),
    )
