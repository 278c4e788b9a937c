"""What the engine knows of a request: from its submission to its end, and afterwards if others may continue it."""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataproto.errors import DataProtoError, InvalidPrompt
from rollout.continuation import FinishedRequest, SubmittedRequest, continued_by, shown_media
from rollout.engine import Completion, FinishReason, Request, SamplingParams

LayerCache = tuple[Tensor, Tensor]
"""Of one layer and one row: keys and values ``(H, T, D)``, or the last inputs ``(C, width)`` of the convolution and the state
``(H, D, E)``.
"""


@dataclass(eq=False)
class Prefix(FinishedRequest):
    """The prompt and the response of a finished request, and what was cached of them."""

    cache: list[LayerCache] | None
    """One for each layer, of all tokens but the last, which was sampled and not read. ``None`` once it is dropped."""
    experts: Tensor | None = None  # (P' + R' - 1, M, k) that its tokens were sent to, if they are recorded

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache."""
        return len(self.input_ids) - 1

    @property
    def bytes(self) -> int:
        """Memory of the cache."""
        return sum(part.nbytes for layer in self.cache or () for part in layer)


class KeptPrefixes:
    """Prefixes by the numbers of their requests, with caches of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()  # last used last
        self.bytes = 0
        """Memory of all caches."""

    def add(self, number: int, prefix: Prefix) -> None:
        """Adds a prefix. If there is too little memory, the cache that was used longest ago is dropped, or else this one."""
        self._prefixes[number] = prefix
        self.bytes += prefix.bytes
        for each in self._prefixes.values():
            if self.bytes <= self.max_bytes:
                break
            self._drop(each)

    def continued_by(self, request: Request, number: int) -> Prefix:
        """The prefix ``number``, which the request continues. Raises the errors of `RequestEngine.fork`."""
        prefix = continued_by(request, number, self._prefixes)
        self._prefixes.move_to_end(number)
        return prefix

    def remove(self, number: int) -> None:
        """Forgets a prefix, if there is one of this number. A request that waits to continue it still can."""
        prefix = self._prefixes.pop(number, None)
        if prefix is not None:
            self.bytes -= prefix.bytes

    def drop_caches(self) -> None:
        """Drops all caches, because the weights change. The prefixes can still be continued."""
        for prefix in self._prefixes.values():
            self._drop(prefix)

    def _drop(self, prefix: Prefix) -> None:
        self.bytes -= prefix.bytes
        prefix.cache = None


@dataclass(eq=False)
class OpenRequest(SubmittedRequest):
    """A request that is waiting or running."""

    stop_ids: frozenset[int] = frozenset()
    prefix: Prefix | None = None  # that it continues, until its prompt has been read
    cached_tokens: int = 0
    experts: list[Tensor] = field(default_factory=list)  # (n, M, k) of its tokens so far, in order
    experts_known: int = 0  # tokens that they are of

    def add_experts(self, found: Tensor, prefix: Prefix | None = None) -> None:
        """Adds the experts ``(n, M, k)`` of the last n of its tokens that have been read, which follow those of ``prefix``. What
        is known stays as it was: a request that was interrupted is read again.
        """
        if prefix is not None and prefix.experts is not None and not self.experts:
            self._append(prefix.experts)
        first = len(self.request.input_ids) + len(self.token_ids) - len(found)
        self._append(found[self.experts_known - first :])

    def _append(self, experts: Tensor) -> None:
        self.experts.append(experts)
        self.experts_known += len(experts)

    @property
    def drawn(self) -> int:
        """Numbers drawn from its random stream."""
        return self.request.drawn + len(self.token_ids)

    @property
    def unread_tokens(self) -> int:
        """Number of its tokens so far that are in no cache, if it waits."""
        cached = 0 if self.prefix is None else self.prefix.cached_tokens
        return len(self.request.input_ids) + len(self.token_ids) - cached

    @property
    def _all_experts(self) -> Tensor | None:
        return torch.cat(self.experts) if self.experts else None

    def prefix_with(self, cache: list[LayerCache] | None) -> Prefix:
        """Its prompt and response, for requests that continue it."""
        return Prefix(self.ids, shown_media(self.request.multi_modal_inputs), cache, self._all_experts)

    def completion(self, reason: FinishReason, error: DataProtoError | None = None) -> Completion:
        """Its tokens so far."""
        return self.completed(reason, self._all_experts, self.cached_tokens, error)


def check_room(request: Request, sampling: SamplingParams, positions: int | None) -> None:
    """Raises `InvalidPrompt` for a request that is longer, with its response, than the model has positions.

    An environment may show any amount of text, and reading it could take for ever.
    """
    length = len(request.input_ids)
    if positions is not None and length + sampling.max_tokens > positions:
        raise InvalidPrompt(
            f"{length} prompt tokens and max_tokens={sampling.max_tokens} exceed the {positions} positions of the model"
        )
