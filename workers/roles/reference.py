"""The reference of a run: a model of its own, or the actor's with its adapters off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.model.lora import without_adapters
from workers.roles.actor import ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker


class BaseReferenceWorker(ReferenceWorker):
    """The reference of an actor that trains adapters: the actor's own model without them, which no update changes."""

    def __init__(self, actor: ActorWorker) -> None:
        self.config, self.model = actor.config, actor.model

    @contextmanager
    def acting(self) -> Iterator[None]:
        """The adapters are off. It chooses experts for itself, as a reference with a model of its own does."""
        replays, self.module.replays_routing = self.module.replays_routing, False
        try:
            with without_adapters(self.module.model):
                yield
        finally:
            self.module.replays_routing = replays


def reference_worker(config: PolicyConfig, actor: ActorWorker) -> ReferenceWorker:
    """The reference of ``actor``, on its device and ranks: without a second model if it is the base that the actor adapts.

    Where the actor does not train its vision tower, both keep the tower's features for each other.
    """
    adapted: Any = actor.config
    if adapted.lora_rank and config == adapted.frozen():
        return BaseReferenceWorker(actor)
    reference = ReferenceWorker(config, actor.model.device, actor.model.ranks)
    if config.model_path == adapted.model_path and config.dtype == adapted.dtype:
        reference.module.kept = actor.module.kept  # a tower that is not trained has the same features in both
    return reference
