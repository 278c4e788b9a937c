"""Rows as a model sees them: text with special tokens, pictures, what is learnt, and what the reward gives the truth."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from PIL import Image

from dataproto.errors import DataProtoError, InvalidRow
from recipes.report.samples import pictures_of
from recipes.rewards import RewardFunction
from recipes.rewards.reward_check import check_first_row, examples
from recipes.rewards.truth_check import TruthScores, reason_not_to_ask, truth_scores
from rollout.prompts import Prompt, PromptBuilder
from rollout.prompts.conversations import TrainingRow
from rollout.prompts.prepared_rows import media_objects

Kind = Literal["text", "special", "media"]


@dataclass(frozen=True)
class Span:
    """Tokens of one kind that follow each other: text, a special token, or the places of a medium."""

    text: str
    kind: Kind
    learnt: bool = False


@dataclass(frozen=True)
class ShownRow:
    """A row of a data set as the model sees it, or the ``error`` because of which it is not used."""

    index: int
    spans: tuple[Span, ...] = ()
    tokens: int = 0
    learnt: int | None = None  # tokens that are learnt; None: those that are sampled
    pictures: tuple[Image.Image, ...] = ()
    sizes: tuple[str, ...] = ()  # of the pictures, as given and as seen
    truth: Any = None
    scores: TruthScores | None = None
    error: str | None = None


@dataclass(frozen=True)
class ShownSource:
    """The first rows of a data set, its columns, and what there is to say of the reward."""

    name: str
    read: tuple[str, ...]  # columns
    others: tuple[str, ...]
    rows: tuple[ShownRow, ...]
    supervised: bool = False
    unasked: str | None = None  # why the reward is not asked
    fault: str | None = None  # what the reward refuses

    @property
    def is_well(self) -> bool:
        """Whether all rows can be used, and the reward gives its best to their truths."""
        best = all(row.error is None and (row.scores is None or row.scores.is_best) for row in self.rows)
        return best and self.fault is None


def token_spans(
    tokenizer: Any, ids: Sequence[int], types: Sequence[int], learnt: Iterable[bool] | None = None
) -> tuple[Span, ...]:
    """A row's tokens as text, with each run of a medium's places written once.

    Args:
        ids: ``(L,)``.
        types: ``(L,)``, 0 for text.
        learnt: ``(L,)``; by default nothing is learnt.
    """
    special = {*tokenizer.all_special_ids}
    special |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    marks = [False] * len(ids) if learnt is None else map(bool, learnt)
    tokens = [
        (token, "media" if kind else "special" if token in special else "text", mark)
        for token, kind, mark in zip(ids, types, marks, strict=True)
    ]
    spans = []
    for (kind, mark, token), run in groupby(tokens, lambda each: (*each[1:], None if each[1] == "text" else each[0])):
        found = [each[0] for each in run]
        name = "" if token is None else str(tokenizer.convert_ids_to_tokens(token))
        if kind == "text":
            texts = [str(tokenizer.decode(found, skip_special_tokens=False, clean_up_tokenization_spaces=False))]
        else:
            texts = [f"{name} × {len(found)}"] if kind == "media" else [name] * len(found)
        spans += [Span(text, kind, mark) for text in texts]
    return tuple(spans)


def shown_row(place: int, row: Mapping[str, Any] | DataProtoError, builder: PromptBuilder) -> ShownRow:
    """A row of a data set as the builder's model sees it."""
    if isinstance(row, DataProtoError):
        return ShownRow(place, error=_reason(row))
    try:
        prompt = builder.prepare(row)
    except DataProtoError as error:
        return ShownRow(place, error=_reason(error))
    learnt = prompt.loss_mask if isinstance(prompt, TrainingRow) else None
    return ShownRow(
        place,
        token_spans(builder.tokenizer, prompt.input_ids.tolist(), prompt.token_types.tolist(), learnt),
        len(prompt.input_ids),
        None if learnt is None else int(learnt.sum()),
        tuple(pictures_of(media_objects(prompt.images, prompt.videos))),
        tuple(_sizes(prompt, builder)),
        (row.get("reward_model") or {}).get("ground_truth"),
    )


def _reason(error: DataProtoError) -> str:
    """What an error says, without the row that is named in front of it."""
    return error.reason if isinstance(error, InvalidRow) else str(error)


def _sizes(prompt: Prompt, builder: PromptBuilder) -> Iterable[str]:
    """The sizes of pictures in pixels: as given and, if the model's grid tells it, as the model sees them."""
    for picture in prompt.images:
        size = f"{picture.image.width} x {picture.image.height}"
        grid, patch = picture.inputs.get("image_grid_thw"), getattr(builder.image_processor, "patch_size", None)
        if grid is not None and isinstance(patch, int):
            _, height, width = grid[0].tolist()
            size += f", seen as {width * patch} x {height * patch}"
        yield size
    for video in prompt.videos:
        yield f"{len(video.frames)} frames"


def with_scores(
    source: ShownSource, given: Sequence[Any], reward: RewardFunction, builder: PromptBuilder
) -> ShownSource:
    """The rows with what the reward gives their truths, or why it is not asked, or what it refuses.

    Args:
        given: the rows of the data set, of which those that have an error are left out.
    """
    used = [place for place, row in enumerate(source.rows) if row.error is None]
    try:
        if used:
            check_first_row(reward, given[used[0]])
        reason = reason_not_to_ask(reward)
        if not used or reason is not None:
            return replace(source, unasked=reason)
        asked = examples([given[place] for place in used], builder)
        found = truth_scores(reward, asked, count=lambda text: len(builder.encode_text(text)))
    except DataProtoError as error:
        return replace(source, fault=str(error))
    rows = list(source.rows)
    for place, scores in zip(used, found, strict=True):
        rows[place] = replace(rows[place], scores=scores)
    return replace(source, rows=tuple(rows))
