"""Episodes of agents: their requests on one engine, each at its own pace, and the rows that their conversations become."""

import math
import numbers
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from dataproto import DataProto, object_array
from dataproto.errors import InvalidConfig, InvalidPrompt, describe, end_after, ending
from rollout.agents.agent import Agent, AgentHost, AgentTask, Ended, Rewarded, task_messages
from rollout.agents.conversations import AgentTurn, Conversations, Prompts
from rollout.agents.endpoint import Asked, Endpoint
from rollout.agents.messages import Refused, Reply, TokenLogProb, read_reply
from rollout.agents.wire_replies import CONTEXT
from rollout.continuation import Tokens
from rollout.engine import Completion, RequestEngine, SamplingParams
from rollout.environments.environment import MAX_REWARD
from rollout.environments.episode import Episode, EpisodeLimits, EpisodeRow, EpisodeStart, Turn, TurnRequests
from rollout.environments.turn_renderer import TurnRenderer
from rollout.prompts.image_processing import batch_of, joined
from rollout.prompts.messages import read_tools

MODEL = "policy"
"""The name of the model on the endpoint; requests may name it otherwise."""


@dataclass
class AgentEpisode(Episode):
    """The record of an episode, with the reason of each of its rows, see `rollout.agents.conversations.REASONS`."""

    new_rows: list[str] = field(default_factory=list)
    scored: bool = True  # False: the agent returned no reward


def run_agents(
    engine: RequestEngine,
    renderer: TurnRenderer,
    starts: Sequence[EpisodeStart],
    agent: Agent,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    weight_version: int = 0,
) -> list[AgentEpisode]:
    """Runs an agent from each start to its end, on an endpoint that is up meanwhile.

    Args:
        sampling: of each turn; ``max_tokens`` is the limit of a turn, and ``n`` is not used. The temperature, top-p and top-k of
            requests are not used either: the policy is that of the run.
        limits: ``seconds`` is the time of the agent between its requests. ``last_pictures`` is the agent's own choice.
        weight_version: of the engine's weights.

    Raises:
        InvalidConfig: ``limits`` has ``last_pictures``.
        DataProtoError: the engine failed at a request, e.g. `NonFiniteLogits`. Failures of agents raise nothing.
    """
    if limits.last_pictures is not None:
        raise InvalidConfig("last_pictures: an agent keeps its own history, so it leaves out pictures itself")
    run = _Run(engine, renderer, starts, sampling, limits, weight_version)
    images = batch_of(joined(start.images for start in starts))
    with renderer.builder.one_batch(images), ending(run.stop, renderer.forget):
        run.play(agent)
    return [live.record() for live in run.episodes]


def agent_columns(data: DataProto, episodes: Sequence[AgentEpisode]) -> None:
    """Adds columns of the rows of agents' episodes: ``new_row``, the reason of each row, see
    `rollout.agents.conversations.REASONS`, and ``agent_scored``, whether the agent returned a reward.
    """
    rows = [(reason, episode.scored) for episode in episodes for reason in episode.new_rows or [""]]
    data["new_row"] = object_array([reason for reason, _ in rows])
    data["agent_scored"] = torch.tensor([scored for _, scored in rows], dtype=torch.bool)


@dataclass(eq=False)
class _Pending:
    """A request whose replies are sampled."""

    asked: Asked
    turns: list[AgentTurn]


class _Live:
    """An episode while its agent runs."""

    def __init__(self, number: int, start: EpisodeStart, prompts: Prompts) -> None:
        self.number, self.start = number, start
        self.talk = Conversations(start, prompts)
        self.key = ""
        self.in_flight: dict[int, tuple[_Pending, AgentTurn]] = {}  # by the number in the engine
        self.rewards: dict[str, float] = {}  # by turn
        self.last: AgentTurn | None = None  # that was answered
        self.began = self.idle_since = time.monotonic()
        self.idle = 0.0  # seconds in which no request of the agent was sampled
        self.cut: Any = None  # the limit by which its last request was refused
        self.ended: Any = None
        self.message, self.info = "", dict[str, Any]()
        self.scored = True

    def seconds_idle(self) -> float:
        """Seconds that the agent took between its requests so far."""
        return self.idle + (0.0 if self.in_flight else time.monotonic() - self.idle_since)

    def give(self, value: Any) -> None:
        """Adds a reward to the last turn. Raises `ValueError` if it is no finite number, or there is no turn."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(float(value)) <= MAX_REWARD:
            raise ValueError(f"the agent gave the reward {value!r}, not a finite number of float32")
        if self.last is None:
            raise ValueError("the agent gave a reward before a request was answered")
        self.rewards[self.last.id] = self.rewards.get(self.last.id, 0.0) + float(value)

    def record(self) -> AgentEpisode:
        """The episode as it is put into rows, those whose last turn came last after the others."""
        rows, turns, reasons = list[EpisodeRow](), list[Turn](), list[str]()
        for row in sorted(self.talk.rows, key=lambda row: row.turns[-1].id):
            begins, ends = row.turns[0].request, row.turns[-1].request
            rows.append(EpisodeRow(len(turns), begins, ends, experts=row.experts))
            reasons.append(row.reason)
            for turn, following in zip(row.turns, [*row.turns[1:], None], strict=True):
                assert turn.tokens is not None
                shown = None if following is None else following.rendered
                ids, log_probs, versions = turn.tokens.token_ids, turn.tokens.log_probs, turn.tokens.weight_versions
                turns.append(Turn(ids, log_probs, self.rewards.get(turn.id, 0.0), shown, versions, turn.state))
        told: dict[str, Any] = {"ended": self.ended, "message": self.message, "info": self.info}
        return AgentEpisode(self.start, turns=turns, rows=rows, new_rows=reasons, scored=self.scored, **told)


class _Run:
    """The loop of `run_agents`, in the thread of the engine."""

    def __init__(
        self,
        engine: RequestEngine,
        renderer: TurnRenderer,
        starts: Sequence[EpisodeStart],
        sampling: SamplingParams,
        limits: EpisodeLimits,
        weight_version: int,
    ) -> None:
        self.engine, self.sampling, self.limits, self.weight_version = engine, sampling, limits, weight_version
        self.tokenizer = renderer.builder.tokenizer
        prompts = Prompts(renderer, TurnRequests(renderer, limits))
        self.episodes = [_Live(number, start, prompts) for number, start in enumerate(starts)]
        self.requests: dict[int, _Live] = {}  # by the number in the engine
        self.inbox: SimpleQueue[Any] = SimpleQueue()

    def play(self, agent: Agent) -> None:
        with Endpoint(self.inbox, MODEL) as self.endpoint, AgentHost(agent, self.inbox) as self.host:
            try:
                for live in self.episodes:
                    self._begin(live)
                while any(live.ended is None for live in self.episodes):
                    self._take(self._time_left())
                    for completion in self.engine.poll() if self.requests else ():
                        if completion.request in self.requests:
                            self._completed(completion)
            finally:  # nobody waits for an endpoint that is gone
                for live in self.episodes:
                    self._refuse_waiting(live)

    def stop(self) -> None:
        """Frees what the engine holds."""
        end_after(None, *(partial(self._free, live) for live in self.episodes))

    def _begin(self, live: _Live) -> None:
        live.key = self.endpoint.open(live.number)
        row, url = live.start.row, self.endpoint.url
        task = AgentTask(
            f"{url}/v1",
            url,
            live.key,
            MODEL,
            task_messages(row["raw_prompt"]),
            [dict(tool) for tool in read_tools(row.get("tools"))],
            row,
            live.start.environment_seed,
            lambda value: self.inbox.put(Rewarded(live.number, value)),
        )
        live.began = live.idle_since = time.monotonic()
        self.host.begin(live.number, task)

    # From agents

    def _take(self, left: float) -> None:
        """Takes what agents have done; waits for it, at most ``left`` seconds, if the engine has nothing to do."""
        wait = not self.requests
        while True:
            try:
                event = self.inbox.get(block=wait, timeout=min(left, 3600.0) if wait else None)
            except Empty:
                return
            wait = False
            live = self.episodes[event.episode]
            if isinstance(event, Asked):
                self._asked(live, event)
            elif live.ended is None:
                self._rewarded(live, event) if isinstance(event, Rewarded) else self._returned(live, event)

    def _asked(self, live: _Live, asked: Asked) -> None:
        try:
            self._start(live, asked)
        except Refused as error:
            asked.replies.set_exception(error)

    def _start(self, live: _Live, asked: Asked) -> None:
        """Gives a request to the engine. Raises `Refused`."""
        ask, limits = asked.ask, self.limits
        if live.ended is not None:
            raise Refused("the episode of this key is over", None, "episode_over")
        if sum(1 for _ in live.talk.turns) + ask.n > limits.turns:
            live.cut = "turns"
            raise Refused(f"the episode has at most {limits.turns} turns", None, "turn_limit_exceeded")
        turns = live.talk.open(ask)
        try:
            used = max(len(turns[0].request.input_ids) - len(live.talk.rows[0].turns[0].request.input_ids), 0)
            if limits.room(used) < 1:
                raise InvalidPrompt(f"the row has {used} tokens after its prompt, at most {limits.tokens} are allowed")
            most = int(min(self.sampling.max_tokens, limits.room(used), ask.max_tokens or math.inf))
            self._submit(live, _Pending(asked, turns), most)
        except InvalidPrompt as error:
            live.cut = "tokens"
            for turn in turns:
                self._abort(live, turn)
                live.talk.drop(turn)
            raise Refused(f"the context is full: {error}", "messages", CONTEXT) from error
        live.cut = None

    def _submit(self, live: _Live, pending: _Pending, most: int) -> None:
        """Submits the turns of a request. Raises `InvalidPrompt` if the engine has no room for them."""
        ask, parent = pending.asked.ask, pending.turns[0].parent
        stop = tuple(dict.fromkeys((*self.sampling.stop, *ask.stops)))
        sampling = replace(self.sampling, n=1, max_tokens=most, stop=stop, top_log_probs=ask.top_log_probs or 0)
        idle = live.seconds_idle()
        for turn in pending.turns:
            if parent is None or parent.number is None:
                turn.number = self.engine.submit(turn.request, sampling, True)
            else:
                turn.number = self.engine.fork(parent.number, turn.request, sampling, True)
            live.idle = idle
            live.in_flight[turn.number] = pending, turn
            self.requests[turn.number] = live
        if parent is not None:
            self._abort(live, parent)

    def _abort(self, live: _Live, turn: AgentTurn) -> None:
        """Frees what the engine holds of a turn."""
        if turn.number is not None:
            self.engine.abort(turn.number)
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
        if event.error is not None:
            reason = "memory" if isinstance(event.error, MemoryError) else "error"
            self._end(live, live.cut or reason, "" if live.cut else f"the agent raised {describe(event.error)}")
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
        pending, turn = live.in_flight.pop(completion.request)
        if not live.in_flight:
            live.idle_since = time.monotonic()
        if completion.error is not None:
            raise completion.error
        live.talk.answered(turn, Tokens.of(completion, self.weight_version), self._reply(turn, completion))
        live.last = turn
        if all(each.reply is not None for each in pending.turns):
            pending.asked.replies.set_result([each.reply for each in pending.turns if each.reply is not None])

    def _reply(self, turn: AgentTurn, completion: Completion) -> Reply:
        ask, ids = turn.ask, completion.token_ids
        text = ask.begins + self.tokenizer.decode(ids, skip_special_tokens=True)
        facts: dict[str, Any] = {
            "prompt_tokens": len(turn.request.input_ids),
            "cached_tokens": completion.cached_tokens,
            "sampled_tokens": len(ids),
        }
        if ask.top_log_probs is not None:
            others = completion.top_log_probs or [[]] * len(ids)
            facts["log_probs"] = tuple(
                TokenLogProb(self._text(token), value, tuple((self._text(each), found) for each, found in likeliest))
                for token, value, likeliest in zip(ids, completion.log_probs, others, strict=True)
            )
        return read_reply(turn.id, text, ask, "length" if completion.finish_reason == "length" else "stop", **facts)

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    # Ends

    def _time_left(self) -> float:
        """Seconds until the next limit of time. Episodes whose time is over now are ended."""
        now, left = time.monotonic(), math.inf
        for live in self.episodes:
            if live.ended is not None:
                continue
            clock = math.inf if self.limits.wall_clock is None else self.limits.wall_clock - (now - live.began)
            own = self.limits.seconds - live.seconds_idle()
            if clock <= 0:
                self._end(live, "clock")
            elif own <= 0:
                self._end(
                    live, "timeout", f"the agent took more than {self.limits.seconds:g} seconds between its requests"
                )
            else:
                left = min(left, clock, math.inf if live.in_flight else own)
        return left if any(live.ended is None for live in self.episodes) else 0.0

    def _end(self, live: _Live, reason: Any, message: str = "") -> None:
        live.ended, live.message = reason, message
        self.endpoint.shut(live.key)
        self.host.cancel(live.number)
        self._drop_waiting(live)
        self._free(live)

    def _drop_waiting(self, live: _Live) -> None:
        """Forgets the requests that are sampled now: the agent has not seen a reply."""
        self._refuse_waiting(live)
        for _, turn in list(live.in_flight.values()):
            self._abort(live, turn)
        for turn in [turn for turn in live.talk.turns if turn.reply is None]:
            live.talk.drop(turn)

    def _refuse_waiting(self, live: _Live) -> None:
        for pending, _ in live.in_flight.values():
            waiting: Future[list[Reply]] = pending.asked.replies
            if not waiting.done():
                waiting.set_exception(Refused("the episode of this key is over", None, "episode_over"))

    def _free(self, live: _Live) -> None:
        for turn in list(live.talk.turns):
            self._abort(live, turn)
