"""What a recipe checks of its reward before models are loaded."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataproto.errors import DataProtoError, InvalidRow
from recipes.rewards.geometry3k import check_truth, geo3k_reward
from recipes.rewards.truth_check import reason_not_to_ask, truth_warning
from rollout.prompts import PromptBuilder
from workers.roles.reward import RewardFunction, RewardRow, reward_rows
from workers.training.checkpoint import random_states, set_random_states

ASKED = 3
"""Rows whose truths a reward is asked for at the start of a run."""


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
    return check_truth if reward is geo3k_reward else None
