"""The reward of Geometry3K."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataproto.errors import RewardError
from recipes.rewards.checking import AnswerChecker, default_checker
from workers.roles.reward import RewardRow

FORMAT_WEIGHT = 0.1

_WORD = (
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?"
    r"(?:[mcdk]?m|in|ft|yd|mi|inch(?:es)?|foot|feet|yards?|miles?|(?:milli|centi|deci|kilo)?met(?:er|re)s?|units?|degrees?)"
)
_SPACE, _POWER = r"(?:\s|~|\\[,;:!\s])", r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
_UNIT = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|[°º])\.?\s*$"
    rf"|{_SPACE}*\\(?:text|textrm|mathrm)\s*\{{[\s~]*(?:{_WORD}|[°º])\.?\s*\}}{_POWER}\.?\s*$"
    rf"|{_SPACE}+{_WORD}{_POWER}\.?\s*$"
)
"""A unit at the end of an answer: degrees, lengths, areas and volumes, as models and ground truths write them."""
_LONGEST_UNIT = 60  # characters
_NOT_OF_A_UNIT = re.compile(r"[\s\\,;:!~{}^.°º]|text(?:rm)?|mathrm|circ|degrees?")


def geo3k_reward(rows: Sequence[RewardRow], checker: AnswerChecker | None = None) -> list[dict[str, float]]:
    r"""Geometry3K: ``score`` = 0.9 ``acc`` + 0.1 ``format``, as in verl (``verl/utils/reward_score/geo3k.py``) and EasyR1
    (``examples/reward_function/math.py``).

    ``acc`` is 1 if mathruler finds the content of the last ``\boxed{}`` equal to the ground truth, else 0. A unit or a degree
    sign that only one of the two has does not count, nor that the minus of the truth is a typographic one; see `without_unit`.
    (mathruler, and so verl, ignores some units; there an answer with a hyphen never equals such a truth.) A comparison that
    exceeds the time limit of the checker counts as wrong; see `AnswerChecker`.

    Args:
        rows: the responses and their ground truths.
        checker: compares the answers; by default `default_checker`.

    Returns:
        ``score``, ``acc`` and ``format`` of each row.

    Raises:
        RewardError: a row has no ground truth, or a list or mapping, with whose text no answer would agree.
    """
    pairs: list[tuple[str, str] | None] = []
    for number, row in enumerate(rows):
        try:
            check_truth(row.ground_truth)
        except RewardError as error:
            raise RewardError(f"row {number}{f' (uid {row.uid})' if row.uid else ''}: {error}") from error
        answer = boxed_answer(row.solution_str)
        pairs.append(None if answer is None else without_unit(answer, truth_text(row.ground_truth)))
    boxed = [pair for pair in pairs if pair is not None]
    correct = dict(zip(boxed, (checker or default_checker())(boxed), strict=True))
    results = []
    for pair, row in zip(pairs, rows, strict=True):
        acc, form = float(pair is not None and correct[pair]), format_score(row.solution_str)
        results.append({"score": (1 - FORMAT_WEIGHT) * acc + FORMAT_WEIGHT * form, "acc": acc, "format": form})
    return results


def check_truth(truth: Any) -> None:
    """Raises `RewardError` for a ground truth with which no answer can be compared."""
    if isinstance(truth, (Mapping, Sequence, np.ndarray)) and not isinstance(truth, str):
        raise RewardError(
            f"the ground truth {truth!r} is not one answer, as text or a number; for several right answers write a reward "
            "function of your own"
        )
    if truth is None or truth != truth or not str(truth).strip():
        raise RewardError(
            "there is no ground truth to compare the answer with: name its column by --answer-key, or give a --reward that needs "
            "none"
        )


def truth_text(truth: Any) -> str:
    r"""The answer in a ground truth: within ``<answer>`` tags, after ``####`` as in GSM8K, or in the last ``\boxed{}``.

    >>> truth_text("<answer> 3 </answer>"), truth_text("1 + 2 = 3 #### 3"), truth_text(r"So \boxed{3}."), truth_text(3)
    ('3', '3', '3', '3')
    """
    text = str(truth)
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    text = (tagged[-1] if tagged else text).rpartition("####")[2]
    boxed = boxed_answer(text)
    return (text if boxed is None else boxed).strip()


def without_unit(answer: str, truth: str) -> tuple[str, str]:
    r"""An answer and a ground truth without their units, unless their units differ. A typographic minus (U+2212) of the truth
    may be a hyphen in the answer.

    >>> without_unit("65°", "65"), without_unit("12", "12 cm"), without_unit("12 m", "12 cm")
    (('65', '65'), ('12', '12'), ('12 m', '12 cm'))
    """
    if "\N{MINUS SIGN}" in truth:  # which no answer with a hyphen equals
        answer, truth = (text.replace("\N{MINUS SIGN}", "-") for text in (answer, truth))
    found = [_UNIT.search(text[-_LONGEST_UNIT:]) for text in (answer, truth)]
    if len({_NOT_OF_A_UNIT.sub("", unit[0]) for unit in found if unit}) > 1:
        return answer, truth
    plain = [
        text[: len(text) - len(unit[0])] if unit else text for text, unit in zip((answer, truth), found, strict=True)
    ]
    return plain[0], plain[1]


def boxed_answer(response: str) -> str | None:
    r"""The content of the last ``\boxed{}``, or `None` without one.

    >>> boxed_answer(r"<think>90 - 25</think> \boxed{65}")
    '65'
    """
    from mathruler.grader import extract_boxed_content

    found: str = extract_boxed_content(response)
    return None if found == "None" else found  # what mathruler returns for a response without a box


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    r"""`geo3k_reward` of one response, with verl's signature.

    >>> compute_score("hiyouga/geometry3k", r"<think>90 - 25</think> \boxed{65}", "65")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    return geo3k_reward([RewardRow(solution_str, ground_truth, data_source, extra_info)])[0]


def format_score(response: str) -> float:
    r"""1 if the whole response has the form ``<think>...</think>...\boxed{...}...``, else 0.

    White space around ``<``, ``>`` and ``/`` is ignored, as in EasyR1 (verl does not ignore it). The result equals a full match
    of ``<think>.*</think>.*\\boxed\{.*\}.*`` in which dots match all characters, but takes linear time; the regular expression
    takes cubic time on hostile responses.

    >>> [format_score(each) for each in (r"<think>so</think> \boxed{9}", r"< think >so</ think> \boxed{9}", r"\boxed{9}")]
    [1.0, 1.0, 0.0]
    """
    first, *others = re.split("([<>/])", response)
    if others:  # strip text between two marks on both sides, text before the first or after the last mark on one side
        *between, last = others
        response = "".join([first.rstrip(), *(part.strip() for part in between), last.lstrip()])
    if not response.startswith("<think>"):
        return 0.0
    position = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        position = response.find(mark, position)
        if position < 0:
            return 0.0
        position += len(mark)
    return 1.0
