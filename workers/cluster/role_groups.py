"""The roles of one run: what to launch (`LaunchPlan`), what makes their workers, and the launched groups (`Roles`)."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataproto import DataProto
from dataproto.errors import InvalidConfig, end_after, ending
from rollout.engine import SamplingParams
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, CriticWorker, RewardModelWorker
from workers.roles.model_worker import PolicyConfig
from workers.roles.reference import reference_worker
from workers.roles.reward import ModelReward, ModelRewardWorker, RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker, lora_streams

Phase = Callable[[str], AbstractContextManager[Any]]
"""The name of a phase of the start -> a context manager for the time of the phase, for instance to show it."""

Make = Callable[[Any], Any]
"""From the host of a rank, with its ``device``, its ``ranks`` and the ``roles`` that it has by now, to a role's worker there."""


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


def worker_makers(plan: LaunchPlan) -> dict[str, Make]:
    """What makes the worker of each role of a plan, in the order in which they start."""
    parts: tuple[Any, ...] = plan.actor, plan.reference, plan.critic, plan.reward, plan.rollout
    actor, reference, critic, reward, rollout = parts

    def trained(host: Any) -> Any:
        kind = ActorWorker if isinstance(actor, ActorConfig) else RewardModelWorker
        return kind(actor, host.device, host.ranks)

    def scorer(host: Any) -> RewardWorker:
        if isinstance(reward, ModelReward):
            return ModelRewardWorker(reward, actor.model_path, host.device, host.ranks)
        return RewardWorker(reward, actor.model_path)

    def sampler(host: Any) -> RolloutWorker:
        policy = host.roles["actor"]
        lora = lora_streams(actor, policy.base_weights, policy.adapter_weights)
        return RolloutWorker(rollout, policy.named_weights, host.ranks, lora=lora)

    makers: dict[str, tuple[object, Make]] = {
        "actor": (actor, trained),
        "reference": (reference, lambda host: reference_worker(reference, host.roles["actor"])),
        "critic": (critic, lambda host: CriticWorker(critic, host.device, host.ranks)),
        "reward": (reward, scorer),
        "rollout": (rollout, sampler),
    }
    return {role: make for role, (wanted, make) in makers.items() if wanted is not None}


def start_phase(role: str, plan: LaunchPlan) -> str:
    """The name of the phase in which a role starts."""
    if role == "rollout" and plan.rollout is not None:
        return engine_phase(plan.rollout.engine)
    return "starting the reward" if role == "reward" else f"loading the {role}"


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
    send_ahead: Callable[[DataProto], object] = lambda data: None
    """Sends the media of the next step's batch to roles in other processes, while a step runs. A thread may call it."""

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
        return self.rollout.generate(prompts, sampling or SamplingParams())

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is not None or self.actor.closed_reason is not None:  # the caller already has the error
            end_after(error, self.close)
            return
        with ending(self.close):
            self.finish_saves()
            self.release()

    def finish_saves(self) -> None:
        """Waits until the background saves of actor and critic are on disk, and raises the first of their errors."""
        trained = (self.actor, self.critic) if self.has("critic") else (self.actor,)
        end_after(None, *(group.finish_save for group in trained))
