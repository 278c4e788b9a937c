"""Values of rows as data sets write them: JSON as text, turns under other names, answers in messages, templates of questions.

Also the columns that several schemas share: ``system``, which becomes the first message, ``history``, whose turns come before the
question, and a question in two columns.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime
from functools import cache
from itertools import islice
from math import isnan
from numbers import Number
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dataproto.errors import InvalidConfig, InvalidRow, raised_as
from recipes.data.column_keys import KNOWN, QUESTIONS, STREAM_HEAD, ColumnKeys, columns_of
from recipes.data.tables import JsonStream
from rollout.prompts.messages import MEDIA, VIDEO_SOUND, with_media
from rollout.prompts.sources import media_list

_TURNS = ("prompt", "messages", "conversations", "chosen", "rejected")
_CHATS = (*_TURNS, "completion", "response", "answer", "solution")
_BOX_MARKS = re.compile("<(bbox|ref-object)>")
"""What ms-swift replaces by a row's ``objects``."""
MEDIA_COLUMNS = tuple(name for kind, column in MEDIA.items() for name in (column, kind))
"""The columns of media, of several and of one."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")
_OBJECTS = ("reward_model", "extra_info")
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool"}
_CALLS = ("function_call", "tool_call")  # roles of turns of the assistant that are the JSON of a call, or of several
_OWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2", ".txt")
LISTS = (list, tuple, np.ndarray)
"""What a value that is several may be."""
_PAIRS = {"instruction": "output", "query": "response"}
"""Columns of a question and of its answer: of alpaca, and of ms-swift."""
CONTEXT_COLUMNS = ("tools", "system", "history")
"""The columns that are read in each schema."""


def known_row(
    raw: Mapping[str, Any], index: int, keys: ColumnKeys = KNOWN
) -> tuple[dict[str, Any], ColumnKeys, dict[str, list[Any]]]:
    """A row under the names that the readers know, what is JSON as text parsed; the keys that apply to it; and its media.

    Raises:
        InvalidRow: the row lacks the column of the question that ``keys`` names, or its text has marks of ms-swift's for
            ``objects``, which would be learned; or as `parsed_row`.
    """
    keys = keys_of_row(raw, keys)
    row = parsed_row(keys.rename(whole_question(raw, keys, index), index), index)
    if row.get("objects") is not None and (mark := _BOX_MARKS.search(repr([row.get(name) for name in _TURNS]))):
        raise InvalidRow(
            index, f"{mark[0]} stands for what 'objects' holds, which is not read: write it in the text itself"
        )
    return row, keys, row_media(row, index)


def row_media(raw: Mapping[str, Any], index: int) -> dict[str, list[Any]]:
    """The media of a row by their kinds: of each kind those in its column of several, a list or one medium, or, if that is
    missing, in that of one: there a list is several images or sounds, but the frames of one video.

    Raises:
        InvalidRow: both columns have media.
    """
    found = {}
    for kind, column in MEDIA.items():
        one, several = raw.get(kind), media_list(raw.get(column))
        if several and media_list(one):
            raise InvalidRow(index, f"both {kind!r} and {column!r} have {column}: name the one to read by --{kind}-key")
        found[kind] = several or ([one] if kind == "video" and one is not None else media_list(one))
    return found


def shown_columns(
    prompt: Sequence[Any], raw: Mapping[str, Any], media: Mapping[str, list[Any]], index: int, data_source: str
) -> dict[str, Any]:
    """The columns that rows of all schemas have, as `rollout.prompts.PromptBuilder` reads them.

    Raises:
        InvalidRow: a message of the user is empty.
    """
    prompt = with_media(prompt, media)
    for message in prompt:
        if message.get("role") == "user":
            check_question(message.get("content"), index)
    row: dict[str, Any] = {"prompt": prompt, **{MEDIA[kind]: found for kind, found in media.items()}}
    row |= {"data_source": raw.get("data_source") or data_source, "index": index}
    return row | {name: raw[name] for name in ("tools", VIDEO_SOUND) if raw.get(name) is not None}


def check_question(content: Any, index: int) -> None:
    """Raises `InvalidRow` for a question without text and media."""
    said = plain_answer(content)
    if said is None or is_blank(said) or (isinstance(said, LISTS) and not len(said)):
        raise InvalidRow(index, "the question is empty: fill it in, or name its column by --prompt-key")


def check_answerable(prompt: Sequence[Mapping[str, Any]], index: int) -> None:
    """Raises `InvalidRow` for a question that ends with a message of the assistant, as a beginning of the answer does."""
    if prompt and prompt[-1].get("role") == "assistant":
        raise InvalidRow(
            index, "the prompt ends with a message of the assistant, which no answer can follow: leave it out"
        )


def first_of(raw: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these columns that has one; a blank text only where no other has one.

    >>> first_of({"answer": " ", "solution": "9"}, ("answer", "solution")), first_of({"answer": ""}, ("answer", "solution"))
    ('9', '')
    """
    found = [raw[name] for name in names if raw.get(name) is not None]
    return next((each for each in found if not isinstance(each, str) or each.strip()), found[0] if found else None)


def parsed_row(raw: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A row in which what is JSON as text is what it says, and NaN, which pandas writes where there is nothing, is ``None``.

    Messages, lists of media, ``history``, ``reward_model`` and ``extra_info`` may be JSON as text.

    Raises:
        InvalidRow: ``reward_model`` or ``extra_info`` is no mapping, or the text of messages is not JSON.

    >>> parsed_row({"images": '["a.png"]', "reward_model": '{"ground_truth": 3}', "answer": float("nan")}, 0)
    {'images': ['a.png'], 'reward_model': {'ground_truth': 3}, 'answer': None}
    """
    row = {name: None if isinstance(value, float) and isnan(value) else value for name, value in raw.items()}
    for name in _CHATS:
        text = row.get(name)
        items = json_list(text)
        if items and all(isinstance(item, dict) and _is_turn(item) for item in items):
            row[name] = items
        elif items is None and name in _TURNS and isinstance(text, str) and _MESSAGES.match(text):
            raise InvalidRow(index, f"{name!r} looks like messages, but is not JSON: {text[:200]}")
    for name in (*MEDIA_COLUMNS, "history"):
        items, blank = json_list(row.get(name)), is_blank(row.get(name))
        row |= {name: items} if items is not None else {name: None} if blank else {}
    for name in _OBJECTS:
        value = row.get(name)
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                row[name] = value = json.loads(value) if value.strip() else None
        if value is not None and not isinstance(value, Mapping):
            raise InvalidRow(index, f"{name!r} must be an object, or the JSON of one, not {value!r}")
    return row


def json_list(value: Any) -> list[Any] | None:
    """The list whose JSON a text is, else `None`."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return list(json.loads(value))
    return None


def is_blank(value: Any) -> bool:
    """Whether a value is a text without a sign, which tables of text have where there is nothing."""
    return isinstance(value, str) and not value.strip()


def _is_turn(item: Mapping[str, Any]) -> bool:
    return "role" in item or "from" in item


def chat_messages(turns: Any, index: int) -> list[Mapping[str, Any]]:
    """Messages of turns that have ``role`` and ``content``, or ``from`` and ``value`` as in ShareGPT, LLaVA and VLM-R1.

    Turns ``function_call`` (LLaMA-Factory) and ``tool_call`` (ms-swift) become ``tool_calls`` of the assistant.

    Raises:
        InvalidRow: a turn is no mapping, its role is unknown, or its call is not JSON.

    >>> chat_messages([{"from": "human", "value": "<image>?"}, {"from": "function_call", "value": '{"name": "zoom"}'}], 0)[1]
    {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': {'name': 'zoom', 'arguments': {}}}]}
    """
    if isinstance(turns, str) or not isinstance(turns, (Sequence, np.ndarray)):
        way_out = " (--prompt-key names a column of text)" if isinstance(turns, str) else ""
        raise InvalidRow(index, f"the messages must be a list{'' if way_out else ', or text'}, not {turns!r}{way_out}")
    return [_message(turn, index) for turn in turns]


def _message(turn: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping):
        raise InvalidRow(index, f"a turn must be a mapping, not {turn!r}")
    who, said = first_of(turn, ("from", "role")), first_of(turn, ("value", "content"))
    kept = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if who in _CALLS:
        return kept | {"role": "assistant", "content": "", "tool_calls": _tool_calls(said, who, index)}
    role = _ROLES.get(str(who), who)
    if role not in _OWN_ROLES:
        known = ", ".join((*_ROLES, *_CALLS, *_OWN_ROLES))
        raise InvalidRow(index, f"a turn is from {who!r}, but must be from one of {known}: rename the role")
    return kept | {"role": role, "content": said}


def _tool_calls(said: Any, who: str, index: int) -> list[dict[str, Any]]:
    calls = []
    try:
        found = json.loads(said) if isinstance(said, str) else said
        for call in found if isinstance(found, list) else [found]:
            arguments = call.get("arguments") or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        form = '{"name": ..., "arguments": {...}}, or a list of them'
        raise InvalidRow(index, f"a turn of {who!r} must be the JSON of {form}, not {said!r}") from error
    return calls


def plain_answer(answer: Any) -> Any:
    """An answer that is a message, or typed parts of text, as its text, and a date as JSON has it; other values as they are.

    >>> plain_answer({"role": "assistant", "content": "3"}), plain_answer([{"type": "text", "text": "3"}]), plain_answer([1, 2])
    ('3', '3', [1, 2])
    """
    items = list(answer) if isinstance(answer, LISTS) else [answer]
    if len(items) == 1 and isinstance(items[0], Mapping) and _is_turn(items[0]):
        return plain_answer(items[0].get("content" if "role" in items[0] else "value"))
    if items and all(isinstance(item, Mapping) and item.get("type") == "text" for item in items):
        return "".join(str(item.get("text") or "") for item in items)
    if isinstance(answer, datetime) and answer.time() == datetime.min.time():
        answer = answer.date()
    return answer.isoformat() if isinstance(answer, date) else answer


def read_instruction(instruction: str) -> str:
    """An instruction, or what the file has that it names.

    Raises:
        InvalidConfig: there is no such file, or it holds a template that cannot be rendered.
    """
    named = instruction.strip()
    if len(named.split()) == 1 and len(named) < 256 and (Path(named).is_file() or named.endswith(_TEMPLATE_FILES)):
        with raised_as(InvalidConfig, f"--instruction {named} cannot be read", OSError, UnicodeDecodeError):
            instruction = Path(named).read_text(encoding="utf-8").strip()
    with raised_as(InvalidConfig, "--instruction: the template cannot be rendered", jinja2.TemplateError):
        instructed("", instruction)
    return instruction


def instructed(question: str, instruction: str) -> str:
    """A question followed by an instruction; or within it, if that is a template of jinja with ``content``, as EasyR1's.

    >>> instructed("2 + 2?", "Think first."), instructed("2 + 2? ", "{{ content | trim }} Think first.")
    ('2 + 2? Think first.', '2 + 2? Think first.')
    """
    if re.search(r"\{[{%][^}]*\bcontent\b", instruction):
        return _template(instruction).render(content=question)
    return f"{question} {instruction}".strip()


@cache
def _template(text: str) -> jinja2.Template:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(text)


def keys_of_row(raw: Mapping[str, Any], keys: ColumnKeys) -> ColumnKeys:
    """``keys``, and where they and the row name no other question, those of alpaca's or ms-swift's columns.

    >>> keys_of_row({"instruction": "Add.", "input": "2 + 2", "output": "4"}, ColumnKeys())
    ColumnKeys(prompt_key='instruction', messages_key=None, answer_key='output', image_key=None, video_key=None, audio_key=None)
    """
    if keys.prompt_key or keys.messages_key or any(raw.get(name) is not None for name in QUESTIONS):
        return keys
    for question, answer in _PAIRS.items():
        if isinstance(raw.get(question), str):
            return replace(keys, prompt_key=question, answer_key=keys.answer_key or (answer if answer in raw else None))
    return keys


def whole_question(raw: Mapping[str, Any], keys: ColumnKeys, index: int) -> Mapping[str, Any]:
    """The row with alpaca's ``input`` in its own line after the ``instruction``. Raises `InvalidRow` if it is no text or number.

    >>> whole_question({"instruction": "Add.", "input": "2 + 2"}, ColumnKeys(prompt_key="instruction"), 0)["instruction"]
    'Add.\\n2 + 2'
    """
    more = raw.get("input")
    if keys.prompt_key != "instruction" or more is None or is_blank(more):
        return raw
    if not isinstance(more, str | Number):
        raise InvalidRow(index, f"'input' must be text or a number, not {more!r}: write it into the instruction")
    if more != more:  # NaN: what pandas writes where there is nothing
        return raw
    return {**raw, "instruction": f"{raw['instruction']}\n{more}"}


def conversation(turns: Sequence[str], source: str, place: int, images: Sequence[Any] = ()) -> dict[str, Any]:
    """A row for `rollout.prompts.SupervisedBuilder`, of turns of the user and of the assistant."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    return {"prompt": messages, "images": list(images), "data_source": source, "index": place}


def with_context(messages: Sequence[Any], raw: Mapping[str, Any], index: int) -> list[Any]:
    """The messages after the row's ``system`` text and the turns of its ``history``.

    Raises:
        InvalidRow: ``system`` is no text, or the messages have another one; ``history`` is no list of questions and answers.

    >>> raw = {"system": "Be brief.", "history": [["1 + 1?", "2"]]}
    >>> [message["content"] for message in with_context([{"role": "user", "content": "2 + 2?"}], raw, 0)]
    ['Be brief.', '1 + 1?', '2', '2 + 2?']
    """
    earlier: list[Any] = []
    history = raw.get("history")
    for turn in history if isinstance(history, LISTS) else [history] if history else []:
        if not isinstance(turn, LISTS) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise InvalidRow(index, f"'history' must be a list of [question, answer], not {raw['history']!r}")
        earlier += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    own = [each for each in messages if isinstance(each, Mapping) and each.get("role") in ("system", "developer")]
    first = own[:1] if own and own[0] is messages[0] else []
    messages = [*first, *earlier, *messages[len(first) :]]
    system = raw.get("system")
    if system is None or is_blank(system):
        return messages
    if not isinstance(system, str):
        raise InvalidRow(index, f"'system' must be text, not {system!r}")
    if not own:
        return [{"role": "system", "content": system}, *messages]
    if len(own) > 1 or own != first or own[0] != {**own[0], "role": "system", "content": system}:
        kind = own[-1]["role"]
        raise InvalidRow(index, f"the row has a 'system' column and another {kind} message: leave one of them out")
    return messages


def present_columns(rows: Any) -> list[str]:
    """The columns of `TableRows` or `StreamRows`; other rows have none."""
    return list(dict.fromkeys(name for names in _columns_of_rows(rows) for name in names))


def columns_left_out(rows: Any, known: Collection[str], keys: ColumnKeys) -> list[str]:
    """The columns of a data set that no reader takes.

    Args:
        rows: with ``tables`` or a ``stream``, see `recipes.data.tables`; others have no columns.
        known: what the reader of the schema knows.
    """
    left_out = dict[str, None]()
    for names in _columns_of_rows(rows):
        of_row = keys_of_row(dict.fromkeys(names, ""), keys)
        read = of_row.read_of(known) | ({"input"} if of_row.prompt_key == "instruction" else set())
        left_out |= dict.fromkeys(name for name in names if name not in read)
    return list(left_out)


def _columns_of_rows(rows: Any) -> Iterator[Sequence[str]]:
    """The columns of each table, or of its first rows where they may differ; of a stream of pictures those of its first row."""
    for table in [table.rows for table in rows.tables] if hasattr(rows, "tables") else [getattr(rows, "stream", [])]:
        local = hasattr(table, "__len__") or isinstance(table, JsonStream)
        yield from islice(columns_of(table), STREAM_HEAD if local else 1)
