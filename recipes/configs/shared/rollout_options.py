"""The options of rollouts: which samples are decoded when, and what comes with them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataproto.errors import InvalidConfig
from rollout.engine import check_early_rewards


@dataclass(frozen=True)
class RolloutOptions:
    """Which tokens are sampled, as far as the options of the algorithm leave that open, which samples are decoded when, and what
    comes with them. By default a step decodes the samples of its own prompts to their end.

    Attributes:
        over_ask: groups decoded at a time, in batch sizes, from 1 to 2: a step ends when its batch of groups is whole,
            the rest go on later
        ahead: decode the next step's groups during the update, on --ray.rollout-processes of their own
        parts: number of parts in which a step's groups come; with ahead, new weights come after the first one
        early_update: compute a part's gradients while the next parts are decoded
        max_staleness: updates after which a begun group is waited for; default: 2 with over-ask above 1, and 1 more with
            ahead
        replay_routing: let the actor use the experts that the engine chose, with a mixture of experts
        min_p: sample from tokens with at least this share of the likeliest token's probability; 0: from all
        stop: texts that end a response, in the evaluation too; the response keeps the text
        early_rewards: score whole groups while others are decoded, in the engine's process, where the reward function
            then runs too
    """

    over_ask: float = 1.0
    ahead: bool = False
    parts: int = 1
    early_update: bool = False
    max_staleness: int | None = None
    replay_routing: bool = True
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    early_rewards: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.over_ask <= 2 or not math.isfinite(self.over_ask):
            raise InvalidConfig(f"rollout.over_ask={self.over_ask}: must be from 1 to 2")
        if self.parts < 1:
            raise InvalidConfig(f"rollout.parts={self.parts}: must be at least 1")
        if self.parts > 1 and not self.ahead and not self.early_update:
            raise InvalidConfig(
                f"rollout.parts={self.parts} is for --rollout.early-update, which learns from a part while the next is decoded, "
                "and for --rollout.ahead, which takes new weights after the first one: add one of them"
            )
        if self.early_update and self.parts == 1:
            raise InvalidConfig(
                "rollout.early_update learns from the first part of a step's groups: give --rollout.parts N"
            )
        if self.max_staleness is not None and not self.carries:
            raise InvalidConfig(
                f"rollout.max_staleness={self.max_staleness} is for --rollout.over-ask above 1 and --rollout.ahead: without "
                "them all samples are of the newest weights"
            )
        if self.carries and self.staleness < self._least:
            raise InvalidConfig(
                f"rollout.max_staleness={self.staleness}: over_ask={self.over_ask} with ahead={self.ahead} needs at least "
                f"{self._least}, else each group would be waited for in its first step"
            )

    @property
    def carries(self) -> bool:
        """Whether samples go on after their step."""
        return self.over_ask > 1 or self.ahead

    @property
    def _first(self) -> str:
        return "over_ask" if self.over_ask > 1 else "ahead" if self.ahead else "early_update"

    @property
    def in_order(self) -> bool:
        """Whether a step decodes its own samples to their end before it learns."""
        return not self.carries and not self.early_update

    @property
    def _least(self) -> int:
        return int(self.over_ask > 1) + int(self.ahead)

    @property
    def staleness(self) -> int:
        """The largest number of updates between the weights that sampled a token and those that learn from it."""
        # Over-asking by 1.5 saves little with one update: a step then lasts half of the longest response.
        usual = self._least + int(self.over_ask > 1)
        return usual if self.max_staleness is None else self.max_staleness

    def check_engine(self, options: Mapping[str, Any], correction: str) -> None:
        """Raises `InvalidConfig` for an engine, further ``options`` of it, or an algorithm, that these options do not fit."""
        if self.early_rewards and not self.in_order:
            raise InvalidConfig(
                f"rollout.early_rewards is for steps that decode their own samples to the end: leave out rollout.{self._first}"
            )
        if self.early_rewards:
            check_early_rewards(options)
        quantization = options.get("quantization")
        if quantization is not None and correction == "none":
            raise InvalidConfig(
                f"engine_options quantization={quantization}: the engine then samples from another policy than the actor's, for "
                "which the loss must correct: add --algorithm.correction token (or sequence, geometric)"
            )

    def check(self, on: str, rollout_processes: int, reasons: Sequence[str], whole: Sequence[str]) -> None:
        """Raises `InvalidConfig` for a run that these options do not fit.

        Args:
            reasons: why a step can only learn from samples of its own prompts; empty if it can learn from others.
            whole: why an update needs the whole batch; empty if its groups can come in parts.
        """
        if (self.ahead or self.early_update) and (on == "local" or not rollout_processes):
            raise InvalidConfig(
                f"rollout.{'ahead' if self.ahead else 'early_update'} decodes during the update: give the engines separate "
                "devices with --on ray --ray.rollout-processes N"
            )
        if reasons:
            raise InvalidConfig(
                f"{'; '.join(reasons)}: leave out rollout.{self._first}, with which a step learns from groups as they are whole"
            )
        if self.early_update and whole:
            raise InvalidConfig(
                f"{'; '.join(whole)}: leave out rollout.early_update, which learns from some groups first"
            )
