"""The policy inside vLLM: tokens and log-probs by the same functions as in the Hugging Face engine.

vLLM's sampler is replaced by one that samples tokens with `rollout.sampling`. So banned ids, temperature, top-p and top-k mean
the same in both engines, log-probs are those before top-p and top-k, a sample draws the same numbers in any batch and on any
rank, and the random state of the process is not used. (With its own seeds vLLM would loop over rows; with a logits processor it
would wait for the tokens of each step before it prepares the next.) Log-probs stay on the device until their response is
complete.

With drafts (`rollout.vllm.sampler`) a step has several tokens of a row. Each is drawn from its row's random stream,
in place of vLLM's rejection sampler, whose tokens have the same distribution but are others. A drafted token counts if it is the
one that is drawn, so the tokens are those of a run without drafts.

Logits are float32, as in the actor. vLLM would round them to the model's dtype, where a logit of 20 becomes a multiple of 1/8.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from dataproto.vlm import family_of
from rollout.drafts import Drafts
from rollout.engine import SamplingParams, TopLogProbs
from rollout.sampling import likeliest, policy_log_probs, project, sample, uniforms
from rollout.vllm.expert_slots import ExpertSlots
from rollout.vllm.running_engine import batch_of, slots_of_request, slots_of_step

EXTRA_ARGUMENT = "dataproto_request"
"""The argument of a vLLM request that holds its slot."""
FIRST_COLUMNS = 256
"""Initial number of log-probs per response that memory is allocated for."""
FIRST_SLOTS = 64
"""Initial number of open requests that memory is allocated for."""
CHUNK_ROWS = 512
"""Rows sampled at a time, which bounds memory to a few copies of their logits."""
SHARED = 32
"""How many arrays that steps have in common stay on the device."""


@dataclass(eq=False)
class Slot:
    """How the tokens of an open request are sampled, and the likeliest ones found so far."""

    sampling: SamplingParams
    stop_id: int | None
    top: dict[int, list[TopLogProbs]] = field(default_factory=dict)  # by place, counted from 1


CLOSED = Slot(SamplingParams(), None)
"""Of a row whose request has ended, in a step that had been prepared."""


class PolicySampler(Sampler):
    """Samples the next token of every row, each by the settings of its request. An open request has a slot."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config.hf_config
        family = family_of(config)
        self.banned_ids = family.banned_ids(family.used_config(config))  # masked in the policy
        self.undrawn_ids: tuple[int, ...] = ()  # never drawn, although the policy gives them probability
        self.runner = runner
        self.expert_slots: ExpertSlots | None = None
        self.device: torch.device = runner.device
        self.drafts: Drafts | None = None
        self.takes_drafts = runner.speculative_config is not None
        if self.takes_drafts:
            alone = runner.vllm_config.parallel_config.world_size == 1  # ranks that run one vLLM take the same steps
            self.drafts = Drafts(self.banned_ids, self.device if alone else None)
        # Log-probs are read after their tokens reached the host: reading them need not wait for the current step.
        self.side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._clear()

    def _clear(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.seeds = np.zeros(0, dtype=np.uint64)
        self.drawn = np.zeros(0, dtype=np.int64)
        self.filled = np.zeros(0, dtype=np.int64)  # tokens that only make the draft for the next step longer
        # Log-probs (slots, tokens). The first column is for tokens that vLLM discards, of prompts that are read in parts.
        self.found = torch.zeros(0, 1 + FIRST_COLUMNS, device=self.device)
        # At the first token of each step of a row the number of its drafts and 1, else 0; if the engine drafts any.
        self.begun = torch.zeros(0, 1 + FIRST_COLUMNS, dtype=torch.int16, device=self.device)
        self._one = torch.ones(1, dtype=torch.int16, device=self.device)  # a number of the host would be waited for
        self._sent_before: dict[Any, Tensor] = {}
        self._free: list[int] = []
        self._rows = np.zeros(0, dtype=np.int64)  # the slots of the rows of a step
        self._names: list[str] = []
        self._name_of: dict[int, str] = {}  # vLLM's own names of the requests in slots

    # Requests

    def open(self, seed: int, drawn: int, sampling: SamplingParams, stop_id: int | None) -> int:
        """A slot for a request that draws from the stream of ``seed``, from number ``drawn`` on. ``stop_id`` is any of the
        tokens that end it. For drafts see `open_drafts`.
        """
        if not self.slots:
            self._clear()
        if not self._free:
            self._add_slots(max(FIRST_SLOTS, len(self.seeds)))
        slot = self._free.pop()
        self._name_of.pop(slot, None)
        self.slots[slot] = Slot(sampling, stop_id)
        self.seeds[slot], self.drawn[slot], self.filled[slot] = seed, drawn, 0
        return slot

    def take_drafts(self) -> None:
        """Has the runner ask for drafts here and check them here."""
        self.runner.rejection_sampler = self.verify
        self.runner.drafter.sampler = self

    def take_weights(self) -> None:
        """The model has other weights from now on."""

    def open_drafts(self, slot: int, key: Hashable, prompt: Tensor) -> None:
        """Drafts tokens for the request in a slot, of the group ``key`` with the ``prompt (P',)``, if the engine drafts any."""
        if self.drafts is not None:
            self.drafts.open(slot, key, prompt)

    def close(self, slot: int) -> None:
        """Frees a slot. The next step may still write to it, before the first step of the request that gets it."""
        if self.slots.pop(slot, None) is not None:
            self._free.append(slot)
            if self.drafts is not None:
                self.drafts.close(slot)

    def drafted_and_accepted(self, slot: int, count: int) -> tuple[int, int] | None:
        """How many tokens were drafted for the request in a slot, and how many of its ``count`` tokens took no step of their own;
        ``None`` if the engine drafts none.
        """
        if not self.takes_drafts:
            return None
        begun = self._first_of(self.begun, slot, count)
        steps = sum(map(bool, begun))
        return sum(begun) - steps, count - steps

    def log_probs(self, slot: int, count: int) -> list[float]:
        """Log-probs of the first ``count`` sampled tokens of the request in a slot."""
        return self._first_of(self.found, slot, count)

    def _first_of(self, values: Tensor, slot: int, count: int) -> list[Any]:
        with nullcontext() if self.side_stream is None else torch.cuda.stream(self.side_stream):
            return values[slot, 1 : 1 + count].tolist()

    def experts(self, slot: int, tokens: int) -> Tensor | None:
        """The experts ``(tokens, M, k)`` of the first tokens of the request in a slot, if they are recorded."""
        name = self._name_of.get(slot)
        if self.expert_slots is None or name is None:
            return None
        places = self._places_of(name, self.expert_slots.group, tokens)
        return None if places is None else self.expert_slots.at(places)

    def _places_of(self, name: str, group: int, tokens: int) -> np.ndarray | None:
        return slots_of_request(self.runner, name, group, tokens)

    def top_log_probs(self, slot: int, count: int) -> list[TopLogProbs]:
        """The likeliest tokens at the places of the first ``count`` sampled tokens."""
        return [self.slots[slot].top[place][0] for place in range(1, 1 + count)]

    # Steps

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """Samples tokens ``(B, 1)`` int32 for the ``logits (B, V)`` of the current step."""
        if not self.runner.input_batch.num_reqs:
            return SamplerOutput(sampled_token_ids=self._trial(logits), logprobs_tensors=None)
        names, steps, discarded = self._begin_step()
        tokens = self._draw(logits, np.arange(len(names)), steps, discarded, self._parts, self._order)
        return SamplerOutput(sampled_token_ids=tokens.int().unsqueeze(-1), logprobs_tensors=None)

    def verify(self, metadata: Any, draft_probs: Any, logits: Tensor, *_: Any) -> SamplerOutput:
        """Samples tokens ``(B, 1 + K)`` int32 for the ``logits (N, V)`` of the current step, which has up to K drafted tokens of
        each row; -1 fills a row after its first token that differs from the draft. It replaces vLLM's rejection sampler.
        """
        if not self.runner.input_batch.num_reqs:
            return SamplerOutput(sampled_token_ids=self._trial(logits), logprobs_tensors=None)
        steps, discarded = self._begin_step()[1:]
        drafted = np.array(metadata.num_draft_tokens)
        drawn = self._draw_next_to(logits, drafted, metadata.draft_token_ids, steps, discarded)
        return SamplerOutput(sampled_token_ids=drawn.int(), logprobs_tensors=None)

    def _draw_next_to(
        self, logits: Tensor, drafted: np.ndarray, drafts: Tensor, steps: np.ndarray, discarded: np.ndarray
    ) -> Tensor:
        """Tokens ``(B, 1 + K)`` int64 for ``logits (N, V)`` of rows with ``drafted (B,)`` tokens each, in all ``drafts (D,)``.

        -1 fills a row after its first token that differs from the draft.
        """
        rows, columns = np.repeat(np.arange(len(drafted)), drafted + 1), np.arange(1 + int(drafted.max(initial=0)))
        firsts = np.cumsum(drafted + 1) - (drafted + 1)
        ahead = np.arange(len(rows)) - firsts[rows]
        begun = np.where(ahead, 0, 1 + np.maximum(drafted - self.filled[self._rows], 0)[rows])
        tokens = self._draw(
            logits, rows, (steps - drafted)[rows] + ahead, discarded[rows], *self._parts_of(rows), begun
        )
        there = columns <= drafted[:, None]
        places = np.where(there, firsts[:, None] + columns, 0)
        draft_places = np.where(there & (columns > 0), places - np.arange(len(drafted))[:, None] - 1, 0)
        places, draft_places, there = self._shared(np.stack([places, draft_places, there]))
        drawn = tokens[places]
        kept = ((drawn[:, :-1] == drafts[draft_places[:, 1:]]) * there[:, 1:]).cumprod(1)
        drawn[:, 1:].masked_fill_(kept == 0, -1)
        return drawn

    def _trial(self, logits: Tensor) -> Tensor:
        """Tokens ``(N, 1)`` int32 for the ``logits (N, V)`` of no request, by which a start measures memory."""
        halves = torch.full((len(logits),), 0.5, dtype=torch.float64, device=logits.device)
        parts = zip(logits.split(CHUNK_ROWS), halves.split(CHUNK_ROWS), strict=True)
        drawn = [sample(part, SamplingParams(), each, self.banned_ids, self.undrawn_ids)[0] for part, each in parts]
        return torch.cat(drawn).int().unsqueeze(-1)

    def next_drafts(self, sampled: Sequence[Sequence[int]], most: int) -> list[list[int]] | None:
        """Drafts of at most ``most`` tokens for the rows of the step that has just ended, which ``sampled`` these tokens, or
        ``None`` if no row is to have one.

        On CUDA tokens of no meaning make drafts equally long, because graphs are recorded for rows of equal length.
        """
        if self.drafts is None:
            return None
        slots = [int(slot) if ids else -1 for slot, ids in zip(self._rows, sampled, strict=False)]
        rows = [row for row, slot in enumerate(slots) if slot in self.slots]
        for row in rows:
            self.drafts.add(slots[row], sampled[row])
        if not self.drafts.pay(len(rows)):
            return None
        found: list[list[int]] = [[] for _ in sampled]
        for row in rows:
            found[row] = self.drafts.next_tokens(slots[row], most)
        filled = self.side_stream is not None and any(found)
        for row in rows:
            missing = most - len(found[row]) if filled else 0
            found[row] += [0] * missing
            self.filled[slots[row]] = missing
        return found

    def _begin_step(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names of the rows of the current step, the number of the last of the tokens that each samples, and whether they are
        discarded."""
        names, steps, discarded = batch_of(self.runner)
        if self.expert_slots is not None:
            self.expert_slots.record(slots_of_step(self.runner, self.expert_slots.group))
        if names != self._names:
            self._set_names(names)
        return names, steps, discarded

    def _draw(
        self,
        logits: Tensor,
        rows: np.ndarray,
        steps: np.ndarray,
        discarded: np.ndarray,
        parts: Sequence[tuple[slice | Tensor, Slot]],
        order: Tensor | None,
        begun: np.ndarray | None = None,
    ) -> Tensor:
        """Tokens ``(N,)`` for ``logits (N, V)``, which are token number ``steps (N,)`` of ``rows (N,)``; notes log-probs and
        ``begun (N,)``, by default that each token has a step of its own.
        """
        slots, places, numbers = self._places(rows, steps, discarded)
        for row, slot in self._with_top:
            for place in np.flatnonzero(rows == row):
                found = policy_log_probs(logits[place, None], slot.sampling.temperature or 1.0, self.banned_ids)
                slot.top[int(places[place])] = likeliest(found, slot.sampling.top_log_probs)
        chosen, log_probs = [], []
        for part, slot in parts:
            tokens, values = sample(logits[part], slot.sampling, numbers[part], self.banned_ids, self.undrawn_ids)
            if slot.stop_id is not None:  # a row with non-finite logits ends here; its log-prob reports it
                tokens = tokens.where(values.isfinite(), slot.stop_id)
            chosen.append(tokens)
            log_probs.append(values)
        tokens, values = (each[0] if len(each) == 1 else torch.cat(each) for each in (chosen, log_probs))
        if order is not None:
            tokens, values = tokens[order], values[order]
        self.found[slots, places] = values
        if self.takes_drafts:
            counts = self._one if begun is None else self._shared(begun.astype(np.int16))
            self.begun.index_put_((slots, places), counts)
        return tokens

    def _places(self, rows: np.ndarray, steps: np.ndarray, discarded: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, columns of `found` and random numbers ``(N,)`` for tokens number ``steps (N,)`` of ``rows (N,)``."""
        places = np.where(discarded, 0, steps + 1)
        self._add_columns(int(places.max(initial=0)))
        slots = self._rows[rows]
        numbers = uniforms(self.seeds[slots], self.drawn[slots] + np.where(discarded, 0, steps))
        sent = self._sent(np.stack([slots, places, numbers.view(np.int64)]))
        return sent[0], sent[1], sent[2].view(torch.float64)

    def _sent(self, values: np.ndarray) -> Tensor:
        """The values on the device, in one copy that the host does not wait for."""
        tensor = torch.from_numpy(values)
        return tensor if self.side_stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _shared(self, values: np.ndarray) -> Tensor:
        """As `_sent`, for values that many steps have in common: one tensor for all of them, to be read only."""
        key = values.dtype, values.shape, values.tobytes()
        if key not in self._sent_before:
            if len(self._sent_before) == SHARED:
                self._sent_before.clear()
            self._sent_before[key] = self._sent(values)
        return self._sent_before[key]

    def _set_names(self, names: list[str]) -> None:
        """Finds the slots of rows by vLLM's names of their requests."""
        requests = self.runner.requests
        self._names = names
        self._set_slots(np.array([requests[name].sampling_params.extra_args[EXTRA_ARGUMENT] for name in names]))
        self._name_of |= zip(self._rows.tolist(), names, strict=True)

    def _set_slots(self, rows: np.ndarray) -> None:
        """Sets the slots ``(B,)`` of the rows of a step, and finds the rows that one call of `sample` can serve."""
        self._rows = rows
        slots = [self.slots.get(row, CLOSED) for row in self._rows.tolist()]
        self._with_top = [(row, slot) for row, slot in enumerate(slots) if slot.sampling.top_log_probs]
        groups: dict[Any, list[int]] = {}
        for row, slot in enumerate(slots):
            groups.setdefault((slot.sampling.policy, slot.stop_id), []).append(row)
        self._groups = [(slots[rows[0]], rows) for rows in groups.values()]
        self._parts, self._order = self._parts_of(np.arange(len(rows)))

    def _parts_of(self, rows: np.ndarray) -> tuple[list[tuple[slice | Tensor, Slot]], Tensor | None]:
        """The places of ``rows (N,)`` in parts of at most `CHUNK_ROWS` for one call of `sample` each, and what sorts them."""
        parts: list[tuple[slice | Tensor, Slot]] = []
        if len(self._groups) == 1:
            starts = range(0, len(rows), CHUNK_ROWS)
            return [(slice(start, start + CHUNK_ROWS), self._groups[0][0]) for start in starts], None
        for slot, members in self._groups:
            places = self._sent(np.flatnonzero(np.isin(rows, members)))
            parts += [(part, slot) for part in places.split(CHUNK_ROWS)]
        return parts, torch.cat([part for part, _ in parts if isinstance(part, Tensor)]).argsort()

    def _add_slots(self, count: int) -> None:
        first = len(self.seeds)
        self.seeds = np.concatenate([self.seeds, np.zeros(count, dtype=np.uint64)])
        self.drawn = np.concatenate([self.drawn, np.zeros(count, dtype=np.int64)])
        self.filled = np.concatenate([self.filled, np.zeros(count, dtype=np.int64)])
        self._free += range(first + count - 1, first - 1, -1)
        self._pad((0, 0, 0, count))

    def _add_columns(self, column: int) -> None:
        """Adds columns up to this one, so that memory grows with the longest response, not to ``max_tokens``."""
        width = self.found.shape[1]
        if column >= width:
            self._pad((0, max(column + 1, 2 * column) - width))

    def _pad(self, sides: tuple[int, ...]) -> None:
        self.found, self.begun = (torch.nn.functional.pad(each, sides) for each in (self.found, self.begun))
        if self.side_stream is not None:  # the copy of earlier values is ordered after the current step
            self.side_stream.wait_stream(torch.cuda.current_stream(self.device))


class Float32Head(UnquantizedEmbeddingMethod):
    """An output projection that does not round logits."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """States ``(N, H)`` of any dtype to logits ``(N, V)`` float32."""
        logits = project(x, layer.weight)
        return logits if bias is None else logits + bias


class SiblingDrafter:
    """Drafts from the tokens of a request, of its prompt and of the other samples of it."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        self.sampler: Any = None  # set once the policy's sampler is installed

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        """A draft for each row of the step that has just ended; ``num_tokens_no_spec`` tokens of a row are known."""
        drafts = None if self.sampler is None else self.sampler.next_drafts(sampled_token_ids, self._most)
        if drafts is None:
            return [[] for _ in sampled_token_ids]
        return [
            draft[: max(self._max_tokens - int(known) - 1, 0)]
            for draft, known in zip(drafts, num_tokens_no_spec, strict=False)
        ]
