"""Episodes in environments or of agents, from their starts to their ends at once or over several steps of training."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataproto import DataProto
from dataproto.errors import ending, undoing
from rollout.continuation import BegunTurn, WholeGroups
from rollout.engine import RequestEngine, SamplingParams
from rollout.environments.episode import EpisodeLimits, EpisodeStart
from rollout.environments.turn_renderer import TurnRenderer


@dataclass(frozen=True)
class Decoding:
    """What samples the turns of episodes, until there are enough whole groups."""

    engine: RequestEngine
    renderer: TurnRenderer
    sampling: SamplingParams  # of each turn: ``max_tokens`` is the limit of a turn, and ``n`` is not used
    groups: WholeGroups
    weight_version: int = 0  # of the engine's weights


class EpisodeRun(Protocol):
    """Episodes that are played together, and what they take place in, until it is closed."""

    @property
    def held(self) -> list[Any]:
        """The episodes that were begun and not dropped."""

    def begin(self, start: EpisodeStart, begun: Sequence[BegunTurn] = ()) -> Any:
        """A new episode. What was sampled of it in an earlier process is not sampled again, see `BegunTurn`."""

    def drop(self, episode: Any) -> None:
        """Forgets an episode, and ends it if it has not ended."""

    def advance(self, episodes: Sequence[Any], decoding: Decoding) -> list[Any]:
        """Plays episodes until there are enough whole groups, or the engine fails at one: see ``groups.failure``. Those that
        have not ended can continue, in this run or, from what was sampled of them, in another one.

        Returns:
            The records of the episodes.
        """

    def close(self) -> None:
        """Ends what the episodes take place in."""


class Plan:
    """Where episodes take place, and how long they may be."""

    limits: EpisodeLimits

    def run(self) -> EpisodeRun:
        """What plays them."""
        raise NotImplementedError

    def add_columns(self, data: DataProto, episodes: Sequence[Any]) -> None:
        """Adds columns to those of `episode_columns`; by default none."""

    def play(
        self,
        engine: RequestEngine,
        renderer: TurnRenderer,
        starts: Sequence[EpisodeStart],
        sampling: SamplingParams,
        weight_version: int = 0,
    ) -> list[Any]:
        """Plays an episode from each start to its end, on one engine.

        Args:
            sampling: of each turn; ``max_tokens`` is the limit of a turn, and ``n`` is not used.
            weight_version: of the engine's weights.

        Raises:
            InvalidConfig: see `run` of the plan.
            DataProtoError: the engine failed at a request, e.g. `NonFiniteLogits`. Failures of environments and agents raise
                nothing.
        """
        everyone, run = WholeGroups([str(number) for number in range(len(starts))], wanted=len(starts)), self.run()
        with ending(run.close):
            episodes = [run.begin(start) for start in starts]
            played = run.advance(episodes, Decoding(engine, renderer, sampling, everyone, weight_version))
        if everyone.failure is not None:
            raise everyone.failure[1]
        return played


class HeldEpisodes:
    """The episodes of this process that have begun and not ended, and what they take place in."""

    def __init__(self) -> None:
        self._run: EpisodeRun | None = None
        self._shut: Callable[[], Any] = lambda: None  # closes the run, also when the process ends

    def advance(
        self,
        plan: Plan,
        starts: Sequence[EpisodeStart],
        begun: Sequence[Sequence[Mapping[str, Any]]],
        decoding: Decoding,
    ) -> list[Any]:
        """Plays episodes until there are enough whole groups, and holds those that have not ended.

        An episode that is held continues where it is. Another one that has ``begun``, in an earlier process, is played again
        with what was sampled then. Held episodes that are not among ``starts`` are dropped. As long as any is held, all are
        played by the plan of the first. If this raises, nothing is held: the episodes are somewhere between ``begun`` and what
        comes next.
        """
        if self._run is None:
            self._run = plan.run()
            self._shut = weakref.finalize(self, self._run.close)
        run = self._run
        with undoing(self.release):
            turns = {
                start.trajectory: [BegunTurn.of(turn) for turn in each]
                for start, each in zip(starts, begun, strict=True)
            }
            for episode in run.held:
                if episode.begun != turns.get(episode.start.trajectory):
                    run.drop(episode)
            held = {episode.start.trajectory: episode for episode in run.held}
            episodes = [held.get(start.trajectory) or run.begin(start, turns[start.trajectory]) for start in starts]
            played = run.advance(episodes, decoding)
        for episode in episodes:
            if episode.ended:
                run.drop(episode)
        if not run.held:
            self.release()
        return played

    def release(self) -> None:
        """Closes the run. Episodes that have not ended can be played again."""
        self._shut()
        self._run, self._shut = None, lambda: None
