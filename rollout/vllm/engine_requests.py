"""What the engine knows of a request that vLLM runs, and vLLM's output as a completion."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import DataProtoError
from rollout.continuation import Media, media_parts
from rollout.engine import Completion, FinishReason, Request, SamplingParams, TopLogProbs


@dataclass(frozen=True)
class FinishedRequest:
    """The prompt and the response of a request that may be continued. Its KV cache is in vLLM's cache of prefixes."""

    input_ids: Tensor  # (P' + R',) int64
    media: tuple[Media, ...]


@dataclass(eq=False)
class EngineRequest:
    """A request that is waiting or running."""

    number: int
    name: str  # for messages
    request: Request
    sampling: SamplingParams
    keep: bool
    slot: int = -1  # in the sampler
    token_ids: list[int] = field(default_factory=list)  # sampled before vLLM got the request for the last time
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt: list[Mapping[int, Any] | None] | None = None  # vLLM's log-probs of the prompt

    @property
    def rest(self) -> tuple[Request, SamplingParams]:
        """The request for the tokens that are still to be sampled."""
        if not self.token_ids:
            return self.request, self.sampling
        request, ids, count = self.request, torch.tensor(self.token_ids), len(self.token_ids)
        prompt_ids = list(request.prompt_ids) or request.input_ids.tolist()
        whole = torch.cat([request.input_ids, ids])
        return replace(
            request, prompt_ids=[*prompt_ids, *self.token_ids], input_ids=whole, drawn=request.drawn + count
        ), replace(self.sampling, max_tokens=self.sampling.max_tokens - count)

    def response(self, token_ids: Sequence[int]) -> list[int]:
        """All its tokens, with those of an earlier request that it goes on with, if ``token_ids`` are the last ones."""
        ids = self.request.input_ids
        return [*ids[len(ids) - self.request.drawn :].tolist(), *self.token_ids, *token_ids]

    def finished(self) -> FinishedRequest:
        """Its prompt and response, for requests that continue it."""
        ids = torch.cat([self.request.input_ids, torch.tensor(self.token_ids, dtype=torch.int64)])
        return FinishedRequest(ids, media_parts(self.request.multi_modal_inputs))

    def completion(
        self, reason: FinishReason, cached_tokens: int = 0, error: DataProtoError | None = None
    ) -> Completion:
        """Its tokens so far."""
        sampling = self.sampling
        scores, top = prompt_scores(self.prompt, self.request, sampling.top_prompt_log_probs)
        return Completion(
            self.number,
            self.token_ids,
            self.log_probs,
            reason,
            cached_tokens=cached_tokens,
            prompt_log_probs=scores if sampling.prompt_log_probs else None,
            top_log_probs=self.top_log_probs if sampling.top_log_probs else None,
            top_prompt_log_probs=top if sampling.top_prompt_log_probs else None,
            error=error,
        )


def prompt_scores(
    found: Sequence[Mapping[int, Any] | None] | None, request: Request, count: int
) -> tuple[list[float] | None, list[TopLogProbs] | None]:
    """Log-probs of a prompt's tokens and the ``count`` likeliest ones at each place, from those that vLLM found."""
    if found is None:
        return None, None
    values: list[float] = []
    top: list[TopLogProbs] = []
    for token, medium, place in zip(request.input_ids.tolist(), request.token_types.tolist(), found, strict=False):
        if place is None or medium:
            values.append(math.nan)
            top.append([])
            continue
        values.append(float(place[token].logprob))
        likeliest = sorted(((each.logprob, -other) for other, each in place.items()), reverse=True)
        top.append([(-other, value) for value, other in likeliest[:count]])
    return values, top
