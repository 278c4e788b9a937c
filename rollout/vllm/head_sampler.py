"""Drafts by the head of a model (MTP) on vLLM's second model runner.

Drafts stay on the device, and so does the number of tokens that count: the host prepares a step while the device computes
another.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rollout.engine import SamplingParams
from rollout.fused_sampling import draw
from rollout.sampling import draw_tokens, policy_log_probs_, uniforms
from rollout.vllm.sampler import CLOSED, Float32Head
from rollout.vllm.second_runner import SecondRunnerSampler

MOST_DRAWN = 32_768
"""The number of tokens of a larger vocabulary that drafts are chosen from: those that samples have drawn most often. With few
rows it takes a sixth of a step's time to read the output projection of the whole vocabulary for each draft.
"""

STEPS_AHEAD = 64
"""For so many steps random numbers are computed at a time, because each of some 30 operations costs the host."""


class HeadSampler(SecondRunnerSampler):
    """A `SecondRunnerSampler` next to a head that drafts. How many earlier drafts counted is known on the device alone."""

    def take_drafts(self) -> None:
        """See `PolicySampler.take_drafts`."""
        runner, speculator = self.runner, self.runner.speculator
        self.drafts, self._head = None, HeadDrafts(speculator, self.banned_ids)
        runner.model_memory_usage = getattr(runner, "model_memory_usage", 0) + self._head.num_bytes
        self._ahead = torch.arange(2 * runner.num_speculative_steps + 1, device=self.device)
        runner.rejection_sampler = self
        self._own_propose, speculator.propose = speculator.propose, self.propose

    def open(self, seed: int, drawn: int, sampling: SamplingParams, stop_id: int | None) -> int:
        """See `PolicySampler.open`."""
        if not self.slots:
            self._head.choose_tokens()
        return super().open(seed, drawn, sampling, stop_id)

    def take_weights(self) -> None:
        """See `PolicySampler.take_weights`."""
        self._head.choose_tokens()

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

        They are computed for `STEPS_AHEAD` more steps, each of which gives a row at most 1 + K tokens. Only then are the tokens
        of the step before counted, because counting takes the host time too.
        """
        if reads or not self._steps_left:
            if self._drawn is not None:
                self._head.count(self._drawn[0])
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


def most_drawn(counts: Tensor, number: int, banned_ids: Sequence[int]) -> Tensor:
    """The ids ``(number,)`` int64, ascending, of the tokens that were drawn most often. ``counts (V,)`` int64 tells how often.

    Of tokens drawn equally often it takes those with lower ids: a vocabulary that was made by merges begins with frequent texts.

    >>> most_drawn(torch.tensor([0, 5, 0, 9, 5]), 3, banned_ids=[3]).tolist()
    [0, 1, 4]
    """
    ranks = counts * len(counts) - torch.arange(len(counts), device=counts.device)
    ranks[list(banned_ids)] = torch.iinfo(ranks.dtype).min
    return ranks.topk(number).indices.sort().values


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
        own = self._projection = speculator.model.lm_head
        self._counts = torch.zeros(own.org_vocab_size, dtype=torch.int64, device=device)
        self._tokens: Tensor | None = None  # (MOST_DRAWN,) those that can be drafts; None: all
        plain = own.tp_size == 1 and isinstance(own.quant_method, UnquantizedEmbeddingMethod)
        if plain and len(self._counts) > MOST_DRAWN + len(banned_ids):
            self._tokens = self._counts.new_empty(MOST_DRAWN)
            weight = own.weight.new_empty(MOST_DRAWN, own.weight.shape[1])  # CUDA graphs read these two
            # What vLLM's logits processor reads of a projection.
            self._projection = SimpleNamespace(weight=weight, tp_size=1, quant_method=Float32Head())
            self.choose_tokens()
        speculator.sample_draft = self._choose

    @property
    def num_bytes(self) -> int:
        """Device memory of the weights that are copied."""
        return 0 if self._tokens is None else self._projection.weight.nbytes

    def count(self, drawn: Tensor) -> None:
        """Counts tokens ``drawn (B, 1 + K)``; those below 0 are none."""
        self._counts.index_add_(0, drawn.flatten().clamp(min=0), (drawn >= 0).flatten().long())

    def choose_tokens(self) -> None:
        """Chooses anew which tokens can be drafts, and copies the model's weights for them."""
        if self._tokens is not None:
            self._tokens.copy_(most_drawn(self._counts, MOST_DRAWN, self._banned_ids))
            own = self._speculator.model.lm_head.weight
            torch.index_select(own.detach(), 0, self._tokens, out=self._projection.weight)

    def draw_from(self, numbers: Tensor) -> None:
        """The numbers ``(B, K)`` float64 for the next drafts, where CUDA graphs read them."""
        self._numbers[: len(numbers)] = numbers

    def temper(self, temperatures: Tensor) -> None:
        """The temperatures ``(B,)`` of the rows, where CUDA graphs read them."""
        self._temperatures[: len(temperatures)] = temperatures

    def _choose(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The tokens ``(B,)`` int64 that a step of the head drafts."""
        logits = self._speculator.model.logits_processor(self._projection, hidden_states).float()
        step = self._speculator.current_draft_step.expand(len(logits), 1)
        numbers, temperatures = (
            self._numbers[: len(logits)].gather(1, step).squeeze(1),
            self._temperatures[: len(logits)],
        )
        banned_ids = self._banned_ids if self._tokens is None else ()
        if logits.device.type == "cuda":
            drawn = draw(logits, temperatures, numbers, banned_ids)[0]
        else:
            logits.div_(temperatures[:, None].where(temperatures[:, None] > 0, 1.0))
            log_probs = policy_log_probs_(logits, 1.0, banned_ids)
            drawn = draw_tokens(log_probs.exp(), numbers).where(temperatures > 0, log_probs.argmax(-1))
        return drawn if self._tokens is None else self._tokens[drawn]
