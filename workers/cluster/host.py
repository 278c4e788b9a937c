"""The process of one rank: it holds the workers of several roles, which share its device, and may send weights to other
processes.

Weights go through a channel, without the driver and without a disk, to engines on devices separate from the actor's. The channel
is a process group apart from the default one: its rank 0 holds the actor, each other rank holds a rollout engine.
"""

import json
import logging.config
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from dataproto.errors import InvalidConfig, RankFailure
from dataproto.planning import split_by_size
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks, raised_on_all_ranks

PACKAGES = ("dataproto", "rollout", "workers", "recipes", "dataproto_server")


class PhaseMonitor:
    """Stores the last phase that each rank reported, so that it is known after a rank has died."""

    def __init__(self) -> None:
        self._phases: dict[int, str] = {}

    def report(self, rank: int, phase: str) -> None:
        self._phases[rank] = phase

    def last_phases(self) -> dict[int, str]:
        return self._phases


class Host:
    """The workers of one rank by role, and the connections of the rank to others."""

    def __init__(self, report: Callable[[str], None] = lambda phase: None, device: torch.device | None = None) -> None:
        """
        Args:
            report: is called with the name of each phase before the rank begins it.
            device: the first CUDA device, or the CPU, if ``None``.
        """
        self.rank = 0  # until `init_distributed`
        self.roles: dict[str, Any] = {}
        self.ranks = Ranks()
        self.channel: WeightChannel | None = None
        self.device = device or (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
        self.report = report
        self.desynced_by: str | None = None  # the call that failed on this rank, but perhaps not on all ranks
        self._listener: socket.socket | None = None
        self._aside = ExitStack()

    def keep_libraries_aside(self, file: Path) -> None:
        """Appends what libraries warn of in this process to a file from now on, if its folder exists here."""
        if file.parent.is_dir():
            self._aside.enter_context(libraries_aside(file))

    def listen(self, ip: str) -> str:
        """Opens a port on ``ip`` for other ranks to connect to, and returns ``ip:port``.

        The port is open on this address only, while a ``TCPStore`` that opens its own port listens on every address of the
        machine.
        """
        self._stop_listening()
        self._listener = socket.create_server((ip, 0))
        return f"{ip}:{self._listener.getsockname()[1]}"

    def _connect_store(self, address: str, rank: int, size: int, timeout_s: float) -> distributed.TCPStore:
        """The store of ``size`` processes, which rank 0 serves at ``address``."""
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

    def init_distributed(self, layout: Layout, rank: int, address: str, timeout_s: float) -> None:
        """Becomes ``rank`` of ``layout``. All ranks call it with the address at which rank 0 listens.

        Sets the environment variables of ``torchrun`` for engines that start their own ranks.
        """
        self.rank = rank
        self.report("connecting to the other ranks")
        host, port = address.rsplit(":", 1)
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(layout.world_size), LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if layout.world_size > 1:
            distributed.init_process_group(
                "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo",
                store=self._connect_store(address, self.rank, layout.world_size, timeout_s),
                rank=self.rank,
                world_size=layout.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        self._stop_listening()
        self.ranks = init_ranks(layout, self.device)

    def open_channel(self, address: str, rank: int, size: int, timeout_s: float) -> None:
        """Opens a `WeightChannel` of ``size`` processes as its ``rank``."""
        store = self._connect_store(address, rank, size, timeout_s)
        self.channel = WeightChannel(store, rank, size, self.device, timeout_s)

    def send_weights(self, role: str, dtype: torch.dtype, streams: Sequence[str]) -> None:
        """Sends a role's weights through the channel. All ranks gather them; the one with the channel sends.

        Args:
            dtype: as for the role's ``named_weights``.
            streams: the role's methods that yield what is sent, one after the other; the receiver asks for each by itself.
        """
        self.report(f"{role}: sending weights")
        for stream in streams:
            weights = getattr(self.roles[role], stream)(dtype)
            if self.channel is not None:
                self.channel.send(weights)
            else:
                for _ in weights:  # take part in gathering
                    pass

    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The (name, tensor) pairs that arrive through the channel.

        Raises:
            InvalidConfig: this process has no channel.
        """
        if self.channel is None:
            raise InvalidConfig("this process has no weight channel: call open_channel first")
        return self.channel.receive()

    def build(self, role: str, make: Callable[["Host"], Any]) -> type:
        """Builds the worker of a role and returns its class."""
        self.report(f"building {role}")
        self.roles[role] = make(self)
        return type(self.roles[role])

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of a role's worker. An exception carries its traceback as a note.

        After an error that did not reach all ranks (see `Ranks.fail_together`), other ranks may still wait for this one in a
        collective, which the next call would enter at the wrong point. This rank then refuses calls until `resync`.

        Raises:
            RankFailure: an earlier call failed in that way.
        """
        if self.desynced_by is not None:
            raise RankFailure(f"rank {self.rank} refused {role}.{method} after its failure in {self.desynced_by}")
        self.report(f"{role}.{method}")
        try:
            return getattr(self.roles[role], method)(*args, **kwargs)
        except Exception as error:
            error.add_note(f"rank {self.rank}, {role}.{method}:\n{traceback.format_exc()}")
            if self.ranks.mesh is not None and not raised_on_all_ranks(error):
                self.desynced_by = f"{role}.{method}"
            raise

    def resync(self) -> None:
        """Accepts calls again, once every rank has finished the failed one."""
        self.desynced_by = None


def shadowing_folders(directory: Path) -> dict[str, str]:
    """Our packages that a folder or file in ``directory`` would replace in Ray's processes, and where ours are.

    Ray puts the directory in which its processes begin first into their search path, whatever the driver's search path is.
    """
    ours = {name: Path(sys.modules[name].__path__[0]) for name in PACKAGES if name in sys.modules}
    found = {}
    for name, folder in ours.items():
        others = (directory / name, directory / f"{name}.py")
        if any(other.exists() and other.resolve() != folder.resolve() for other in others):
            found[name] = str(folder.parent)
    return found


def import_ours(folders: Mapping[str, str]) -> Callable[[], None]:
    """A function for the start of each of Ray's processes that imports packages from their folders, before anything else does.

    It is pickled by value, as all inner functions are, so that the process needs none of our modules to read it.
    """
    places = dict(folders)

    def import_first() -> None:
        import sys
        from importlib import import_module

        for name, folder in places.items():
            sys.path.insert(0, folder)
            try:
                import_module(name)
            finally:
                sys.path.remove(folder)

    return import_first


def log_progress() -> None:
    """Writes the progress that our packages report to the process's error output. Ray keeps that in a file of the process
    (``worker-*.err`` in its folder of logs), and `RayConfig.show_logs` prints it at the driver.
    """
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"time": {"format": "%(asctime)s %(message)s", "datefmt": "%H:%M:%S"}},
            "handlers": {"progress": {"class": "logging.StreamHandler", "formatter": "time"}},
            "loggers": {name: {"level": "INFO", "handlers": ["progress"], "propagate": False} for name in PACKAGES},
        }
    )


@contextmanager
def libraries_aside(file: Path) -> Iterator[None]:
    """Appends what libraries log and warn of to a file instead of the console, whose table it would break; errors stay there."""
    aside = logging.FileHandler(file, encoding="utf-8", delay=True)
    aside.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))

    def divert(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            aside.handle(record)
        return record.levelno >= logging.ERROR

    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    loggers = [logging.root, *(each for each in known if each.name not in PACKAGES)]
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    handlers = {each for logger in loggers for each in logger.handlers if getattr(each, "stream", None) in console}
    handlers |= {logging.lastResort} if logging.lastResort else set()
    filtered: list[logging.Filterer] = [*handlers, logging.getLogger("py.warnings")]
    for each in filtered:
        each.addFilter(divert)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for each in filtered:
            each.removeFilter(divert)
        aside.close()


BUCKET_BYTES = 1 << 28  # tensors are sent together up to this size; a larger one by itself

Sending = tuple[distributed.Work, Tensor]
"""A broadcast that has begun, and its tensor, which has to last until it ends."""


class WeightChannel:
    """Broadcasts (name, tensor) pairs from rank 0, over NCCL between GPUs and over gloo otherwise."""

    def __init__(self, store: distributed.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """All ``size`` processes connect through ``store``."""
        timeout = timedelta(seconds=timeout_s)
        backend: Any = distributed.ProcessGroupNCCL if device.type == "cuda" else distributed.ProcessGroupGloo
        self._group = backend(store, rank, size, timeout)
        self._device = device

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """On rank 0: sends all pairs, bucket by bucket. The next bucket is gathered while one is on its way."""
        on_the_way: list[Sending] = []
        for bucket in split_by_size(((pair, pair[1].nbytes) for pair in weights), BUCKET_BYTES):
            header = json.dumps([(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in bucket])
            header_bytes = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            data = torch.cat([weight.contiguous().view(-1).view(torch.uint8) for _, weight in bucket])
            begun = [self._begin(each) for each in (torch.tensor([len(header_bytes)]), header_bytes, data)]
            for work, _ in on_the_way:
                work.wait()
            on_the_way = begun
        for work, _ in [*on_the_way, self._begin(torch.tensor([0]))]:
            work.wait()

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """On the other ranks: yields the pairs that rank 0 sends. Each bucket is freed before the next one arrives."""
        while size := int(self._broadcast(torch.zeros(1, dtype=torch.int64))):
            header = self._broadcast(torch.empty(size, dtype=torch.uint8)).cpu().numpy().tobytes()
            entries = [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(header)]
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in entries]
            parts = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)).split(sizes)
            for (name, dtype, shape), part in zip(entries, parts, strict=True):
                aligned = part.clone() if part.storage_offset() % dtype.itemsize else part
                yield name, aligned.view(dtype).view(shape)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        work, tensor = self._begin(tensor)
        work.wait()
        return tensor

    def _begin(self, tensor: Tensor) -> Sending:
        tensor = tensor.to(self._device)
        return self._group.broadcast([tensor]), tensor
