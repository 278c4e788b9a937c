"""Episodes of agents: their requests on one engine, each at its own pace, to the end or over several steps of training, and the
rows that their conversations become.
"""

import math
import numbers
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dataproto import DataProto, object_array
from dataproto.errors import InvalidConfig, InvalidPrompt, end_after, ending
from rollout.agents.agent import Agent, task_messages
from rollout.agents.agent_host import AgentHost, Ended, Rewarded
from rollout.agents.agent_process import AgentApart, AgentsApart
from rollout.agents.conversations import AgentTurn, Conversations, Prompts
from rollout.agents.endpoint import HOST, Asked
from rollout.agents.messages import Refused, Reply, TokenLogProb, read_reply
from rollout.agents.wire_replies import CONTEXT
from rollout.continuation import BegunTurn, Tokens, continued
from rollout.engine import Completion
from rollout.environments.environment import MAX_REWARD
from rollout.environments.environment_host import copied
from rollout.environments.episode import Episode, EpisodeLimits, EpisodeRow, EpisodeStart, Turn
from rollout.environments.held_episodes import Decoding, Plan
from rollout.prompts.image_processing import batch_of
from rollout.prompts.messages import read_tools

LOOK_SECONDS = 0.05
"""Between looks at the limits of time, and at whether further agents can begin."""


def episode_over() -> Refused:
    """What a request for an episode that has ended gets: an error of its own, since each keeps the traceback of its raising."""
    return Refused("the episode of this key is over", None, "episode_over")


@dataclass
class AgentEpisode(Episode):
    """The record of an episode, with the reason of each of its rows, see `rollout.agents.conversations.REASONS`. If it continues
    later, ``repeated`` is what was sampled so far, in the order of its requests. ``cut_rows``: those whose last reply has no end.
    """

    new_rows: list[str] = field(default_factory=list)
    cut_rows: list[bool] = field(default_factory=list)
    scored: bool = True  # False: the agent returned no reward


@dataclass(frozen=True)
class AgentPlan(Plan):
    """Which agent plays episodes, on an endpoint that is up meanwhile, and how long they may be.

    The temperature, top-p and top-k of its requests are not used: the policy is that of the run. The limit ``seconds`` is the
    time of the agent between its requests, and ``last_pictures`` is the agent's own choice.
    """

    agent: Agent | AgentApart
    limits: EpisodeLimits

    def run(self) -> "AgentRun":
        """What plays them. Raises `InvalidConfig` if the limits have ``last_pictures``."""
        return AgentRun(self.agent, self.limits)

    def add_columns(self, data: DataProto, episodes: Sequence[Any]) -> None:
        """See `agent_columns`."""
        agent_columns(data, episodes)


def agent_columns(data: DataProto, episodes: Sequence[AgentEpisode]) -> None:
    """Adds columns of the rows of agents' episodes: ``new_row``, the reason of each row, see
    `rollout.agents.conversations.REASONS`, and ``agent_scored``, whether the agent returned a reward. Rows whose last reply was
    cut are ``truncated`` too.
    """
    rows = [
        (*row, each.scored) for each in episodes for row in list(zip(each.new_rows, each.cut_rows)) or [("", False)]
    ]
    data["new_row"] = object_array([reason for reason, _, _ in rows])
    data["truncated"] |= torch.tensor([cut for _, cut, _ in rows], dtype=torch.bool)
    data["agent_scored"] = torch.tensor([scored for _, _, scored in rows], dtype=torch.bool)


class _Live:
    """An episode while its agent runs."""

    talk: Conversations  # once it has begun

    def __init__(self, number: int, start: EpisodeStart, begun: Sequence[BegunTurn] = ()) -> None:
        """``begun``: what an earlier process has sampled. The agent gets it where it asks for the same again."""
        self.number, self.start = number, start
        self.called = False  # its agent
        self.in_flight: dict[int, AgentTurn] = {}  # by the number in the engine
        self.stopped: list[AgentTurn] = []  # Turns that continue when the engine does.
        self.repeated = {turn.state.partition(" ")[0]: turn for turn in begun}  # by the seed of the request
        self.rewards: dict[str, float] = {}  # by turn
        self.last: AgentTurn | None = None  # that was answered
        self.began = self.idle_since = time.monotonic()
        self.played = 0.0  # seconds until it was paused
        self.idle = 0.0  # seconds in which no request of the agent was sampled
        self.cut: Any = None  # the limit by which its last request was refused, and how that was told
        self.refusal: Refused | None = None
        self.ended: Any = None
        self.message, self.info = "", dict[str, Any]()
        self.scored = True

    def seconds_idle(self) -> float:
        """Seconds that the agent took between its requests so far."""
        return self.idle + (0.0 if self.in_flight else time.monotonic() - self.idle_since)

    @property
    def begun(self) -> list[BegunTurn]:
        """What was sampled so far."""
        turns = sorted(self.talk.turns, key=lambda turn: turn.id)
        sampled = [turn.sampled for turn in turns if turn.tokens is not None or turn.partial is not None]
        return [*sampled, *self.repeated.values()]

    def give(self, value: Any) -> None:
        """Adds a reward to the last turn. Raises `ValueError` if it is no finite number, or there is no turn."""
        number: Any = value  # mypy compares no `numbers.Real`
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(number) <= MAX_REWARD:
            raise ValueError(f"the agent gave the reward {value!r}, not a finite number of float32")
        if self.last is None:
            raise ValueError("the agent gave a reward before a request was answered")
        self.rewards[self.last.id] = self.rewards.get(self.last.id, 0.0) + float(value)

    def record(self) -> AgentEpisode:
        """The episode as it is put into rows, those whose last turn came last after the others; without rows if it goes on."""
        rows, turns, reasons, cut = list[EpisodeRow](), list[Turn](), list[str](), list[bool]()
        for row in sorted(self.talk.rows if self.ended else (), key=lambda row: row.turns[-1].id):
            begins, ends = row.turns[0].request, row.turns[-1].request
            rows.append(EpisodeRow(len(turns), begins, ends, experts=row.experts))
            reasons.append(row.reason)
            cut.append(row.turns[-1].ends == "length")
            for turn, following in zip(row.turns, [*row.turns[1:], None], strict=True):
                assert turn.tokens is not None
                shown = None if following is None else following.rendered
                ids, log_probs, versions = turn.tokens.token_ids, turn.tokens.log_probs, turn.tokens.weight_versions
                turns.append(Turn(ids, log_probs, self.rewards.get(turn.id, 0.0), shown, versions, turn.state))
        told: dict[str, Any] = {"ended": self.ended, "message": self.message, "info": self.info}
        told |= {"scored": self.scored, "repeated": [] if self.ended else self.begun}
        return AgentEpisode(self.start, turns=turns, rows=rows, new_rows=reasons, cut_rows=cut, **told)


class AgentRun:
    """Agents and their endpoint, which are up until it is closed, and their episodes, see `EpisodeRun`. `advance` runs in the
    thread of the engine.

    Between two calls agents may think and ask, and wait for their replies. An agent that is not held is called again: as long as
    it asks for the same as then, it gets what was sampled then; else its requests are sampled as new ones.
    """

    def __init__(self, agent: Agent | AgentApart, limits: EpisodeLimits) -> None:
        """Raises `InvalidConfig` if ``limits`` has ``last_pictures``."""
        if limits.last_pictures is not None:
            raise InvalidConfig("last_pictures: an agent keeps its own history, so it leaves out pictures itself")
        self.limits = limits
        self.lives: dict[int, _Live] = {}  # by number
        self.agents = AgentsApart(agent) if isinstance(agent, AgentApart) else AgentHost(agent)
        self._opened = 0
        self.agents.__enter__()

    @property
    def held(self) -> list[_Live]:
        """The episodes that were begun and not dropped."""
        return list(self.lives.values())

    def begin(self, start: EpisodeStart, begun: Sequence[BegunTurn] = ()) -> _Live:
        """A new episode, see `_Live`."""
        live = self.lives[self._opened] = _Live(self._opened, start, begun)
        self._opened += 1
        return live

    def drop(self, live: _Live) -> None:
        """Ends an episode that does not go on."""
        del self.lives[live.number]
        if live.called and live.ended is None:
            self._shut(live)

    def close(self) -> None:
        """Ends all agents."""
        end_after(None, self._refuse_all, partial(self.agents.__exit__, None, None, None))

    def _refuse_all(self) -> None:
        """Answers every request: nobody waits for an endpoint that is gone."""
        for live in self.lives.values():
            if live.called and live.ended is None:
                self.agents.end(live.number)
            self._refuse_waiting(live)
        while (event := self.agents.next(0.0)) is not None:
            if isinstance(event, Asked):
                event.replies.set_exception(episode_over())

    def advance(self, episodes: Sequence[_Live], decoding: Decoding) -> list[AgentEpisode]:
        """Lets agents continue until there are enough whole groups."""
        self.decoding, renderer = decoding, decoding.renderer
        self.requests: dict[int, _Live] = {}  # by the number in the engine
        self.episodes, self.places = episodes, {live.number: place for place, live in enumerate(episodes)}
        images = batch_of(live.start.images for live in episodes)
        with renderer.builder.one_batch(images), ending(self._pause, renderer.forget):
            self._resume(Prompts(renderer, self.limits))
            self._play()
        return [live.record() for live in episodes]

    def _play(self) -> None:
        look = time.monotonic()
        while any(live.ended is None for live in self.episodes) and not self.decoding.groups.enough:
            if (now := time.monotonic()) >= look:
                self._begin_further()
                look = now + min(self._time_left(), LOOK_SECONDS)
            self._take(max(look - now, 0.0))
            for completion in self.decoding.engine.poll() if self.requests and not self.decoding.groups.enough else ():
                if completion.request in self.requests:
                    self._completed(completion)

    def _resume(self, prompts: Prompts) -> None:
        """Gives the engine the turns that were stopped."""
        now = time.monotonic()
        for live in self.episodes:
            if not live.called:
                live.talk = Conversations(live.start, prompts)
                continue
            live.talk.prompts = prompts
            live.began, live.idle_since = now - live.played, now
            stopped, live.stopped = live.stopped, []
            for turn in stopped:
                self._decode(live, turn)

    def _pause(self) -> None:
        """Takes the tokens of turns that are not finished, and frees what the engine holds."""
        end_after(None, *(partial(self._stop, live) for live in self.episodes))

    def _stop(self, live: _Live) -> None:
        live.played, live.idle = time.monotonic() - live.began, live.seconds_idle()
        in_flight, live.in_flight = live.in_flight, {}
        for number, turn in in_flight.items():
            stopped = self.decoding.engine.abort(number)
            if stopped is not None:
                turn.partial = (turn.partial or Tokens()) + Tokens.of(stopped, self.decoding.weight_version)
            live.stopped.append(turn)
        self._free(live)

    def _begin_further(self) -> None:
        """Begins episodes while no more than `CommandAgent.at_once` run."""
        running = sum(live.called and live.ended is None for live in self.lives.values())
        room = len(self.episodes) if self.agents.at_once is None else self.agents.at_once - running
        for live in [live for live in self.episodes if not live.called][: max(room, 0)]:
            self._begin(live)

    def _begin(self, live: _Live) -> None:
        row = copied(live.start.row, {})
        messages, tools = task_messages(row["raw_prompt"]), [dict(tool) for tool in read_tools(row.get("tools"))]
        live.called, live.began = True, time.monotonic()
        live.idle_since = live.began
        self.agents.begin(live.number, (messages, tools, row, live.start.environment_seed))

    # From agents

    def _take(self, left: float) -> None:
        """Takes what agents have done; waits for it, at most ``left`` seconds, if the engine has nothing to do."""
        wait = not self.requests
        while (event := self.agents.next(left if wait else 0.0)) is not None:
            wait = False
            live = self.lives.get(event.episode)  # none for an episode that was dropped
            if isinstance(event, Asked):
                try:
                    self._start(live, event)
                except Refused as error:
                    event.replies.set_exception(error)
            elif live is not None and live.ended is None:
                self._rewarded(live, event) if isinstance(event, Rewarded) else self._returned(live, event)

    def _start(self, live: _Live | None, asked: Asked) -> None:
        """Gives a request to the engine. Raises `Refused`."""
        ask, limits = asked.ask, self.limits
        if live is None or live.ended is not None:
            raise episode_over()
        if sum(1 for _ in live.talk.turns) + ask.n > limits.turns:
            told = f"the episode has at most {limits.turns} turns"
            live.cut, live.refusal = "turns", Refused(told, None, "turn_limit_exceeded")
            raise live.refusal
        turns, idle = live.talk.open(ask, asked.replies), live.seconds_idle()
        parent, first = turns[0].parent, turns[0].request
        sampling, top = self.decoding.sampling, ask.top_log_probs or 0
        stop = tuple(dict.fromkeys((*sampling.stop, *ask.stops)))
        try:
            row = turns[0].row if turns[0].row.reason == "conversation" else live.talk.rows[0]
            used = max(len(first.input_ids) - len(row.turns[0].request.input_ids), 0)
            if limits.room(used) < 1:
                raise InvalidPrompt(f"the row has {used} tokens after its prompt, at most {limits.tokens} are allowed")
            most = int(min(sampling.max_tokens, limits.room(used), ask.max_tokens or math.inf))
            sampling = replace(sampling, n=1, max_tokens=most, stop=stop, top_log_probs=top)
            for turn in turns:
                turn.sampling = sampling
                self._decode(live, turn)
                live.idle = idle
            if parent is not None:
                self._abort(live, parent)
        except InvalidPrompt as error:
            live.cut, live.refusal = "tokens", Refused(f"the context is full: {error}", "messages", CONTEXT)
            for turn in turns:
                self._abort(live, turn)
                live.talk.drop(turn)
            raise live.refusal from error
        live.cut = live.refusal = None

    def _decode(self, live: _Live, turn: AgentTurn) -> None:
        """Gives a turn to the engine, from the tokens that it has so far. What an earlier process has sampled is not sampled
        again. Raises `InvalidPrompt` if the engine has no room for it.
        """
        known = live.repeated.pop(str(turn.request.seed), None)
        if known is not None and known.before == turn.request.input_ids.tolist():
            if known.whole:
                self._answer(live, turn, known.tokens, known.state.partition(" ")[2])
                return
            turn.partial = known.tokens
        begun, parent = [] if turn.partial is None else turn.partial.token_ids, turn.parent
        rest, sampling = continued(turn.request, begun, self.decoding.renderer.builder.family), turn.sampling
        assert sampling is not None
        sampling = replace(sampling, max_tokens=sampling.max_tokens - len(begun))
        if parent is None or parent.number is None:
            turn.number = self.decoding.engine.submit(rest, sampling, True)
        else:
            turn.number = self.decoding.engine.fork(parent.number, rest, sampling, True)
        live.in_flight[turn.number] = turn
        self.requests[turn.number] = live

    def _abort(self, live: _Live, turn: AgentTurn) -> None:
        """Frees what the engine holds of a turn."""
        if turn.number is not None:
            self.decoding.engine.abort(turn.number)
            self.requests.pop(turn.number, None)
            live.in_flight.pop(turn.number, None)
            turn.number = None
            if not live.in_flight:
                live.idle_since = time.monotonic()

    def _rewarded(self, live: _Live, event: Rewarded) -> None:
        try:
            live.give(event.value)
        except ValueError as error:
            self._end(live, "invalid", str(error))

    def _returned(self, live: _Live, event: Ended) -> None:
        if event.failure and live.refusal is not None and tells_of(event, live.refusal):
            self._end(live, live.cut)  # its error is that of a request beyond the limit
        elif event.failure:
            self._end(live, "memory" if event.of_memory else "error", event.failure)
        elif live.last is None:
            self._end(live, live.cut or "invalid", "the agent returned before a request of it was answered")
        else:
            self._score(live, event.outcome)

    def _score(self, live: _Live, outcome: Any) -> None:
        """Takes the reward that an agent returned, and ends its episode."""
        self._drop_waiting(live)
        live.scored = outcome is not None
        try:
            if isinstance(outcome, Mapping):
                live.info = {name: value for name, value in outcome.items() if name != "score"}
                outcome = outcome.get("score")
                if outcome is None:
                    raise ValueError("the agent returned a dict without 'score'")
            if live.scored:
                live.last = (live.talk.rows and max(live.talk.turns, key=lambda turn: turn.id)) or live.last
                live.give(outcome)
        except ValueError as error:
            self._end(live, "invalid", str(error))
            return
        self._end(live, live.cut or "done")

    # From the engine

    def _completed(self, completion: Completion) -> None:
        live = self.requests.pop(completion.request)
        turn = live.in_flight.pop(completion.request)
        if not live.in_flight:
            live.idle_since = time.monotonic()
        if completion.error is not None:
            live.stopped.append(turn)
            self.decoding.groups.fail(self.places[live.number], completion.error)
            return
        tokens = (turn.partial or Tokens()) + Tokens.of(completion, self.decoding.weight_version)
        self._answer(live, turn, tokens, completion.finish_reason, completion)

    def _answer(
        self, live: _Live, turn: AgentTurn, tokens: Tokens, reason: str, completion: Completion | None = None
    ) -> None:
        """Gives a turn its tokens, and the agent the replies of its request once all are there."""
        turn.ends = reason
        live.talk.answered(turn, tokens, self._reply(turn, tokens, completion))
        live.last = turn
        replies = [each.reply for each in turn.together if each.reply is not None]
        if len(replies) == len(turn.together):
            turn.replies.set_result(replies)

    def _reply(self, turn: AgentTurn, tokens: Tokens, completion: Completion | None) -> Reply:
        ask, ids = turn.ask, tokens.token_ids
        text = ask.begins + self.decoding.renderer.builder.tokenizer.decode(ids, skip_special_tokens=True)
        facts: dict[str, Any] = {
            "prompt_tokens": len(turn.request.input_ids),
            "cached_tokens": 0 if completion is None else completion.cached_tokens,
            "sampled_tokens": len(ids),
        }
        if ask.top_log_probs is not None:
            others = (completion and completion.top_log_probs) or []
            others = [[]] * (len(ids) - len(others)) + list(others)  # those of a turn that was stopped are not kept
            facts["log_probs"] = tuple(
                TokenLogProb(self._text(token), value, tuple((self._text(each), found) for each, found in likeliest))
                for token, value, likeliest in zip(ids, tokens.log_probs, others, strict=True)
            )
        return read_reply(turn.id, text, ask, "length" if turn.ends == "length" else "stop", **facts)

    def _text(self, token: int) -> str:
        return str(self.decoding.renderer.builder.tokenizer.decode([token]))

    # Ends

    def _time_left(self) -> float:
        """Seconds until the next limit of time. Episodes whose time is over now are ended; then 0, as further ones can begin."""
        now, left = time.monotonic(), math.inf
        running = [live for live in self.episodes if live.called and live.ended is None]
        for live in running:
            clock = math.inf if self.limits.wall_clock is None else self.limits.wall_clock - (now - live.began)
            own = self.limits.seconds - live.seconds_idle()
            if clock <= 0:
                self._end(live, "clock")
            elif own <= 0:
                told = f"the agent took more than {self.limits.seconds:g} seconds between its requests"
                self._end(live, "timeout", told)
            left = min(left, max(clock, 0.0), math.inf if live.in_flight else max(own, 0.0))
        return left if running else 0.0

    def _end(self, live: _Live, reason: Any, message: str = "") -> None:
        live.ended, live.message = reason, message
        self._shut(live)
        self._free(live)
        self.decoding.groups.finish(self.places[live.number])

    def _shut(self, live: _Live) -> None:
        """Lets an agent ask no more."""
        self.agents.end(live.number)
        self._drop_waiting(live)

    def _drop_waiting(self, live: _Live) -> None:
        """Forgets the requests that are sampled now: the agent has not seen a reply."""
        self._refuse_waiting(live)
        for turn in [*live.in_flight.values(), *live.stopped]:
            self._abort(live, turn)
        live.stopped.clear()
        for turn in [turn for turn in live.talk.turns if any(each.reply is None for each in turn.together)]:
            self._abort(live, turn)
            live.talk.drop(turn)

    def _refuse_waiting(self, live: _Live) -> None:
        for turn in [*live.in_flight.values(), *live.stopped]:
            if not turn.replies.done():
                turn.replies.set_exception(episode_over())

    def _free(self, live: _Live) -> None:
        for turn in list(live.talk.turns):
            self._abort(live, turn)


def tells_of(event: Ended, refusal: Refused) -> bool:
    """Whether an agent's error, or one that it came from, is what its client made of a request that was refused.

    >>> refusal = Refused("the episode has at most 2 turns", code="turn_limit_exceeded")
    >>> error = RuntimeError("Error code: 400 - {'code': 'turn_limit_exceeded'}")
    >>> tells_of(Ended.by(error), refusal), tells_of(Ended.by(KeyError("x")), refusal)
    (True, False)
    """
    return any(
        str(refusal) in cause
        or refusal.code in cause
        or ("Bad Request" in cause and HOST in cause)  # of an unread body
        for cause in event.causes
    )
