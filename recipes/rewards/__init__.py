"""Reward functions: the reward of Geometry3K, reward models, and adapters for functions, files and servers of users."""

from recipes.rewards.checking import AnswerChecker
from recipes.rewards.geometry3k import compute_score, format_score, geo3k_reward
from recipes.rewards.reward_functions import (
    WeightedRewards,
    as_reward_function,
    from_easyr1,
    from_trl,
    from_verl,
    load_reward,
    remote_reward,
)
from recipes.rewards.sequence_classifier import SequenceClassifier
from recipes.rewards.short_answers import normalised, short_answer_reward
from workers.roles.reward import RewardFunction, RewardRow

__all__ = [
    "AnswerChecker",
    "RewardFunction",
    "RewardRow",
    "SequenceClassifier",
    "WeightedRewards",
    "as_reward_function",
    "compute_score",
    "format_score",
    "from_easyr1",
    "from_trl",
    "from_verl",
    "geo3k_reward",
    "load_reward",
    "normalised",
    "remote_reward",
    "short_answer_reward",
]


def __getattr__(name: str) -> object:
    if name == "Judge":
        raise ImportError("recipes.rewards.Judge has ended: copy docs/judge.py, whose last line names server and model")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
