"""Moves bytes between the ranks of a process group, and lets ranks agree first, so that none waits for one that failed.

Ranks are those within the group. Bytes are tensors ``(n,)`` uint8, which every backend supports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from dataproto.errors import InvalidIndex, RankFailure, not_hiding
from dataproto.transfer import all_gather_equal

Result = TypeVar("Result")
MOST_PADDING = 2  # all-gathers may move this many times the bytes of the messages, to be one collective
LITTLE = 1 << 26  # or this many bytes on each rank
Kind = Literal["all_gather", "gather", "broadcast", "scatter"]


@dataclass(frozen=True)
class Call:
    """A collective and its root rank; all ranks must make the same call."""

    kind: Kind
    root: int = 0

    def __str__(self) -> str:
        return {"all_gather": "all_gather", "gather": f"gather to rank {self.root}"}.get(
            self.kind, f"{self.kind} from rank {self.root}"
        )

    def sends(self, rank: int) -> bool:
        """Whether a rank sends messages."""
        return self.kind in ("all_gather", "gather") or rank == self.root

    def receives(self, rank: int, messages: int) -> range:
        """Which of the messages a rank receives; a root does not send to itself."""
        if self.kind == "all_gather":
            return range(messages)
        if self.kind == "gather":
            return range(messages if rank == self.root else 0)
        first = rank if self.kind == "scatter" else 0
        return range(first, first + (rank != self.root))


@dataclass(frozen=True)
class GroupRanks:
    """A process group as this rank sees it.

    Raises:
        InvalidIndex: this process is not in the group.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> "GroupRanks":
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidIndex("this process is not a rank of the group")
        return cls(group, rank, dist.get_world_size(group))

    def together(self, act: Callable[[], tuple[Result, Any]]) -> tuple[Result, list[Any]]:
        """Runs ``act`` on all ranks; returns its result here, and the second value that it returned on each rank.

        Raises:
            RankFailure: it failed on a rank; raised on all ranks, names rank and reason.
        """
        outcome, problem = attempted(act)
        heard = self._heard(None if outcome is None else outcome[1], problem)
        assert outcome is not None
        return outcome[0], heard

    def agreed(self, act: Callable[[], Result]) -> Result:
        """Runs ``act`` on all ranks and returns its result here. Costs one number of traffic unless a rank fails.

        Raises:
            RankFailure: it failed on a rank; raised on all ranks, names rank and reason.
        """
        outcome, problem = attempted(lambda: (act(),))
        failed = torch.tensor([int(problem is not None)], dtype=torch.int32, device=self.carrier("cpu"))
        with not_hiding(problem):
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if failed.item():
            self._heard(None, problem)
        assert outcome is not None
        return outcome[0]

    def _heard(self, value: Any, problem: Exception | None) -> list[Any]:
        """The value of each rank; raises `RankFailure` on all if one has a problem."""
        failure = None if problem is None else f"{type(problem).__name__}: {problem}"
        heard: list[Any] = [None] * self.size
        with not_hiding(problem):
            dist.all_gather_object(heard, (failure, value), group=self.group)
        if failures := {rank: message for rank, (message, _) in enumerate(heard) if message is not None}:
            raise RankFailure(f"no batch was exchanged: {grouped('rank', failures)}") from problem
        return [each for _, each in heard]

    def carrier(self, wanted: str) -> torch.device:
        """The device to send bytes from and to: of the wanted kind if the backend of the group supports it.

        Gloo claims to support GPU memory, but point-to-point operations on it end the process.
        """
        config = str(dist.get_backend_config(self.group))  # such as cpu:gloo,cuda:nccl
        backends = dict(part.split(":") for part in config.split(","))
        kinds = [kind for kind, backend in backends.items() if kind == "cpu" or backend != "gloo"]
        return local_device(wanted if wanted in kinds else kinds[0])

    def padded_bytes(self, call: Call, sizes: Sequence[int]) -> int:
        """The working memory of `move`: all-gathers of little, or of about equal messages, fill them up to one length and join
        them at once.
        """
        longest = max(sizes, default=0)
        if call.kind != "all_gather" or len(set(sizes)) == 1:
            return 0
        if self.size * longest > max(MOST_PADDING * sum(sizes), LITTLE):
            return 0
        return (self.size + 1) * longest

    def move(
        self,
        call: Call,
        sent: Sequence[torch.Tensor],
        sizes: Sequence[int],
        received: torch.Tensor,
        padded: torch.Tensor | None = None,
    ) -> None:
        """Moves one section of every message.

        Args:
            padded: at least `padded_bytes` of working memory.
            sent: the bytes of this rank, one tensor for each message that it sends.
            sizes: the number of bytes of every message.
            received: filled with the messages that this rank receives, one after the other.
        """
        if not any(sizes):
            return
        if call.kind == "all_gather" and len(set(sizes)) == 1:
            all_gather_equal(received, sent[0], group=self.group)
        elif padded is not None and self.padded_bytes(call, sizes):
            self._gather_padded(sent[0], sizes, received, padded[: self.padded_bytes(call, sizes)])
        elif call.kind == "all_gather":
            for rank, place in enumerate(received.split(list(sizes))):
                if rank == self.rank:
                    place.copy_(sent[0])
                if len(place):
                    dist.broadcast(place, group_src=rank, group=self.group)
        elif call.kind == "broadcast":
            dist.broadcast(sent[0] if self.rank == call.root else received, group_src=call.root, group=self.group)
        elif call.kind == "gather":
            self._gather(call.root, sent[0], sizes, received)
        else:
            self._scatter(call.root, sent, received)

    def _gather_padded(
        self, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor, padded: torch.Tensor
    ) -> None:
        mine, everybody = padded.split([max(sizes), self.size * max(sizes)])
        mine[: len(sent)].copy_(sent)
        all_gather_equal(everybody, mine, group=self.group)
        for place, part, size in zip(received.split(list(sizes)), everybody.view(self.size, -1), sizes):
            place.copy_(part[:size])

    # Gather and scatter of unequal sizes, which torch's pad to one size

    def _gather(self, root: int, sent: torch.Tensor, sizes: Sequence[int], received: torch.Tensor) -> None:
        if self.rank != root:
            return self._wait([self._operation(dist.isend, sent, root)] if len(sent) else [])
        places = received.split(list(sizes))
        places[root].copy_(sent)
        others = [(rank, place) for rank, place in enumerate(places) if rank != root and len(place)]
        return self._wait([self._operation(dist.irecv, place, rank) for rank, place in others])

    def _scatter(self, root: int, sent: Sequence[torch.Tensor], received: torch.Tensor) -> None:
        if self.rank != root:
            return self._wait([self._operation(dist.irecv, received, root)] if len(received) else [])
        others = [(rank, part) for rank, part in enumerate(sent) if rank != root and len(part)]
        return self._wait([self._operation(dist.isend, part, rank) for rank, part in others])

    def _operation(self, direction: Any, data: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, data, group=self.group, group_peer=peer)

    def _wait(self, operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def attempted(act: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of ``act``, or what it raised."""
    try:
        return act(), None
    except Exception as error:  # any error: the other ranks must not wait for this one
        return None, error


def local_device(kind: str) -> torch.device:
    """The current device of a kind, or the CPU if this process has none of that kind."""
    here = torch.accelerator.current_accelerator()
    if kind == "cpu" or here is None or here.type != kind:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def grouped(what: str, found: Mapping[int, str]) -> str:
    """A phrase that names each value and those that have it, for error messages.

    >>> grouped("rank", {0: "torch.int64", 1: "absent", 2: "torch.int64"})
    'torch.int64 on ranks 0, 2 and absent on rank 1'
    """
    holders: dict[str, list[int]] = {}
    for number, value in found.items():
        holders.setdefault(value, []).append(number)
    return " and ".join(
        f"{value} on {what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        for value, numbers in holders.items()
    )
