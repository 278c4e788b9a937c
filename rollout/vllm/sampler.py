"""The policy inside vLLM: tokens and log-probs exactly as DESIGN defines them, each sample from its own stream.

vLLM's sampler is replaced by one that chooses the tokens of a step with the function that the Hugging Face engine uses. So banned
ids, temperature, top-p and top-k mean the same in both engines, log-probs are those before top-p and top-k, a sample draws the
same numbers in any batch and on any rank, and no random state of the process is touched. (vLLM's own seeds would make it loop
over the rows; a logits processor makes it wait for each step's tokens before it prepares the next.) Log-probs stay on the device
until their response is whole.

Logits are float32, as the actor's are: vLLM would round them to the model's dtype, and a logit of 20 to a multiple of 1/8.
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
from rollout.randomness import uniforms
from rollout.sampling import project, sample
from rollout.vllm.versions import batch_of, model_of

EXTRA_ARGUMENT = "dataproto_request"
"""The argument under which a request of vLLM's carries its number among those of the run."""
FIRST_COLUMNS = 256
"""Tokens of each response that log-probs are kept for at first."""
CHUNK_ROWS = 256  # rows sampled at a time: bounds memory to a few copies of so many rows of logits


class PolicySampler(Sampler):
    """Chooses the next token of every row; knows the requests of one run at a time."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config.hf_config
        self.banned_ids = family_of(config).banned_ids(config)
        self.runner = runner
        self.device: torch.device = runner.device
        # What is read back was written before the tokens came to the host: it must not wait for the step under way.
        self.side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def begin(self, requests: Sequence[Request], sampling: SamplingParams, stop_ids: Sequence[int]) -> None:
        """Forgets the last run: from here on rows belong to these requests, which end with any of ``stop_ids``."""
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        # The first column is for tokens that vLLM throws away, of prompts read in part.
        self.found = torch.zeros(len(requests), 1 + min(sampling.max_tokens, FIRST_COLUMNS), device=self.device)
        self._names: list[str] = []
        self._numbers = np.zeros(0, dtype=np.int64)

    def log_probs(self, number: int, count: int) -> list[float]:
        """Those of the first ``count`` tokens of request ``number``, which have been sampled."""
        with nullcontext() if self.side_stream is None else torch.cuda.stream(self.side_stream):
            values: list[float] = self.found[number, 1 : 1 + count].tolist()
        return values

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """``logits (B, V)`` of the batch under way; sampled tokens are ``(B, 1)`` int32."""
        names, steps, thrown_away = batch_of(self.runner)
        if names != self._names:
            self._names, requests = names, self.runner.requests
            self._numbers = np.array([requests[name].sampling_params.extra_args[EXTRA_ARGUMENT] for name in names])
        places = np.where(thrown_away, 0, steps + 1)
        self._make_room(int(places.max(initial=0)))
        numbers = uniforms(self.seeds[self._numbers], np.where(thrown_away, 0, steps))
        sent = torch.from_numpy(np.stack([self._numbers, places, numbers.view(np.int64)]))
        if self.side_stream is not None:
            sent = sent.pin_memory().to(self.device, non_blocking=True)  # one copy, which the host does not wait for
        chosen, log_probs = [], []
        for start in range(0, len(names), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            tokens, values = sample(logits[part], self.sampling, sent[2, part].view(torch.float64), self.banned_ids)
            if self.stop_ids:  # a row that nothing can be sampled for ends here, and its log-prob tells
                tokens = tokens.where(values.isfinite(), self.stop_ids[0])
            chosen.append(tokens)
            log_probs.append(values)
        self.found[sent[0], sent[1]] = torch.cat(log_probs)
        return SamplerOutput(sampled_token_ids=torch.cat(chosen).int().unsqueeze(-1), logprobs_tensors=None)

    def _make_room(self, column: int) -> None:
        """Widens the log-probs kept so that they have this column: they grow with the longest response, not to ``max_tokens``."""
        width = self.found.shape[1]
        if column < width:
            return
        wider = max(column + 1, min(2 * column, self.sampling.max_tokens + 1))
        self.found = torch.nn.functional.pad(self.found, (0, wider - width))
        if self.side_stream is not None:  # what was written before is copied behind the step under way
            self.side_stream.wait_stream(torch.cuda.current_stream(self.device))


class Float32Head(UnquantizedEmbeddingMethod):
    """Logits that are not rounded after the product."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(N, H)`` states in any dtype -> ``(N, V)`` float32."""
        logits = project(x, layer.weight)
        return logits if bias is None else logits + bias


def install(worker: Any) -> PolicySampler:
    """Puts the policy in the place of a worker's sampler, and what gives it logits in that of the head's product."""
    for module in model_of(worker).modules():
        half = isinstance(module, VocabParallelEmbedding) and module.weight.dtype in (torch.bfloat16, torch.float16)
        if half and type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method = Float32Head()
    sampler = PolicySampler(worker.model_runner)
    worker.model_runner.sampler = sampler
    return sampler
