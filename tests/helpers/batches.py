"""Rollout batches for tests: rows with several images, one image or none."""

from typing import Any

import numpy as np
import torch

from dataproto import DataProto, object_array
from dataproto.columns import media_parts
from dataproto.vlm import family_of, media_grids
from helpers.tiny_models import END, START, VIDEO, expand, forward_inputs, image_inputs, placeholder, token_by_token


def prompt_batch(config: Any, grids_of_rows: list[list[tuple[int, int]]], texts: list[int], seed: int = 0) -> DataProto:
    """Left-padded prompt rows: row ``i`` has ``texts[i]`` random text tokens with the images of ``grids_of_rows[i]`` among them.

    Rows with equal grids share one media object, as the samples of a prompt do.
    """
    family, rng = family_of(config), np.random.default_rng(seed)
    media: dict[tuple[tuple[int, int], ...], dict[str, torch.Tensor]] = {(): {}}
    rows, ids_of_rows, types_of_rows = [], [], []
    for number, (grids, text) in enumerate(zip(grids_of_rows, texts, strict=True)):
        key = tuple(grids)
        if key not in media:
            media[key] = image_inputs(config, *grids, seed=seed + number)
        words = rng.integers(1, 240, text)
        pictures = placeholder(config.model_type) * len(grids)
        ids, types = expand(config, [*words[: text // 2], *pictures, *words[text // 2 :]], *grids)
        rows.append(media[key])
        ids_of_rows.append(ids)
        types_of_rows.append(types)
    width = max(len(ids) for ids in ids_of_rows)
    ids, types, mask = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(3))
    for row, (row_ids, row_types) in enumerate(zip(ids_of_rows, types_of_rows, strict=True)):
        ids[row, width - len(row_ids) :] = row_ids
        types[row, width - len(row_ids) :] = row_types
        mask[row, width - len(row_ids) :] = 1
    token_types, attention_mask = torch.from_numpy(types).to(torch.int8), torch.from_numpy(mask)
    inputs = np.empty(len(rows), dtype=object)
    inputs[:] = rows
    return DataProto.from_dict(
        {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": attention_mask,
            "mm_token_type_ids": token_types,
            "position_ids": family.position_ids(token_types, attention_mask, **media_grids(rows), config=config),
        },
        non_tensors={
            "multi_modal_inputs": inputs,
            "uid": np.array([f"prompt-{row}" for row in range(len(rows))], dtype=object),
        },
    )


def film_prompt(config: Any, width: int) -> DataProto:
    """A prompt with a video of three time steps, left-padded to ``width``."""
    clip = image_inputs(config, (3, 4, 4), kind="video", seed=4)
    if config.model_type == "qwen2_5_vl":
        clip["second_per_grid_ts"] = torch.tensor([1.5])
    ids, types = expand(config, [10, 20, START, VIDEO, END, 21], clip=clip, seconds=[[0.5, 2.0, 3.5]])
    padded, kinds, mask = torch.zeros(3, 1, width, dtype=torch.int64)
    for row, values in ((padded, ids), (kinds, types), (mask, np.ones_like(ids))):
        row[0, width - len(ids) :] = torch.as_tensor(np.asarray(values).astype(np.int64))
    kinds = kinds.to(torch.int8)
    positions = family_of(config).position_ids(kinds, mask, **media_grids([clip]), config=config)
    inputs = np.empty(1, dtype=object)
    inputs[0] = clip
    return DataProto.from_dict(
        {"input_ids": padded, "attention_mask": mask, "mm_token_type_ids": kinds, "position_ids": positions},
        non_tensors={"multi_modal_inputs": inputs, "uid": np.array(["clip"], dtype=object)},
    )


def with_responses(config: Any, prompts: DataProto, lengths: list[int], width: int, seed: int = 0) -> DataProto:
    """Adds random responses of the given lengths, right-padded to ``width``."""
    family, rng = family_of(config), np.random.default_rng(seed + 1)
    mask = torch.from_numpy((np.arange(width) < np.array(lengths)[:, None]).astype(np.int64))
    responses = torch.from_numpy(rng.integers(1, 240, mask.shape)) * mask
    data = prompts[:]
    positions = family.extend_positions(prompts["position_ids"], prompts["attention_mask"], width)
    types = prompts["mm_token_type_ids"]
    data["prompts"] = prompts["input_ids"]
    data["responses"] = responses
    data["input_ids"] = torch.cat([prompts["input_ids"], responses], dim=1)
    data["attention_mask"] = torch.cat([prompts["attention_mask"], mask], dim=1)
    data["position_ids"] = torch.cat([prompts["position_ids"], positions], dim=-1)
    data["mm_token_type_ids"] = torch.cat([types, types.new_zeros(mask.shape)], dim=1)
    data["response_mask"] = mask
    return data


def with_turns(config: Any, prompts: DataProto, grids: list[list[tuple[int, int]]], seed: int = 0) -> DataProto:
    """Adds responses of several turns: words, and an image of each of the row's grids with words after it."""
    family, rng = family_of(config), np.random.default_rng(seed + 1)
    ids, types, mask, media = [], [], [], []
    for row, own in enumerate(grids):
        words = [rng.integers(1, 240, 3) for _ in range(len(own) + 1)]
        turns = [expand(config, placeholder(config.model_type), grid) for grid in own]
        ids.append(np.concatenate([words[0], *(x for (a, _), b in zip(turns, words[1:], strict=True) for x in (a, b))]))
        shown = [np.concatenate([kinds, np.zeros(3, np.int8)]) for _, kinds in turns]
        types.append(np.concatenate([np.zeros(3, np.int8), *shown]))
        sampled = [np.concatenate([np.zeros(len(a), int), np.ones(3, int)]) for a, _ in turns]
        mask.append(np.concatenate([np.ones(3, int), *sampled]))
        images = [image_inputs(config, grid, seed=seed + 10 * row + place) for place, grid in enumerate(own)]
        media.append(tuple(part for part in (prompts["multi_modal_inputs"][row], *images) if part))
    width = max(map(len, ids))
    right = [
        torch.tensor(np.array([np.pad(row, (0, width - len(row))) for row in rows])) for rows in (ids, types, mask)
    ]
    filled = (torch.arange(width) < torch.tensor([len(row) for row in ids])[:, None]).long()
    data = prompts[:]
    data["prompts"], data["responses"], data["response_mask"] = prompts["input_ids"], right[0], right[2].long()
    data["input_ids"] = torch.cat([prompts["input_ids"], right[0]], dim=1)
    data["attention_mask"] = torch.cat([prompts["attention_mask"], filled], dim=1)
    data["mm_token_type_ids"] = torch.cat([prompts["mm_token_type_ids"], right[1].to(torch.int8)], dim=1)
    data["position_ids"] = family.position_ids(
        data["mm_token_type_ids"], data["attention_mask"], **media_grids(media), config=config
    )
    data["multi_modal_inputs"] = object_array(media)
    return data


def padded_log_probs(
    model: Any, data: DataProto, temperature: float = 1.0, banned: tuple[int, ...] = ()
) -> torch.Tensor:
    """Log-probs ``(B, R)`` from the forward pass of Hugging Face, one row at a time, with its own position ids.

    They are 0 where ``response_mask`` is. Media may lie in the prompt and after it.
    """
    forbidden = torch.tensor(banned or family_of(model.config).banned_ids(model.config), dtype=torch.int64)
    width = data["response_mask"].shape[1]
    rows = []
    for row in range(len(data)):
        kept = data["attention_mask"][row].bool()
        ids = data["input_ids"][row, kept][None]
        with token_by_token():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                **forward_inputs(
                    model, data["mm_token_type_ids"][row, kept][None], _joined(data["multi_modal_inputs"][row])
                ),
            ).logits[0]
        logits = (logits.float() / temperature).index_fill(-1, forbidden, -1e30)
        chosen = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        length = int(kept[-width:].sum())
        rows.append(torch.cat([chosen[len(chosen) - length :], torch.zeros(width - length)]))
    return torch.stack(rows) * data["response_mask"]


def _joined(media: Any) -> dict[str, torch.Tensor]:
    """The inputs of a row as one mapping."""
    parts = [part for part in media_parts(media) if part]
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
