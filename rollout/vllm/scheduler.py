"""vLLM's scheduler with less work for rows that decode; vLLM calls `make_scheduler` by its name.

At each step vLLM asks for every running request which images it is to read and which blocks of the KV cache it needs. A request
that decodes reads no images, and needs a block once in as many steps as a block has tokens. Both are known without asking, and a
step of hundreds of rows then costs the host less.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


def make_scheduler(vllm_config: Any, kv_cache_config: Any, **options: Any) -> Scheduler:
    """The scheduler of an engine, in vLLM's asynchronous form or its other one, as the engine is configured."""
    kind = DecodingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else DecodingScheduler
    return kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **options)


class _Decoding:
    """What both forms leave out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        groups = options["kv_cache_config"].kv_cache_groups
        if len(groups) == 1 and type(groups[0].kv_cache_spec).__name__ == "FullAttentionSpec":
            manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
            manager.allocate_slots = HeldSlots(manager)

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *budget: Any, **shift: Any
    ) -> Any:
        """The images that a request is to read in this step, and the tokens that it then can read."""
        own = super()._try_schedule_encoder_inputs  # type: ignore[misc]
        if num_computed_tokens < request.num_prompt_tokens:
            return own(request, num_computed_tokens, num_new_tokens, *budget, **shift)
        nothing = own(request, num_computed_tokens, 0, *budget, **shift)  # its form differs between versions
        return nothing[0], num_new_tokens, *nothing[2:]


class DecodingScheduler(_Decoding, Scheduler):
    """vLLM's scheduler that waits for the tokens of a step before it prepares the next."""


class DecodingAsyncScheduler(_Decoding, AsyncScheduler):
    """vLLM's scheduler that prepares a step while the device computes another."""


class HeldSlots:
    """A manager's ``allocate_slots`` that asks for blocks only where a request's own have no room for its next token."""

    def __init__(self, manager: Any) -> None:
        (group,) = manager.coordinator.single_type_managers
        self._own, self._nothing = manager.allocate_slots, manager.empty_kv_cache_blocks
        self._blocks, self._size = group.req_to_blocks, group.block_size

    def __call__(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **options: Any) -> Any:
        """New blocks for the next tokens of a request, ``None`` if there are none left; see vLLM."""
        if num_new_tokens == 1 and not options and request.status == RequestStatus.RUNNING:
            held = len(self._blocks.get(request.request_id, ())) * self._size
            if request.num_computed_tokens + 1 + num_lookahead_tokens <= held:
                return self._nothing
        return self._own(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **options)
