"""What a recipe checks of its reward before models are loaded: its columns, and what it gives the truth and an empty answer.

A reward that does not know the truth when it sees it, because the data write it in another form than the reward reads, gives
every answer the same, and nothing is learned.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dataproto.errors import DataProtoError, InvalidRow, ScoreCountMismatch
from recipes.rewards.checking import quick_verdict
from recipes.rewards.geometry3k import check_truth, geo3k_reward, truth_text
from recipes.rewards.reward_functions import WeightedRewards, parts_of
from recipes.rewards.sequence_classifier import SequenceClassifier
from rollout.prompts import PromptBuilder
from workers.roles.reward import RewardFunction, RewardRow, check_results, reward_rows, uses_device
from workers.training.checkpoint import random_states, set_random_states

FORMS = (
    ("", ""),
    (r"\boxed{", "}"),
    ("<answer>", "</answer>"),
    ("<think>So it is.</think>\n\\boxed{", "}"),
    ("<think>So it is.</think>\n<answer>", "</answer>"),
    ("<think>So it is.</think>\n<answer>\\boxed{", "}</answer>"),
    ("So it is.\n#### ", ""),
)
"""How models write an answer: texts before and after it."""
PATIENCE_S = 10.0
"""Seconds of calls after which a slow reward is asked no more."""

ASKED = 3
"""Rows whose truths a reward is asked for at the start of a run."""

Result = Mapping[str, float]


@dataclass(frozen=True)
class TruthScores:
    """What a reward gives for a row: to the truth, in the form that gets most, to a wrong answer in that form, and to nothing.

    ``wrong`` is ``None`` if all rows have the same truth.
    """

    answer: str
    right: Result
    empty: Result
    wrong: Result | None = None

    @property
    def is_best(self) -> bool:
        """Whether the truth gets more than the others, and counts as right where the reward says what is right.

        >>> TruthScores("3", right={"score": 1.0}, empty={"score": 0.0}, wrong={"score": 0.1}).is_best
        True
        >>> TruthScores("3", right={"score": 0.1, "acc": 0.0}, empty={"score": 0.0}).is_best
        False
        """
        others = [self.empty["score"]] + ([] if self.wrong is None else [self.wrong["score"]])
        return self.right["score"] > max(others) and self.right.get("acc") not in (0, False)


def reason_not_to_ask(reward: RewardFunction) -> str | None:
    """Why a reward is not called only to see what it gives the truth; ``None`` if it can be."""
    if isinstance(reward, WeightedRewards):
        return next(filter(None, map(reason_not_to_ask, reward.parts.values())), None)
    function = getattr(reward, "function", reward)
    if isinstance(function, SequenceClassifier):
        return "a model computes it"
    if uses_device(function):
        return "it computes on a device"
    if callable(getattr(function, "check", None)):
        return "it asks something outside of this process"
    if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        return "it is async, as functions are that ask a server"
    return None


def truth_scores(
    reward: RewardFunction, rows: Sequence[RewardRow], count: Callable[[str], int] = len
) -> list[TruthScores | None]:
    """What the reward gives the truths of rows; ``None`` for a row without one.

    Args:
        rows: with their truths; the responses do not count.
        count: the number of tokens of an answer.

    Raises:
        RewardError: what the reward raises for one of these answers, which a model may give too.

    >>> rows = [RewardRow("", "3"), RewardRow("", "4")]
    >>> boxed = lambda rows: [{"score": float(row.solution_str == rf"\\boxed{{{row.ground_truth}}}")} for row in rows]
    >>> truth_scores(boxed, rows)[0]
    TruthScores(answer='\\\\boxed{3}', right={'score': 1.0}, empty={'score': 0.0}, wrong={'score': 0.0})
    """
    known = [row for row in rows if row.ground_truth is not None]
    if not known:
        return [None] * len(rows)

    def ask(answers: Sequence[str]) -> Sequence[Result]:
        given = [replace(row, solution_str=text, response_length=count(text)) for row, text in zip(known, answers)]
        results = reward(given)
        check_results(results, len(given))
        return results

    truths = [answer_text(row.ground_truth) for row in known]
    others = [
        next((other for other in truths if not quick_verdict(other.strip(), truth.strip())), None) for truth in truths
    ]
    started, empty = time.monotonic(), ask([""] * len(known))
    best: list[TruthScores | None] = [None] * len(known)
    for before, after in FORMS:
        answers = [f"{before}{truth}{after}" for truth in truths]
        right = ask(answers)
        wrong = ask([f"{before}{truth if other is None else other}{after}" for truth, other in zip(truths, others)])
        for place, other in enumerate(others):
            found = TruthScores(answers[place], right[place], empty[place], None if other is None else wrong[place])
            best[place] = max(filter(None, (best[place], found)), key=lambda each: (each.is_best, each.right["score"]))
        if time.monotonic() - started > PATIENCE_S:
            break
    found_of = iter(best)
    return [None if row.ground_truth is None else next(found_of) for row in rows]


def answer_text(truth: Any) -> str:
    r"""A truth as a model would write it: what is in its marks, and JSON for lists and mappings.

    >>> answer_text("<answer> 3 </answer>"), answer_text(r"So \boxed{x^2}."), answer_text([1, 2]), answer_text(3)
    ('3', 'x^2', '[1, 2]', '3')
    """
    if isinstance(truth, str):
        return truth if (marked := truth_text(truth)) == truth.strip() else marked
    if isinstance(truth, (list, tuple, Mapping, np.ndarray)):
        return json.dumps(truth, default=lambda value: value.tolist(), ensure_ascii=False)
    return str(truth)


def truth_warning(reward: RewardFunction, rows: Sequence[RewardRow], count: Callable[[str], int] = len) -> str | None:
    """One line if the reward does not give its best to the truth of one of the rows, or fails; ``None`` if all is well.

    Raises:
        ScoreCountMismatch: the reward does not return one score for each row, so it cannot be used with any answer.
    """
    try:
        found = truth_scores(reward, rows, count)
    except ScoreCountMismatch:
        raise
    except DataProtoError as error:
        return f"the reward fails for an answer that a model may give: {error}"
    for row, scores in zip(rows, found, strict=True):
        if scores is not None and not scores.is_best:
            wrong = "" if scores.wrong is None else f", {scores.wrong['score']:g} to a wrong answer"
            acc = f" (acc {scores.right['acc']:g})" if "acc" in scores.right else ""
            right = f"{scores.right['score']:g}{acc}"
            return (
                f"the reward does not give its best to the truth {row.ground_truth!r:.100}: it gives {right} to the truth{wrong} "
                f"and {scores.empty['score']:g} to an empty answer; does it read truths of this form? (dataproto show)"
            )
    return None


def check_reward(reward: RewardFunction, rows: Any, builder: PromptBuilder, here: bool) -> None:
    """Checks the first rows: in most data sets all rows are alike. Warns in one line if the truth does not get the best reward.

    Args:
        here: whether this process scores; otherwise the reward is not called.

    Raises:
        RewardError: the reward needs a column that the first row does not have, or does not return one score for each row.
    """
    with suppress(InvalidRow):  # the loader reports it, or skips it
        check_first_row(reward, rows[0])
    reason = reason_not_to_ask(reward) if here else "it scores in processes of its own"
    if reason is not None:
        print(f"the reward is not asked what it gives the truth: {reason}")
        return
    try:
        first = examples([rows[place] for place in range(min(ASKED, len(rows)))], builder)
    except DataProtoError:
        return
    states = random_states()
    warning = truth_warning(reward, first, count=lambda text: len(builder.encode_text(text)))
    set_random_states(states)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)


def examples(rows: Sequence[Mapping[str, Any]], builder: PromptBuilder) -> list[RewardRow]:
    """What a reward gets of rows, with an empty response. The builder's next uids stay what they are."""
    named = [{**row, "uid": f"example-{place}"} for place, row in enumerate(rows)]
    return reward_rows(builder(named), [""] * len(rows))


def check_first_row(reward: RewardFunction, row: Mapping[str, Any]) -> None:
    """Raises `RewardError` if the reward needs a column that the row lacks."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if callable(check_columns := getattr(reward, "check_columns", None)):
        own = {**row.get("own_columns", {}), **row.get("media_columns", {})}
        check_columns(RewardRow("", truth, extra_info=row.get("extra_info"), columns=own))


def truth_check(reward: RewardFunction | None) -> Callable[[Any], None] | None:
    """What raises `RewardError` for a truth that a reward cannot use; ``None`` for a reward that takes any."""
    return check_truth if geo3k_reward in parts_of(reward) else None
