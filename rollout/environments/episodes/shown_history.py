"""What the policy still sees of an episode: all pictures of its observations, or the last ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image
from torch import Tensor

from rollout.engine import Request
from rollout.environments.environment import Observation

OMITTED = "(image omitted)"
"""The text in the place of a picture that is not shown any more."""


@dataclass
class EpisodeRow:
    """A part of an episode whose ids only grow."""

    first: int  # index of the turn that it begins with
    begins: Request  # of this turn
    ends: Request  # of its last turn so far
    omitted: int = 0  # pictures of the episode that it does not show any more
    experts: Tensor | None = None  # (n, M, k) of its first tokens, if the engine records them


def last_pictures(observations: Sequence[Observation], count: int) -> tuple[list[Observation], int]:
    """The observations of an episode with all but their last ``count`` pictures replaced by `OMITTED`, and how many were.

    The last observation stays whole.

    >>> from PIL import Image
    >>> seen = [Observation(["start", Image.new("L", (1, 1))]), Observation([Image.new("L", (1, 1))])]
    >>> shown, omitted = last_pictures(seen, 1)
    >>> shown[0].content, len(shown[1].content), omitted
    (['start', '(image omitted)'], 1, 1)
    """
    shown: list[Observation] = []
    seen = omitted = 0
    for observation in reversed(observations):
        content: list[str | Image.Image] = []
        for part in reversed(observation.content):
            if isinstance(part, Image.Image):
                seen += 1
                if seen > count and shown:
                    omitted, part = omitted + 1, OMITTED
            content.insert(0, part)
        shown.insert(0, replace(observation, content=content))
    return shown, omitted
