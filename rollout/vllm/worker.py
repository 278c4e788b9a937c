"""vLLM's worker with the policy's sampler, and the one that records experts too; vLLM imports them by their names."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from rollout.vllm.expert_slots import ExpertSlots
from rollout.vllm.low_rank import LORA_RANK, WEIGHTS_STAY, make_room
from rollout.vllm.process_settings import BY_HEAD
from rollout.vllm.running_engine import model_of
from rollout.vllm.sampler import Float32Head, PolicySampler
from rollout.vllm.weights import match_latent_attention

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
        decode_positions_at_once(self.model_runner)
        if rank := self.vllm_config.additional_config.get(LORA_RANK):
            room = make_room(self, rank)  # outside of the memory that a sleep frees
            runner = self.model_runner
            runner.model_memory_usage = getattr(runner, "model_memory_usage", 0) + room  # what the cache leaves free
        self.policy_sampler = install(self)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """The memory for what has this tag, which a sleep frees; weights that stay are in torch's own."""
        if tag == "weights" and self.vllm_config.additional_config.get(WEIGHTS_STAY):
            return nullcontext()
        return super()._maybe_get_memory_pool_context(tag)


def decode_positions_at_once(runner: Any) -> None:
    """Has vLLM's first model runner find the m-RoPE positions of a step in which each row decodes one token without a loop over
    rows, which would take a tenth of the host's time for a step.
    """
    own: Any = getattr(runner, "_calc_mrope_positions", None)

    def positions(plan: Any) -> None:
        batch, rows = runner.input_batch, len(runner.input_batch.req_ids)
        read = batch.num_computed_tokens_cpu[:rows]
        if plan.total_num_scheduled_tokens > rows or (read < batch.num_prompt_tokens[:rows]).any():
            own(plan)
        else:
            ahead = [runner.requests[name].mrope_position_delta for name in batch.req_ids]
            runner.mrope_positions.np[:, :rows] = read + ahead

    if own is not None:
        runner._calc_mrope_positions = positions


def install(worker: Any) -> PolicySampler:
    """Replaces a worker's sampler by the policy's, and its output projection by one in float32."""
    for module in model_of(worker).modules():
        half = isinstance(module, VocabParallelEmbedding) and module.weight.dtype in (torch.bfloat16, torch.float16)
        if half and type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method = Float32Head()
    sampler = _sampler_for(worker)
    worker.model_runner.sampler = sampler
    if sampler.takes_drafts:
        sampler.take_drafts()
    return sampler


def _sampler_for(worker: Any) -> PolicySampler:
    """The policy's sampler in the form that the worker's model runner calls."""
    if not getattr(worker, "use_v2_model_runner", False):
        return PolicySampler(worker.model_runner)
    from rollout.vllm.head_sampler import HeadSampler  # its imports need Triton
    from rollout.vllm.second_runner import SecondRunnerSampler

    by_head = getattr(worker.model_runner.speculative_config, "method", None) == BY_HEAD
    return (HeadSampler if by_head else SecondRunnerSampler)(worker.model_runner)


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
    return worker.policy_sampler


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
