"""Shows the first rows of a data set as the model sees them; see `recipes.show.show_config`."""

import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from dataproto.errors import DataProtoError
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversation_rows import CONVERSATION_COLUMNS, conversation_rows, conversation_stream
from recipes.data.drawn_rows import DrawnTalks, ProblemRows
from recipes.data.loader import draws
from recipes.data.problem_rows import PROBLEM_COLUMNS, load_rows
from recipes.data.row_values import columns_left_out, present_columns
from recipes.demo.tiny_model import make_tiny_processors
from recipes.options import exit_status
from recipes.rewards import load_reward
from recipes.rewards.reward_check import truth_check
from recipes.run.policy_gradient import prompt_builder
from recipes.run.supervised import supervised_builders
from recipes.show.show_config import ShowConfig, parse
from recipes.show.show_page import write_page
from recipes.show.shown_rows import ShownSource, shown_row, with_scores
from recipes.show.terminal import print_source
from rollout.prompts import PromptBuilder


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows and returns the exit status: 1 if one cannot be used, or the truth does not get the best reward."""
    with exit_status(arguments, resumes=False) as status:
        asked = parse(status.arguments)
        disable_progress_bar()
        sources = list(shown_sources(asked))
        for source in sources:
            print_source(source)
        if asked.options.page is not None:
            names = ", ".join(source.name for source in sources)
            print(f"page: {write_page(asked.options.page, f'{names} as {asked.recipe} reads it', sources)}")
        status.code = int(not all(source.is_well for source in sources))
    return status.code


def shown_sources(asked: ShowConfig) -> Iterator[ShownSource]:
    """The first rows of each data set that the options name."""
    config, supervised = asked.config, asked.recipe == "sft"
    if config.model_path is None:
        print("no --model-path: the tokenizer and the image processor are those of the small Qwen2.5-VL")
    with tempfile.TemporaryDirectory() as folder:
        model_path = config.model_path or str(make_tiny_processors(Path(folder)))
        builder: PromptBuilder
        if supervised:
            builder = supervised_builders(config.data, model_path)[0].learning(config.data.turns)
        else:
            builder = prompt_builder(config.data, model_path)
    for name, rows in _opened(asked):
        given = list(islice(_rows(rows), asked.options.rows))
        shown = tuple(shown_row(place, row, builder) for place, row in enumerate(given))
        source = ShownSource(name, *_columns(rows, config.data.keys, supervised), shown, supervised)
        yield source if supervised else with_scores(source, given, load_reward(config.reward or "geo3k"), builder)


def _opened(asked: ShowConfig) -> Iterator[tuple[str, Any]]:
    """The data sets by name; without one the synthetic rows of the recipe."""
    config, data = asked.config, asked.config.data
    if asked.recipe == "sft":
        for path in data.data_path:
            read = conversation_stream if data.streaming else conversation_rows
            yield path, read(path, keys=data.keys, media_root=data.media_root)
        if not data.data_path:
            yield "synthetic conversations", DrawnTalks(config.run.seed)
    elif data.data_path is None:
        yield "synthetic problems", ProblemRows(data.level, config.run.seed, "train", data.instruction)
    else:
        usable = truth_check(load_reward(config.reward or "geo3k"))
        rows = load_rows(data.data_path, "train", None, data.instruction, data.keys, data.media_root, usable)
        yield data.data_path, rows


def _columns(rows: Any, keys: ColumnKeys, supervised: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of a data set that are read, and its others; none of synthetic rows."""
    others = columns_left_out(rows, CONVERSATION_COLUMNS if supervised else PROBLEM_COLUMNS, keys)
    return tuple(name for name in present_columns(rows) if name not in others), tuple(others)


def _rows(rows: Any) -> Iterator[Any]:
    """The rows in their order; for one that cannot be read, its error."""
    for _, place, raw in takewhile(lambda drawn: drawn[0].startswith("0-"), draws(rows, 0, shuffle=False)):
        try:
            yield rows[place] if raw is None else rows.read_row(raw, place)
        except DataProtoError as error:
            yield error
