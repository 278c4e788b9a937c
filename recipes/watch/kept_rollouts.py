"""Rows of training, kept on disk for the viewer: some whole groups of each step, their tokens and their pictures.

A row is a rollout with its reward, or a row of supervised training with its loss.

A run's directory holds ``rollouts/training/step_<step>.jsonl``, one line a row, and next to it
``step_<step>.tokens.jsonl.gz``, the tokens of the same rows, line by line: those of responses, and of episodes those of whole
conversations. Pictures lie once each in ``rollouts/images``, for all steps.
"""

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import compress, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataproto import DataProto
from dataproto.errors import replace_file
from dataproto.grouping import grouped_by
from recipes.watch.rollout_files import (
    FOLDER,
    TRAINING,
    Row,
    pictures_of,
    prompt_text,
    reward_parts,
    rows_file,
    saved_media,
    sounds_of,
    texts_of,
    tokens_file,
)
from rollout.answers import ANSWER_KEY

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

NEEDED = ("response_mask", "attention_mask", "uid")
MEASURED = (("responses", "token_level_rewards"), ("input_ids", "actor_log_probs"))  # of rollouts; of other rows
EPISODES = {"trajectory": "", "new_row": "", "end_reason": "done", "end_message": ""}
"""The name of a row's episode, which other rows lack, why it has the row, why it ended, and its failure, with their defaults."""
PER_TOKEN = {  # name in the file: columns (B, R), of which the first that the batch has is kept
    "engine_log_probs": ("rollout_log_probs",),
    "actor_log_probs": ("actor_log_probs", "old_log_probs"),
    "advantages": ("advantages",),
}
PER_TURN = {"rewards": ("token_level_rewards",), "turn": ("turn",)}
"""The same of episodes."""
DIGITS = 6  # decimals of numbers in the files


class KeptRollouts:
    """Keeps some rollouts of each step in a run's directory.

    The files of a step are complete or absent, and a step written again replaces its files.
    """

    def __init__(self, directory: str | Path, limit: float, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Makes no file yet.

        Args:
            directory: of the run.
            limit: the largest number of rows of a step, or below 1 a share of them; 0 keeps none.
            tokenizer: gives the text of each token; without it the files hold ids only.
        """
        self.limit = limit
        self.directory, self.root = Path(directory), Path(directory) / FOLDER
        self.tokenizer = tokenizer
        self.text_of = cache(lambda token: tokenizer.decode([token])) if tokenizer is not None else None

    def drop_after(self, step: int) -> None:
        """Removes the rollouts of later steps, which a resumed run writes again."""
        for path in (self.root / TRAINING).glob("step_*"):
            match = re.match(r"step_(\d+)\.", path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def keep(self, step: int, data: DataProto) -> None:
        """Writes the kept rows of a step; nothing for a batch that holds neither rewards nor losses.

        Args:
            data: with the columns of `NEEDED` and one pair of `MEASURED`; if present, those of `PER_TOKEN`, ``truncated``,
                ``response_text``, ``score`` and further numbers of the reward, ``raw_prompt``, ``reward_model``, ``data_source``,
                ``multi_modal_data``.
        """
        is_measured = any({*NEEDED, *pair} <= {*data.names()} for pair in MEASURED)
        if not self.limit or not len(data) or not is_measured:
            return
        (self.root / TRAINING).mkdir(parents=True, exist_ok=True)
        (self.root / "images").mkdir(exist_ok=True)
        limit = int(self.limit) if self.limit >= 1 else max(round(self.limit * len(data)), 1)
        rows, samples = chosen_rows(data["uid"], limit, step)
        kept = data[rows]
        described = self._rows(step, kept, samples)
        tokens = list(_tokens(kept, self.text_of))
        for place, (row, found) in enumerate(zip(described, tokens, strict=True)):
            row |= {"length": sum(found["sampled"]), "mismatch": found.pop("mismatch")}
            if "token_level_rewards" not in kept:
                row |= _supervised(found, self.tokenizer)
            if ANSWER_KEY in kept:
                row["prompt"] = prompt_text(kept["raw_prompt"][place])
                row["ground_truth"] = judgement(kept["labels"][place], row["sample"])
        replace_file(tokens_file(self.directory, step), gzip.compress(_lines(tokens), compresslevel=1, mtime=0))
        replace_file(rows_file(self.directory, step), _lines(described))  # last: readers look for this one

    def _rows(self, step: int, data: DataProto, samples: Sequence[int]) -> list[Row]:
        scored = "token_level_rewards" in data
        parts = reward_parts(data) if scored else {}
        shaped = data["token_level_rewards"].sum(-1).tolist() if scored else [None] * len(data)
        files: dict[tuple[int, ...], Row] = {}  # of pictures and sounds, by the media that rows share
        unknown, episodes = [None] * len(data), EPISODES if "trajectory" in data else {}
        score, cut, seen = (
            data[name] if name in data else unknown for name in ("score", "truncated", "multi_modal_data")
        )
        rows = []
        for row, sample in enumerate(samples):
            media = seen[row] or {}
            shared = tuple(id(medium) for kind in media.values() for medium in kind)
            if shared not in files:
                files[shared] = saved_media(self.root / "images", pictures_of(media), sounds_of(media))
            reward = _number(shaped[row] if score[row] is None else score[row])
            # The row of an episode may have a part of its reward.
            same = "trajectory" in data or _number(shaped[row]) == reward
            changed = {} if same else {"shaped": _number(shaped[row])}
            rows.append(
                {"step": step, "uid": str(data["uid"][row]), "sample": sample}
                | texts_of(data, row)
                | {"reward": reward, "parts": {name: _number(value[row]) for name, value in parts.items()} | changed}
                | {"truncated": bool(cut[row]), **files[shared]}
                | {name: str(data[name][row]) if name in data else default for name, default in episodes.items()}
            )
        return rows


def chosen_rows(uids: Sequence[Any], limit: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """The rows of some whole groups, at most ``limit``, and the number of each row within its group.

    Groups are taken at random by the seed, until the next one would be too many. Only where the first group is itself larger than
    the limit are its first rows taken.

    >>> rows, samples = chosen_rows(["a", "b", "a", "b", "c", "c"], limit=5, seed=1)
    >>> rows.tolist(), samples
    ([0, 1, 2, 3], [0, 0, 1, 1])
    >>> chosen_rows(["a", "a", "a"], limit=2, seed=1)[0].tolist()
    [0, 1]
    """
    groups = list(grouped_by(range(len(uids)), lambda row: uids[row]).values())
    taken: list[tuple[int, int]] = []  # row, its number in the group
    for index in np.random.default_rng(seed).permutation(len(groups)):
        group = groups[index]
        if taken and len(taken) + len(group) > limit:
            break
        taken += [(row, sample) for sample, row in enumerate(group[:limit])]
    taken.sort()
    return np.array([row for row, _ in taken]), [sample for _, sample in taken]


def _tokens(data: DataProto, text_of: Any) -> Iterator[Row]:
    """Ids, texts and numbers of each row's response tokens, those of an environment included, with its mismatch.

    Of episodes they are those of the whole row, with the rewards of turns and ``media``: first place and number of the tokens of
    each picture.
    """
    sampled, episodes = data["response_mask"].bool(), "trajectory" in data
    width = sampled.shape[1]
    ids_of = data["responses"] if "responses" in data else data["input_ids"][:, 1:]
    ids_of = data["input_ids"] if episodes else ids_of
    before = ids_of.shape[1] - width  # tokens of prompts
    attended = data["attention_mask"][:, -ids_of.shape[1] :].bool() if width else sampled
    if "responses" not in data and "mm_token_type_ids" in data:  # of a conversation the text, without places of media
        attended = attended & (data["mm_token_type_ids"][:, -width:] == 0)
    found = {
        name: next((data[column] for column in columns if column in data), None)
        for name, columns in (PER_TOKEN | PER_TURN if episodes else PER_TOKEN).items()
    }
    mismatch = _mismatch(found["engine_log_probs"], found["actor_log_probs"], sampled)
    numbers = {name: _numbers(column) for name, column in found.items() if column is not None}
    types: list[Any] = data["mm_token_type_ids"].tolist() if episodes else len(data) * [None]
    for row, (ids, kept, own) in enumerate(zip(ids_of.tolist(), attended.tolist(), sampled.tolist(), strict=True)):
        tokens = list(compress(ids, kept))
        yield (
            {"tokens": tokens}
            | ({} if text_of is None else {"texts": [text_of(token) for token in tokens]})
            | {"sampled": [int(each) for each in compress([*(before * [0]), *own], kept)]}
            | {name: list(compress([*(before * [None]), *values[row]], kept)) for name, values in numbers.items()}
            | ({"media": _runs(list(compress(types[row], kept)))} if episodes else {})
            | {"mismatch": mismatch[row]}
        )


def _runs(types: Sequence[int]) -> list[list[int]]:
    """First place and length of each run of tokens of a medium.

    >>> _runs([0, 1, 1, 0, 2])
    [[1, 2], [4, 1]]
    """
    places = groupby(range(len(types)), key=lambda place: types[place])
    return [[(run := list(found))[0], len(run)] for kind, found in places if kind]


def _supervised(found: Row, tokenizer: "PreTrainedTokenizerBase | None") -> Row:
    """The fields of a row of supervised training: its texts outside of and in what is learnt, and the mean loss of the latter."""
    own = [bool(each) for each in found["sampled"]]
    losses = [-value for value in compress(found.get("actor_log_probs", ()), own) if value is not None]
    fields: Row = {"parts": {"loss": _number(math.fsum(losses) / len(losses))} if losses else {}}
    if tokenizer is not None:
        parts = [list(compress(found["tokens"], kept)) for kept in (own, [not each for each in own])]
        learnt, given = (str(tokenizer.decode(part, skip_special_tokens=True)).strip() for part in parts)
        fields |= {"response": learnt, "ground_truth": learnt, "prompt": given}
    return fields


def judgement(labels: Sequence[bool], number: int) -> str:
    """What is said of an answer in place of its truth, of the labels of all answers of its prompt.

    >>> judgement((True, False), 1), judgement((True,), 0)
    ('rejected', 'desirable')
    """
    names = ("rejected", "chosen") if len(labels) == 2 else ("undesirable", "desirable")
    return names[labels[number]]


def _mismatch(engine: "Tensor | None", actor: "Tensor | None", sampled: "Tensor") -> list[float | None]:
    """Mean |actor - engine| of each row's sampled tokens, in nats; ``None`` where it is not known."""
    if engine is None or actor is None:
        return [None] * len(sampled)
    difference = (actor.double() - engine.double()).abs().where(sampled, 0.0).sum(-1) / sampled.sum(-1)
    return [None if math.isnan(value) else value for value in difference.tolist()]


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in rows).encode()


def _number(value: Any) -> float | None:
    """A number that JSON has; ``None`` for NaN, infinity and ``None``."""
    return round(float(value), DIGITS) if value is not None and math.isfinite(value) else None


def _numbers(column: "Tensor") -> list[list[float | None]]:
    """The rows of a column as numbers that JSON has."""
    rounded = column.double().round(decimals=DIGITS)
    rows: list[list[float | None]] = rounded.tolist()
    return rows if bool(rounded.isfinite().all()) else [[_number(value) for value in row] for row in rows]
