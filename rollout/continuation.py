"""Requests that continue a finished one, and samples that continue later.

A request that continues another has a prompt that begins with its prompt and response, and experts that begin with its experts.

A sample that is stopped, because enough groups are whole, keeps its tokens, their log-probs and the weights that sampled each of
them. It continues with the next number of its random stream, so under equal weights it gets the tokens that it would have got
without the interruption.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dataproto.columns import RowMedia, media_parts
from dataproto.errors import DataProtoError, InvalidConfig, InvalidPrompt, MediaMismatch, end_after, ending
from dataproto.grouping import grouped_by
from dataproto.vlm import VLMFamily
from rollout.engine import Completion, FinishReason, Request, RequestEngine, SamplingParams, TopLogProbs

Media = Mapping[str, Tensor]
"""``multi_modal_inputs`` of a part of a prompt."""


def shown_media(inputs: RowMedia) -> tuple[Media, ...]:
    """The mappings of `Request.multi_modal_inputs` that are not empty."""
    return tuple(part for part in media_parts(inputs) if part)


@dataclass(eq=False)
class SubmittedRequest:
    """A request of an engine from its submission to its end, and what was found for it so far."""

    number: int
    name: str  # for messages
    request: Request
    sampling: SamplingParams
    keep: bool
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # numbers of drafted and of accepted tokens, if any are drafted

    @property
    def ids(self) -> Tensor:
        """The tokens ``(P' + R',)`` int64 of its prompt and of its response so far."""
        return torch.cat([self.request.input_ids, torch.tensor(self.token_ids, dtype=torch.int64)])

    def response(self, more: Sequence[int] = ()) -> list[int]:
        """Its tokens so far and ``more`` of them, after those of an earlier request that it continues."""
        ids = self.request.input_ids
        return [*ids[len(ids) - self.request.drawn :].tolist(), *self.token_ids, *more]

    def completed(
        self, reason: FinishReason, experts: Tensor | None, cached_tokens: int, error: DataProtoError | None
    ) -> Completion:
        """The completion with its tokens so far, and with what its sampling asks for."""
        drafted, accepted = self.drafts or (None, None)
        top = self.top_log_probs if self.sampling.top_log_probs else None
        found = (self.number, self.token_ids, self.log_probs, reason, cached_tokens, top, experts, error)
        return Completion(*found, drafted_tokens=drafted, accepted_tokens=accepted)


@dataclass(eq=False)
class FinishedRequest:
    """The prompt and the response of a request that may be continued."""

    input_ids: Tensor  # (P' + R',) int64
    media: tuple[Media, ...]  # one for each turn that shows some


F = TypeVar("F", bound=FinishedRequest)


def joined_media(parts: Sequence[Media]) -> dict[str, Tensor]:
    """The inputs of several parts, one after another. The tensors of a single one are not copied.

    >>> joined_media([{"image_grid_thw": torch.tensor([[1, 2, 2]])}, {"image_grid_thw": torch.tensor([[1, 2, 4]])}])
    {'image_grid_thw': tensor([[1, 2, 2],
            [1, 2, 4]])}
    """
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [part[name] for part in parts if name in part]
        joined[name] = found[0] if len(found) == 1 else torch.cat(found)
    return joined


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of equal elements with which two sequences begin.

    >>> common_length("<a>x", "<a><think>")
    3
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def continued_by(request: Request, number: int, kept: Mapping[int, F]) -> F:
    """The finished request ``number``, which the ``request`` continues. Raises the errors of `RequestEngine.fork`."""
    if number not in kept:
        raise InvalidConfig(f"request {number} cannot be continued: it is no finished request submitted with keep")
    input_ids, media = kept[number].input_ids, kept[number].media
    length = len(input_ids)
    if len(request.input_ids) < length or not torch.equal(request.input_ids[:length], input_ids):
        first = common_length(request.input_ids.tolist(), input_ids.tolist())
        raise InvalidPrompt(
            f"its prompt differs from token {first} on from the {length} tokens of the request that it continues"
        )
    parts = shown_media(request.multi_modal_inputs)
    if len(parts) < len(media) or not all(map(same_tensors, parts, media)):
        raise InvalidPrompt(
            "its media do not begin with those of the request that it continues; multi_modal_inputs of several turns are a "
            "sequence with one mapping for each turn that shows media"
        )
    return kept[number]


def continued_experts(known: Tensor | None, found: Tensor | None) -> Tensor | None:
    """The experts ``(n, M, k)`` of a row's first tokens, from those ``known`` and those ``found`` when the row was read again.

    Both begin with the first token. What is known stays: the tokens that follow were sampled after it.

    >>> continued_experts(torch.tensor([[[3]], [[1]]]), torch.tensor([[[3]], [[0]], [[2]]])).flatten().tolist()
    [3, 1, 2]
    """
    if known is None or found is None:
        return found if known is None else known
    return torch.cat([known, found[len(known) :]])


def same_tensors(one: Media, other: Media) -> bool:
    """Whether two mappings have equal tensors under the same names. The same object is equal to itself without a comparison."""
    return one.keys() == other.keys() and all(
        one[name] is other[name] or torch.equal(one[name], other[name]) for name in one
    )


BEGUN = "_begun"
"""The column with what was sampled of each row so far: a list with one mapping for each turn, see `BegunTurn.plain`."""

SUBMITTED_AT_A_TIME = 64
"""Requests that are submitted before the engine's next step, and the others of their groups. Rendering a prompt takes time, in
which a GPU would wait. Engines share a prompt among the samples that are submitted together."""


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens.

    >>> Tokens([5], [-0.5], [1]) + Tokens([7], [-1.0], [2])
    Tokens(token_ids=[5, 7], log_probs=[-0.5, -1.0], weight_versions=[1, 2])
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    experts: Tensor | None = field(default=None, compare=False, repr=False)
    """``(n, M, k)`` of the row's first tokens, those before the sampled ones included, if the engine records them."""

    @classmethod
    def of(cls, completion: Completion, weight_version: int) -> "Tokens":
        """The tokens of a completion, all sampled by the same weights."""
        versions = [weight_version] * len(completion.token_ids)
        return cls(completion.token_ids, completion.log_probs, versions, completion.routed_experts)

    def __add__(self, later: "Tokens") -> "Tokens":
        return Tokens(
            [*self.token_ids, *later.token_ids],
            [*self.log_probs, *later.log_probs],
            [*self.weight_versions, *later.weight_versions],
            continued_experts(self.experts, later.experts),
        )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class BegunTurn:
    """A turn of a sample that is not finished. A sample without environment has one turn."""

    tokens: Tokens
    whole: bool = False  # its action was passed on to the environment
    before: list[int] = field(default_factory=list)  # tokens of the prompt or the observation that precedes it
    state: str = ""  # digest of that observation, whose pictures the tokens do not tell

    def plain(self) -> dict[str, Any]:
        """As plain values and tensors, which a file can hold."""
        tokens, told = self.tokens, {"whole": self.whole, "state": self.state}
        lists = {"token_ids": tokens.token_ids, "weight_versions": tokens.weight_versions, "before": self.before}
        found = {name: torch.tensor(each, dtype=torch.int64) for name, each in lists.items()}
        found["log_probs"] = torch.tensor(tokens.log_probs, dtype=torch.float64)
        return found | told | ({} if tokens.experts is None else {"experts": tokens.experts})

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "BegunTurn":
        """The turn of which these are the plain values."""
        ids, log_probs, versions, before = (
            plain[name].tolist() for name in ("token_ids", "log_probs", "weight_versions", "before")
        )
        return cls(
            Tokens(ids, log_probs, versions, plain.get("experts")), bool(plain["whole"]), before, plain.get("state", "")
        )


class WholeGroups:
    """Counts the groups of which all samples have finished, until there are enough of them or the engine fails at a sample.

    >>> groups = WholeGroups(["a", "a", "b"], wanted=1)
    >>> groups.finish(0)
    >>> groups.enough
    False
    >>> groups.finish(2)
    >>> groups.enough
    True
    """

    failure: tuple[int, DataProtoError] | None = None
    """The sample at which the engine failed, and its error."""

    def __init__(self, labels: Sequence[str], wanted: int, due: Collection[str] = ()) -> None:
        """``labels`` are the groups of the samples. ``wanted`` groups, and those that are ``due``, have to be whole."""
        self.labels, self.wanted = list(labels), wanted
        self._left = Counter(labels)
        self._due = set(due) & set(labels)
        self._whole = 0

    def finish(self, sample: int) -> None:
        """Notes the end of a sample."""
        label = self.labels[sample]
        self._left[label] -= 1
        if not self._left[label]:
            self._whole += 1
            self._due.discard(label)

    def fail(self, sample: int, error: DataProtoError) -> None:
        """Notes that the engine failed at a sample, which ends decoding."""
        self.failure = self.failure or (sample, error)

    @property
    def enough(self) -> bool:
        """Whether decoding ends."""
        return self.failure is not None or (self._whole >= self.wanted and not self._due)


def continued(request: Request, token_ids: Sequence[int], family: VLMFamily) -> Request:
    """The request for the tokens that follow ``token_ids``, the first ones of its response."""
    if not token_ids:
        return request
    count, ids = len(token_ids), torch.tensor(token_ids, dtype=torch.int64)
    attended = torch.ones(1, len(request.input_ids), dtype=torch.int64)
    positions = family.extend_positions(request.position_ids[None], attended, count)[0]
    return replace(
        request,
        prompt_ids=[*(list(request.prompt_ids) or request.input_ids.tolist()), *token_ids],
        input_ids=torch.cat([request.input_ids, ids]),
        token_types=torch.cat([request.token_types, request.token_types.new_zeros(count)]),
        position_ids=torch.cat([request.position_ids, positions], dim=-1),
        drawn=request.drawn + count,
    )


def submitted_together(labels: Sequence[str]) -> Iterator[list[int]]:
    """Places of samples, at least `SUBMITTED_AT_A_TIME` in each list but the last. The samples of a group stay in one list, and
    groups are in the order of their first samples.

    >>> list(submitted_together(["a", "b"] * 40 + ["c"]))[1]
    [80]
    """
    places: list[int] = []
    for group in grouped_by(range(len(labels)), lambda place: labels[place]).values():
        places += group
        if len(places) >= SUBMITTED_AT_A_TIME:
            yield places
            places = []
    if places:
        yield places


def decode_groups(
    engine: RequestEngine,
    requests: Sequence[Request],
    begun: Sequence[Tokens],
    sampling: SamplingParams,
    groups: WholeGroups,
    family: VLMFamily,
    weight_version: int,
) -> list[tuple[Tokens, FinishReason]]:
    """Decodes until there are enough whole groups, or the engine fails at a sample: see ``groups.failure``.

    Args:
        begun: the first tokens of each response.

    Returns:
        For each request all its tokens, and "abort" where they are not the whole response. Of the sample at which the engine
        failed they are those of ``begun``.
    """
    found: list[tuple[Tokens, FinishReason]] = [(tokens, "abort") for tokens in begun]
    running: dict[int, int] = {}  # number in the engine -> place
    goes_on = [  # all of them before the first is decoded, so that a mistake costs nothing
        (continued(request, tokens.token_ids, family), replace(sampling, max_tokens=sampling.max_tokens - len(tokens)))
        for request, tokens in zip(requests, begun, strict=True)
    ]
    waiting = deque(submitted_together(groups.labels))

    def stop(number: int, place: int) -> None:
        stopped = engine.abort(number)
        if stopped is not None:
            found[place] = found[place][0] + Tokens.of(stopped, weight_version), "abort"

    with ending(lambda: end_after(None, *(partial(stop, *each) for each in running.items()))):
        while (waiting or running) and not groups.enough:
            for place in waiting.popleft() if waiting else ():  # the engine reads the first ones meanwhile
                try:
                    running[engine.submit(*goes_on[place])] = place
                except (InvalidPrompt, MediaMismatch) as error:
                    groups.fail(place, error)
                    break
            for completion in () if groups.enough else engine.poll():
                place = running.pop(completion.request)
                if completion.error is not None:
                    groups.fail(place, completion.error)
                    continue
                found[place] = found[place][0] + Tokens.of(completion, weight_version), completion.finish_reason
                groups.finish(place)
    return found
