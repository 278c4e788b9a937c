"""A process that holds the workers of one rank: several roles that share a device."""

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from dataproto.errors import InvalidConfig, RankFailure
from workers.cluster.weight_channel import WeightChannel
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks, raised_on_all_ranks


class Monitor:
    """Knows what each rank did last, also of one that is dead."""

    def __init__(self) -> None:
        self.phases: dict[int, str] = {}

    def report(self, rank: int, phase: str) -> None:
        self.phases[rank] = phase

    def last(self) -> dict[int, str]:
        return self.phases


class Host:
    """One rank's workers by role, in a process of its own."""

    def __init__(self, report: Callable[[str], None] = lambda phase: None) -> None:
        """``report`` is told what this rank does next."""
        self.rank = 0  # until `meet`
        self.roles: dict[str, Any] = {}
        self.ranks = Ranks()
        self.channel: WeightChannel | None = None
        self._listener: socket.socket | None = None  # where others meet this rank, until they do
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.report = report
        self.adrift: str | None = None  # the call that failed on this rank, and on others perhaps not

    def address(self, ip: str) -> str:
        """``ip:port`` where this rank can be met from now on, and nowhere else: torch's own store would listen on every address
        of the machine.
        """
        self._stop_listening()
        self._listener = socket.create_server((ip, 0))
        return f"{ip}:{self._listener.getsockname()[1]}"

    def _store(self, address: str, rank: int, size: int, timeout_s: float) -> distributed.TCPStore:
        """What ``size`` processes meet by, at the address of the first."""
        host, port = address.rsplit(":", 1)
        listener = self._listener.detach() if rank == 0 and self._listener is not None else None
        self._stop_listening()
        return distributed.TCPStore(
            host,
            int(port),
            size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener,
        )

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def meet(self, layout: Layout, rank: int, address: str, timeout_s: float) -> None:
        """Takes the place of ``rank`` among all ranks of ``layout``, which meet at ``address``."""
        self.rank = rank
        self.report("meeting the other ranks")
        host, port = address.rsplit(":", 1)
        world = {
            "RANK": self.rank,
            "WORLD_SIZE": layout.world_size,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        os.environ.update(
            {name: str(value) for name, value in world.items()}
        )  # engines with ranks of their own read them
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if layout.world_size > 1:
            distributed.init_process_group(
                "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo",
                store=self._store(address, self.rank, layout.world_size, timeout_s),
                rank=self.rank,
                world_size=layout.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        self._stop_listening()
        self.ranks = init_ranks(layout, self.device)

    def open_channel(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        """Takes a place among the processes that hand weights over."""
        store = self._store(address, rank, size, timeout_s)
        self.channel = WeightChannel(store, rank, size, self.device, timeout_s)

    def send_weights(self, role: str, dtype: torch.dtype | None = None) -> None:
        """Hands a role's weights, in ``dtype``, to the other end of the channel. Every rank gathers; the first one sends."""
        self.report(f"{role}: sending weights")
        weights = ((name, weight.to(dtype or weight.dtype)) for name, weight in self.roles[role].named_weights(dtype))
        if self.channel is not None:
            self.channel.send(weights)
        else:
            for _ in weights:  # take part in gathering
                pass

    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What the other end of the channel sends."""
        if self.channel is None:
            raise InvalidConfig("this process has no channel that weights come through")
        return self.channel.receive()

    def build(self, role: str, make: Callable[["Host"], Any]) -> type:
        """Makes the worker of a role; returns its class."""
        self.report(f"building {role}")
        self.roles[role] = make(self)
        return type(self.roles[role])

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the role's method returns; what it raises carries its traceback as text.

        After an error that not all ranks raise (`Ranks.fail_together`), others may wait for this rank in a collective. It
        takes no call then until it is told to `rejoin`: a call that came behind would meet them in the wrong place.

        Raises:
            RankFailure: such an error was before.
        """
        if self.adrift is not None:
            raise RankFailure(f"rank {self.rank} did not begin {role}.{method}: it had failed in {self.adrift} before")
        self.report(f"{role}.{method}")
        try:
            return getattr(self.roles[role], method)(*args, **kwargs)
        except Exception as error:
            error.add_note(f"rank {self.rank}, {role}.{method}:\n{traceback.format_exc()}")
            if self.ranks.mesh is not None and not raised_on_all_ranks(error):
                self.adrift = f"{role}.{method}"
            raise

    def rejoin(self) -> None:
        """All ranks have come back: this one takes calls again."""
        self.adrift = None
