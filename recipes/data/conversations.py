"""Data sets of conversations for supervised training, in any of these schemas.

* chat messages: ``messages`` (or ``conversations`` with ``from`` and ``value``, as in ShareGPT and LLaVA), with string content
  and ``<image>`` markers, or with typed parts (``image``, ``image_url``)
* prompt and answer: ``prompt`` (a string or messages) with ``completion``, ``response`` or ``answer``
* the_cauldron: ``images``, and ``texts`` with ``user``, ``assistant`` and ``source``: one conversation about all images
* alpaca: ``instruction``, ``input``, ``output``; ms-swift: ``query``, ``response``
* any other, whose columns a `ColumnKeys` names

In each of them ``tools``, ``system`` and ``history`` are read (`recipes.data.row_values`).

Images are in ``images`` (or ``image``) or in the parts: PIL objects, bytes, paths or data URIs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

from dataproto.errors import InvalidRow, raised_as
from recipes.data import row_values
from recipes.data.column_keys import KNOWN, ColumnKeys, why_lacking
from recipes.data.tables import ConvertedRows, open_rows, open_stream
from rollout.prompts import invalid_row
from rollout.prompts.messages import LEARNED, as_parts, has_some, with_markers

_QUESTIONS = ("messages", "conversations", "texts", "prompt")
_ANSWERS = ("completion", "response", "answer")
_OTHERS = (*row_values.MEDIA_COLUMNS, "data_source", *row_values.CONTEXT_COLUMNS)
CONVERSATION_COLUMNS = (*_QUESTIONS, *_ANSWERS, *_OTHERS)
"""The columns that `read_conversation_row` knows."""


def read_conversation_row(
    raw: Mapping[str, Any], index: int, data_source: str = "", keys: ColumnKeys = KNOWN
) -> dict[str, Any]:
    """Converts a row of any schema to ``prompt`` (the whole conversation), ``images``, ``videos``, ``audios``, ``data_source``,
    ``index``.

    Raises:
        InvalidRow: the row matches none of the schemas.

    >>> row = read_conversation_row({"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A cat."}]}, 0)
    >>> row["prompt"]
    [{'role': 'user', 'content': '<image>What?'}, {'role': 'assistant', 'content': 'A cat.'}]
    """
    raw, _, media = row_values.known_row(raw, index, keys)
    prompt, texts = row_values.with_context(_messages(raw, index, media), raw, index), raw.get("texts")
    source = texts[0].get("source") if isinstance(texts, row_values.LISTS) and len(texts) else None
    return row_values.shown_columns(prompt, raw, media, index, source or data_source)


conversation_rows = partial(open_rows, read_conversation_row)
"""Opens a data set of conversations; see `recipes.data.tables.open_rows` and `read_conversation_row`."""
conversation_stream = partial(open_stream, read_conversation_row)
"""Opens a data set of conversations as a stream; see `recipes.data.tables.open_stream`."""


def _messages(raw: Mapping[str, Any], index: int, media: Mapping[str, list[Any]]) -> list[Any]:
    if raw.get("texts") is not None:
        return _cauldron_messages(raw["texts"], index, media)
    if (turns := row_values.first_of(raw, ("messages", "conversations"))) is not None:
        return row_values.chat_messages(turns, index)
    prompt, answer = raw.get("prompt"), row_values.first_of(raw, _ANSWERS)
    if prompt is None or answer is None:
        known = "no 'messages', 'conversations', 'texts', or 'prompt' with an answer"
        way_out = "name yours by --messages-key, or by --prompt-key and --answer-key"
        lacking = f"{known}, among its columns {sorted(raw)}: {way_out}"
        raise InvalidRow(index, why_lacking(raw, _QUESTIONS if prompt is None else _ANSWERS, lacking))
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = row_values.chat_messages(turns, index)
    context = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in asked]
    answers = answer_messages(answer, index)
    if answers[0]["role"] == "assistant":
        row_values.check_answerable(asked, index)
    return context + answers


def answer_messages(answer: Any, index: int) -> list[Mapping[str, Any]]:
    """The messages of an answer: text, a number, typed parts, a message or several."""
    if isinstance(answer, Mapping):
        answer = [answer]
    if isinstance(answer, row_values.LISTS) and len(answer) and all(isinstance(part, Mapping) for part in answer):
        typed = all(part.get("type") and "role" not in part for part in answer)
        return [{"role": "assistant", "content": list(answer)}] if typed else row_values.chat_messages(answer, index)
    text = row_values.plain_answer(answer)
    if not isinstance(text, str | Number):
        raise InvalidRow(index, f"the answer must be text, a number or messages, not {answer!r}")
    return [{"role": "assistant", "content": str(text)}]


def _cauldron_messages(texts: Any, index: int, media: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The messages of a row; all of its media come before the first question."""
    messages = []
    for number, turn in enumerate(texts if isinstance(texts, row_values.LISTS) else [texts]):
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(who), str) for who in ("user", "assistant")):
            raise InvalidRow(index, f"texts[{number}] lacks a 'user' or an 'assistant': {turn!r}")
        messages.append({"role": "user", "content": with_markers(turn["user"].strip(), {} if number else media)})
        messages.append({"role": "assistant", "content": turn["assistant"].strip()})
    return messages


def last_questions(rows: Sequence[Mapping[str, Any]], written: Callable[[Mapping[str, Any]], str]) -> ConvertedRows:
    """Conversations as prompts: each up to its last answer, which becomes the ground truth; what follows it is left out.

    Args:
        written: the last answer of a row as a model writes it, for one that calls tools.

    >>> talk = {"prompt": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    >>> row = last_questions([talk], written=repr)[0]
    >>> row["prompt"], row["reward_model"]["ground_truth"]
    ([{'role': 'user', 'content': '2 + 2?'}], '4')
    """
    return ConvertedRows(rows, partial(_question, written))


def _question(written: Callable[[Mapping[str, Any]], str], row: Mapping[str, Any], place: int) -> dict[str, Any]:
    answered = [at for at, message in enumerate(row["prompt"]) if message.get("role") == "assistant"]
    if not answered:
        raise invalid_row(row, place, "the conversation must contain an answer")
    *asked, answer = row["prompt"][: answered[-1] + 1]
    said = answer.get("content")
    bad = partial(invalid_row, row, place)
    with raised_as(bad, f"the answer must be text or parts of text, not {said!r}", TypeError, AttributeError):
        truth = "".join(part.get("text") or "" for part in as_parts("" if said is None else said))
    if has_some(answer, "tool_calls"):
        shown = {name: value for name, value in answer.items() if name not in LEARNED}  # it may be for context only
        truth = written({**row, "prompt": [*asked, shown]})
    return {**row, "prompt": asked, "reward_model": {"style": "exact", "ground_truth": truth.strip()}}
