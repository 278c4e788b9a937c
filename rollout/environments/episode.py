"""An episode: what it begins from, how long it may be, the record of its turns, and the request of each turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from dataproto.columns import media_parts
from dataproto.errors import InvalidConfig, check_at_least
from rollout.continuation import BegunTurn, Tokens, continued_experts
from rollout.engine import Request
from rollout.environments.environment import Failure, Observation
from rollout.environments.turn_renderer import RenderedTurn, TurnRenderer
from rollout.prompts import Prompt
from rollout.prompts.image_processing import Made
from rollout.prompts.prepared_rows import keys_of_images, media_objects
from rollout.sampling import turn_seed

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
    pictures = sum(isinstance(part, Image.Image) for observation in observations for part in observation.content)
    shown, omitted = list[Observation](), 0
    for observation in observations[:-1]:
        content: list[str | Image.Image] = []
        for part in observation.content:
            hides = isinstance(part, Image.Image) and omitted < pictures - count
            omitted += hides
            content.append(OMITTED if hides else part)
        shown.append(replace(observation, content=content))
    return [*shown, *observations[-1:]], omitted


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
    tokens: int | None = None  # of a row after the prompt, sampled ones and observations; None: no limit
    seconds: float = 60.0
    """That the environment may take, all its calls together; decoding does not count, see `EndReason`."""
    last_pictures: int | None = None  # of the observations that a turn sees; None: all
    memory_gib: float | None = None
    """Of the environment, in a process of its own; ``None``: in a thread of this one, no limit."""
    wall_clock: float | None = None  # seconds from the episode's begin, decoding included; None: no limit

    def __post_init__(self) -> None:
        check_at_least(1, self, "turns", "tokens", "last_pictures")
        if not 0 < self.seconds < float("inf"):
            raise InvalidConfig(f"seconds={self.seconds}: must be a finite number above 0")
        if self.wall_clock is not None and not 0 < self.wall_clock < float("inf"):
            raise InvalidConfig(f"wall_clock={self.wall_clock}: must be a finite number above 0, or None for no limit")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise InvalidConfig(f"memory_gib={self.memory_gib}: must be above 0, or None for no limit")

    def most_tokens(self, most_of_turn: int) -> int:
        """The largest number of sampled tokens, or of tokens after the prompt if those are limited."""
        return self.turns * most_of_turn if self.tokens is None else self.tokens

    def room(self, used: int) -> float:
        """The number of tokens that are left after ``used`` ones."""
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
    name: str = ""  # among those that are played together
    prompt: Prompt | None = None
    turns: list[Turn] = field(default_factory=list)
    ended: EndReason | None = None
    message: str = ""  # of a failure
    info: dict[str, Any] = field(default_factory=dict)  # of the last observation
    state: str = ""  # digest of the last observation
    observations: list[Observation] = field(default_factory=list)
    """Those that were shown, if later turns may leave out pictures."""
    rows: list[EpisodeRow] = field(default_factory=list)
    request: Request | None = None  # of the last turn
    number: int | None = None  # of the last turn's request in the engine
    elapsed: float = 0.0  # seconds that it was played before it waited for a later step
    partial: Tokens | None = None  # of a turn that was stopped
    repeated: list[BegunTurn] = field(default_factory=list)  # turns of an earlier process, which are played again

    @property
    def begun(self) -> list[BegunTurn]:
        """What was sampled so far, for an episode that continues later."""
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
        """Number of tokens after the prompt, in the row that grows."""
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

    def next_of(self, request: Request) -> Request:
        """The request with the random stream of the next turn."""
        return replace(request, seed=turn_seed(self.start.seed, len(self.turns)), uid=self.start.uid)

    def show(self, request: Request, shown: RenderedTurn | None) -> None:
        """Notes the request of a turn that begins, and what it shows after the turn before."""
        self.request = self.rows[-1].ends = request
        if shown is not None:
            self.turns[-1] = replace(self.turns[-1], shown=shown)

    def add_turn(self, tokens: Tokens) -> None:
        """Adds a turn of these tokens, which answers the last observation."""
        self.turns.append(
            Turn(tokens.token_ids, tokens.log_probs, weight_versions=tokens.weight_versions, state=self.state)
        )

    def end(self, reason: EndReason, message: str = "") -> None:
        """Ends the episode."""
        self.ended, self.message = reason, message


class TurnRequests:
    """Makes the requests of episodes that are played together: samples of a prompt share the tensors of their first one."""

    def __init__(self, renderer: TurnRenderer, limits: EpisodeLimits) -> None:
        self.renderer, self.limits = renderer, limits
        self._first: dict[Any, tuple[Prompt, Request]] = {}  # by row and content

    def first_turn(self, start: EpisodeStart, observation: Observation) -> tuple[Prompt, Request]:
        """The prompt of an episode that begins with this observation, and its first request, without a seed."""
        key = (id(start.row), observation.role, *self.renderer.content_key(observation))
        if key not in self._first:
            prompt = self.renderer.prompt(start.row, observation)
            self._first[key] = prompt, self._first_request(prompt, observation)
        return self._first[key]

    def new_row(self, episode: Episode) -> EpisodeRow | None:
        """The row in which the episode continues if it has to leave out pictures that its present row shows."""
        if self.limits.last_pictures is None or not episode.turns:
            return None
        (first, *others), omitted = last_pictures(episode.observations, self.limits.last_pictures)
        if omitted == episode.rows[-1].omitted:
            return None
        _, request = self.first_turn(episode.start, first)
        for turn, observation in zip(episode.turns, others, strict=True):
            request = self.continued(request, turn.token_ids, self.renderer.turn(observation, turn.token_ids[-1]))
        request = episode.next_of(request)
        return EpisodeRow(len(episode.turns), request, request, omitted)

    def _first_request(self, prompt: Prompt, observation: Observation) -> Request:
        media = prompt.media
        shown = sum(not isinstance(part, str) for part in observation.content)
        # Media of the task and of the observation are apart, so that rows that do not show the latter share the former.
        cut = len(media) if self.limits.last_pictures is None else len(media) - shown
        parts = tuple(self.renderer.media(part) for part in (media[:cut], media[cut:]) if part)
        return Request(
            prompt.raw_ids,
            torch.from_numpy(prompt.input_ids),
            torch.from_numpy(prompt.token_types),
            self.renderer.positions(prompt.token_types, parts),
            multi_modal_data=media_objects(prompt.media),
            multi_modal_inputs=parts,
            image_keys=keys_of_images(prompt.media),
        )

    def next_request(self, episode: Episode, shown: RenderedTurn) -> Request:
        """The request of the next turn, after an observation."""
        assert episode.request is not None
        return episode.next_of(self.continued(episode.request, episode.turns[-1].token_ids, shown))

    def continued(self, earlier: Request, token_ids: Sequence[int], shown: RenderedTurn) -> Request:
        """The request after an earlier one, what was sampled for it, and an observation.

        This is the law of turns: its ids begin with those of the earlier one and what was sampled, which
        `RequestEngine.fork` checks.
        """
        sampled = torch.tensor(token_ids)
        types = torch.zeros_like(sampled, dtype=torch.int8)
        data = dict(earlier.multi_modal_data)
        for kind, objects in media_objects(shown.shown).items():
            data[kind] = [*data.get(kind, ()), *objects]
        return Request(
            [*earlier.prompt_ids, *sampled.tolist(), *shown.raw_ids],
            torch.cat([earlier.input_ids, sampled, torch.from_numpy(shown.ids)]),
            torch.cat([earlier.token_types, types, torch.from_numpy(shown.token_types)]),
            self._positions(earlier.position_ids, len(sampled), shown.position_ids),
            multi_modal_data=data,
            multi_modal_inputs=(*media_parts(earlier.multi_modal_inputs), *([shown.media] if shown.media else [])),
            image_keys=[*earlier.image_keys, *keys_of_images(shown.shown)],
        )

    def _positions(self, earlier: Tensor, sampled: int, shown: Tensor) -> Tensor:
        """Positions of a row that continues with sampled tokens and an observation, whose own positions begin at 0.

        They continue from the largest position of the row so far.
        """
        mask = torch.ones(1, earlier.shape[-1], dtype=torch.int64)
        following = self.renderer.builder.family.extend_positions(earlier[None], mask, sampled + 1)[0]
        return torch.cat([earlier, following[..., :sampled], following[..., sampled:] + shown], dim=-1)
