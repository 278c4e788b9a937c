"""Reward functions: the reward of Geometry3K, and adapters for functions, files and servers of users."""

from recipes.rewards.checking import AnswerChecker
from recipes.rewards.geometry3k import compute_score, format_score, geo3k_reward
from recipes.rewards.reward_functions import (
    as_reward_function,
    from_trl,
    from_verl,
    load_reward,
    remote_reward,
)
from workers.roles.reward import RewardFunction, RewardRow

__all__ = [
    "AnswerChecker",
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
