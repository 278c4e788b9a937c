"""The policy's sampler, recorder of experts and drafts by n-grams for vLLM's second model runner, vLLM's default from 0.29 on.

vLLM's first runner prepares each row of a step in Python. The second one keeps what it knows of rows in arrays, so that a step of
hundreds of rows costs the host less. It needs Triton. `rollout.vllm.process_settings` says which versions, models and options
run on it.

That runner takes no drafter of another project's, so the engine names one of vLLM's, whose function is replaced here: that by
n-grams, or that by the head of a model (`rollout.vllm.head_sampler`). N-grams are looked up on the host, which waits for each
step's tokens. A recurrent layer keeps its state after each token of a step. vLLM continues from the state after the last token
that counts.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rollout.engine import SamplingParams
from rollout.vllm.running_engine import slots_in_blocks
from rollout.vllm.sampler import EXTRA_ARGUMENT, PolicySampler

NO_SLOT = -1
"""Of a trial request by which a start measures memory and compiles kernels."""


class SecondRunnerSampler(PolicySampler):
    """A `PolicySampler` whose rows are found by their places in the states of the runner."""

    enable_adaptive_verification = False  # vLLM asks its rejection sampler, whose place this takes too

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._slot_at = np.full(runner.max_num_reqs, NO_SLOT, dtype=np.int64)
        self.penalties_state = SimpleNamespace(output_bin_counts=None)  # the runner counts no tokens for penalties
        unused = SimpleNamespace(gpu=torch.zeros(runner.max_num_reqs, device=self.device))
        self.sampling_states = SimpleNamespace(temperature=unused, seeds=unused)  # the runner hands them to its drafter
        self._drawn: tuple[Tensor, Tensor] | None = None  # tokens and their numbers, of the last step
        self._next_drafts: tuple[list[str], list[list[int]]] = [], []

    def take_drafts(self) -> None:
        """See `PolicySampler.take_drafts`."""
        runner = self.runner
        runner.rejection_sampler, runner.speculator.propose = self, self.propose
        runner.draft_tokens_handler.get_draft_tokens = lambda: DraftTokenIds(*self._next_drafts)

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
        """Samples tokens ``(B, 1)`` int64 for the ``logits (B, V)`` of the runner's ``batch``; for drafts see `check_drafts`."""
        if getattr(batch, "num_draft_tokens", 0):
            return self.check_drafts(logits, batch)
        if self._is_trial(batch):
            ones = logits.new_ones(len(logits)).int()
            return _output(self._trial(logits).long(), ones, ones - 1)
        steps, discarded = self._begin(batch)
        tokens = self._draw(logits, np.arange(len(steps)), steps, discarded, self._parts, self._order).unsqueeze(-1)
        sampled, rejected = self._shared(np.stack([~discarded, np.zeros_like(discarded)]).astype(np.int32))
        self._drawn = tokens, sampled
        return _output(tokens, sampled, rejected)

    def check_drafts(self, logits: Tensor, batch: Any) -> Any:
        """Samples tokens ``(B, 1 + K)`` int64 for the ``logits (N, V)`` of a ``batch`` with up to K drafted tokens a row."""
        drafted = np.asarray(batch.num_draft_tokens_per_req, dtype=np.int64)
        ends = np.cumsum(drafted + 1)
        if self._is_trial(batch):
            last, rejected = self._sent(np.stack([ends - 1, drafted]))
            return _output(self._trial(logits[last]).long(), torch.ones_like(last).int(), rejected.int())
        steps, discarded = self._begin(batch)
        after_first = self._shared(np.delete(np.arange(len(logits)), ends - drafted - 1))
        drafts = batch.input_ids[batch.logits_indices[after_first]]
        tokens = self._draw_next_to(logits, drafted, drafts, steps, discarded)
        read, counts = self._shared(np.stack([drafted + 1, ~discarded]).astype(np.int32))
        sampled = (tokens >= 0).sum(1, dtype=torch.int32) * counts
        self._drawn = tokens, sampled
        return _output(tokens, sampled, (read - sampled) * counts)

    def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **options: Any) -> Tensor:
        """Drafts ``(B, K)`` int64 by n-grams for the rows of the step that has just ended, filled up with 0."""
        most, found = self.runner.num_speculative_steps, [list[int]() for _ in range(input_batch.num_reqs)]
        if not dummy_run and self._drawn is not None and not self._is_trial(input_batch):
            tokens, counts = (each.tolist() for each in self._drawn)
            found = self.next_drafts([row[:count] for row, count in zip(tokens, counts, strict=True)], most) or found
        self._next_drafts = (
            input_batch.req_ids,
            [draft[: options.get("num_speculative_tokens", most)] for draft in found],
        )
        return self._sent(np.array([[*draft, *[0] * (most - len(draft))] for draft in found], dtype=np.int64))

    def _is_trial(self, batch: Any) -> bool:
        return not self.slots or bool((self._slot_at[batch.idx_mapping_np] == NO_SLOT).any())

    def _begin(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """The number of the last of the tokens ``(B,)`` that each row samples in this step, and whether they are discarded."""
        slots = self._slot_at[batch.idx_mapping_np]
        if not np.array_equal(slots, self._rows):
            self._set_slots(slots)
            self._name_of |= zip(slots.tolist(), getattr(batch, "req_ids", ()), strict=False)
        if self.expert_slots is not None:
            self.expert_slots.record(
                self.runner.block_tables.slot_mappings[self.expert_slots.group, : batch.num_tokens]
            )
        lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        steps = lengths - self.runner.req_states.prompt_len.np[batch.idx_mapping_np]
        return steps, lengths < batch.prefill_len_np

    def _places_of(self, name: str, group: int, tokens: int) -> np.ndarray | None:
        place, tables = self.runner.req_states.req_id_to_index.get(name), self.runner.block_tables
        if place is None:
            return None
        blocks = tables.block_tables[group].gpu[place, : int(tables.num_blocks.np[group, place])]
        return slots_in_blocks(self.runner, blocks.cpu().numpy().astype(np.int64), group, tokens)


def _output(tokens: Tensor, sampled: Tensor, rejected: Tensor) -> Any:
    """Of the ``tokens (B, 1 + K)`` int64 the first ``sampled (B,)`` count; of what was read, ``rejected (B,)`` do not."""
    return SamplerOutput(tokens, None, None, num_sampled=sampled, num_rejected=rejected)
