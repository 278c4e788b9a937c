"""Requests of later turns: what was sampled, then an observation of text and images; and their completions."""

from dataclasses import replace

import torch

from dataproto.vlm import family_of, media_grids
from helpers.tiny_models import expand, image_inputs, placeholder
from rollout.continuation import shown_media
from rollout.prompts.prepared_rows import share_media
from rollout.sampling import turn_seed


def finish(engine, *numbers):
    """The completions of these requests, in this order."""
    done = {}
    while not done.keys() >= set(numbers):
        assert engine.unfinished
        done |= {each.request: each for each in engine.poll()}
    return [done[number] for number in numbers]


def next_turn(config, request, completion, words, *grids, turn=1):
    """The request after ``completion`` of ``request``, with ``words`` and one image for each grid as observation."""
    ids, types = expand(config, [*words[:1], *placeholder(config.model_type) * len(grids), *words[1:]], *grids)
    media = image_inputs(config, *grids, seed=turn) if grids else {}
    return _continued(config, request, completion, ids, types, media, turn)


def observed_turn(builder, request, completion, row, turn=1):
    """The same with the prompt of a row as observation."""
    seen = builder.prepare(row)
    ((data,), (media,)) = share_media([seen])
    raw_ids = [*request.prompt_ids, *completion.token_ids, *seen.raw_ids]
    images = [*request.multi_modal_data.get("image", ()), *data.get("image", ())]
    later = _continued(builder.config, request, completion, seen.input_ids, seen.token_types, media, turn)
    return replace(later, prompt_ids=raw_ids, multi_modal_data={"image": images} if images else {})


def _continued(config, request, completion, ids, types, media, turn):
    sampled, old = torch.tensor(completion.token_ids, dtype=torch.int64), request.token_types
    input_ids = torch.cat([request.input_ids, sampled, torch.from_numpy(ids)])
    token_types = torch.cat([old, old.new_zeros(len(sampled)), torch.from_numpy(types).to(old.dtype)])
    parts = tuple(part for part in (*shown_media(request.multi_modal_inputs), media) if part)
    positions = family_of(config).position_ids(
        token_types[None], torch.ones_like(input_ids)[None], **media_grids(parts), config=config
    )
    return replace(
        request,
        prompt_ids=(),
        input_ids=input_ids,
        token_types=token_types,
        position_ids=positions[0],
        multi_modal_inputs=parts,
        seed=turn_seed(request.seed, turn),
    )
