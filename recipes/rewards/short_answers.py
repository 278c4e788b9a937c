"""The reward of free-form answers in a few words: equal to the truth after light normalisation."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workers.roles.reward import RewardFunction, RewardRow, check_ready


def normalised(text: str) -> str:
    """A text in lower case, without punctuation and articles, with single spaces.

    >>> normalised(" The  circle. "), normalised("Yes!"), normalised("dark-red")
    ('circle', 'yes', 'dark red')
    """
    words = re.sub(r"[^\w\s]|_", " ", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def short_answer_reward(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
    """1 for an answer that is the truth after `normalised`, else 0; an empty answer is wrong.

    >>> short_answer_reward([RewardRow("A circle.", "circle"), RewardRow("no circle", "circle")])
    [{'score': 1.0, 'acc': 1.0}, {'score': 0.0, 'acc': 0.0}]
    """
    scores = []
    for row in rows:
        answer = normalised(row.solution_str)
        scores.append(float(bool(answer) and answer == normalised(str(row.ground_truth))))
    return [{"score": score, "acc": score} for score in scores]


@dataclass(frozen=True)
class ShuffledScores:
    """A control: the scores of ``reward``, permuted at random among the rows of a call; ``acc`` and other numbers stay true.

    The mean score of a batch is the true one, but a score says nothing about its row, so nothing can be learned from it. The
    permutation depends on the rows alone, so that a run that is resumed equals one that is not.
    """

    reward: RewardFunction

    def check(self) -> None:
        """As that of ``reward``."""
        check_ready(self.reward)

    def __call__(self, rows: Sequence[RewardRow]) -> list[Mapping[str, float]]:
        results = list(self.reward(rows))
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            digest.update(f"{row.uid}\0{row.solution_str}\0".encode())
        order = np.random.default_rng(int.from_bytes(digest.digest())).permutation(len(results)).tolist()
        return [dict(result) | {"score": results[other]["score"]} for result, other in zip(results, order, strict=True)]
