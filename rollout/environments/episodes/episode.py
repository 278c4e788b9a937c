"""An episode: what it begins from, how long it may be, and the record of its turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from dataproto.errors import InvalidConfig
from rollout.carried_samples import BegunTurn, Tokens
from rollout.continuation import continued_experts
from rollout.engine import Request
from rollout.environments.environment import Failure, Observation
from rollout.environments.episodes.shown_history import EpisodeRow
from rollout.environments.episodes.turn_renderer import RenderedTurn
from rollout.prompts import Prompt
from rollout.prompts.made_images import Made

EndReason = Literal["done", "turns", "tokens", "length", "clock"] | Failure
"""Why an episode ended.

- ``done``: the environment said so.
- ``turns``, ``tokens``: the limits of an episode; ``tokens`` also if the engine has no room for the next turn.
- ``length``: a turn was cut at ``max_tokens``.
- ``clock``: the limit of an episode's wall clock, decoding and waiting included. It comes earlier on a slower machine and in a
  larger batch: what it cuts is not the same again.
- ``error``, ``timeout``, ``memory``, ``invalid``: the environment failed, see `Failure`. The clock of ``timeout`` runs only while
  the environment is called.
"""


@dataclass(frozen=True)
class EpisodeLimits:
    """How long an episode may be, and what the policy sees of it."""

    turns: int  # of the policy
    tokens: int | None = None  # of a row behind the prompt, sampled ones and observations; None: no limit
    seconds: float = (
        60.0  # that the environment may take, all its calls together; decoding does not count, see `EndReason`
    )
    last_pictures: int | None = None  # of the observations that a turn sees; None: all
    memory_gib: float | None = (
        None  # of the environment, in a process of its own; None: in a thread of this one, no limit
    )
    wall_clock: float | None = None  # seconds from the episode's begin, decoding included; None: no limit

    def __post_init__(self) -> None:
        if self.turns < 1 or (self.tokens is not None and self.tokens < 1):
            raise InvalidConfig(f"turns={self.turns}, tokens={self.tokens} must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise InvalidConfig(f"seconds={self.seconds}: must be a finite number above 0")
        if self.last_pictures is not None and self.last_pictures < 1:
            raise InvalidConfig(f"last_pictures={self.last_pictures}: must be at least 1, or None for all")
        if self.wall_clock is not None and not 0 < self.wall_clock < float("inf"):
            raise InvalidConfig(f"wall_clock={self.wall_clock}: must be a finite number above 0, or None for no limit")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise InvalidConfig(f"memory_gib={self.memory_gib}: must be above 0, or None for no limit")

    def most_tokens(self, most_of_turn: int) -> int:
        """The largest number of sampled tokens, or of tokens behind the prompt if those are limited."""
        return self.turns * most_of_turn if self.tokens is None else self.tokens

    def room(self, used: int) -> float:
        """The number of tokens that are left behind ``used`` ones."""
        return float("inf") if self.tokens is None else self.tokens - used


@dataclass(frozen=True)
class EpisodeStart:
    """What an episode begins from."""

    row: Mapping[str, Any]  # of the prompt; ``raw_prompt`` are its messages
    seed: int  # of the sample's random stream
    environment_seed: int
    uid: str = ""
    trajectory: str = ""  # its name: the uid, and the sample's number among those of the uid
    images: Made = field(default_factory=dict)  # of the row, processed before


@dataclass(frozen=True)
class Turn:
    """What the policy sampled in a turn, and the observation that follows if there is a next turn."""

    token_ids: list[int]
    log_probs: list[float]
    reward: float = 0.0
    shown: RenderedTurn | None = None
    weight_versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    state: str = ""  # digest of the observation that it answers


@dataclass
class Episode:
    """An episode that is being played, and its record afterwards."""

    start: EpisodeStart
    prompt: Prompt | None = None
    turns: list[Turn] = field(default_factory=list)
    ended: EndReason | None = None
    message: str = ""  # of a failure
    info: dict[str, Any] = field(default_factory=dict)  # of the last observation
    state: str = ""  # digest of the last observation
    observations: list[Observation] = field(
        default_factory=list
    )  # that were shown, if later turns may leave out pictures
    rows: list[EpisodeRow] = field(default_factory=list)
    request: Request | None = None  # of the last turn
    number: int | None = None  # of the last turn's request in the engine
    elapsed: float = 0.0  # seconds that it was played before it waited for a later step
    partial: Tokens | None = None  # of a turn that was stopped
    repeated: list[BegunTurn] = field(default_factory=list)  # turns of an earlier process, which are played again

    @property
    def begun(self) -> list[BegunTurn]:
        """What was sampled so far, for an episode that goes on later."""
        if self.prompt is None:
            return list(self.repeated)
        befores = [turn.shown.ids.tolist() if turn.shown else [] for turn in self.turns]  # before the next turn
        befores.insert(0, self.prompt.input_ids.tolist())
        for row in self.rows:
            befores[row.first] = row.begins.input_ids.tolist()
        sampled = [Tokens(turn.token_ids, turn.log_probs, turn.weight_versions) for turn in self.turns]
        states = [turn.state for turn in self.turns]
        turns = [BegunTurn(tokens, True, *shown) for tokens, *shown in zip(sampled, befores, states, strict=False)]
        if self.partial:  # one that was stopped before its first token has not begun
            turns.append(BegunTurn(self.partial, False, befores[len(self.turns)], self.state))
        if turns and not self.repeated:  # the last turn tells the experts of the whole row
            last = replace(turns[-1].tokens, experts=self.rows[-1].experts)
            turns[-1] = replace(turns[-1], tokens=last)
        return [*turns, *self.repeated]

    @property
    def failed(self) -> bool:
        """Whether the environment failed, so that the reward says nothing about the policy."""
        return self.ended in get_args(Failure)

    @property
    def length(self) -> int:
        """Number of tokens behind the prompt, in the row that grows."""
        if self.prompt is None:
            return 0
        row, before = self.rows[-1], len(self.prompt.input_ids)
        added = (
            len(turn.token_ids) + (0 if turn.shown is None else len(turn.shown.ids)) for turn in self.turns[row.first :]
        )
        return len(row.begins.input_ids) - before + sum(added)

    def add_experts(self, tokens: Tokens) -> None:
        """Takes the experts of the present row, which come with the tokens that were sampled last."""
        row = self.rows[-1]
        row.experts = continued_experts(row.experts, tokens.experts)

    def end(self, reason: EndReason, message: str = "") -> None:
        """Ends the episode."""
        self.ended, self.message = reason, message
