"""Drafts of the tokens that a sample draws next, by n-grams of its own tokens and of the other samples of its prompt.

A draft changes no token: the engine draws each token from the sample's own random stream, and keeps a drafted one only if it is
the one that was drawn (exact-match speculation). After prompt lookup decoding (Saxena 2023), with siblings in addition to
the prompt.

Drafts cost work, and what they give depends on the samples, on their number and on the device. So an engine on CUDA decodes with
drafts or without, whichever has given more tokens a second. All rows of a pass have drafts or none, because a pass lasts as long
for a row without a draft when others have one. On a CPU each pass has drafts, so that a seed gives the same run to the last bit.
Each pass has drafts too where several ranks run one vLLM: their clocks differ, and they have to take the same steps.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter

import torch
from torch import Tensor

NGRAM_SIZES = (4, 2)
"""How many last tokens are looked up, largest first."""
TRIAL = 3
"""The number of passes with drafts, and then without, by which the two are compared. None of them reads a prompt, or comes
directly after one of the other kind."""
WINDOW = 16
"""So many last passes of each kind count. A device that is busy with drafts for long gets slower than it was in a trial."""
AGAIN = 64, 256, 1024
"""After so many passes the two are compared again, and after each further 1,024."""


@dataclass(eq=False)
class _Comparison:
    """Compares passes that have drafts with passes that have none, over about equally many rows."""

    passes: tuple[list[tuple[float, float]], list[tuple[float, float]]] = field(default_factory=lambda: ([], []))
    """Tokens a row and seconds of the last compared passes, without drafts and with them."""
    number: int = 0  # of passes until now

    @property
    def done(self) -> bool:
        """Whether enough passes of both kinds were compared."""
        return all(len(part) >= TRIAL for part in self.passes)

    def drafts(self) -> bool:
        """Whether the next pass has drafts."""
        if not self.done:
            return len(self.passes[1]) < TRIAL
        (tokens, seconds), (drafted_tokens, drafted_seconds) = (zip(*part, strict=True) for part in self.passes)
        plain = median(seconds)
        # A pass with drafts computes more than one without. If it seems shorter, the host was busy in the other.
        drafted = max(plain, median(drafted_seconds))
        return fmean(drafted_tokens) / drafted > fmean(tokens) / plain

    def note(self, drafted: bool, tokens: float, seconds: float, changed: bool) -> None:
        """A pass has given so many tokens a row. If it ``changed`` the way, it took time that the next ones do not take."""
        self.number += 1
        if self.number in AGAIN or not self.number % AGAIN[-1]:
            self.passes = [], []
        elif not changed:
            self.passes[drafted].append((tokens, seconds))
            del self.passes[drafted][:-WINDOW]


class Payoff:
    """Whether the passes of an engine with drafts have given more tokens a second than those without."""

    def __init__(self) -> None:
        self._compared: dict[int, _Comparison] = {}  # by the number of binary digits of the number of rows
        self.restart()

    def restart(self) -> None:
        """The pass that is running is not compared: it reads a prompt, or is the first one."""
        # Binary digits of its number of rows, whether the pass before had drafts, and its beginning.
        self._began = 0, False, 0.0

    def passed(self, rows: int, tokens: int, drafted: bool) -> None:
        """A pass has ended that gave ``tokens`` to ``rows``, and another one runs."""
        now, digits = perf_counter(), rows.bit_length()
        before, had_drafts, began = self._began
        if rows and before == digits:
            self._of(rows).note(drafted, tokens / rows, now - began, changed=drafted != had_drafts)
        self._began = digits, drafted, now

    def drafts(self, rows: int, reads: bool = False) -> bool:
        """Whether the next pass over so many rows has drafts. If it ``reads`` a prompt, it is not compared, and tries none."""
        compared = self._of(rows)
        return compared.drafts() and (compared.done or not reads)

    def _of(self, rows: int) -> _Comparison:
        """At first what is known of more rows, if drafts pay there, or of fewer, if they do not."""
        compared = self._compared.setdefault(digits := rows.bit_length(), _Comparison())
        if not compared.number:
            nearest = sorted(self._compared.items(), key=lambda other: abs(other[0] - digits))
            known = (each.passes for size, each in nearest if each.done and each.drafts() == (size > digits))
            without, with_drafts = next(known, compared.passes)
            compared.passes = [*without], [*with_drafts]
        return compared


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
    began: bool = False  # whether it has drawn a token


def payoff_on(device: torch.device | None) -> Payoff | None:
    """What decides which passes have drafts; ``None`` where all have some."""
    return Payoff() if device is not None and device.type == "cuda" else None


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

    def __init__(self, banned_ids: Collection[int] = (), device: torch.device | None = None) -> None:
        """A draft ends before the first of ``banned_ids``. On a ``device`` without CUDA each pass has drafts."""
        self._banned, self._payoff = frozenset(banned_ids), payoff_on(device)
        self._groups: dict[Hashable, _Group] = {}
        self._samples: dict[int, _Sample] = {}
        self._added, self._drafted = 0, True  # tokens of this pass, and whether it has drafts

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
        if not sample.began:  # this pass read a prompt too
            sample.began = True
            self._restart()
        sample.last = _learn(sample.group, sample.last, token_ids)
        self._added += len(token_ids)

    def pay(self, rows: int) -> bool:
        """Whether the next pass, over so many rows, has drafts. To be asked once before each pass."""
        if self._payoff is None:
            return True
        self._payoff.passed(rows, self._added, self._drafted)
        self._added, self._drafted = 0, self._payoff.drafts(rows)
        return self._drafted

    def _restart(self) -> None:
        if self._payoff is not None:
            self._payoff.restart()

    def next_tokens(self, number: int, most: int) -> list[int]:
        """At most ``most`` tokens that followed the sample's last ones before; none if these are new to its group."""
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
        if not self._samples:
            self._restart()  # the engine may do something else before its next pass


def _learn(group: _Group, last: list[int], token_ids: Sequence[int]) -> list[int]:
    """Notes what each token follows. Returns the last tokens."""
    for token in token_ids:
        for size in NGRAM_SIZES:
            if len(last) >= size:
                group.following[tuple(last[-size:])] = token
        last = [*last[1:], token] if len(last) == max(NGRAM_SIZES) else [*last, token]
    return last
