"""Drafts by the head of a model (MTP) on vLLM's second model runner.

Drafts stay on the device, and so does the number of tokens that count: the host prepares a step while the device computes
another.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.fused_sampling import draw
from rollout.sampling import draw_tokens, policy_log_probs_, uniforms
from rollout.vllm.sampler import CLOSED
from rollout.vllm.second_runner import SecondRunnerSampler

STEPS_AHEAD = 64
"""For so many steps random numbers are computed at a time, because each of some 30 operations costs the host."""


class HeadSampler(SecondRunnerSampler):
    """A `SecondRunnerSampler` next to a head that drafts. How many earlier drafts counted is known on the device alone."""

    def take_drafts(self) -> None:
        """See `PolicySampler.take_drafts`."""
        runner, speculator = self.runner, self.runner.speculator
        self.drafts, self._head = None, HeadDrafts(speculator, self.banned_ids)
        self._ahead = torch.arange(2 * runner.num_speculative_steps + 1, device=self.device)
        runner.rejection_sampler = self
        self._own_propose, speculator.propose = speculator.propose, self.propose

    def propose(self, input_batch: Any, *context: Any, dummy_run: bool = False, **options: Any) -> Tensor:
        """Drafts ``(B, K)`` int64 by the head for the rows of the step that the device computes; the scheduler may want none."""
        if not dummy_run and self._drawn is not None and not self._is_trial(input_batch):
            count = self.runner.num_speculative_steps
            if options.get("num_speculative_tokens") == 0 and not input_batch.has_prefill:  # the head reads all prompts
                return torch.zeros(input_batch.num_reqs, count, dtype=torch.int64, device=self.device)
            self._head.draw_from(self._numbers.gather(1, self._drawn[1][:, None] + self._ahead[:count]))
        drafts: Tensor = self._own_propose(input_batch, *context, dummy_run=dummy_run, **options)
        return drafts

    def _set_slots(self, rows: np.ndarray) -> None:
        super()._set_slots(rows)
        # (3, B): slots, bits of the seeds, and how many numbers of its stream each row had drawn when its request began.
        self._streams = self._sent(np.stack([rows, self.seeds[rows].view(np.int64), self.drawn[rows]]))
        temperatures = [self.slots.get(row, CLOSED).sampling.temperature for row in rows.tolist()]
        self._head.temper(self._sent(np.array(temperatures, dtype=np.float32)))
        self._steps_left = 0

    def _begin(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """The number of the last of the tokens ``(B,)`` that each row samples, counted from the first one in this step, and
        whether they are discarded.
        """
        most, discarded = super()._begin(batch)
        self._add_columns(int(most.max(initial=0)) + 1)
        told = getattr(batch, "num_draft_tokens_per_req", None)
        drafted = np.zeros_like(most) if told is None else np.asarray(told, dtype=np.int64)
        prompts = self.runner.req_states.prompt_len.np[batch.idx_mapping_np]
        # (B,): which of its response's tokens, counted from 0, is the first that a row samples in this step.
        self._first = batch.seq_lens[: len(most)] - self._shared(prompts + drafted)
        self._numbers = self._next_numbers(bool(discarded.any()))
        return drafted, discarded

    def _next_numbers(self, reads: bool) -> Tensor:
        """The random numbers ``(B, 2 K + 1)`` float64 of this step's tokens and of the drafts after them; ``reads``: some row has
        not read its prompt.

        They are computed for `STEPS_AHEAD` more steps, each of which gives a row at most 1 + K tokens.
        """
        if reads or not self._steps_left:
            _, seeds, drawn = self._streams
            self._begins, self._steps_left = self._first, 0 if reads else STEPS_AHEAD
            width = len(self._ahead) + self._steps_left * (1 + self.runner.num_speculative_steps)
            numbers = (drawn + self._first)[:, None] + torch.arange(width, device=self.device)
            self._computed = uniforms(seeds[:, None], numbers)
        else:
            self._steps_left -= 1
        return self._computed.gather(1, (self._first - self._begins)[:, None] + self._ahead)

    def _places(self, rows: np.ndarray, steps: np.ndarray, discarded: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """See `PolicySampler._places`. Here ``steps`` count from the first token of each row in this step."""
        at, after_first, counts = self._shared(np.stack([rows, steps, ~discarded]))
        return self._streams[0, at], (self._first[at] + after_first + 1) * counts, self._numbers[at, after_first]


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
        step = self._speculator.current_draft_step.expand(len(logits), 1)
        numbers = self._numbers[: len(logits)].gather(1, step).squeeze(1)
        tempered, temperatures = logits.float(), self._temperatures[: len(logits)]
        if tempered.device.type == "cuda":
            return draw(tempered, temperatures, numbers, self._banned_ids)[0]
        tempered.div_(temperatures[:, None].where(temperatures[:, None] > 0, 1.0))
        log_probs = policy_log_probs_(tempered, 1.0, self._banned_ids)
        return draw_tokens(log_probs.exp(), numbers).where(temperatures > 0, log_probs.argmax(-1))
