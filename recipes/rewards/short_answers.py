"""The reward of free-form answers in a few words: equal to the truth after light normalisation."""

import re
from collections.abc import Sequence

from workers.roles.reward import RewardRow


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
