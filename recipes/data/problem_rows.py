"""Data sets of problems with pictures, in any of these schemas.

* verl: ``data_source, prompt, images, ability, reward_model {style, ground_truth}, extra_info``
* EasyR1, as in ``hiyouga/geometry3k``: ``problem, answer, images``; `INSTRUCTION` is appended to the problem
* chat messages with typed parts or markers: ``messages`` (or ``prompt``), with ``answer`` or ``solution``
* any other, whose columns a `ColumnKeys` names

Reading a file runs no code, and paths in it are read as images only. Relative paths start at the folder of the file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import InvalidConfig, InvalidRow
from recipes.data.column_keys import ColumnKeys, with_markers
from recipes.data.tables import Table, TableRows, open_tables, table_files
from rollout.prompts.images import media_list

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)
"""The instruction of verl (``examples/data_preprocess/geo3k.py``) and EasyR1 (``examples/format_prompt/math.jinja``)."""

KNOWN = ColumnKeys()
_MEDIA = ("images", "image", "videos", "video")
_ANSWERS = ("answer", "solution", "ground_truth")
PROBLEM_COLUMNS = (
    *("prompt", "messages", "problem", *_MEDIA, *_ANSWERS),
    *("data_source", "ability", "reward_model", "extra_info"),
)
"""The columns that `read_row` knows; rewards get all the others too."""


class Geo3KDataset(TableRows):
    """Rows for `PromptBuilder`, read from disk on access.

    ``rows[i]`` has ``prompt``, ``images``, ``videos``, ``data_source``, ``ability``, ``reward_model``, ``extra_info``,
    ``own_columns`` and ``media_columns`` (see `own_columns`), ``index`` (i) and ``media_root``. It raises `InvalidRow` if the row
    matches none of the schemas.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        split: str,
        data_source: str,
        instruction: str = INSTRUCTION,
        keys: ColumnKeys = KNOWN,
        files: Sequence[Path] = (),
    ) -> None:
        """``tables`` are `datasets.Dataset` objects, each with the folder at which its relative paths start."""
        self.split, self.data_source, self.instruction = split, data_source, instruction
        read = partial(read_row, split=split, data_source=data_source, instruction=instruction, keys=keys)
        super().__init__(tables, read, files)


def load_rows(
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    data_source: str | None = None,
    instruction: str = INSTRUCTION,
    keys: ColumnKeys = KNOWN,
) -> Geo3KDataset:
    """Opens a data set of problems.

    Args:
        source, split: as `recipes.data.tables.open_tables`.
        data_source: the ``data_source`` of rows that have none; by default the name of the data set.
        instruction: the text appended to the problem of an EasyR1 row, and to a question that ``keys`` names.
        keys: the columns of a data set in none of the known schemas.

    Raises:
        InvalidConfig: the file, folder or data set does not exist, has no rows, or lacks a column that ``keys`` names.
        FileFormatError: a file cannot be read.
    """
    tables, name = open_tables(source, split)
    keys.check([table for table, _ in tables], name)
    rows = Geo3KDataset(tables, split, data_source or name, instruction, keys, table_files(source, split))
    if not len(rows):
        raise InvalidConfig(f"data set {name!r} has no rows")
    return rows


def read_row(
    raw: Mapping[str, Any],
    index: int,
    split: str = "",
    data_source: str = "",
    instruction: str = INSTRUCTION,
    keys: ColumnKeys = KNOWN,
) -> dict[str, Any]:
    """Converts a row of any of the schemas, or with the columns that ``keys`` names, to verl's.

    Raises:
        InvalidRow: the row matches none of the schemas.

    >>> row = read_row({"problem": "<image>Find x.", "answer": "9", "images": ["a.png"]}, index=3, split="train")
    >>> row["prompt"][0]["content"][:24], row["reward_model"], row["extra_info"]["index"]
    ('<image>Find x. You FIRST', {'style': 'rule', 'ground_truth': '9'}, 3)
    """
    own, media_columns = own_columns(raw, keys)
    raw = keys.rename(raw, index)
    messages, problem = raw.get("messages"), raw.get("problem")
    prompt = raw.get("prompt") if messages is None else messages
    if prompt is None and isinstance(problem, str):
        prompt = [{"role": "user", "content": f"{problem} {instruction}".strip()}]
    if prompt is None:
        lacking = f"no 'prompt', 'messages' or 'problem' among its columns {sorted(raw)}"
        raise InvalidRow(index, f"{lacking}: name that of the question by --prompt-key, or --messages-key")
    images, videos = row_media(raw, "images", "image"), row_media(raw, "videos", "video")
    if isinstance(prompt, str):
        problem = prompt if keys.prompt_key else problem
        text = f"{with_markers(prompt, len(images), len(videos))} {instruction}".strip() if keys.prompt_key else prompt
        prompt = [{"role": "user", "content": text}]
    answer = next((raw[name] for name in _ANSWERS if raw.get(name) is not None), None)
    if not isinstance(prompt, (Sequence, np.ndarray)) or not all(isinstance(message, Mapping) for message in prompt):
        raise InvalidRow(index, f"the prompt must be a string or a list of messages, not {prompt!r}")
    if (
        messages is not None and prompt and prompt[-1].get("role") == "assistant"
    ):  # an answered problem: its answer is the ground truth
        answer = prompt[-1].get("content") if answer is None else answer
        prompt = prompt[:-1]
    extra = {"split": split, "index": index, "answer": answer, "question": problem}
    extra |= {
        name: value for name, value in raw.items() if name not in (*_MEDIA, *_ANSWERS, "prompt", "messages", "problem")
    }
    return {
        "prompt": prompt,
        "images": images,
        "videos": videos,
        "data_source": raw.get("data_source") or data_source,
        "ability": raw.get("ability") or "math",
        "reward_model": raw.get("reward_model") or {"style": "rule", "ground_truth": answer},
        "extra_info": raw.get("extra_info") or extra,
        "own_columns": own,
        "media_columns": media_columns,
        "index": index,
    } | row_tools(raw)


def own_columns(raw: Mapping[str, Any], keys: ColumnKeys = KNOWN) -> tuple[dict[str, Any], dict[str, str]]:
    """The columns of a row by their own names: values without the prompt, and what the columns of media hold: one or several.

    >>> own_columns({"problem": "Where?", "solution": [0, 0, 4, 4], "photo": "a.png"}, ColumnKeys(image_key="photo"))
    ({'problem': 'Where?', 'solution': [0, 0, 4, 4]}, {'photo': 'image'})
    """
    media = {}
    for kind, key in (("image", keys.image_key), ("video", keys.video_key)):
        read = next((name for name in ([key] if key else [f"{kind}s", kind]) if raw.get(name) is not None), None)
        if read is not None:
            several = read != kind and isinstance(raw[read], (list, tuple, np.ndarray))
            media[read] = f"{kind}s" if several else kind
    left_out = {"prompt", "messages", keys.messages_key, *_MEDIA, *media}
    return {name: value for name, value in raw.items() if name not in left_out}, media


def row_tools(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tools`` of a row, if it has them, for its chat template."""
    return {} if raw.get("tools") is None else {"tools": raw["tools"]}


def row_media(raw: Mapping[str, Any], several: str, single: str) -> list[Any]:
    """The media of a row in the column ``several``, a list or one medium, or, if that is missing, ``single``."""
    if raw.get(several) is not None:
        return media_list(raw[several])
    return [] if raw.get(single) is None else [raw[single]]
