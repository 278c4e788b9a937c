"""The roles of one run: what to launch (`LaunchPlan`), and the launched groups (`Roles`)."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dataproto import DataProto
from dataproto.errors import InvalidConfig, end_after, ending, raise_first
from rollout.engine import SamplingParams
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, RewardModelWorker
from workers.roles.model_worker import PolicyConfig
from workers.roles.reward import ModelReward, RewardFunction
from workers.roles.rollout_worker import RolloutConfig

Phase = Callable[[str], AbstractContextManager[Any]]
"""The name of a phase of the start -> a context manager for the time of the phase, for instance to show it."""


@dataclass(frozen=True)
class LaunchPlan:
    """The roles of one run, before they are launched. An optional role that is ``None`` is left out."""

    actor: ActorConfig | CriticConfig  # a critic: a reward model learns in the actor's place
    reference: PolicyConfig | None
    reward: RewardFunction | ModelReward | None
    rollout: RolloutConfig | None
    layout: Layout
    critic: CriticConfig | None = None
    libraries: Path | None = None  # file for what libraries warn of in other processes


def trained_worker(config: ActorConfig | CriticConfig, *place: Any) -> Any:
    """The `ActorWorker`, or the `RewardModelWorker` in its place; ``place``: its device and ranks."""
    return ActorWorker(config, *place) if isinstance(config, ActorConfig) else RewardModelWorker(config, *place)


def timed_phase(phase: Phase, seconds: dict[str, float]) -> Phase:
    """A phase that also stores its seconds in ``seconds``, under its name."""

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        with phase(name):
            yield
        seconds[name] = time.perf_counter() - start

    return timed


def engine_phase(engine: str) -> str:
    """The name of the phase in which an engine starts.

    >>> engine_phase("hf")
    'starting the engine hf'
    """
    return f"starting the engine {engine}" + (" (weights, compilation, graphs)" if engine == "vllm" else "")


@dataclass
class Roles:
    """The groups of one run, as attributes.

    A context manager: on exit it waits for unfinished checkpoints and releases environments, unless an error ended the run, and
    closes the groups.
    ``reference``, ``critic`` and ``reward`` raise `InvalidConfig` if they were not launched; ``rollout`` then is ``None``.
    """

    actor: Any
    rollout: Any
    optional: dict[str, Any]
    close: Callable[[], None] = lambda: None
    after_sync: Callable[[], None] = lambda: None  # called at the end of `sync_weights`
    release: Callable[[], Any] = lambda: None  # closes the environments that the processes of `close` hold
    devices: int = 1  # GPUs (processes where there are none) that hold models, those of separate engines included
    start_seconds: dict[str, float] = field(default_factory=dict)  # of the phases of the start; see `launch`
    scores_apart: bool = False  # whether a reward function scores in processes of its own, on no device of the models
    ways: Mapping[str, str] = field(default_factory=dict)  # how one gets an optional role, where not by `launch`

    @property
    def reference(self) -> Any:
        return self._optional("reference")

    @property
    def critic(self) -> Any:
        return self._optional("critic")

    @property
    def reward(self) -> Any:
        return self._optional("reward")

    def has(self, role: str) -> bool:
        """Whether an optional role was launched."""
        return self.optional.get(role) is not None

    def sync_weights(self) -> None:
        """Marks the engine's weights as stale; the next generation receives the actor's weights, once."""
        if self.rollout is not None:
            self.rollout.mark_stale()
        self.after_sync()

    def sample(self, prompts: DataProto, sampling: SamplingParams | None = None) -> DataProto:
        """Generates ``sampling.n`` responses to each prompt; see `RolloutWorker.generate`.

        Uses the weights that the engine last received. It receives the actor's weights first if it has none: before the first
        `sync_weights`, or after it dropped them while asleep (vLLM on CUDA, unless its option ``sleep_level`` is 1).
        """
        data: DataProto = self.rollout.generate(prompts, sampling or SamplingParams())
        return data

    def save_weights_for_sampler(self) -> None:
        """Sends the actor's current weights to the engine now; `sync_weights` defers that to the next generation."""
        self.sync_weights()
        self.rollout.refresh()

    def _optional(self, role: str) -> Any:
        if not self.has(role):
            raise InvalidConfig(f"this run has no {role}: {self.ways.get(role, f'pass launch({role}=...)')}")
        return self.optional[role]

    def __enter__(self) -> "Roles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self.actor.closed_reason is not None:  # the caller already has the error
            end_after(error, self.close)
            return
        with ending(self.close):
            self.finish_saves()
            self.release()

    def finish_saves(self) -> None:
        """Waits until the background saves of actor and critic are on disk, and raises the first of their errors."""
        errors: list[Exception] = []
        for group in (self.actor, *([self.critic] if self.has("critic") else [])):
            try:
                group.finish_save()
            except Exception as error:
                errors.append(error)
        raise_first(errors)
