"""Which rollouts a reader asks for, and in which order."""

import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dataproto.errors import InvalidConfig

Row = Mapping[str, Any]
Test = Callable[[Row], bool]

NUMBERS = ("step", "sample", "reward", "length", "mismatch", "truncated")
TEXTS = {
    "uid": ("uid",),
    "source": ("source",),
    "prompt": ("prompt",),
    "response": ("response",),
    "truth": ("ground_truth",),
    "text": ("uid", "prompt", "response", "ground_truth"),
}
COMPARISONS = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
COMPARISON = re.compile(r"([A-Za-z_][\w/.-]*)(>=|<=|!=|=|>|<)([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def value_of(row: Row, field: str) -> float | str | None:
    """The value of a field: a number, a part of the reward, or the uid."""
    return row[field] if field in NUMBERS or field == "uid" else row["parts"].get(field)


def fields_of(rows: Iterable[Row]) -> list[str]:
    """The fields that rows can be compared and sorted by, except for the uid."""
    return [*NUMBERS, *dict.fromkeys(name for row in rows for name in row["parts"])]


def matching(rows: list[Row], text: str) -> list[Row]:
    """The rows that match all terms of a filter.

    A term is a comparison (``reward>0.5``, ``acc=0``), a text in one field (``uid:7``, ``response:"x = 3"``), or a text that the
    uid, the prompt, the response or the ground truth contains. Upper and lower case are equal. A row without a value matches no
    comparison.

    Raises:
        InvalidConfig: a quotation mark is not closed, or a comparison names no field.

    >>> rows = [{"step": 1, "reward": r, "length": 2, "mismatch": None, "uid": "a", "prompt": "", "response": "Yes", "parts": {},
    ...          "sample": 0, "truncated": False, "ground_truth": ""} for r in (0.0, 1.0)]
    >>> [row["reward"] for row in matching(rows, "reward>=0.5 yes")], matching(rows, "mismatch<1")
    ([1.0], [])
    """
    try:
        terms = shlex.split(text)
    except ValueError as error:
        raise InvalidConfig(f"filter {text!r}: {error}") from error
    known = fields_of(rows)
    tests = [_test(term, known) for term in terms]
    return [row for row in rows if all(test(row) for test in tests)]


def in_order(rows: list[Row], field: str, descending: bool) -> list[Row]:
    """The rows sorted by a field; rows without a value come last, and equal ones stay in their order.

    Raises:
        InvalidConfig: there is no such field.
    """
    if field != "uid" and field not in (known := fields_of(rows)):
        raise InvalidConfig(f"no field {field!r} to sort by: choose one of uid, {', '.join(known)}")
    having = [row for row in rows if value_of(row, field) is not None]
    lacking = [row for row in rows if value_of(row, field) is None]
    return sorted(having, key=lambda row: value_of(row, field), reverse=descending) + lacking  # type: ignore[arg-type,return-value]


def _test(term: str, known: list[str]) -> Test:
    if match := COMPARISON.fullmatch(term):
        field, sign, number = match.groups()
        if field not in known:
            raise InvalidConfig(
                f"no field {field!r} to compare: choose one of {', '.join(known)}; or search for text:{term}"
            )
        return _comparison(field, COMPARISONS[sign], float(number))
    name, colon, wanted = term.partition(":")
    fields = TEXTS.get(name) if colon else None
    return _contains(*(("text", term) if fields is None else (name, wanted)))


def _comparison(field: str, compare: Callable[[Any, Any], bool], number: float) -> Test:
    def test(row: Row) -> bool:
        value = value_of(row, field)
        return value is not None and compare(value, number)

    return test


def _contains(name: str, wanted: str) -> Test:
    lowered = wanted.lower()
    return lambda row: any(lowered in row[field].lower() for field in TEXTS[name])
