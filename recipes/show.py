"""The first rows of a data set as the model sees them: ``dataproto show DATA``; its options are `recipes.configs.show_config`."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from rich.console import Console
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from dataproto.errors import WAY_OUT, DataProtoError, FileNotWritten, InvalidRow
from recipes.configs.show_config import RECIPES, ShowConfig, parse
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import CONVERSATION_COLUMNS, conversation_rows, conversation_stream
from recipes.data.loader import draws, read_draw
from recipes.data.preferences import PREFERENCE_COLUMNS, preference_rows
from recipes.data.problem_rows import PROBLEM_COLUMNS, load_rows
from recipes.data.row_values import columns_left_out, present_columns
from recipes.demo.rows import DrawnPairs, DrawnTalks, ProblemRows
from recipes.demo.tiny_model import make_tiny_processors
from recipes.options import exit_status
from recipes.rewards import RewardFunction, load_reward, reward_check
from recipes.run.policy_gradient import prompt_builder
from recipes.run.supervised import rows_builder
from recipes.watch.kept_rollouts import judgement
from recipes.watch.pages import render, write_page
from recipes.watch.rollout_files import pictures_of, sounds_of
from rollout.answers import AnsweredPrompt, AnswersBuilder, Grouping
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.prompts.conversations import TrainingRow
from rollout.prompts.image_processing import ProcessedMedium
from rollout.prompts.prepared_rows import by_kind, invalid_row, media_objects
from rollout.prompts.sounds import RATE

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
    pictures: tuple[Image.Image, ...] = ()
    sounds: tuple[bytes, ...] = ()  # WAV files
    facts: dict[str, str] = field(default_factory=dict)
    """Tokens, pictures, sounds and truth, what the reward gives, and a ``warning`` if the truth does not get the best."""
    error: str | None = None


@dataclass(frozen=True)
class ShownSource:
    """The first rows of a data set, with lines on its columns and on the reward."""

    name: str
    lines: tuple[str, ...]
    rows: tuple[ShownRow, ...]
    is_refused: bool = False  # by the reward

    @property
    def is_well(self) -> bool:
        """Whether all rows can be used, and the reward gives its best to their truths."""
        return not self.is_refused and all(row.error is None and "warning" not in row.facts for row in self.rows)


def main(arguments: Sequence[str] | None = None, config: ShowConfig | None = None) -> int:
    """Prints the rows and returns the exit status: 1 if one cannot be used, or the truth does not get the best reward."""
    with exit_status(arguments, resumes=False) as status:
        asked = by_its_data(config or parse(status.arguments))
        disable_progress_bar()
        sources = list(shown_sources(asked))
        for source in sources:
            shown = str(render("show.txt", source=source, begin=BEGIN, end=END))
            Console(highlight=False).print(Text.from_markup(shown.rstrip(), emoji=False), soft_wrap=True)
        if asked.options.page is not None:
            names = ", ".join(source.name for source in sources)
            title = f"{names} as {asked.recipe} reads it"
            try:
                print(f"page: {write_page(asked.options.page, 'show.html', title=title, sources=sources)}")
            except FileNotWritten as error:
                raise FileNotWritten(f"{str(error).removesuffix(WAY_OUT)}: give another --page") from error
        status.code = int(not all(source.is_well for source in sources))
    return status.code


def by_its_data(asked: ShowConfig) -> ShowConfig:
    """What is asked for, or if no recipe was named and the data are pairs of answers, the same of dpo."""
    if asked.others is None or not asked.config.data.data_path:
        return asked
    _, rows = next(_opened(asked))
    paired = {"chosen", "rejected"} <= {*present_columns(rows)}
    return replace(asked, recipe="dpo", config=RECIPES["dpo"](asked.others)) if paired else asked


def shown_sources(asked: ShowConfig) -> Iterator[ShownSource]:
    """The first rows of each data set that the options name."""
    config = asked.config
    hears = isinstance(getattr(config.data, "level", 1), str)  # synthetic problems about sounds
    if config.model_path is None:
        name = "Qwen2.5-Omni" if hears else "Qwen2.5-VL"
        print(f"no --model-path: the tokenizer and the image processor are those of the small {name}")
    with tempfile.TemporaryDirectory() as folder:
        model_path = config.model_path or str(make_tiny_processors(Path(folder), hears=hears))
        builder: PromptBuilder
        if asked.recipe == "sft":
            builder = rows_builder(SupervisedBuilder, config.data, model_path).learning(config.data.turns)
        elif asked.recipe in PAIRED:
            unpaired = asked.recipe == "dpo" and config.algorithm.unpaired
            grouping: Grouping = "answers" if unpaired else "scored" if asked.recipe == "reward-model" else "pairs"
            builder = rows_builder(AnswersBuilder, config.data, model_path).grouped(grouping)
        else:
            builder = prompt_builder(config.data, model_path)
    for name, rows in _opened(asked):
        # A draw is named by its epoch and its place in it.
        first_epoch = takewhile(lambda drawn: drawn[0].startswith("0-"), draws(rows, 0, shuffle=False))
        given = [read_draw(rows, drawn) for drawn in islice(first_epoch, asked.options.rows)]
        shown = tuple(shown_row(place, row, builder) for place, row in enumerate(given))
        source = ShownSource(name, tuple(_columns(rows, config.data.keys, asked.recipe)), shown)
        if asked.recipe in KNOWN_COLUMNS:
            yield source
        else:
            yield with_scores(source, given, load_reward(config.rewards, weights=config.reward_weights), builder)


PAIRED = ("dpo", "reward-model")
KNOWN_COLUMNS = {"sft": CONVERSATION_COLUMNS, **dict.fromkeys(PAIRED, PREFERENCE_COLUMNS)}
"""The columns that are read of data which no reward sees."""


def _opened(asked: ShowConfig) -> Iterator[tuple[str, Any]]:
    """The data sets by name; without one the synthetic rows of the recipe."""
    config, data, seed = asked.config, asked.config.data, asked.config.run.seed
    read: Callable[..., Any]
    if asked.recipe == "sft":
        synthetic: tuple[str, Any] = "synthetic conversations", DrawnTalks(seed)
        read = conversation_stream if data.streaming else conversation_rows
    elif asked.recipe in PAIRED:
        synthetic, read = ("synthetic pairs", DrawnPairs(seed)), preference_rows
    else:
        synthetic = "synthetic problems", ProblemRows(data.level, seed, "train", data.instruction)
        usable = reward_check.truth_check(load_reward(config.rewards, weights=config.reward_weights))
        read = partial(load_rows, instruction=data.instruction, check_truth=usable)
    paths = [data.data_path] if isinstance(data.data_path, str) else data.data_path or ()
    for path in paths:
        yield path, read(path, keys=data.keys, media_root=data.media_root)
    if not paths:
        yield synthetic


def _columns(rows: Any, keys: ColumnKeys, recipe: str) -> Iterator[str]:
    """What there is to say of the columns of a data set; synthetic rows have none."""
    others = columns_left_out(rows, KNOWN_COLUMNS.get(recipe, PROBLEM_COLUMNS), keys)
    yield f"columns that are read: {', '.join(name for name in present_columns(rows) if name not in others) or 'none'}"
    if others:
        which = "are not read" if recipe in KNOWN_COLUMNS else "only the reward gets"
        yield f"columns that {which}: {', '.join(others)}"


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
        return ShownRow(place, error=_reason(invalid_row(row, place, str(error))))
    learnt = prompt.loss_mask if isinstance(prompt, TrainingRow) else None
    count = len(prompt.input_ids)
    facts = {"tokens": f"{count}" if learnt is None else f"{count}, {int(learnt.sum())} of them learnt"}
    for name, kinds in (("pictures", ("image", "video")), ("sounds", ("audio",))):
        if sizes := [_size(medium, builder) for medium in by_kind(prompt.media) if medium.kind in kinds]:
            facts[name] = "; ".join(sizes)
    if isinstance(prompt, AnsweredPrompt):
        facts |= dict(_answers(prompt, row["labels"], builder))
    elif learnt is None:
        truth = (row.get("reward_model") or {}).get("ground_truth")
        facts["truth"] = "none" if truth is None else repr(truth)
    spans = token_spans(builder.tokenizer, prompt.input_ids.tolist(), prompt.token_types.tolist(), learnt)
    media = media_objects(prompt.media)
    return ShownRow(place, spans, tuple(pictures_of(media)), tuple(sounds_of(media)), facts)


def _answers(prompt: AnsweredPrompt, labels: Sequence[bool], builder: PromptBuilder) -> Iterator[tuple[str, str]]:
    """The answers of a prompt with their ends, and what is trained on."""
    for number, answer in enumerate(prompt.answers):
        yield judgement(labels, number), f"{BEGIN}{builder.tokenizer.decode(answer, skip_special_tokens=False)}{END}"
    counts = " and ".join(str(len(answer)) for answer in prompt.answers)
    answers = "answer" if len(labels) == 1 else "two answers"
    scored = getattr(builder, "grouping", "") == "scored"
    yield "trained on", f"{'the scores at the ends of' if scored else 'all of'} the {counts} tokens of the {answers}"


def _reason(error: DataProtoError) -> str:
    """What an error says, without the row that is named in front of it."""
    return error.reason if isinstance(error, InvalidRow) else str(error)


def _size(medium: ProcessedMedium, builder: PromptBuilder) -> str:
    """The frames of a video, the length of a sound; of a picture the pixels: as given and, if the model's grid tells it, as the
    model sees it.
    """
    if medium.kind == "video":
        return f"{len(medium.content[0])} frames"
    if medium.kind == "audio":
        return f"{len(medium.content) / RATE:.2f} s at {RATE:,} Hz"
    size = f"{medium.content.width} x {medium.content.height}"
    grid, patch = medium.inputs.get("image_grid_thw"), getattr(builder.image_processor, "patch_size", None)
    if grid is not None and isinstance(patch, int):
        _, height, width = grid[0].tolist()
        size += f", seen as {width * patch} x {height * patch}"
    return size


def with_scores(
    source: ShownSource, given: Sequence[Any], reward: RewardFunction, builder: PromptBuilder
) -> ShownSource:
    """The rows, with what the reward gives their truths in their facts; or why it is not asked, or what it refuses.

    Args:
        given: the rows of the data set, of which those that have an error are left out.
    """
    used = [place for place, row in enumerate(source.rows) if row.error is None]
    try:
        if used:
            reward_check.check_first_row(reward, given[used[0]])
        reason = reward_check.reason_not_to_ask(reward)
        if not used or reason is not None:
            told = () if reason is None else (f"the reward is not asked what it gives the truth: {reason}",)
            return replace(source, lines=(*source.lines, *told))
        asked = reward_check.examples([given[place] for place in used], builder)
        found = reward_check.truth_scores(reward, asked, count=lambda text: len(builder.encode_text(text)))
    except DataProtoError as error:
        return replace(source, lines=(*source.lines, f"the reward refuses these rows: {error}"), is_refused=True)
    for place, scores in zip(used, found, strict=True):
        source.rows[place].facts.update({} if scores is None else _score_facts(scores))
    return source


BEGIN, END = "⟦", "⟧"
"""Marks around what is learnt, which show it without colours too."""


def _score_facts(scores: reward_check.TruthScores) -> dict[str, str]:
    facts = {"reward of the truth": f"{_numbers(scores.right)} for {scores.answer!r}"}
    if scores.wrong is not None:
        facts["reward of a wrong answer"] = _numbers(scores.wrong)
    facts["reward of an empty answer"] = _numbers(scores.empty)
    if not scores.is_best:
        facts["warning"] = "the reward does not give its best to the truth"
    return facts


def _numbers(result: reward_check.Result) -> str:
    """
    >>> _numbers({"score": 0.9, "acc": 1.0})
    '0.9 (acc 1)'
    """
    parts = ", ".join(f"{name} {value:g}" for name, value in result.items() if name != "score" and value is not None)
    return f"{result['score']:g}" + (f" ({parts})" if parts else "")
