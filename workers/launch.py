"""Roles to devices: the one place that knows where workers run."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dataproto.errors import InvalidConfig
from workers.actor import ActorConfig, ActorWorker
from workers.group import LocalGroup
from workers.policy import PolicyConfig, ReferenceWorker
from workers.reward import RewardFunction, RewardWorker
from workers.rollout import RolloutConfig, RolloutWorker


@dataclass
class Roles:
    """The groups of one run; a context manager that closes them.

    `reference` and `reward` raise when asked for without having been launched.
    """

    actor: Any
    rollout: Any
    optional: dict[str, Any]
    close: Callable[[], None] = lambda: None

    @property
    def reference(self) -> Any:
        return self._optional("reference")

    @property
    def reward(self) -> Any:
        return self._optional("reward")

    def has(self, role: str) -> bool:
        return self.optional.get(role) is not None

    def sync_weights(self) -> None:
        """Tells the engine that the actor has changed; the next generation streams the weights, once."""
        self.rollout.mark_stale()

    def _optional(self, role: str) -> Any:
        if not self.has(role):
            raise InvalidConfig(f"this run has no {role}: pass launch({role}=...)")
        return self.optional[role]

    def __enter__(self) -> "Roles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(
    actor: ActorConfig,
    reference: PolicyConfig | None = None,
    reward: RewardFunction | None = None,
    rollout: str | RolloutConfig = "hf",
    on: str = "local",
) -> Roles:
    """Starts the roles of a recipe.

    Args:
        rollout: an engine's name, or a `RolloutConfig` with options for it.
        on: where: ``"local"`` is this process.

    Raises:
        InvalidConfig: an unknown place or engine.
    """
    if on not in PLACES:
        raise InvalidConfig(f"on={on!r} is unknown: choose one of {sorted(PLACES)}")
    if isinstance(rollout, str):
        rollout = RolloutConfig(actor.model_path, engine=rollout)
    return PLACES[on](actor, reference, reward, rollout)


def _launch_local(
    actor: ActorConfig, reference: PolicyConfig | None, reward: RewardFunction | None, rollout: RolloutConfig
) -> Roles:
    policy = ActorWorker(actor)
    optional = {
        "reference": reference and LocalGroup(ReferenceWorker(reference)),
        "reward": reward and LocalGroup(RewardWorker(reward, actor.model_path)),
    }
    return Roles(LocalGroup(policy), LocalGroup(RolloutWorker(rollout, policy.named_weights)), optional)


PLACES: dict[str, Callable[..., Roles]] = {"local": _launch_local}
