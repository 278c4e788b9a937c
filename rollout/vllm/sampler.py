"""The policy inside vLLM: tokens and log-probs by the same functions as in the Hugging Face engine.

vLLM's sampler is replaced by one that samples tokens with `rollout.sampling`. So banned ids, temperature, top-p and top-k mean
the same in both engines, log-probs are those before top-p and top-k, a sample draws the same numbers in any batch and on any
rank, and the random state of the process is not used. (With its own seeds vLLM would loop over rows; with a logits processor it
would wait for the tokens of each step before it prepares the next.) Log-probs stay on the device until their response is
complete.

Logits are float32, as in the actor. vLLM would round them to the model's dtype, where a logit of 20 becomes a multiple of 1/8.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from dataproto.vlm import family_of
from rollout.engine import Request, SamplingParams
from rollout.sampling import project, sample, uniforms
from rollout.vllm.versions import batch_of, model_of

EXTRA_ARGUMENT = "dataproto_request"
"""The argument of a vLLM request that holds its number in the run."""
FIRST_COLUMNS = 256
"""Initial number of log-probs per response that memory is allocated for."""
CHUNK_ROWS = 256
"""Rows sampled at a time, which bounds memory to a few copies of their logits."""


class PolicySampler(Sampler):
    """Samples the next token of every row, for the requests of one run at a time."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config.hf_config
        self.banned_ids = family_of(config).banned_ids(config)
        self.runner = runner
        self.device: torch.device = runner.device
        # Log-probs are read after their tokens reached the host: reading them need not wait for the current step.
        self.side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def begin(self, requests: Sequence[Request], sampling: SamplingParams, stop_ids: Sequence[int]) -> None:
        """Begins a run: from now on rows belong to these requests, which end with any of ``stop_ids``."""
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        # The first column is for tokens that vLLM discards, of prompts that are read in parts.
        self.found = torch.zeros(len(requests), 1 + min(sampling.max_tokens, FIRST_COLUMNS), device=self.device)
        self._names: list[str] = []
        self._numbers = np.zeros(0, dtype=np.int64)

    def log_probs(self, number: int, count: int) -> list[float]:
        """Log-probs of the first ``count`` sampled tokens of request ``number``."""
        with nullcontext() if self.side_stream is None else torch.cuda.stream(self.side_stream):
            values: list[float] = self.found[number, 1 : 1 + count].tolist()
        return values

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """Samples tokens ``(B, 1)`` int32 for the ``logits (B, V)`` of the current step."""
        names, steps, discarded = batch_of(self.runner)
        if names != self._names:
            self._names, requests = names, self.runner.requests
            self._numbers = np.array([requests[name].sampling_params.extra_args[EXTRA_ARGUMENT] for name in names])
        places = np.where(discarded, 0, steps + 1)
        self._extend(int(places.max(initial=0)))
        numbers = uniforms(self.seeds[self._numbers], np.where(discarded, 0, steps))
        sent = torch.from_numpy(np.stack([self._numbers, places, numbers.view(np.int64)]))
        if self.side_stream is not None:
            sent = sent.pin_memory().to(self.device, non_blocking=True)  # one copy, without waiting
        chosen, log_probs = [], []
        for start in range(0, len(names), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            tokens, values = sample(logits[part], self.sampling, sent[2, part].view(torch.float64), self.banned_ids)
            if self.stop_ids:  # a row with non-finite logits ends here; its log-prob reports it
                tokens = tokens.where(values.isfinite(), self.stop_ids[0])
            chosen.append(tokens)
            log_probs.append(values)
        self.found[sent[0], sent[1]] = torch.cat(log_probs)
        return SamplerOutput(sampled_token_ids=torch.cat(chosen).int().unsqueeze(-1), logprobs_tensors=None)

    def _extend(self, column: int) -> None:
        """Extends the memory of log-probs to this column, so that it grows with the longest response, not to ``max_tokens``."""
        width = self.found.shape[1]
        if column < width:
            return
        wider = max(column + 1, min(2 * column, self.sampling.max_tokens + 1))
        self.found = torch.nn.functional.pad(self.found, (0, wider - width))
        if self.side_stream is not None:  # the copy of earlier values is ordered after the current step
            self.side_stream.wait_stream(torch.cuda.current_stream(self.device))


class Float32Head(UnquantizedEmbeddingMethod):
    """An output projection that does not round logits."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """States ``(N, H)`` of any dtype to logits ``(N, V)`` float32."""
        logits = project(x, layer.weight)
        return logits if bias is None else logits + bias


def install(worker: Any) -> PolicySampler:
    """Replaces a worker's sampler by the policy's, and its output projection by one in float32."""
    for module in model_of(worker).modules():
        half = isinstance(module, VocabParallelEmbedding) and module.weight.dtype in (torch.bfloat16, torch.float16)
        if half and type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method = Float32Head()
    sampler = PolicySampler(worker.model_runner)
    worker.model_runner.sampler = sampler
    return sampler
