"""A worker of vLLM that records the experts which the routers of its model choose; vLLM imports it by its name."""

from typing import Any

from rollout.vllm.policy.worker import PolicyWorker
from rollout.vllm.routing.expert_slots import ExpertSlots


class RecordingWorker(PolicyWorker):
    """Watches the routers from the moment that the model is loaded, before graphs are captured."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model; see vLLM."""
        super().load_model(*args, **kwargs)
        self.expert_slots = self.policy_sampler.expert_slots = ExpertSlots(self)

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Frees memory; see vLLM. The experts belong to the KV cache, which a sleep drops."""
        self.expert_slots.clear()
        super().sleep(*args, **kwargs)
