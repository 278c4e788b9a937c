"""Rows to train on and rows to hold out, of those that fit."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from dataproto.errors import InvalidConfig
from recipes.data.column_keys import ColumnKeys, ColumnOptions, eval_sets
from recipes.data.loader import PromptLoader, drop_overlong
from recipes.data.row_values import columns_left_out
from recipes.demo.problems import EPOCH_ROWS, RowsBySeed
from rollout.prompts import PromptBuilder

ReadSplit = Callable[[str, str], Any]
"""A path or the name of a data set, and ``train`` or ``test`` -> its rows that fit."""


def open_sets(
    data: ColumnOptions,
    paths: Sequence[str],
    open_rows: Callable[..., Any],
    builder: PromptBuilder,
    columns: Collection[str],
    which: str = "are not read",
) -> tuple[list[Any], dict[str, Any]]:
    """Of the rows that fit, those to train on of each path, and the held-out ones of each set by its name; says how many do not.

    Without sets in the options each path gives a part, see `split_rows`; their name is "".

    Args:
        open_rows: the path or the name of a data set, ``train`` or ``test``, ``keys`` and ``media_root`` -> its rows.
        columns: those that ``open_rows`` reads.
        which: what becomes of the others.
    """

    def read(path: str, split: str) -> Any:
        rows = open_rows(path, split, keys=data.keys, media_root=data.media_root)
        tell_files(path, rows, split)
        if split == "train":
            tell_columns_left_out(path, rows, columns, data.keys, which)
        kept, dropped = drop_overlong(rows, builder, data.on_bad_row)
        if dropped:
            print(f"{path}: {len(dropped)} rows of {split} exceed {builder.max_prompt_length} tokens and are left out")
        return kept

    if sets := eval_sets(data.eval_data_path):
        rows = [read(path, "train") for path in paths]
        return rows, {name: first_rows(read(path, "test"), data.eval_rows) for name, path in sets.items()}
    parts = [split_rows(path, read, max(data.eval_rows // len(paths), 1)) for path in paths]
    held = [part for _, part in parts if len(part)]
    held_out = {"": held[0] if len(held) == 1 else ConcatDataset(held)} if held else {}
    return [rows for rows, _ in parts], held_out


def split_rows(path: str, read: ReadSplit, eval_rows: int) -> tuple[Any, Any]:
    """Rows to train on, and rows to hold out: of a file its last rows, at most a fifth, of a folder or a name its ``test`` split.

    Raises:
        InvalidConfig: a file has too few rows to hold some out.
    """
    rows = read(path, "train")
    if not Path(path).is_file():
        return rows, first_rows(read(path, "test"), eval_rows)
    kept = len(rows) - min(eval_rows, len(rows) // 5)
    if kept == len(rows):
        raise InvalidConfig(f"{path} has {len(rows)} rows, too few to hold some out: give --eval-data-path")
    return Subset(rows, range(kept)), Subset(rows, range(kept, len(rows)))


def first_rows(rows: Any, most: int) -> "Subset[Any]":
    """At most so many of the first rows."""
    return Subset(rows, range(min(most, len(rows))))


def tell_data(loader: PromptLoader, *held_out: Any) -> None:
    """Prints how many rows a run has read, trains on and holds out, its steps an epoch, and whether rows repeat within a step."""
    sets = [each for each in held_out if each is not None]
    held, batch = sum(map(len, sets)), loader.batch_size
    synthetic = isinstance(loader.rows, RowsBySeed) and len(loader.rows) == EPOCH_ROWS
    if synthetic or not hasattr(loader.rows, "__len__"):
        kind = "synthetic rows, new ones in each step" if synthetic else "a stream or mixture of rows"
        print(f"data: {kind}, {batch} a step; {held:,} held out")
        return
    rows, steps = len(loader.rows), loader.steps(1)
    sources = {id(source): len(source) for source in map(_source, (loader.rows, *sets))}
    read = f"{sum(sources.values()):,} rows read, {rows:,} to train on, {held:,} held out"
    print(f"data: {read}; {batch} a step, {steps:,} step{'s' * (steps > 1)} an epoch")
    if batch > rows:
        print(f"warning: --batch-size {batch} is more than the {rows} rows, so that rows repeat within a step")


def _source(rows: Any) -> Any:
    """The rows of which these are a part."""
    while isinstance(rows, Subset):
        rows = rows.dataset
    return rows


def tell_files(path: str, rows: Any, split: str) -> None:
    """Prints the files of a split that are not shards of one, such as ``train.jsonl`` and its copy ``train_old.jsonl``."""
    names = [table.file.name for table in getattr(rows, "tables", []) if table.file is not None]
    if len({re.sub(r"\d+", "", name) for name in names}) > 1:
        print(f"{path}: the rows of {split} are those of {', '.join(names)} together")


def tell_columns_left_out(path: str, rows: Any, columns: Collection[str], keys: ColumnKeys, which: str) -> None:
    """Prints the columns of a data set that the model is not shown; ``which`` says what becomes of them."""
    if left_out := columns_left_out(rows, columns, keys):
        print(f"{path}: columns that {which}: {', '.join(left_out)}")
