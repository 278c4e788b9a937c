"""Reward functions: Geometry3K's own, and the ways to bring one's own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataproto.errors import RewardError
from recipes.rewards.checking import AnswerChecker, default_checker
from recipes.rewards.remote_reward import remote_reward
from recipes.rewards.reward_functions import as_reward_function, from_trl, from_verl, load_function
from workers.roles.reward import RewardFunction, RewardRow

__all__ = [
    "RewardFunction",
    "RewardRow",
    "as_reward_function",
    "compute_score",
    "format_score",
    "from_trl",
    "from_verl",
    "geo3k_reward",
    "load_reward",
    "remote_reward",
]

FORMAT_WEIGHT = 0.1


def geo3k_reward(rows: Sequence[RewardRow], checker: AnswerChecker | None = None) -> list[dict[str, float]]:
    r"""Geometry3K: ``score`` = 0.9 ``acc`` + 0.1 ``format``, as in verl (``verl/utils/reward_score/geo3k.py``) and EasyR1
    (``examples/reward_function/math.py``).

    ``acc`` is 1 if mathruler finds the last ``\boxed{}`` equal to the truth; without a box it is 0. A comparison that
    takes too long counts as wrong (see `AnswerChecker`). Raises `RewardError` for a row without a truth.
    """
    from mathruler.grader import extract_boxed_content

    pairs = []
    for number, row in enumerate(rows):
        if row.ground_truth is None:
            raise RewardError(f"row {number}: there is no ground truth to compare with")
        pairs.append((extract_boxed_content(row.solution_str), str(row.ground_truth)))
    boxed = [pair for pair in pairs if pair[0] != "None"]  # mathruler's way to say that there is none
    correct = dict(zip(boxed, (checker or default_checker())(boxed), strict=True))
    results = []
    for pair, row in zip(pairs, rows, strict=True):
        acc, form = float(correct.get(pair, False)), format_score(row.solution_str)
        results.append({"score": (1 - FORMAT_WEIGHT) * acc + FORMAT_WEIGHT * form, "acc": acc, "format": form})
    return results


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    r"""`geo3k_reward` of one response, with verl's signature.

    >>> compute_score("hiyouga/geometry3k", r"<think>90 - 25</think> \boxed{65}", "65")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    return geo3k_reward([RewardRow(solution_str, ground_truth, data_source, extra_info)])[0]


def format_score(response: str) -> float:
    r"""1 if the whole response is of the form ``<think>...</think>...\boxed{...}...``, else 0.

    White space around ``<``, ``>`` and ``/`` does not count, as in EasyR1 (verl's check is strict); answers are compared as they
    are. The same as a full match of ``<think>.*</think>.*\\boxed\{.*\}.*`` with dots for all characters, in linear time,
    where the pattern takes cubic time on a response made to hurt.

    >>> [format_score(each) for each in (r"<think>so</think> \boxed{9}", r"< think >so</ think> \boxed{9}", r"\boxed{9}")]
    [1.0, 1.0, 0.0]
    """
    first, *others = re.split("([<>/])", response)
    if others:  # text between two marks is stripped on both sides, that before the first and behind the last on one
        *between, last = others
        response = "".join([first.rstrip(), *(part.strip() for part in between), last.lstrip()])
    if not response.startswith("<think>"):
        return 0.0
    place = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        place = response.find(mark, place)
        if place < 0:
            return 0.0
        place += len(mark)
    return 1.0


def load_reward(name: str) -> RewardFunction:
    """The reward that a command line names: ``geo3k``, ``file.py:function`` with one of the known signatures, or the address
    of a server (see `remote_reward`).

    Raises `RewardError` if there is no such file or function, or its signature is of no known kind.
    """
    if name.startswith(("http://", "https://")):
        return remote_reward(name)
    return geo3k_reward if name == "geo3k" else as_reward_function(load_function(name))
