"""Episodes: turns of policy and environment on one engine, each at its own pace."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dataproto.columns import media_parts
from dataproto.errors import InvalidConfig, InvalidPrompt
from rollout.carried_samples import BegunTurn, Tokens, WholeGroups, continued
from rollout.continuation import continued_experts
from rollout.engine import Completion, FinishReason, Request, RequestEngine, SamplingParams
from rollout.environments.environment import EnvironmentFailed, Failure, MakeEnvironment, Observation
from rollout.environments.environment_host import EnvironmentHost, Outcome
from rollout.environments.shown_history import EpisodeRow, last_pictures
from rollout.environments.turn_renderer import RenderedTurn, TurnRenderer
from rollout.prompts import Prompt
from rollout.prompts.prepared_rows import in_prompt_order, media_objects
from rollout.sampling import turn_seed

WORTH_WAITING = 0.1
"""Part of the engine's last step that it waits for environments which usually answer sooner."""

EndReason = Literal["done", "turns", "tokens", "length"] | Failure
"""Why an episode ended.

- ``done``: the environment said so.
- ``turns``, ``tokens``: the limits of an episode; ``tokens`` also if the engine has no room for the next turn.
- ``length``: a turn was cut at ``max_tokens``.
- ``error``, ``timeout``, ``memory``, ``invalid``: the environment failed, see `Failure`. The clock of ``timeout`` runs only while
  the environment is called. A limit on the time of decoding would end an episode earlier on a slower machine, or in a larger
  batch: ``turns``, ``tokens`` and ``max_tokens`` bound decoding.
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

    def __post_init__(self) -> None:
        if self.turns < 1 or (self.tokens is not None and self.tokens < 1):
            raise InvalidConfig(f"turns={self.turns}, tokens={self.tokens} must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise InvalidConfig(f"seconds={self.seconds}: must be a finite number above 0")
        if self.last_pictures is not None and self.last_pictures < 1:
            raise InvalidConfig(f"last_pictures={self.last_pictures}: must be at least 1, or None for all")
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
        turns = [BegunTurn(tokens, True, before) for tokens, before in zip(sampled, befores, strict=False)]
        if self.partial:  # one that was stopped before its first token has not begun
            turns.append(BegunTurn(self.partial, False, befores[len(self.turns)]))
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


def play_episodes(
    engine: RequestEngine,
    renderer: TurnRenderer,
    starts: Sequence[EpisodeStart],
    make_environment: MakeEnvironment,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    weight_version: int = 0,
) -> list[Episode]:
    """Plays an episode from each start to its end; environments step while the engine decodes others.

    Args:
        sampling: of each turn; ``max_tokens`` is the limit of a turn, and ``n`` is not used.
        weight_version: of the engine's weights.

    Raises:
        InvalidConfig: ``make_environment`` cannot be sent to another process, for a limit of memory.
        DataProtoError: the engine failed at a request, e.g. `NonFiniteLogits`. Failures of environments raise nothing.
    """
    episodes = [Episode(start) for start in starts]
    everyone = WholeGroups([str(number) for number in range(len(starts))], wanted=len(starts))
    with EnvironmentHost(make_environment, limits.seconds, limits.memory_gib) as host:
        go_on(engine, renderer, episodes, host, sampling, limits, everyone, weight_version)
    if everyone.failure is not None:
        raise everyone.failure[1]
    return episodes


def go_on(
    engine: RequestEngine,
    renderer: TurnRenderer,
    episodes: Sequence[Episode],
    host: EnvironmentHost,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    groups: WholeGroups,
    weight_version: int,
) -> None:
    """Plays episodes, begun or not, until there are enough whole groups, or the engine fails at an episode: see
    ``groups.failure``. The others can go on later, and so can that one, from its tokens before this call.

    The environment of an episode that goes on is the one that ``host`` holds. If it holds none, a new one gets the actions of
    ``Episode.repeated``; should it show something else than before, the episode ends as "invalid".

    Raises:
        InvalidConfig: see `play_episodes`.
    """
    play = _Play(engine, renderer, episodes, host, sampling, limits, groups, weight_version)
    with renderer.builder.one_batch():
        try:
            play.run()
        finally:
            play.stop()
            renderer.forget()


class _Play:
    """The loop of `go_on`."""

    def __init__(
        self,
        engine: RequestEngine,
        renderer: TurnRenderer,
        episodes: Sequence[Episode],
        host: EnvironmentHost,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        groups: WholeGroups,
        weight_version: int,
    ) -> None:
        self.engine, self.renderer, self.episodes, self.host = engine, renderer, episodes, host
        self.sampling, self.limits = sampling, limits
        self.groups, self.weight_version = groups, weight_version
        self.requests: dict[int, int] = {}  # number of a request -> of its episode
        self.names = [episode.start.trajectory or str(number) for number, episode in enumerate(episodes)]
        self.first: dict[Any, tuple[Prompt, Request]] = {}  # by row and content: samples share their tensors

    def run(self) -> None:
        host, numbers = self.host, {name: number for number, name in enumerate(self.names)}
        for number in range(len(self.episodes)):
            self._begin(number)
        step_s = 0.0  # of the engine's last step
        while (host.working or self.requests) and not self.groups.enough:
            # Environments that answer at once have their next turns together. The engine never waits long for that: a turn that
            # begins a step later costs it nothing.
            patience = step_s * WORTH_WAITING
            patience = patience if host.typical_s < patience else 0.0
            answered = host.poll(patience if self.requests else None)
            for name, outcome in sorted(answered, key=lambda each: numbers[each[0]]):
                self._observe(numbers[name], outcome)
                self._free_ended(numbers[name])
            if not self.requests:
                continue
            began = time.monotonic()
            completions = self.engine.poll()
            step_s = time.monotonic() - began
            for completion in completions:
                if completion.request in self.requests:
                    number = self.requests.pop(completion.request)
                    self._completed(number, completion)
                    self._free_ended(number)

    def _begin(self, number: int) -> None:
        """Starts an episode, or lets it go on."""
        episode, name = self.episodes[number], self.names[number]
        if name not in self.host:
            self.host.reset(name, episode.start.row, episode.start.environment_seed)
        elif episode.partial is not None:
            self._start(number, episode.request, None)

    def _free_ended(self, number: int) -> None:
        """Closes the environment of an episode that has ended, and frees what the engine holds of it."""
        episode = self.episodes[number]
        if episode.ended:
            self.groups.finish(number)
            self.host.close(self.names[number])
            if episode.number is not None:
                self.engine.abort(episode.number)

    def stop(self) -> None:
        """Takes the tokens of turns that are not finished, and frees what the engine holds of episodes that have not ended."""
        for episode in self.episodes:
            if episode.number is not None and not episode.ended:
                stopped = self.engine.abort(episode.number)
                if episode.number in self.requests:
                    tokens = Tokens() if stopped is None else Tokens.of(stopped, self.weight_version)
                    episode.partial = (episode.partial or Tokens()) + tokens
                    episode.add_experts(tokens)
                episode.number = None

    # From an environment

    def _observe(self, number: int, outcome: Outcome) -> None:
        episode = self.episodes[number]
        if isinstance(outcome, EnvironmentFailed):
            episode.end(outcome.reason, str(outcome))
            return
        episode.info = dict(outcome.info)
        if episode.turns:
            episode.turns[-1] = replace(episode.turns[-1], reward=float(outcome.reward))
        if outcome.done or len(episode.turns) == self.limits.turns:
            self._end(episode, outcome)
            return
        try:
            if self.limits.last_pictures is not None:
                episode.observations.append(self.renderer.kept(outcome))
            shown, row = self._shown(episode, outcome), self._new_row(episode)
        except InvalidPrompt as error:
            episode.end("invalid", f"its observation cannot be shown: {error}")
            return
        episode.state = self.renderer.digest(outcome)
        if row is not None:
            self._begin_row(number, row)
        elif shown is None:
            self._submit(number, episode.request, None)
        elif self.limits.room(episode.length + len(shown.ids)) < 1:
            episode.end("tokens")
        else:
            self._submit(number, self._next_request(episode, shown), shown)

    def _end(self, episode: Episode, observation: Observation) -> None:
        if not episode.turns:
            episode.end("invalid", "its environment was over before the first turn")
        else:
            episode.end("done" if observation.done else "turns")

    def _shown(self, episode: Episode, observation: Observation) -> RenderedTurn | None:
        """The observation as tokens behind the last turn; the first one becomes the prompt of the episode."""
        if episode.turns:
            return self.renderer.turn(observation, ended=episode.turns[-1].token_ids[-1] in self.renderer.end_ids)
        episode.prompt, request = self._first_turn(episode.start, observation)
        episode.request = replace(request, seed=turn_seed(episode.start.seed, 0), uid=episode.start.uid)
        experts = episode.repeated[-1].tokens.experts if episode.repeated else None
        episode.rows = [EpisodeRow(0, episode.request, episode.request, experts=experts)]
        return None

    def _first_turn(self, start: EpisodeStart, observation: Observation) -> tuple[Prompt, Request]:
        """The prompt of an episode that begins with this observation, and its first request, without a seed."""
        key = (id(start.row), observation.role, *self.renderer.content_key(observation))
        if key not in self.first:
            prompt = self.renderer.prompt(start.row, observation)
            self.first[key] = prompt, self._first_request(prompt, observation)
        return self.first[key]

    def _new_row(self, episode: Episode) -> EpisodeRow | None:
        """The row in which the episode goes on if it has to leave out pictures that its present row shows."""
        if self.limits.last_pictures is None or not episode.turns:
            return None
        (first, *others), omitted = last_pictures(episode.observations, self.limits.last_pictures)
        if omitted == episode.rows[-1].omitted:
            return None
        _, request = self._first_turn(episode.start, first)
        for turn, observation in zip(episode.turns, others, strict=True):
            shown = self.renderer.turn(observation, ended=turn.token_ids[-1] in self.renderer.end_ids)
            request = self._continued(request, turn.token_ids, shown)
        request = replace(request, seed=turn_seed(episode.start.seed, len(episode.turns)), uid=episode.start.uid)
        return EpisodeRow(len(episode.turns), request, request, omitted)

    def _begin_row(self, number: int, row: EpisodeRow) -> None:
        """Starts the next turn in a new row."""
        episode = self.episodes[number]
        assert episode.prompt is not None
        if self.limits.room(len(row.begins.input_ids) - len(episode.prompt.input_ids)) < 1:
            episode.end("tokens")
            return
        episode.rows.append(row)
        if episode.number is not None:
            self.engine.abort(episode.number)
            episode.number = None
        self._submit(number, row.begins, None)

    def _submit(self, number: int, request: Request | None, shown: RenderedTurn | None) -> None:
        """Starts the next turn, which ``shown`` precedes."""
        episode = self.episodes[number]
        assert request is not None
        if episode.repeated:
            turn = episode.repeated.pop(0)
            if turn.before != (request.input_ids if shown is None else shown.ids).tolist():
                episode.end(
                    "invalid", f"its environment did not repeat what it showed before turn {len(episode.turns)}"
                )
                return
            if turn.whole:
                self._shown_before(episode, request, shown)
                self._sampled(number, turn.tokens, "stop")
                return
            episode.partial = turn.tokens
        self._start(number, request, shown)

    def _start(self, number: int, request: Request | None, shown: RenderedTurn | None) -> None:
        """Gives the next turn to the engine, from the tokens that it has so far."""
        episode, earlier = self.episodes[number], self.episodes[number].number
        assert request is not None
        begun = (episode.partial or Tokens()).token_ids
        rest = continued(request, begun, self.renderer.builder.family)
        keep, sampling = len(episode.turns) + 1 < self.limits.turns, self._sampling(episode, shown, len(begun))
        try:
            if earlier is None:
                episode.number = self.engine.submit(rest, sampling, keep)
            else:
                episode.number = self.engine.fork(earlier, rest, sampling, keep)
                self.engine.abort(earlier)
        except InvalidPrompt as error:
            episode.end("tokens", f"the engine has no room for the next turn: {error}")
            return
        self.requests[episode.number] = number
        self._shown_before(episode, request, shown)

    def _shown_before(self, episode: Episode, request: Request, shown: RenderedTurn | None) -> None:
        episode.request = episode.rows[-1].ends = request
        if shown is not None:
            episode.turns[-1] = replace(episode.turns[-1], shown=shown)

    # Requests

    def _first_request(self, prompt: Prompt, observation: Observation) -> Request:
        media = list(in_prompt_order(prompt.conversation, prompt.images, prompt.videos))
        shown = sum(not isinstance(part, str) for part in observation.content)
        # Media of the task and of the observation are apart, so that rows that do not show the latter share the former.
        cut = len(media) if self.limits.last_pictures is None else len(media) - shown
        parts = tuple(self.renderer.media(part) for part in (media[:cut], media[cut:]) if part)
        return Request(
            prompt.raw_ids,
            torch.from_numpy(prompt.input_ids),
            torch.from_numpy(prompt.token_types),
            self.renderer.positions(prompt.token_types, parts),
            multi_modal_data=media_objects(prompt.images, prompt.videos),
            multi_modal_inputs=parts,
        )

    def _next_request(self, episode: Episode, shown: RenderedTurn) -> Request:
        assert episode.request is not None
        request = self._continued(episode.request, episode.turns[-1].token_ids, shown)
        return replace(request, seed=turn_seed(episode.start.seed, len(episode.turns)), uid=episode.start.uid)

    def _continued(self, earlier: Request, token_ids: Sequence[int], shown: RenderedTurn) -> Request:
        """The request behind an earlier one, what was sampled for it, and an observation."""
        sampled = torch.tensor(token_ids)
        types = torch.zeros_like(sampled, dtype=torch.int8)
        data = dict(earlier.multi_modal_data)
        for kind, objects in media_objects(shown.images).items():
            data[kind] = [*data.get(kind, ()), *objects]
        request = Request(
            [*earlier.prompt_ids, *sampled.tolist(), *shown.raw_ids],
            torch.cat([earlier.input_ids, sampled, torch.from_numpy(shown.ids)]),
            torch.cat([earlier.token_types, types, torch.from_numpy(shown.token_types)]),
            self._positions(earlier.position_ids, len(sampled), shown.position_ids),
            multi_modal_data=data,
            multi_modal_inputs=(*media_parts(earlier.multi_modal_inputs), *([shown.media] if shown.media else [])),
        )
        check_growth(earlier, sampled, request)
        return request

    def _positions(self, earlier: Tensor, sampled: int, shown: Tensor) -> Tensor:
        """Positions of a row that goes on with sampled tokens and an observation, whose own positions begin at 0.

        They continue from the largest position of the row so far.
        """
        mask = torch.ones(1, earlier.shape[-1], dtype=torch.int64)
        following = self.renderer.builder.family.extend_positions(earlier[None], mask, sampled + 1)[0]
        return torch.cat([earlier, following[..., :sampled], following[..., sampled:] + shown], dim=-1)

    def _sampling(self, episode: Episode, shown: RenderedTurn | None, begun: int) -> SamplingParams:
        """Of the next turn: at most as many tokens as the episode has left. ``begun`` of them have been sampled."""
        used = episode.length + (0 if shown is None else len(shown.ids))
        most = int(min(self.sampling.max_tokens, self.limits.room(used))) - begun
        return self.sampling if most == self.sampling.max_tokens else replace(self.sampling, max_tokens=most)

    # From the engine

    def _completed(self, number: int, completion: Completion) -> None:
        episode = self.episodes[number]
        if completion.error is not None:
            episode.partial = episode.partial or Tokens()  # its turn has begun
            self.groups.fail(number, completion.error)
            return
        tokens = (episode.partial or Tokens()) + Tokens.of(completion, self.weight_version)
        episode.partial = None
        episode.add_experts(tokens)
        self._sampled(number, tokens, completion.finish_reason)

    def _sampled(self, number: int, tokens: Tokens, reason: FinishReason) -> None:
        """Adds a turn and, unless the episode ends with it, passes its action on."""
        episode = self.episodes[number]
        turn = Turn(tokens.token_ids, tokens.log_probs, weight_versions=tokens.weight_versions, state=episode.state)
        episode.turns.append(turn)
        if reason != "stop":
            whole = self.limits.room(episode.length) > 0
            episode.end("length" if whole else "tokens")
            return
        tokenizer = self.renderer.builder.tokenizer
        self.host.step(self.names[number], tokenizer.decode(tokens.token_ids, skip_special_tokens=True))


def check_growth(earlier: Request, sampled: Tensor, later: Request) -> None:
    """The law of turns: the later request's ids begin with those of the earlier one and what was sampled.

    Raises:
        InvalidPrompt: they do not; names the first token that differs.
    """
    expected = torch.cat([earlier.input_ids, sampled])
    found = later.input_ids[: len(expected)]
    if not torch.equal(found, expected):
        both = min(len(found), len(expected))
        wrong = (found[:both] != expected[:both]).nonzero()
        place = int(wrong[0]) if len(wrong) else both
        raise InvalidPrompt(f"the turn's tokens differ from those of the turn before from token {place} on")
