"""The policy inside vLLM's sampler: tokens and log-probs exactly as DESIGN defines them, each sample from its own stream.

vLLM is asked for greedy tokens and for the processed logits of the chosen ones. A logits processor, which sees the raw logits
of a whole step, chooses the tokens with the function that the Hugging Face engine uses, and leaves in each row nothing but the
chosen token, with its log-prob as its logit. So banned ids, temperature, top-p and top-k mean the same in both engines, log-probs
are those before top-p and top-k, a sample draws the same numbers in any batch and on any rank, and no random state of the process
is touched. (vLLM's own seeds would make it loop over the rows.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dataproto.vlm import family_of
from rollout.engine import SamplingParams
from rollout.policy import sample

EXTRA_ARGUMENT = "dataproto_sample"
LOGPROBS_MODE = "processed_logits"  # what vLLM reports of the chosen tokens
CHUNK_ROWS = 256  # rows processed at a time: bounds memory to a few copies of so many rows of logits


@dataclass(frozen=True)
class SampleStream:
    """What a request brings with it: how it is sampled, and its own random numbers."""

    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class _Row:
    stream: SampleStream
    tokens: list[int]  # vLLM's own list of what the row has generated; it grows


class PolicyProcessor(LogitsProcessor):
    """Chooses the next token of every row that carries a `SampleStream`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        config = vllm_config.model_config.hf_config
        self.banned_ids = family_of(config).banned_ids(config)
        self.rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """``logits (B, V)`` float32, in place."""
        for sampling, numbers in self._groups():
            rows = [self.rows[number] for number in numbers]
            seeds = np.array([row.stream.seed for row in rows], dtype=np.uint64)
            steps = np.array([len(row.tokens) for row in rows], dtype=np.int64)
            whole = numbers == list(range(len(logits)))
            for start in range(0, len(rows), CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                where = part if whole else torch.tensor(numbers[part], device=logits.device)
                chosen, log_probs = sample(logits[where], sampling, seeds[part], steps[part], self.banned_ids)
                logits[where] = -torch.inf
                rows_left = torch.arange(start, start + len(chosen), device=logits.device) if whole else where
                logits[rows_left, chosen] = log_probs
        return logits

    def _groups(self) -> Iterator[tuple[SamplingParams, list[int]]]:
        """Row numbers, ascending, by how they are sampled."""
        groups: dict[SamplingParams, list[int]] = {}
        for number in sorted(self.rows):
            groups.setdefault(self.rows[number].stream.sampling, []).append(number)
        yield from groups.items()


def _row(params: Any, prompt_ids: list[int] | None, tokens: list[int]) -> _Row | None:
    stream = (params.extra_args or {}).get(EXTRA_ARGUMENT)
    return None if stream is None else _Row(stream, tokens)
