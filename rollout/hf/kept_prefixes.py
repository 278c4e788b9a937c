"""Finished requests that others may continue, and their KV caches."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from dataproto.errors import InvalidConfig
from rollout.continuation import Media, check_continues
from rollout.engine import Request
from rollout.hf.layer_caches import LayerCache


@dataclass(eq=False)
class Prefix:
    """The prompt and the response of a finished request."""

    input_ids: Tensor  # (P' + R',) int64
    media: tuple[Media, ...]  # one for each turn that shows some
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
        if number not in self._prefixes:
            raise InvalidConfig(f"request {number} cannot be continued: it is no finished request submitted with keep")
        self._prefixes.move_to_end(number)
        prefix = self._prefixes[number]
        check_continues(request, prefix.input_ids, prefix.media)
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
