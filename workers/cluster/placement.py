"""Assigns ranks and threads to processes by the node and GPUs they run on."""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.ranks.failures import FAILURE_GRACE_S

CONNECT_TRIES = 3  # of a node that does not answer in time


@dataclass(frozen=True)
class Placement:
    """Where one process runs."""

    ip: str  # of its node
    node: str  # unique id of the node; several nodes may share an address
    gpus: tuple[str, ...]  # numbers or names of its GPUs on the node
    cores: int  # of the node that its processes may use
    address: str = ""  # ``ip:port`` where other ranks connect to it
    name: str = "not started yet"  # for messages


def rank_order(placements: Sequence[Placement]) -> list[int]:
    """The index of the process that becomes each rank: processes of one node get consecutive ranks, in the order of their GPUs.

    The ranks of a tp group are consecutive, and each node has whole groups (`workers.cluster.ray_group.reserve`), so they share a
    node. Nodes are ordered by address, since Ray assigns the bundles of a placement group to nodes in any order.

    >>> a, b = (Placement(ip, ip, (), 8) for ip in ("10.0.0.9", "10.0.0.10"))
    >>> rank_order([b, a, b, a])
    [1, 3, 0, 2]
    """

    def place(process: int) -> Any:
        placement = placements[process]
        ip, gpus = ([(len(text), text) for text in texts] for texts in (placement.ip.split("."), placement.gpus))
        return ip, placement.node, gpus  # "9" comes before "10"

    return sorted(range(len(placements)), key=place)


def thread_shares(placements: Sequence[Placement]) -> list[int]:
    """Number of threads of each process: an equal share of its node's cores, rounded down, and at least 1.

    >>> thread_shares([Placement("10.0.0.1", "a", (), 9)] * 4 + [Placement("10.0.0.2", "b", (), 5)])
    [2, 2, 2, 2, 5]
    """
    processes = Counter(placement.node for placement in placements)
    return [max(1, placement.cores // processes[placement.node]) for placement in placements]


def answers(address: str, port: int) -> bool:
    """Whether something accepts connections at this address. What does not answer within `FAILURE_GRACE_S` is asked again,
    `CONNECT_TRIES` times in all: it may be slow, or packets got lost.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     port = server.getsockname()[1]
    ...     answers("127.0.0.1", port)
    True
    >>> answers("127.0.0.1", port)
    False
    """
    for _ in range(CONNECT_TRIES):
        try:
            socket.create_connection((address, port), FAILURE_GRACE_S).close()
        except TimeoutError:
            continue
        except OSError:
            return False
        return True
    return False
