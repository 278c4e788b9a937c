"""Whose work is next: deficit round robin, in tokens."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")
TURN_TOKENS = 16_384
"""What a turn adds to the tokens that a client may have computed."""


class FairShare(Generic[Item]):
    """Deficit round robin (Shreedhar and Varghese 1996, IEEE/ACM Transactions on Networking 4(3)).

    In each round every client that waits gets credit for the same number of tokens, and what it has waiting is chosen as long as
    the credit lasts. The rest of the credit is kept for the next round if more waits. Of clients that always wait, none gets more
    than another by more than a turn and two of its largest items.

    >>> share = FairShare[str](10)
    >>> waiting = {"ann": [("a1", 8), ("a2", 8), ("a3", 8)], "ben": [("b1", 25)]}
    >>> share.choose(waiting)
    ['a1']
    >>> share.choose({"ann": waiting["ann"][1:], "ben": waiting["ben"]})
    ['a2']
    >>> share.choose({"ann": waiting["ann"][2:], "ben": waiting["ben"]})
    ['a3', 'b1']
    """

    def __init__(self, turn_tokens: int = TURN_TOKENS) -> None:
        self.turn_tokens = turn_tokens
        self._credits: dict[str, int] = {}

    def choose(self, waiting: Mapping[str, Iterable[tuple[Item, int]]]) -> list[Item]:
        """What is carried out next, at least one item if one waits.

        Args:
            waiting: the items of each client, in their order, with their tokens.
        """
        queues = {client: iter(items) for client, items in waiting.items()}
        heads = {client: head for client, queue in queues.items() if (head := next(queue, None)) is not None}
        credits = {client: self._credits.get(client, 0) for client in heads}
        missing = [max(tokens - credits[client], 1) for client, (_, tokens) in heads.items()]
        turns = min((-(-tokens // self.turn_tokens) for tokens in missing), default=0)
        chosen: list[Item] = []
        for client, head in heads.items():
            credit = credits[client] + turns * self.turn_tokens
            credits[client] = 0
            for item, tokens in chain([head], queues[client]):
                if tokens > credit:
                    credits[client] = credit
                    break
                chosen.append(item)
                credit -= tokens
        self._credits = {client: credit for client, credit in credits.items() if credit}
        return chosen
