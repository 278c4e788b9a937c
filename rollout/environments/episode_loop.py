"""Episodes in environments: turns of policy and environment on one engine, each episode at its own pace."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dataproto.errors import InvalidPrompt, end_after, ending
from rollout.continuation import BegunTurn, Tokens, continued
from rollout.engine import Completion, FinishReason, Request, SamplingParams
from rollout.environments.environment import EnvironmentFailed, MakeEnvironment, Observation
from rollout.environments.environment_host import EnvironmentHost, Outcome
from rollout.environments.episode import Episode, EpisodeLimits, EpisodeRow, EpisodeStart, TurnRequests
from rollout.environments.held_episodes import Decoding, Plan
from rollout.environments.turn_renderer import RenderedTurn
from rollout.prompts.image_processing import batch_of

WORTH_WAITING = 0.1
"""Part of the engine's last step that it waits for environments which usually answer sooner."""


@dataclass(frozen=True)
class EpisodePlan(Plan):
    """Which environments episodes take place in, and how long they may be. They step while the engine decodes others."""

    make_environment: MakeEnvironment
    limits: EpisodeLimits

    def run(self) -> "EnvironmentRun":
        """What plays them. Raises `InvalidConfig` if ``make_environment`` cannot be sent to another process, for a limit of
        memory.
        """
        return EnvironmentRun(self.make_environment, self.limits)


class EnvironmentRun:
    """Environments and the episodes in them, see `EpisodeRun`.

    The environment of an episode that continues is the one that is held. A new one gets the actions of ``Episode.repeated``;
    should it show something else than before, the episode ends as "invalid".
    """

    def __init__(self, make_environment: MakeEnvironment, limits: EpisodeLimits) -> None:
        """Raises `InvalidConfig`, see `EpisodePlan.run`."""
        self.limits = limits
        self.host = EnvironmentHost(make_environment, limits.seconds, limits.memory_gib)
        self.held: list[Episode] = []
        self.close = self.host.shut

    def begin(self, start: EpisodeStart, begun: Sequence[BegunTurn] = ()) -> Episode:
        """A new episode."""
        episode = Episode(start, start.trajectory or str(len(self.held)), repeated=list(begun))
        self.held.append(episode)
        return episode

    def drop(self, episode: Episode) -> None:
        """Forgets an episode and its environment."""
        self.held = [each for each in self.held if each is not episode]
        self.host.close(episode.name)

    def advance(self, episodes: Sequence[Episode], decoding: Decoding) -> list[Episode]:
        """Plays episodes until there are enough whole groups."""
        self.host.resume()
        play, renderer = _Play(self.host, self.limits, episodes, decoding), decoding.renderer
        images = batch_of(episode.start.images for episode in episodes)
        with renderer.builder.one_batch(images), ending(play.stop, renderer.forget):
            play.run()
        self.host.pause()
        return list(episodes)


class _Play:
    """The loop of a run."""

    def __init__(
        self, host: EnvironmentHost, limits: EpisodeLimits, episodes: Sequence[Episode], decoding: Decoding
    ) -> None:
        self.host, self.limits, self.episodes, self.decoding = host, limits, episodes, decoding
        self.places = {episode.name: place for place, episode in enumerate(episodes)}
        self.requests: dict[int, Episode] = {}  # by their numbers in the engine
        self.turn_requests = TurnRequests(decoding.renderer, limits)
        self.began = time.monotonic()

    def run(self) -> None:
        host, engine, groups = self.host, self.decoding.engine, self.decoding.groups
        for episode in self.episodes:
            if episode.name not in host:
                host.reset(episode.name, episode.start.row, episode.start.environment_seed)
            elif episode.partial is not None:
                self._start(episode, episode.request, None)
        step_s = 0.0  # of the engine's last step
        while (host.working or self.requests) and not groups.enough:
            if (left := self._time_left()) <= 0:
                continue
            # Environments that answer at once have their next turns together. The engine never waits long for that: a turn that
            # begins a step later costs it nothing.
            patience = step_s * WORTH_WAITING
            patience = patience if host.typical_s < patience else 0.0
            answered = host.poll(patience if self.requests else None, left)
            for name, outcome in sorted(answered, key=lambda each: self.places[each[0]]):
                episode = self.episodes[self.places[name]]
                self._observe(episode, outcome)
                self._free_ended(episode)
            if not self.requests:
                continue
            began = time.monotonic()
            completions = engine.poll()
            step_s = time.monotonic() - began
            for completion in completions:
                if completion.request in self.requests:
                    episode = self.requests.pop(completion.request)
                    self._completed(episode, completion)
                    self._free_ended(episode)

    def _free_ended(self, episode: Episode) -> None:
        """Closes the environment of an episode that has ended, and frees what the engine holds of it."""
        if episode.ended:
            self.decoding.groups.finish(self.places[episode.name])
            self.host.close(episode.name)
            if episode.number is not None:
                self.decoding.engine.abort(episode.number)

    def stop(self) -> None:
        """Takes the tokens of turns that are not finished, and frees what the engine holds of episodes that have not ended."""
        end_after(None, *(partial(self._stop, episode) for episode in self.episodes if not episode.ended))

    def _stop(self, episode: Episode) -> None:
        episode.elapsed += time.monotonic() - self.began
        self._take_tokens(episode)

    def _take_tokens(self, episode: Episode) -> None:
        """Stops the episode's request. The tokens of a turn that is decoded become its partial turn."""
        if episode.number is not None:
            stopped = self.decoding.engine.abort(episode.number)
            if self.requests.pop(episode.number, None) is not None:
                episode.partial = self._with_partial(episode, stopped)
            episode.number = None

    def _with_partial(self, episode: Episode, found: Completion | None) -> Tokens:
        """The tokens that a turn has so far, with those that the engine has ``found`` after them."""
        tokens = Tokens() if found is None else Tokens.of(found, self.decoding.weight_version)
        whole = (episode.partial or Tokens()) + tokens
        episode.add_experts(whole)
        return whole

    def _time_left(self) -> float:
        """Seconds until the wall clock of an episode is over. Those for which it is over now are ended; then 0.

        The clock of an episode that is played again begins after what it repeats.
        """
        if self.limits.wall_clock is None:
            return math.inf
        played, left = time.monotonic() - self.began, math.inf
        for episode in self.episodes:
            if episode.ended or episode.repeated:
                continue
            rest = self.limits.wall_clock - episode.elapsed - played
            left = min(left, max(rest, 0.0))
            if rest <= 0:
                self._cut(episode)
        return left

    def _cut(self, episode: Episode) -> None:
        """Ends an episode whose wall clock is over, with the tokens so far of a turn that is decoded."""
        self._take_tokens(episode)
        if episode.partial:
            episode.add_turn(episode.partial)
        episode.partial = None
        episode.end("clock")
        self._free_ended(episode)

    # From an environment

    def _observe(self, episode: Episode, outcome: Outcome) -> None:
        if isinstance(outcome, EnvironmentFailed):
            episode.end(outcome.reason, str(outcome))
            return
        episode.info = dict(outcome.info)
        if episode.turns:
            episode.turns[-1] = replace(episode.turns[-1], reward=float(outcome.reward))
        if outcome.done and not episode.turns:
            episode.end("invalid", "its environment was over before the first turn")
            return
        if outcome.done or len(episode.turns) == self.limits.turns:
            episode.end("done" if outcome.done else "turns")
            return
        try:
            if self.limits.last_pictures is not None:
                episode.observations.append(self.decoding.renderer.kept(outcome))
            shown, row = self._shown(episode, outcome), self.turn_requests.new_row(episode)
        except InvalidPrompt as error:
            episode.end("invalid", f"its observation cannot be shown: {error}")
            return
        episode.state = self.decoding.renderer.digest(outcome, () if shown is None else shown.shown)
        if row is not None:
            self._begin_row(episode, row)
        elif shown is None:
            self._submit(episode, episode.request, None)
        elif self.limits.room(episode.length + len(shown.ids)) < 1:
            episode.end("tokens")
        else:
            self._submit(episode, self.turn_requests.next_request(episode, shown), shown)

    def _shown(self, episode: Episode, observation: Observation) -> RenderedTurn | None:
        """The observation as tokens after the last turn; the first one becomes the prompt of the episode."""
        if episode.turns:
            return self.decoding.renderer.turn(observation, episode.turns[-1].token_ids[-1])
        episode.prompt, request = self.turn_requests.first_turn(episode.start, observation)
        episode.request = episode.next_of(request)
        experts = episode.repeated[-1].tokens.experts if episode.repeated else None
        episode.rows = [EpisodeRow(0, episode.request, episode.request, experts=experts)]
        return None

    def _begin_row(self, episode: Episode, row: EpisodeRow) -> None:
        """Starts the next turn in a new row."""
        assert episode.prompt is not None
        if self.limits.room(len(row.begins.input_ids) - len(episode.prompt.input_ids)) < 1:
            episode.end("tokens")
            return
        episode.rows.append(row)
        if episode.number is not None:
            self.decoding.engine.abort(episode.number)
            episode.number = None
        self._submit(episode, row.begins, None)

    def _submit(self, episode: Episode, request: Request | None, shown: RenderedTurn | None) -> None:
        """Starts the next turn, which ``shown`` precedes."""
        assert request is not None
        if episode.repeated:
            turn = episode.repeated.pop(0)
            if not episode.repeated:
                episode.elapsed = self.began - time.monotonic()
            same = turn.before == (request.input_ids if shown is None else shown.ids).tolist()
            if not same or turn.state not in ("", episode.state):
                message = f"its environment did not repeat what it showed before turn {len(episode.turns)}"
                episode.end("invalid", message)
                return
            if turn.whole:
                episode.show(request, shown)
                self._sampled(episode, turn.tokens, "stop")
                return
            episode.partial = turn.tokens
        self._start(episode, request, shown)

    def _start(self, episode: Episode, request: Request | None, shown: RenderedTurn | None) -> None:
        """Gives the next turn to the engine, from the tokens that it has so far."""
        assert request is not None
        engine, earlier, begun = self.decoding.engine, episode.number, (episode.partial or Tokens()).token_ids
        rest = continued(request, begun, self.decoding.renderer.builder.family)
        keep, sampling = len(episode.turns) + 1 < self.limits.turns, self._sampling(episode, shown, len(begun))
        try:
            if earlier is None:
                episode.number = engine.submit(rest, sampling, keep)
            else:
                episode.number = engine.fork(earlier, rest, sampling, keep)
                engine.abort(earlier)
        except InvalidPrompt as error:
            episode.end("tokens", f"the engine has no room for the next turn: {error}")
            return
        self.requests[episode.number] = episode
        episode.show(request, shown)

    def _sampling(self, episode: Episode, shown: RenderedTurn | None, begun: int) -> SamplingParams:
        """Of the next turn: at most as many tokens as the episode has left. ``begun`` of them have been sampled."""
        used, sampling = episode.length + (0 if shown is None else len(shown.ids)), self.decoding.sampling
        most = int(min(sampling.max_tokens, self.limits.room(used))) - begun
        return sampling if most == sampling.max_tokens else replace(sampling, max_tokens=most)

    # From the engine

    def _completed(self, episode: Episode, completion: Completion) -> None:
        if completion.error is not None:
            episode.partial = episode.partial or Tokens()  # its turn has begun
            self.decoding.groups.fail(self.places[episode.name], completion.error)
            return
        tokens, episode.partial = self._with_partial(episode, completion), None
        self._sampled(episode, tokens, completion.finish_reason)

    def _sampled(self, episode: Episode, tokens: Tokens, reason: FinishReason) -> None:
        """Adds a turn and, unless the episode ends with it, passes its action on."""
        episode.add_turn(tokens)
        if reason != "stop":
            episode.end("length" if self.limits.room(episode.length) > 0 else "tokens")
            return
        tokenizer = self.decoding.renderer.builder.tokenizer
        self.host.step(episode.name, tokenizer.decode(tokens.token_ids, skip_special_tokens=True))
