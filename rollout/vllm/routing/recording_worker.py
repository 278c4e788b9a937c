"""A worker of vLLM that records the experts which the routers of its model choose; vLLM imports it by its name."""

from typing import Any

from vllm.platforms import current_platform

from rollout.vllm.routing.expert_slots import ExpertSlots

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class RecordingWorker(Worker):
    """Watches the routers from the moment that the model is loaded, before graphs are captured."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model; see vLLM."""
        super().load_model(*args, **kwargs)
        self.expert_slots = ExpertSlots(self)

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Frees memory; see vLLM. The experts belong to the KV cache, which a sleep drops."""
        self.expert_slots.clear()
        super().sleep(*args, **kwargs)
