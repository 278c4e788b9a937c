"""Drafts of the tokens that a sample draws next, by n-grams of its own tokens and of the other samples of its prompt.

A draft changes no token: the engine draws each token from the sample's own random stream, and keeps a drafted one only if it is
the one that was drawn (exact-match speculation). After prompt lookup decoding (Saxena 2023), with siblings in addition to
the prompt.

A draft is refused if the engine draws none of its tokens; it has then cost work for nothing. A sample pauses after `PATIENCE`
refused drafts in a row: it gets no draft for `PAUSE` passes of the engine, and then one more. A smaller patience would slow down
rows whose drafts are often kept, because a pass lasts as long for a row without a draft when other rows have one.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

NGRAM_SIZES = (4, 2)
"""How many last tokens are looked up, largest first."""
PATIENCE = 12
"""The number of refused drafts in a row after which a sample pauses."""
PAUSE = 64
"""The number of passes that a pause lasts."""


@dataclass(eq=False)
class _Group:
    """What followed each n-gram last in the prompts and samples of a group, and the number of its open samples."""

    following: dict[tuple[int, ...], int] = field(default_factory=dict)
    prompts: set[int] = field(default_factory=set)  # identities of those that were read
    samples: int = 0


@dataclass(eq=False)
class _Sample:
    key: Hashable
    group: _Group
    last: list[int]  # tokens
    drafted: bool = False  # in its last pass
    added: int = 0  # tokens since then
    refused: int = 0  # drafts in a row
    pause: int = 0  # passes that are left of its pause


class Drafts:
    """The open samples of an engine.

    >>> import torch
    >>> drafts, prompt = Drafts(), torch.tensor([7, 8])
    >>> for number in (0, 1):
    ...     drafts.open(number, "group", prompt)
    >>> drafts.add(0, [1, 2, 3, 4])
    >>> drafts.add(1, [1, 2])
    >>> drafts.next_tokens(1, most=3)
    [3, 4]
    """

    def __init__(self, banned_ids: Collection[int] = (), by_head: bool = False) -> None:
        """A draft ends before the first of ``banned_ids``. With ``by_head`` a prediction head drafts where no n-gram is found."""
        self._banned, self._by_head = frozenset(banned_ids), by_head
        self._groups: dict[Hashable, _Group] = {}
        self._samples: dict[int, _Sample] = {}

    def open(self, number: int, key: Hashable, prompt: Tensor) -> None:
        """Adds sample ``number`` of the group ``key``; samples of one ``prompt (P',)`` of token ids share the tensor."""
        group = self._groups.setdefault(key, _Group())
        group.samples += 1
        ids = prompt.tolist()
        if id(prompt) not in group.prompts:
            group.prompts.add(id(prompt))
            _learn(group, [], ids)
        self._samples[number] = _Sample(key, group, ids[-max(NGRAM_SIZES) :])

    def add(self, number: int, token_ids: Sequence[int]) -> None:
        """Adds tokens that a sample has drawn."""
        sample = self._samples[number]
        sample.last = _learn(sample.group, sample.last, token_ids)
        sample.added += len(token_ids)

    def next_tokens(self, number: int, most: int) -> list[int] | None:
        """At most ``most`` tokens that may follow, asked for once before each pass of the engine; none if the sample's last
        tokens are new to its group, and ``None`` while it pauses.
        """
        sample = self._samples[number]
        if sample.drafted:  # the pass then drew one token, and those of the draft that it kept
            sample.refused = 0 if sample.added > 1 else sample.refused + 1
            sample.pause = PAUSE if sample.refused >= PATIENCE else 0
        sample.added, sample.drafted = 0, not sample.pause
        if sample.pause:
            sample.pause -= 1
            return None
        found = self.look_up(number, most)
        sample.drafted = self._by_head or bool(found)
        return found

    def look_up(self, number: int, most: int) -> list[int]:
        """At most ``most`` tokens that followed the sample's last ones before."""
        sample = self._samples[number]
        following, last, found = sample.group.following, list(sample.last), list[int]()
        while len(found) < most:
            keys = (tuple(last[-size:]) for size in NGRAM_SIZES)
            token = next((following[key] for key in keys if key in following), None)
            if token is None or token in self._banned:
                break
            found.append(token)
            last = [*last[1:], token] if len(last) == max(NGRAM_SIZES) else [*last, token]
        return found

    def close(self, number: int) -> None:
        """Removes a sample, if there is one of this number; its tokens stay while other samples of the group are open."""
        sample = self._samples.pop(number, None)
        if sample is not None:
            sample.group.samples -= 1
            if not sample.group.samples:
                del self._groups[sample.key]


def _learn(group: _Group, last: list[int], token_ids: Sequence[int]) -> list[int]:
    """Notes what each token follows. Returns the last tokens."""
    for token in token_ids:
        for size in NGRAM_SIZES:
            if len(last) >= size:
                group.following[tuple(last[-size:])] = token
        last = [*last[1:], token] if len(last) == max(NGRAM_SIZES) else [*last, token]
    return last
