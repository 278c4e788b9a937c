"""The policy's sampler for vLLM's second model runner (``VLLM_USE_V2_MODEL_RUNNER``).

vLLM's first runner prepares each row of a step in Python. The second one keeps what it knows of rows in arrays, so that a step of
hundreds of rows costs the host less. It needs Triton, hence CUDA. `rollout.vllm.process_settings` says which models
and options run on it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rollout.engine import SamplingParams
from rollout.vllm.sampler import EXTRA_ARGUMENT, PolicySampler

NO_SLOT = -1
"""Of a trial request by which a start measures memory and compiles kernels."""


class SecondRunnerSampler(PolicySampler):
    """A `PolicySampler` whose rows are found by their places in the states of the runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._slot_at = np.full(runner.max_num_reqs, NO_SLOT, dtype=np.int64)
        self.penalties_state = SimpleNamespace(output_bin_counts=None)  # the runner counts no tokens for penalties
        self._score_prompts(runner.prompt_logprobs_worker)

    def _score_prompts(self, worker: Any) -> None:
        """Has the runner compute log-probs of prompts as those of the policy."""
        own = worker.compute_prompt_logprobs

        def scored(logits_of: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
            # log softmax of log-probs is the log-probs
            return own(lambda states: self.compute_logprobs(logits_of(states)), *args, **kwargs)

        worker.compute_prompt_logprobs = scored

    def add_request(self, place: int, *settings: Any) -> None:
        """A request begins, or continues, at this place of the runner's states; the last of ``settings`` are vLLM's."""
        self._slot_at[place] = (settings[-1].extra_args or {}).get(EXTRA_ARGUMENT, NO_SLOT)

    def apply_staged_writes(self) -> None:
        """Called before each step, after requests have been added. There is nothing to send to the device."""

    def open(self, seed: int, drawn: int, sampling: SamplingParams, stop_id: int | None) -> int:
        """See `PolicySampler.open`."""
        self._rows = self._rows[:0]  # the slot may be one of a row before
        return super().open(seed, drawn, sampling, stop_id)

    def forward(self, logits: Tensor, batch: Any, *_: Any, **__: Any) -> Any:
        """Samples tokens ``(B, 1)`` int64 for the ``logits (B, V)`` of the runner's ``batch``."""
        slots = self._slot_at[batch.idx_mapping_np]
        if not self.slots or (slots == NO_SLOT).any():
            count = logits.new_ones(len(logits)).int()
            return SamplerOutput(self._trial(logits).long(), None, None, num_sampled=count, num_rejected=count - 1)
        if not np.array_equal(slots, self._rows):
            self._set_slots(slots)
        lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        steps = lengths - self.runner.req_states.prompt_len.np[batch.idx_mapping_np]
        discarded = lengths < batch.prefill_len_np
        tokens = self._draw(logits, np.arange(len(slots)), steps, discarded, self._parts, self._order)
        counts = self._sent(np.stack([~discarded, np.zeros_like(discarded)]).astype(np.int32))
        return SamplerOutput(tokens.unsqueeze(-1), None, None, num_sampled=counts[0], num_rejected=counts[1])
