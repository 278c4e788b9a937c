"""Rows of prompts to episodes, and episodes to rows of a rollout batch: prompt | sampled | observation | sampled | ...

A row that continues with an episode has its history between the prompt and the first sampled token.

Letters: B rows, P prompt tokens, R response tokens, L = P + R.
"""

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto, RaggedTensor, object_array
from dataproto.collation import pad_rows, ragged_rows
from dataproto.columns import (
    IMAGE_KEYS,
    MEDIA_INPUTS,
    PROMPT_ROUTED_EXPERTS,
    ROUTED_EXPERTS,
    RowMedia,
    media_identity,
    media_parts,
    require,
)
from dataproto.packing import MAX_TOKENS, PAD_TOKEN
from dataproto.vlm import media_grids
from rollout.continuation import common_length
from rollout.engine import SamplingParams
from rollout.environments.episode import Episode, EpisodeRow, EpisodeStart
from rollout.environments.turn_renderer import TurnRenderer
from rollout.prompts import PromptBuilder
from rollout.prompts.image_processing import made_images
from rollout.prompts.prepared_rows import media_objects, pad_left
from rollout.responses import OCCURRENCE, expert_columns, number_occurrences, prompt_names
from rollout.sampling import derive_seed

NOT_SHOWN = ("raw_prompt_ids", MEDIA_INPUTS, "multi_modal_data", IMAGE_KEYS)
"""Object columns of prompts that environments do not get."""


def episode_starts(prompts: DataProto, sampling: SamplingParams, call: int = 0) -> list[EpisodeStart]:
    """``n`` consecutive starts for each row of prompts.

    A sample has the random stream that it has in `rollout.responses.build_requests`; its environment's seed derives from
    (sampling.seed, uid), so that all samples of a prompt begin alike.
    """
    require(prompts, "raw_prompt")
    occurrences = (prompts if OCCURRENCE in prompts else number_occurrences(prompts))[OCCURRENCE]
    source: tuple[int | str, ...] = (sampling.seed,) if "uid" in prompts else (sampling.seed, "call", call)
    names = [name for name in prompts.non_tensor_batch if name not in NOT_SHOWN and not name.startswith("_")]
    starts = []
    for place, uid in enumerate(prompt_names(prompts)):
        row = {name: prompts[name][place] for name in names}
        images = made_images({name: prompts[name][place] for name in (IMAGE_KEYS, MEDIA_INPUTS) if name in prompts})
        first = int(occurrences[place]) * sampling.n
        same = (*source, "environment", uid) if uid else (*source, "environment", int(occurrences[place]))
        starts += [
            EpisodeStart(row, derive_seed(*source, uid, sample), derive_seed(*same), uid, f"{uid}/{sample}", images)
            for sample in range(first, first + sampling.n)
        ]
    return starts


def episode_columns(
    prompts: DataProto,
    episodes: Sequence[Episode],
    renderer: TurnRenderer,
    max_tokens: int,
    no_experts: Tensor | None = None,
) -> DataProto:
    """The rollout batch of episodes, each from the row of ``prompts`` at its place: a row each, or several.

    An episode has several rows if it left out pictures: each row has a ``response_mask`` of 1 on the turns that were sampled in
    it, and begins with what the policy saw of the turns before. Rows of one ``uid`` then have the same prompt: what they all
    begin with. ``actions`` are those of the row, the other columns of objects are of the episode.

    The columns are those of `rollout.responses.attach_responses`, with observations and their images among the responses
    (``response_mask`` 0), and ``turn``, ``weight_version``, ``token_level_rewards`` ``(B, R)``, ``turns``, ``actions``,
    ``states``, ``score``, ``trajectory``, ``end_reason``, ``end_message``, ``response_text`` and ``info`` ``(B,)``, the numbers
    and texts of the last one. A row whose environment failed has a ``response_mask`` of 0: nothing is learned from it, and it
    does not enter the baseline of its group.

    Args:
        max_tokens: the largest number of response tokens that was allowed.
        no_experts: ``(0, M, k)``, of an engine that records experts; the rows then have the columns of those, too.

    Raises:
        InvalidRow: experts of an episode's tokens are not known.
    """
    records = _records(episodes, renderer)
    names, places = list(prompts.non_tensor_batch), np.array([record.place for record in records], dtype=np.int64)
    data = prompts.select(non_tensor_batch_keys=names, batch_keys=[])[places]
    for name, values in _objects(records).items():
        data[name] = object_array(values)
    for name, tensor in _tensors(records, renderer.builder).items():
        data[name] = tensor
    if no_experts is not None:
        data[PROMPT_ROUTED_EXPERTS], data[ROUTED_EXPERTS] = _experts(records, no_experts)
    data.meta_info |= {MAX_TOKENS: max_tokens, PAD_TOKEN: renderer.builder.pad_token_id}
    return data


def _tensors(records: Sequence["_Record"], builder: Any) -> dict[str, Tensor]:
    """The columns of tensors, padded to the longest prompt and the longest response."""
    width = max((len(record.ids) for record in records), default=0) or 1

    def padded(name: str, code: Literal["q", "f"] = "q", fill: int = 0) -> tuple[Tensor, Tensor]:
        return pad_rows(ragged_rows([getattr(record, name) for record in records], code), width, fill)

    prompt_ids = pad_left([record.prompt_ids for record in records], builder.pad_token_id)
    prompt_mask = pad_left([np.ones_like(record.prompt_ids) for record in records])
    responses, filled = padded("ids", fill=builder.pad_token_id)
    mask = torch.cat([prompt_mask, filled.to(torch.int64)], dim=1)
    prompt_types = pad_left([record.prompt_types for record in records])
    types = torch.cat([prompt_types, padded("types")[0]], dim=1).to(torch.int8)
    grids = media_grids([record.media for record in records])
    # Positions of the padding on the right continue, as in other rollouts.
    positions = builder.family.position_ids(types, mask.cummax(1).values, **grids, config=builder.config)
    cut = [record.is_last and record.episode.ended in ("length", "tokens", "clock") for record in records]
    return {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": mask,
        "position_ids": positions,
        "mm_token_type_ids": types,
        "response_mask": padded("mask")[0],
        "rollout_log_probs": padded("log_probs", "f")[0],
        "token_level_rewards": padded("rewards", "f")[0],
        "turn": padded("turn")[0],
        "weight_version": padded("weight_versions")[0],
        "turns": torch.tensor([len(record.episode.turns) for record in records]),
        "truncated": torch.tensor(cut),
    }


def _records(episodes: Sequence[Episode], renderer: TurnRenderer) -> list["_Record"]:
    """The rows of all episodes, those of an episode one after another."""
    shared = _shared_prompts(episodes)
    records = []
    for place, episode in enumerate(episodes):
        begun = [row for row in episode.rows if row.first in (0, *range(len(episode.turns)))]
        rows: Sequence[EpisodeRow | None] = begun or [None]
        bounds = [*(row.first for row in begun[1:]), len(episode.turns)]
        for number, (row, stop) in enumerate(zip(rows, bounds, strict=True)):
            is_last = number == len(rows) - 1
            records.append(_Record(place, episode, row, stop, is_last, shared.get(episode.start.uid), renderer))
    return records


def _shared_prompts(episodes: Sequence[Episode]) -> dict[str, int]:
    """For each uid with an episode in several rows the number of tokens with which all its rows begin, at least 1.

    These are the prompt of the rows, so that training computes them once.
    """
    divided = {episode.start.uid for episode in episodes if len(episode.rows) > 1}
    rows: dict[str, list[Tensor]] = {uid: [] for uid in divided}
    for episode in episodes:
        if episode.start.uid in divided:
            rows[episode.start.uid] += [row.begins.input_ids for row in episode.rows]
    return {uid: max(_common_length(ids), 1) for uid, ids in rows.items()}


def _common_length(rows: Sequence[Tensor]) -> int:
    """The number of tokens with which all rows begin.

    >>> _common_length([torch.tensor([1, 2, 3]), torch.tensor([1, 2]), torch.tensor([1, 2, 4])])
    2
    """
    common = rows[0]
    for row in rows[1:]:
        common = common[: common_length(common.tolist(), row.tolist())]
    return len(common)


class _Record:
    """A row of an episode: the tokens after its prompt, and a value of each; empty for an episode that did not begin."""

    def __init__(
        self,
        place: int,
        episode: Episode,
        row: EpisodeRow | None,
        stop: int,
        is_last: bool,
        prompt: int | None,
        renderer: TurnRenderer,
    ) -> None:
        """``stop``: index of the turn after the row's last one. ``prompt``: length of its prompt, if not what came before its
        first turn.
        """
        self.place, self.episode, self.row, self.is_last = place, episode, row, is_last
        first = 0 if row is None else row.first
        turns = episode.turns[first:stop]
        context = np.array([renderer.builder.pad_token_id]) if row is None else row.begins.input_ids.numpy()
        kinds = 0 * context if row is None else row.begins.token_types.numpy().astype(np.int64)
        self.prompt_ids, history = context[:prompt], context[len(context) if prompt is None else prompt :]
        self.prompt_types, history_types = kinds[:prompt], kinds[len(self.prompt_ids) :]
        parts = () if row is None else media_parts(row.ends.multi_modal_inputs)
        self.media: RowMedia = parts if len(parts) > 1 else dict(parts[0]) if parts else {}
        self.objects = {} if row is None else dict(row.ends.multi_modal_data)
        own = np.array([len(turn.token_ids) for turn in turns], dtype=np.int64)
        shown = np.array([0 if turn.shown is None else len(turn.shown.ids) for turn in turns], dtype=np.int64)
        lengths = [len(history), *np.stack([own, shown], 1).ravel()]
        self.turn = np.repeat([0, *np.repeat(np.arange(first, stop) + 1, 2)], lengths)
        self.sampled = np.repeat([0, *np.tile([1, 0], len(turns))], lengths)
        self.mask = self.sampled * (not episode.failed)
        places, observed = self.sampled.astype(bool), [turn.shown for turn in turns if turn.shown is not None]
        self.ids, self.types = np.zeros((2, len(places)), dtype=np.int64)
        self.ids[places] = [token for turn in turns for token in turn.token_ids]
        self.ids[~places] = [*history, *(token for each in observed for token in each.ids)]
        self.types[~places] = [*history_types, *(kind for each in observed for kind in each.token_types)]
        self.log_probs, self.rewards = np.zeros((2, len(places)), dtype=np.float32)
        self.log_probs[places] = [value for turn in turns for value in turn.log_probs]
        self.weight_versions = np.zeros(len(places), dtype=np.int64)
        self.weight_versions[places] = [version for turn in turns for version in turn.weight_versions]
        self.rewards[len(history) + np.cumsum(own + shown) - shown - 1] = [turn.reward for turn in turns]
        decode = renderer.builder.tokenizer.decode
        self.actions = [decode(turn.token_ids, skip_special_tokens=True) for turn in turns]
        self.prompt_key = self._prompt_key(renderer.builder)

    def _prompt_key(self, builder: PromptBuilder) -> Hashable:
        """Equal for rows whose prompt training computes once; see `dataproto.packing.prompt_sharing`."""
        shown: RowMedia = self.media
        if self.types.any():
            split = builder.family.split_media(self.media, torch.from_numpy(self.prompt_types), builder.config)
            if split is None:
                return id(self)
            shown = split[0]
        return self.episode.start.uid, self.prompt_ids.tobytes(), media_identity(shown)


def _experts(records: Sequence[_Record], no_experts: Tensor) -> tuple[RaggedTensor, RaggedTensor]:
    """The experts of the tokens of rows.

    A row without a turn, of which no engine tells experts, has those of another row for a prompt that they share, and expert 0
    for all else. A last observation that no engine read, because the wall clock was over, has the experts of the token before it:
    no sampled token follows it.
    """
    owners = [record.prompt_key for record in records]
    rows = [record.row.experts if record.row is not None and record.actions else None for record in records]
    known: dict[Any, Tensor] = {}
    for owner, row in zip(owners, rows, strict=True):
        if row is not None:
            known.setdefault(owner, row)
    for place, (owner, record) in enumerate(zip(owners, records, strict=True)):
        if not record.actions:
            prompt, rest = (
                no_experts.new_zeros(len(ids), *no_experts.shape[1:]) for ids in (record.prompt_ids, record.ids)
            )
            rows[place] = torch.cat([known.get(owner, prompt)[: len(prompt)], rest])
        elif record.is_last and record.episode.ended == "clock" and (row := rows[place]) is not None:
            unread = len(record.prompt_ids) + len(record.ids) - len(row)
            rows[place] = torch.cat([row, row[-1:].expand(unread, *row.shape[1:])])
    lengths = [len(record.prompt_ids) for record in records], [len(record.ids) for record in records]
    return expert_columns(rows, *lengths, owners)


def _objects(records: Sequence[_Record]) -> dict[str, list[Any]]:
    episodes = [record.episode for record in records]
    return {
        "trajectory": [episode.start.trajectory for episode in episodes],
        "end_reason": [episode.ended for episode in episodes],
        "end_message": [episode.message for episode in episodes],
        "info": [_plain(episode.info) for episode in episodes],
        "actions": [record.actions for record in records],
        "states": [[turn.state for turn in episode.turns] for episode in episodes],
        "response_text": ["\n".join(record.actions) for record in records],
        "score": [sum(turn.reward for turn in episode.turns) for episode in episodes],
        "multi_modal_inputs": [record.media for record in records],
        "multi_modal_data": [record.objects for record in records],
        "raw_prompt": [_messages(episode) for episode in episodes],
    }


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a last ``info``, under names that are texts. Integers that float does not hold are left out.

    >>> _plain({"acc": np.True_, "note": "fell", "map": [[0, 1]], 3: 4, "n": 10**400})
    {'acc': True, 'note': 'fell'}
    """
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in info.items()}
    return {name: value for name, value in values.items() if isinstance(name, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, float | str) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _messages(episode: Episode) -> Any:
    prompt = episode.prompt
    if prompt is None:
        return episode.start.row.get("raw_prompt")
    return prompt.conversation.with_media(media_objects(prompt.media))
