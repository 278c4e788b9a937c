"""vLLM's worker with the policy's sampler; vLLM imports it by its name."""

from typing import Any

from vllm.platforms import current_platform

from rollout.vllm.sampler import PolicySampler, install

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class PolicyWorker(Worker):
    """Samples as the policy does from the moment that the model is loaded.

    So a start measures the memory of the policy's sampling, and builds no kernels of vLLM's own sampler, which no request uses.
    """

    policy_sampler: PolicySampler

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model; see vLLM."""
        super().load_model(*args, **kwargs)
        self.policy_sampler = install(self)


def sampler_of(worker: Any) -> PolicySampler:
    """The sampler of a `PolicyWorker`."""
    sampler: PolicySampler = worker.policy_sampler
    return sampler
