"""Data sets of preferred answers, in any of these schemas.

* TRL: ``prompt``, ``chosen`` and ``rejected`` (text or messages), or two whole conversations ``chosen`` and ``rejected`` with the
  same beginning, which a ``prompt`` may repeat; without a partner ``prompt``, ``completion`` and ``label``
* LLaMA-Factory: ``conversations`` or ``messages`` (or ``instruction`` and ``input``) with ``chosen`` and ``rejected``; without a
  partner conversations that end with an answer (or ``output``), and ``kto_tag``

Questions, media, ``tools``, ``system`` and ``history`` are read as in `recipes.data.conversations`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dataproto.errors import InvalidRow
from recipes.data import row_values
from recipes.data.column_keys import KNOWN, ColumnKeys, why_lacking
from recipes.data.conversations import CONVERSATION_COLUMNS, answer_messages
from recipes.data.tables import open_rows
from rollout.prompts.messages import MARKERS

_LABELS = ("label", "kto_tag")
_MEANINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text; pandas writes floats where a label is missing elsewhere."""
PREFERENCE_COLUMNS = ("chosen", "rejected", *_LABELS, *CONVERSATION_COLUMNS)
"""The columns that `read_preference_row` knows."""


def read_preference_row(
    raw: Mapping[str, Any], index: int, data_source: str = "", keys: ColumnKeys = KNOWN
) -> dict[str, Any]:
    """Converts a row of any schema to ``prompt``, ``answers`` (messages of each), ``labels`` (whether each is desirable),
    ``images``, ``videos``, ``audios``, ``data_source`` and ``index``. Of a pair the chosen answer is the first.

    Raises:
        InvalidRow: the row matches none of the schemas.

    >>> row = read_preference_row({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, 0)
    >>> row["prompt"], [answer[0]["content"] for answer in row["answers"]], row["labels"]
    ([{'role': 'user', 'content': '2 + 2?'}], ['4', '5'], (True, False))
    >>> read_preference_row({"prompt": "2 + 2?", "completion": "5", "label": False}, 0)["labels"]
    (False,)
    """
    raw, _, media = row_values.known_row(raw, index, keys)
    prompt, answers, labels = _answered(raw, index)
    for name, answer in zip(("chosen", "rejected") if len(answers) == 2 else ("answer",), answers):
        if any(_shows_media(message.get("content")) for message in answer):
            reason = f"{name!r} has a marker or a part of a medium, but media belong to the question, which both answers share"
            raise InvalidRow(index, f"{reason}: move it there (a part of text may say '<image>')")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    prompt = row_values.with_context(row_values.chat_messages(prompt, index), raw, index)
    row_values.check_answerable(prompt, index)
    return row_values.shown_columns(prompt, raw, media, index, data_source) | {
        "answers": [[_without_blanks(message) for message in answer] for answer in answers],
        "labels": labels,
    }


preference_rows = partial(open_rows, read_preference_row)
"""Opens a data set of preferred answers; see `recipes.data.tables.open_rows` and `read_preference_row`."""


def _without_blanks(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose blank text is empty, so that its row is refused as one without an answer."""
    return {**message, "content": ""} if row_values.is_blank(message.get("content")) else message


def _shows_media(content: Any) -> bool:
    if isinstance(content, str):
        return MARKERS.search(content) is not None
    parts = content if isinstance(content, row_values.LISTS) else ()  # what is neither is refused where it is read
    return any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts)


Answers = list[list[Mapping[str, Any]]]


def _answered(raw: Mapping[str, Any], index: int) -> tuple[Any, Answers, tuple[bool, ...]]:
    """The question, the messages of each answer, and whether each is desirable."""
    asked, label = row_values.first_of(raw, ("prompt", "messages", "conversations")), row_values.first_of(raw, _LABELS)
    pair = [name for name in ("chosen", "rejected") if raw.get(name) is not None]
    if len(pair) == 1 and label is None:
        raise InvalidRow(index, f"{pair[0]!r} has no partner: a pair has 'chosen' and 'rejected', one answer a 'label'")
    if len(pair) == 2:
        chosen, rejected = (answer_messages(raw[name], index) for name in pair)
        if asked is None or min(len(chosen), len(rejected)) > 1:
            asked, chosen, rejected = _split_conversations(asked, chosen, rejected, index)
        return asked, [chosen, rejected], (True, False)
    if label is None or asked is None:
        lacking = "no question with 'chosen' and 'rejected', or with an answer and 'label' or 'kto_tag'"
        if asked is not None and (empty := next((name for name in _LABELS if name in raw), None)):
            raise InvalidRow(index, f"{empty!r} holds nothing, but must be true or false")
        raise InvalidRow(index, why_lacking(raw, ("chosen", "rejected"), f"{lacking}, in {sorted(raw)}"))
    answer = row_values.first_of(raw, ("completion", "response", "answer"))
    if answer is None and not isinstance(asked, str):
        *asked, answer = row_values.chat_messages(asked, index) or [{}]
    if answer is None or not asked:
        raise InvalidRow(index, f"no answer that the label is about, among its columns {sorted(raw)}")
    meanings = {_MEANINGS.get(str(raw[name]).strip().lower()) for name in _LABELS if raw.get(name) is not None}
    if None in meanings:
        raise InvalidRow(index, f"the label must be true or false, or 1 or 0, not {label!r}")
    if len(meanings) > 1:
        raise InvalidRow(index, "'label' and 'kto_tag' contradict each other: leave one of them out")
    return asked, [answer_messages(answer, index)], tuple(map(bool, meanings))


def _split_conversations(asked: Any, chosen: Any, rejected: Any, index: int) -> tuple[Any, Any, Any]:
    """The common beginning of two conversations, which the question repeats if there is one, and the last message of each."""
    *shared, good = chosen
    if not shared or shared != rejected[:-1]:
        way_out = "" if asked is not None else ": add a 'prompt', or name the column of the question by --prompt-key"
        reason = "'chosen' and 'rejected' are no conversations that differ in the last message only"
        raise InvalidRow(index, reason + way_out)
    if asked is not None and not _repeats(asked, shared, index):
        raise InvalidRow(
            index, "'chosen' and 'rejected' begin with another question than the row has: leave one of them out"
        )
    return shared, [good], rejected[-1:]


def _repeats(asked: Any, shared: list[Mapping[str, Any]], index: int) -> bool:
    """Whether messages begin with the shared ones, or text is that of a shared one."""
    if isinstance(asked, str):
        return any(asked.strip() == str(row_values.plain_answer(message.get("content"))).strip() for message in shared)
    return row_values.chat_messages(asked, index)[: len(shared)] == shared
