"""vLLM's worker with the policy's sampler; vLLM imports it by its name."""

from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from rollout.vllm.sampler import PolicySampler, install
from rollout.vllm.versions import match_latent_attention, model_of

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
        if self.model_config.is_moe:
            make_expert_group()
        super().load_model(*args, **kwargs)
        match_latent_attention(model_of(self))
        self.policy_sampler = install(self)


def make_expert_group() -> None:
    """Makes vLLM's process group for experts if there is none: a process's first engine makes all groups, but that one only for a
    model with experts.
    """
    if parallel_state._EP is None:
        world, devices = parallel_state.get_world_group(), parallel_state.get_tp_group().world_size
        ranks = [list(range(first, first + devices)) for first in range(0, world.world_size, devices)]
        backend = torch.distributed.get_backend(world.device_group)
        parallel_state._EP = parallel_state.init_model_parallel_group(ranks, world.local_rank, backend, group_name="ep")


def sampler_of(worker: Any) -> PolicySampler:
    """The sampler of a `PolicyWorker`."""
    sampler: PolicySampler = worker.policy_sampler
    return sampler
