"""Requests for samples: from what clients ask for to requests of the sampler, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dataproto.errors import InvalidConfig, InvalidPrompt
from dataproto_server.backend import Sample, SampleRequest, SampleResult, SparseRows, TopK
from dataproto_server.engine.base_model import BaseModel
from rollout.adapters import NO_LOG_PROB, Adapter, AdapterRequest, PromptScores
from rollout.engine import Completion, SamplingParams, TopLogProbs
from rollout.sampling import derive_seed


@dataclass
class OpenSample:
    """A request in flight: the numbers of its samples in the engine, in order, and those that are finished."""

    request: SampleRequest
    scores: PromptScores | None
    numbers: list[int] = field(default_factory=list)
    done: dict[int, Completion] = field(default_factory=dict)

    def result(self) -> SampleResult:
        """What was asked for. A greedy answer is there once and returned as often as it was asked for."""
        request, scores = self.request, self.scores
        found, given = None if scores is None else scores.target_log_probs, request.target_prompt_logprobs
        samples = [_sample(self.done[number], request.topk_sample_logprobs) for number in self.numbers]
        top: TopK | None = None
        if scores and scores.top_tokens is not None and scores.top_log_probs is not None:
            top = scores.top_tokens, scores.top_log_probs
        return SampleResult(
            samples * (request.num_samples if request.sampling.temperature == 0 else 1),
            scores.log_probs if scores and request.prompt_logprobs else None,
            top,
            replace(given, values=found[given.listed])
            if isinstance(given, SparseRows) and found is not None
            else found,
        )


def open_sample(request: SampleRequest, base: BaseModel, adapter: Adapter | None) -> OpenSample:
    """Renders the prompt and hands its samples to the engine; samples share the prompt, which is then read once.

    Raises:
        InvalidChunk, InvalidPrompt: the prompt cannot be rendered, or leaves no room in the context.
        InvalidConfig: impossible parameters; names them.
    """
    prompt = base.rendered(request.chunks)
    base.check_context(len(prompt), 1 if request.sampling.max_tokens is None else request.sampling.max_tokens)
    sampling = sampling_params(request, base.max_context_length - len(prompt))
    opened = OpenSample(request, prompt_scores(request, len(prompt), base.vocabulary))
    seed = request.sampling.seed
    for number in range(1 if request.sampling.temperature == 0 else request.num_samples):
        one = AdapterRequest(
            prompt_ids=prompt.prompt_ids,
            input_ids=prompt.input_ids,
            token_types=prompt.token_types,
            position_ids=prompt.position_ids,
            multi_modal_data={"image": [image.image for image in prompt.images]} if prompt.images else {},
            seed=derive_seed("request", request.request_id, number) if seed is None else derive_seed(seed, number),
            uid=request.request_id,
            adapter=adapter,
            images=prompt.images,
            scores=opened.scores,
        )
        opened.numbers.append(base.sampler.submit(one, sampling))
    if opened.scores is not None:
        base.score_later(prompt, adapter, opened.scores)
    return opened


def sampling_params(request: SampleRequest, room: int) -> SamplingParams:
    """How one response is sampled. Stops that are given replace the model's own end tokens.

    Raises:
        InvalidConfig: see `SamplingParams`.
    """
    given = request.sampling
    texts, tokens = stops(given.stop)
    return SamplingParams(
        temperature=float(given.temperature),
        top_p=float(given.top_p),
        top_k=0 if given.top_k == -1 else given.top_k,
        max_tokens=room if given.max_tokens is None else given.max_tokens,
        stop_token_ids=tokens,
        stop=texts,
        ignore_eos=given.stop is not None,
        top_log_probs=request.topk_sample_logprobs,
    )


def stops(stop: str | Sequence[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop texts and stop tokens.

    >>> stops("ab"), stops([5, 6]), stops([]), stops(None)
    ((('ab',), ()), ((), (5, 6)), ((), ()), ((), ()))
    """
    given: list[str | int] = [stop] if isinstance(stop, str) else list(stop or ())
    texts = tuple(each for each in given if isinstance(each, str))
    return texts, tuple(int(each) for each in given if not isinstance(each, str))


def prompt_scores(request: SampleRequest, length: int, vocabulary: int) -> PromptScores | None:
    """What is to be computed of a prompt of this length, if anything.

    Raises:
        InvalidConfig: a number is out of range.
        InvalidPrompt: the targets are not ``(length - 1, K)`` tokens of the model or -1.
    """
    top, last, targets = request.topk_prompt_logprobs, request.prompt_logprobs_last_n, request.target_prompt_logprobs
    if last is not None and not (request.prompt_logprobs and 1 <= last <= max(length - 1, 1)):
        raise InvalidConfig(
            f"prompt_logprobs_last_n={last}: needs prompt_logprobs, and must be from 1 to {length - 1}, the prompt's tokens but "
            "the first"
        )
    if isinstance(targets, SparseRows):
        targets = targets.padded(-1)
    if targets is not None:
        if targets.ndim != 2 or len(targets) != length - 1 or targets.dtype.kind not in "iu":
            raise InvalidPrompt(
                f"target_prompt_logprobs is {targets.dtype} of shape {targets.shape}, but a prompt of {length} tokens takes "
                f"int64 of ({length - 1}, K)"
            )
        if targets.size and (targets.min() < -1 or targets.max() >= vocabulary):
            raise InvalidPrompt(
                f"target_prompt_logprobs holds a number that is neither -1 nor a token below {vocabulary}"
            )
        targets = np.array(targets, dtype=np.int64)
    wanted = request.prompt_logprobs or top > 0 or targets is not None
    return PromptScores(top, last, targets) if wanted else None


def _sample(done: Completion, top: int) -> Sample:
    return Sample(
        np.array(done.token_ids, dtype=np.int32),
        np.array(done.log_probs, dtype=np.float32),
        "stop" if done.finish_reason == "stop" else "length",
        _top_arrays(done.top_log_probs or [], top) if top else None,
    )


def _top_arrays(rows: Sequence[TopLogProbs], count: int) -> TopK:
    """Ids ``(n, count)`` and log-probs ``(n, count)``."""
    ids, values = np.zeros((len(rows), count), np.int32), np.full((len(rows), count), NO_LOG_PROB, np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row)], values[place, : len(row)] = zip(*row, strict=True)
    return ids, values
