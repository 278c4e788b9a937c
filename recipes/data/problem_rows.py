"""Data sets of problems with pictures, in any of these schemas.

* verl: ``data_source, prompt, images, ability, reward_model {style, ground_truth}, extra_info``
* EasyR1, as in ``hiyouga/geometry3k``: ``problem, answer, images``; `INSTRUCTION` is appended to the problem
* chat messages with typed parts or markers: ``messages`` (or ``prompt``, or ``conversations`` with ``from`` and ``value`` as in
  VLM-R1), with ``answer`` or ``solution``
* alpaca: ``instruction``, ``input``, ``output``; ms-swift: ``query``, ``response``
* any other, whose columns a `ColumnKeys` names

In each of them ``tools``, ``system`` and ``history`` are read (`recipes.data.row_values`).

Reading a file runs no code, and paths in it are read as images only. Relative paths start at the folder of the file.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dataproto.errors import InvalidRow, RewardError
from recipes.data import row_values
from recipes.data.column_keys import KNOWN, ColumnKeys, why_lacking
from recipes.data.tables import TableRows, open_rows
from rollout.prompts.messages import MEDIA, with_markers
from rollout.prompts.sources import media_list

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)
"""The instruction of verl (``examples/data_preprocess/geo3k.py``) and EasyR1 (``examples/format_prompt/math.jinja``)."""

_QUESTIONS = ("prompt", "messages", "conversations", "problem")
_ANSWERS = ("answer", "solution", "ground_truth")
_OTHERS = ("data_source", "ability", "reward_model", "extra_info", *row_values.CONTEXT_COLUMNS)
_READ = (*_QUESTIONS, *row_values.MEDIA_COLUMNS, *_ANSWERS)
PROBLEM_COLUMNS = (*_READ, *_OTHERS)
"""The columns that `read_row` knows; rewards get all the others too."""

CheckTruth = Callable[[Any], None]
"""Raises `RewardError` for a ground truth that a reward cannot use."""


def load_rows(
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    data_source: str | None = None,
    instruction: str = INSTRUCTION,
    keys: ColumnKeys = KNOWN,
    media_root: str | Path | None = None,
    check_truth: CheckTruth | None = None,
) -> TableRows:
    """Opens a data set of problems; its rows are those of `read_row`, read from disk on access. Prints a warning if an
    instruction of the caller's own is added to none of the first rows.

    Args:
        source, split, media_root: as `recipes.data.tables.open_tables`.
        data_source: the ``data_source`` of rows that have none; by default the name of the data set.
        instruction: the text appended to the problem of an EasyR1 row, and to a question that ``keys`` names; or a template,
            or the file of one, see `recipes.data.row_values.instructed`.
        keys: the columns of a data set in none of the known schemas.
        check_truth: makes rows with a ground truth that the reward cannot use unusable.

    Raises:
        InvalidConfig: the file, folder or data set does not exist, has no rows, or lacks a column that ``keys`` names.
        FileFormatError: a file cannot be read.
    """
    added = row_values.read_instruction(instruction)
    read = partial(read_row, split=split, instruction=added, check_truth=check_truth)
    rows = open_rows(read, source, split, keys, media_root, data_source)
    if added not in ("", INSTRUCTION) and (asked := _prompts(rows)) and asked == _prompts(rows, instruction=""):
        print(
            f"warning: {source}: --instruction is added to none of the first rows: messages, and a 'prompt' that --prompt-key "
            "does not name, stay as they are"
        )
    return rows


def _prompts(rows: TableRows, **options: str) -> list[Any]:
    """The prompts of the first rows that can be read, with other options of `read_row`."""
    reread = TableRows(rows.tables, partial(rows.read, **options))
    found = []
    for place in range(min(len(rows), 8)):
        with suppress(InvalidRow):
            found.append(reread[place]["prompt"])
    return found


def read_row(
    raw: Mapping[str, Any],
    index: int,
    split: str = "",
    data_source: str = "",
    instruction: str = INSTRUCTION,
    keys: ColumnKeys = KNOWN,
    check_truth: CheckTruth | None = None,
) -> dict[str, Any]:
    """Converts a row of any of the schemas, or with the columns that ``keys`` names, to verl's.

    It has ``prompt``, ``images``, ``videos``, ``audios``, ``data_source``, ``ability``, ``reward_model``, ``extra_info``,
    ``own_columns`` and ``media_columns`` (see `own_columns`), and ``index``.

    Raises:
        InvalidRow: the row matches none of the schemas, or ``check_truth`` refuses its ground truth.

    >>> row = read_row({"problem": "<image>Find x.", "answer": "9", "images": ["a.png"]}, index=3, split="train")
    >>> row["prompt"][0]["content"][:24], row["reward_model"], row["extra_info"]["index"]
    ('<image>Find x. You FIRST', {'style': 'rule', 'ground_truth': '9'}, 3)
    """
    own, named = own_columns(raw, keys)
    raw, keys, media = row_values.known_row(raw, index, keys)
    problem, messages = raw.get("problem"), row_values.first_of(raw, ("messages", "conversations"))
    prompt = raw.get("prompt") if messages is None else messages
    if not any(media.values()) and isinstance(asked := problem if prompt is None else prompt, str):
        row_values.check_question(asked, index)  # before the instruction is added
    if prompt is None and isinstance(problem, (str, *row_values.LISTS)):
        prompt = row_values.instructed(problem, instruction) if isinstance(problem, str) else problem
    if prompt is None:
        lacking = f"no 'prompt', 'messages' or 'problem' among its columns {sorted(raw)}"
        way_out = "name that of the question by --prompt-key, or --messages-key"
        raise InvalidRow(index, why_lacking(raw, _QUESTIONS, f"{lacking}: {way_out}"))
    if isinstance(prompt, str) and messages is None:
        problem = prompt if keys.prompt_key else problem
        earlier = raw.get("history") is not None and len(raw["history"])  # which may say where media belong
        shown = prompt if earlier else with_markers(prompt, media)
        asked = row_values.instructed(shown, instruction) if keys.prompt_key else prompt
        prompt = [{"role": "user", "content": asked}]
    prompt = row_values.with_context(row_values.chat_messages(prompt, index), raw, index)
    answer = row_values.first_of(raw, _ANSWERS)
    if messages is not None and prompt and prompt[-1].get("role") == "assistant":  # its answer is the ground truth
        given = {"answer": answer, "said": prompt[-1].get("content")}
        answer, prompt = row_values.first_of(given, given), prompt[:-1]
    row_values.check_answerable(prompt, index)
    truth = _truth(raw, answer, index, check_truth)
    extra = {"split": split, "index": index, "answer": row_values.plain_answer(answer), "question": problem}
    extra |= {name: value for name, value in raw.items() if name not in _READ}
    return row_values.shown_columns(prompt, raw, media, index, data_source) | {
        "ability": raw.get("ability") or "math",
        "reward_model": truth,
        "extra_info": raw.get("extra_info") or extra,
        "own_columns": own,
        "media_columns": named,
    }


def _truth(raw: Mapping[str, Any], answer: Any, index: int, check_truth: CheckTruth | None) -> dict[str, Any]:
    """The row's ``reward_model``, or one with its answer. Raises `InvalidRow` if ``check_truth`` refuses it."""
    own = raw.get("reward_model") or {"style": "rule"}
    given = {"own": own.get("ground_truth"), "answer": answer}
    truth = {**own, "ground_truth": row_values.plain_answer(row_values.first_of(given, given))}
    if check_truth is not None:
        try:
            check_truth(truth.get("ground_truth"))
        except RewardError as error:
            raise InvalidRow(index, f"{error}; its columns are {', '.join(sorted(raw))}") from error
    return truth


def own_columns(raw: Mapping[str, Any], keys: ColumnKeys = KNOWN) -> tuple[dict[str, Any], dict[str, str]]:
    """The columns of a row by their own names: values without the prompt, and what the columns of media hold: one or several.

    >>> own_columns({"problem": "Where?", "solution": [0, 0, 4, 4], "photo": "a.png"}, ColumnKeys(image_key="photo"))
    ({'problem': 'Where?', 'solution': [0, 0, 4, 4]}, {'photo': 'image'})
    >>> own_columns({"problem": "Where?", "images": '["a.png", "b.png"]'})
    ({'problem': 'Where?'}, {'images': 'images'})
    """
    media = {}
    for kind, column in MEDIA.items():
        key = getattr(keys, f"{kind}_key")
        held = [name for name in ([key] if key else [column, kind]) if raw.get(name) is not None]
        read = next((name for name in held if media_list(raw[name]) and not row_values.is_blank(raw[name])), None)
        if read is not None:
            listed = isinstance(raw[read], row_values.LISTS) or row_values.json_list(raw[read]) is not None
            media[read] = column if listed and read != "video" else kind
    left_out = {"prompt", "messages", "conversations", keys.messages_key, *row_values.MEDIA_COLUMNS, *media}
    return {name: value for name, value in raw.items() if name not in left_out}, media
