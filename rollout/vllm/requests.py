"""What the engine knows of a request that vLLM runs, and vLLM's output as a completion."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dataproto.errors import DataProtoError, InvalidPrompt, RequestFailed
from rollout.continuation import FinishedRequest, SubmittedRequest, continued_experts, shown_media
from rollout.engine import FINISH_REASONS, Completion, FinishReason, Request, SamplingParams
from rollout.sampling import completes_stop_text, non_finite
from rollout.vllm.running_engine import error_line, tokens_of


@dataclass(eq=False)
class EngineRequest(SubmittedRequest):
    """A request that is waiting or running. Its ``token_ids`` were sampled before vLLM got it for the last time."""

    slot: int = -1  # in the sampler
    experts: Tensor | None = None  # (n, M, k) of its first tokens, if they are recorded
    searched: int = 0  # tokens of its response, in this engine, among which none completes a stop text

    @property
    def rest(self) -> tuple[Request, SamplingParams]:
        """The request for the tokens that are still to be sampled."""
        if not self.token_ids:
            return self.request, self.sampling
        request, count = self.request, len(self.token_ids)
        prompt_ids = [*(list(request.prompt_ids) or request.input_ids.tolist()), *self.token_ids]
        rest = replace(request, prompt_ids=prompt_ids, input_ids=self.ids, drawn=request.drawn + count)
        return rest, replace(self.sampling, max_tokens=self.sampling.max_tokens - count)

    def stopped_at(self, token_ids: Sequence[int], tokenizer: Any) -> int | None:
        """How many of ``token_ids``, sampled after those it has, there are up to the first one that completes a stop text.

        A step of vLLM adds several tokens where some were drafted.
        """
        first = max(self.searched - len(self.token_ids), 0) + 1
        for count in range(first, len(token_ids) + 1):
            if completes_stop_text(tokenizer, self.response(token_ids[:count]), self.sampling.stop):
                return count
        self.searched = len(self.token_ids) + len(token_ids)
        return None

    def finished(self) -> FinishedRequest:
        """Its prompt and response, for requests that continue it. Their KV cache is in vLLM's cache of prefixes."""
        return FinishedRequest(self.ids, shown_media(self.request.multi_modal_inputs))

    def completion(
        self, reason: FinishReason, cached_tokens: int = 0, error: DataProtoError | None = None
    ) -> Completion:
        """Its tokens so far."""
        return self.completed(reason, self.experts, cached_tokens, error)


class RunningRequests:
    """The requests that vLLM runs. Each has a slot in the policy's sampler, which knows what has been drawn for it."""

    def __init__(self, engine: Any, sampler: Any, end_ids: Sequence[int]) -> None:
        """``end_ids`` are the tokens that end a response; ``engine`` is vLLM's ``LLMEngine``."""
        self.rows: dict[str, EngineRequest] = {}  # by the names that vLLM knows them by
        self._engine, self._sampler, self._end_ids = engine, sampler, end_ids

    def add(self, name: str, row: EngineRequest, prompt: Any, adapter: Any) -> None:
        """Gives vLLM the rest of a request, with its prompt in vLLM's form.

        Raises:
            InvalidPrompt: vLLM refuses it.
        """
        request, sampling = row.rest
        stop_ids, sampler = sampling.stop_ids(self._end_ids), self._sampler
        row.slot = sampler.open(request.seed, request.drawn, sampling, stop_ids[0] if stop_ids else None)
        sampler.open_drafts(row.slot, request.uid or id(row.request.input_ids), request.input_ids)
        try:
            params = vllm_params(sampling, row.slot, stop_ids)
            self._engine.add_request(name, prompt, params, lora_request=adapter)
        except BaseException as error:
            sampler.close(row.slot)
            if isinstance(error, ValueError):
                raise InvalidPrompt(f"{row.name}: {error_line(error)}") from error
            raise
        self.rows[name] = row

    def end(self, name: str, token_ids: list[int]) -> EngineRequest:
        """The request, which vLLM has ended, with the tokens that it has sampled."""
        row, sampler = self.rows.pop(name), self._sampler
        row.log_probs = row.log_probs + sampler.log_probs(row.slot, len(token_ids))
        if row.sampling.top_log_probs:
            row.top_log_probs = row.top_log_probs + sampler.top_log_probs(row.slot, len(token_ids))
        read = len(row.request.input_ids) + len(row.token_ids) + len(token_ids) - 1
        row.experts = continued_experts(row.experts, sampler.experts(row.slot, read))
        if (drafts := sampler.drafted_and_accepted(row.slot, len(token_ids))) is not None:
            row.drafts = [earlier + found for earlier, found in zip(row.drafts or (0, 0), drafts, strict=True)]
        row.token_ids = row.token_ids + token_ids
        sampler.close(row.slot)
        return row

    def interrupt(self, name: str, count: int | None = None) -> EngineRequest:
        """Takes a request, with its tokens so far or the first ``count`` of them, from vLLM."""
        row = self.end(name, tokens_of(self._engine, name)[:count])
        self._engine.abort_request([name])
        return row

    def interrupt_all(self) -> list[EngineRequest]:
        """Takes all requests, with their tokens so far, from vLLM."""
        return [self.interrupt(name) for name in list(self.rows)]

    def drop(self, names: Sequence[str]) -> None:
        """Aborts requests in vLLM and frees their slots; their tokens are lost."""
        if names:
            self._engine.abort_request(list(names))
        for name in names:
            self._sampler.close(self.rows.pop(name).slot)


def vllm_params(sampling: SamplingParams, slot: int, stop_ids: Sequence[int]) -> Any:
    """vLLM's settings of a request, whose tokens are sampled by the policy's own sampler."""
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    from rollout.vllm.sampler import EXTRA_ARGUMENT

    return Params(
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # the end tokens are among the stop tokens
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={EXTRA_ARGUMENT: slot},
    )


def failure(row: EngineRequest, reason: str | None, banned_ids: Sequence[int]) -> DataProtoError | None:
    """Why a request that vLLM ended for this reason has no response, if it has none."""
    if reason not in FINISH_REASONS:
        return RequestFailed(
            f"{row.name}: vLLM ended its request with {reason!r} after {len(row.token_ids)} tokens, neither by an end token nor "
            "by length"
        )
    return non_finite(row.token_ids, row.log_probs, banned_ids, row.name)
