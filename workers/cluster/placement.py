"""Where processes run: which of them is which rank, and how many threads each may use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where one process runs."""

    ip: str  # of its node
    node: str  # unlike that of any other node, of the same address even
    gpus: tuple[str, ...]  # numbers or names of its GPUs on the node
    cores: int  # of the node, that its processes may use
    address: str = ""  # ``ip:port`` where other ranks meet it
    name: str = "not started yet"  # for people


def rank_order(places: Sequence[Place]) -> list[int]:
    """Which process is which rank: those of a node are neighbours there, in the order of their GPUs.

    Ranks of one tp group are neighbours, so that they share a node wherever a node holds all of them. Nodes are ordered by
    address; Ray gives the bundles of a placement group to nodes in any order.

    >>> a, b = (Place(ip, ip, (), 8) for ip in ("10.0.0.9", "10.0.0.10"))
    >>> rank_order([b, a, b, a])
    [1, 3, 0, 2]
    """
    return sorted(range(len(places)), key=lambda process: _order(places[process]))


def _order(place: Place) -> tuple[tuple[tuple[int, str], ...], str, tuple[tuple[int, str], ...]]:
    ip = tuple(map(_numeric, place.ip.split(".")))
    return ip, place.node, tuple(map(_numeric, place.gpus))


def _numeric(text: str) -> tuple[int, str]:
    """Sorts "10" behind "9"."""
    return len(text), text


def thread_shares(places: Sequence[Place]) -> list[int]:
    """Threads of each process: an equal share of its node's cores, at least 1, never more than the cores of the node together.

    >>> thread_shares([Place("10.0.0.1", "a", (), 9)] * 4 + [Place("10.0.0.2", "b", (), 5)])
    [2, 2, 2, 2, 5]
    """
    processes = Counter(place.node for place in places)
    return [max(1, place.cores // processes[place.node]) for place in places]
