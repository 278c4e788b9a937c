"""The policy's sampler, recorder of experts and drafts for vLLM's second model runner, which is vLLM's default from 0.29 on.

vLLM's first runner prepares each row of a step in Python. The second one keeps what it knows of rows in arrays, so that a step of
hundreds of rows costs the host less. It needs Triton. `rollout.vllm.process_settings` says which versions, models and options
run on it.

That runner takes no drafter of another project's, so the engine names one of vLLM's, whose function is replaced here: that by
n-grams, or that by the head of a model (MTP). Drafts of a head stay on the device, and so does the number of tokens that count:
the host prepares a step while the device computes another. N-grams are looked up on the host, which waits for each step's tokens.
A recurrent layer keeps its state after each token of a step. vLLM continues from the state after the last token that counts.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from rollout.engine import SamplingParams
from rollout.sampling import draw_tokens, policy_log_probs_, uniforms
from rollout.vllm.running_engine import slots_in_blocks
from rollout.vllm.sampler import CLOSED, EXTRA_ARGUMENT, PolicySampler

NO_SLOT = -1
"""Of a trial request by which a start measures memory and compiles kernels."""
STEPS_AHEAD = 64
"""For so many steps next to a head random numbers are computed at a time, because each of some 30 operations costs the host."""


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
        self._head: HeadDrafts | None = None
        self._next_drafts: tuple[list[str], list[list[int]]] = [], []

    def take_drafts(self) -> None:
        """See `PolicySampler.take_drafts`."""
        runner, speculator = self.runner, self.runner.speculator
        runner.rejection_sampler = self
        if getattr(speculator, "model", None) is not None:
            self._head, self.drafts = HeadDrafts(speculator, self.banned_ids), None
            self._ahead = torch.arange(2 * runner.num_speculative_steps + 1, device=self.device)
            self._own_propose, speculator.propose = speculator.propose, self.propose_by_head
            return
        speculator.propose = self.propose
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
        read, counts = self._shared(np.stack([drafted + 1, ~discarded]))
        sampled = (tokens >= 0).sum(1) * counts
        self._drawn = tokens, sampled
        return _output(tokens, sampled.int(), ((read - sampled) * counts).int())

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

    def propose_by_head(self, input_batch: Any, *context: Any, dummy_run: bool = False, **options: Any) -> Tensor:
        """Drafts ``(B, K)`` int64 by the head for the rows of the step that the device computes; the scheduler may want none."""
        head = self._head
        if head is not None and not dummy_run and self._drawn is not None and not self._is_trial(input_batch):
            count = self.runner.num_speculative_steps
            if options.get("num_speculative_tokens") == 0 and not input_batch.has_prefill:  # the head reads all prompts
                return torch.zeros(input_batch.num_reqs, count, dtype=torch.int64, device=self.device)
            head.draw_from(self._numbers.gather(1, self._drawn[1][:, None] + self._ahead[:count]))
        return self._own_propose(input_batch, *context, dummy_run=dummy_run, **options)

    def _set_slots(self, rows: np.ndarray) -> None:
        super()._set_slots(rows)
        if self._head is not None:
            # (3, B): slots, bits of the seeds, and how many numbers of its stream each row had drawn when its request began.
            self._streams = self._sent(np.stack([rows, self.seeds[rows].view(np.int64), self.drawn[rows]]))
            temperatures = [self.slots.get(row, CLOSED).sampling.temperature for row in rows.tolist()]
            self._head.temper(self._sent(np.array(temperatures, dtype=np.float32)))
            self._steps_left = 0

    def _places(self, rows: np.ndarray, steps: np.ndarray, discarded: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """See `PolicySampler._places`. With a head ``steps`` count from the first token of each row in this step."""
        if self._head is None:
            return super()._places(rows, steps, discarded)
        at, after_first, counts = self._shared(np.stack([rows, steps, ~discarded]))
        return self._streams[0, at], (self._first[at] + after_first + 1) * counts, self._numbers[at, after_first]

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
        if self._head is not None:  # how many earlier drafts counted the host does not know yet
            self._add_columns(int(steps.max(initial=0)) + 1)
            drafted = getattr(batch, "num_draft_tokens_per_req", None)
            prompts, steps = lengths - steps, np.zeros_like(steps) if drafted is None else drafted.astype(np.int64)
            # (B,): which of its response's tokens, counted from 0, is the first that a row samples in this step.
            self._first = batch.seq_lens[: len(steps)] - self._shared(prompts + steps)
        discarded = lengths < batch.prefill_len_np
        if self._head is not None:
            self._numbers = self._next_numbers(bool(discarded.any()))
        return steps, discarded

    def _next_numbers(self, reads: bool) -> Tensor:
        """The random numbers ``(B, 2 K + 1)`` float64 of this step's tokens and of the drafts after them; ``reads``: some row has
        not read its prompt.

        They are computed for `STEPS_AHEAD` more steps, each of which gives a row at most 1 + K tokens.
        """
        if reads or not self._steps_left:
            _, seeds, drawn = self._streams
            self._begins, self._steps_left = self._first, 0 if reads else STEPS_AHEAD
            width = len(self._ahead) + self._steps_left * (1 + self.runner.num_speculative_steps)
            self._computed = uniforms(
                seeds[:, None], (drawn + self._first)[:, None] + torch.arange(width, device=self.device)
            )
        else:
            self._steps_left -= 1
        return self._computed.gather(1, (self._first - self._begins)[:, None] + self._ahead)

    def _places_of(self, name: str, group: int, tokens: int) -> np.ndarray | None:
        place, tables = self.runner.req_states.req_id_to_index.get(name), self.runner.block_tables
        if place is None:
            return None
        blocks = tables.block_tables[group].gpu[place, : int(tables.num_blocks.np[group, place])]
        return slots_in_blocks(self.runner, blocks.cpu().numpy().astype(np.int64), group, tokens)


class HeadDrafts:
    """vLLM's drafts by the head of a model, drawn from the numbers that the tokens themselves will be drawn with, so that the two
    agree as often as their distributions let them.
    """

    def __init__(self, speculator: Any, banned_ids: Sequence[int]) -> None:
        """Replaces the choice of tokens of vLLM's ``speculator``, before CUDA graphs are captured."""
        self._speculator, self._banned_ids = speculator, banned_ids
        rows, device = speculator.max_num_reqs, speculator.device
        self._numbers = torch.zeros(rows, speculator.num_speculative_steps, dtype=torch.float64, device=device)
        self._temperatures = torch.ones(rows, device=device)
        speculator.sample_draft = self._choose

    def draw_from(self, numbers: Tensor) -> None:
        """The numbers ``(B, K)`` float64 for the next drafts, where CUDA graphs read them."""
        self._numbers[: len(numbers)] = numbers

    def temper(self, temperatures: Tensor) -> None:
        """The temperatures ``(B,)`` of the rows, where CUDA graphs read them."""
        self._temperatures[: len(temperatures)] = temperatures

    def _choose(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The tokens ``(B,)`` int64 that a step of the head drafts."""
        logits = self._speculator.compute_draft_logits(hidden_states, 0)
        temperatures = self._temperatures[: len(logits), None]
        step = self._speculator.current_draft_step.expand(len(logits), 1)
        numbers = self._numbers[: len(logits)].gather(1, step).squeeze(1)
        tempered = logits.float().div_(temperatures.where(temperatures > 0, 1.0))
        log_probs = policy_log_probs_(tempered, 1.0, self._banned_ids)
        return draw_tokens(log_probs.exp(), numbers).where(temperatures.squeeze(1) > 0, log_probs.argmax(-1))


def _output(tokens: Tensor, sampled: Tensor, rejected: Tensor) -> Any:
    """Of the ``tokens (B, 1 + K)`` int64 the first ``sampled (B,)`` count; of what was read, ``rejected (B,)`` do not."""
    return SamplerOutput(tokens, None, None, num_sampled=sampled, num_rejected=rejected)
