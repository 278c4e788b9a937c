"""Roles to devices: the one place that knows where workers run."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from rollout.engine import SamplingParams
from workers.cluster.local_group import LocalGroup
from workers.ranks.failures import raise_first
from workers.ranks.layout import Layout
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.critic import CriticConfig, CriticWorker
from workers.roles.model_reward import ModelReward, ModelRewardWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.roles.reward import RewardFunction, RewardWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker


@dataclass
class Roles:
    """The groups of one run; a context manager that waits for what they save, unless an error ends it, and closes them.

    `reference`, `critic` and `reward` raise when asked for without having been launched.
    """

    actor: Any
    rollout: Any
    optional: dict[str, Any]
    close: Callable[[], None] = lambda: None
    after_sync: Callable[[], None] = lambda: None  # what the place does at the end of a step
    devices: int = 1  # GPUs, or processes where there are none, that hold models: those of a rollout apart too

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
        return self.optional.get(role) is not None

    def sync_weights(self) -> None:
        """Tells the engine that the actor has changed; the next generation streams the weights, once."""
        self.rollout.mark_stale()
        self.after_sync()

    def sample(self, prompts: DataProto, sampling: SamplingParams | None = None) -> DataProto:
        """``sampling.n`` answers to each prompt; see `RolloutWorker.generate`.

        They come from the weights that the engine was last given, or the actor's if it has none: none have been given yet, or
        they were dropped while it slept (vLLM on CUDA, unless its option ``sleep_level`` is 1).
        """
        data: DataProto = self.rollout.generate(prompts, sampling or SamplingParams())
        return data

    def save_weights_for_sampler(self) -> None:
        """Gives the actor's weights as they are now to the engine, while `sync_weights` leaves that to the next generation."""
        self.sync_weights()
        self.rollout.refresh()

    def _optional(self, role: str) -> Any:
        if not self.has(role):
            raise InvalidConfig(f"this run has no {role}: pass launch({role}=...)")
        return self.optional[role]

    def __enter__(self) -> "Roles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.actor.ended is None:  # else the caller has been told
                self.finish_saves()
        finally:
            self.close()

    def finish_saves(self) -> None:
        """Waits until all that actor and critic save behind the caller's back is on disk; raises what went wrong."""
        errors: list[Exception] = []
        for group in (self.actor, *([self.critic] if self.has("critic") else [])):
            try:
                group.finish_save()
            except Exception as error:
                errors.append(error)
        raise_first(errors)


def launch(
    actor: ActorConfig,
    reference: PolicyConfig | None = None,
    reward: RewardFunction | ModelReward | None = None,
    rollout: str | RolloutConfig = "hf",
    on: str = "local",
    layout: Layout | None = None,
    critic: CriticConfig | None = None,
    **options: Any,
) -> Roles:
    """Starts the roles of a recipe.

    Args:
        reward: a function of rows, or a model.
        rollout: an engine's name, or a `RolloutConfig` with options for it.
        on: where: ``"local"`` is this process, ``"ray"`` one process for each rank of ``layout``, each with all roles.
        layout: how actor, reference and critic are spread over processes.
        options: of the place; on Ray, the fields of `workers.cluster.ray_group.RayConfig`.

    Raises:
        InvalidConfig: an unknown place, engine or option, or a layout that the place cannot hold.
    """
    if on not in PLACES:
        raise InvalidConfig(f"on={on!r} is unknown: choose one of {sorted(PLACES)}")
    if isinstance(rollout, str):
        rollout = RolloutConfig(actor.model_path, engine=rollout)
    module, _, name = PLACES[on].partition(":")
    plan = Plan(actor, reference, reward, rollout, layout or Layout(), critic)
    roles: Roles = getattr(import_module(module), name)(plan, **options)
    return roles


@dataclass(frozen=True)
class Plan:
    """The roles of one run, before they stand anywhere."""

    actor: ActorConfig
    reference: PolicyConfig | None
    reward: RewardFunction | ModelReward | None
    rollout: RolloutConfig
    layout: Layout
    critic: CriticConfig | None = None


PLACES = {"local": "workers.cluster.launcher:launch_local", "ray": "workers.cluster.ray_launcher:launch_ray"}


def launch_local(plan: Plan) -> Roles:
    """All roles in this process."""
    if plan.layout.world_size > 1:
        raise InvalidConfig(f"{plan.layout} needs {plan.layout.world_size} processes: use on='ray'")
    policy = ActorWorker(plan.actor)
    optional = {
        "reference": plan.reference and LocalGroup(ReferenceWorker(plan.reference)),
        "critic": plan.critic and LocalGroup(CriticWorker(plan.critic)),
        "reward": plan.reward and LocalGroup(_reward_worker(plan.reward, plan.actor.model_path)),
    }
    return Roles(LocalGroup(policy), LocalGroup(RolloutWorker(plan.rollout, policy.named_weights)), optional)


def _reward_worker(reward: RewardFunction | ModelReward, model_path: str) -> RewardWorker:
    return (
        ModelRewardWorker(reward, model_path) if isinstance(reward, ModelReward) else RewardWorker(reward, model_path)
    )
