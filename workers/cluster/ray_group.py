"""Groups of workers in Ray processes, on one machine or many. The only module that imports Ray.

A `RayGroup` calls one role on all processes of a `RayPool`; each process is a `RayHost`. Batches pass through Ray's object store:
each distinct image and pixel tensor is put there once a step and memory-mapped by its readers.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataproto import DataProto
from dataproto.errors import InvalidConfig, WorkerFailed, end_after, ending
from dataproto.extras import unimportable_modules
from dataproto.serialization.wire import Buffer, SharedBlobs, shared_blobs
from workers.cluster.host import Host, PhaseMonitor, import_ours, log_progress, shadowing_folders
from workers.cluster.placement import Placement, answers
from workers.cluster.ray_config import RayConfig
from workers.ranks.dispatch_modes import (
    Arguments,
    dispatch_of,
    find_mismatch,
    join_rows,
    returns_result,
    row_counts,
    row_ranges,
    split_rows,
)
from workers.ranks.failures import REPORT_GRACE_S, Failure, grace_period
from workers.training.mini_batches import split_scoring

PLACEMENT_TIMEOUT_S = 60  # for a cluster to reserve its resources
MEDIA_SHARE = 0.25  # of the object store, for media that the calls of a step share


# Starting Ray

_started_with: list[RayConfig] = []
"""The options of the Ray that `running_ray` started in this program; empty if it runs none."""


@contextlib.contextmanager
def running_ray(config: RayConfig, processes: int) -> Iterator[None]:
    """Starts Ray or connects to a cluster, and shuts it down after the block; does nothing if Ray already runs.

    Raises:
        InvalidConfig: Ray already runs, without what ``config`` asks of the start.
    """
    if ray.is_initialized():
        config.check_started(_started_with[0] if _started_with else RayConfig())
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": config.show_logs}
    environment = config.runtime_env
    if config.address is None:
        # The ports of this Ray are open to this machine only. Its processes read the variable, this one the constant.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        options |= {
            "num_cpus": max(os.cpu_count() or 1, int(processes * config.cpus) + 1),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
        if config.object_store_gib is not None:
            options["object_store_memory"] = int(config.object_store_gib * 2**30)
    if shadows := shadowing_folders(Path(config.working_dir or Path.cwd())):
        environment["worker_process_setup_hook"] = import_ours(shadows)
    if environment:
        options["runtime_env"] = environment
    ray.init(address=config.address or "local", **options)
    _started_with.append(config)
    with ending(_started_with.clear, ray.shutdown):
        yield


def pickle_unimportable_modules_by_value() -> None:
    """Lets functions of modules that other processes cannot import, such as those of a reward file, be sent with their code."""
    for module in unimportable_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def gpus_per_process(config: RayConfig) -> float:
    """The configured number of GPUs of a process; by default 1 if the cluster has any."""
    return float(ray.cluster_resources().get("GPU", 0) > 0) if config.gpus is None else config.gpus


def reserve(processes: int, config: RayConfig, together: int = 1) -> PlacementGroup:
    """A placement group with a bundle, which is on one node, for each ``together`` processes.

    Raises:
        InvalidConfig: the cluster has too few CPUs or GPUs.
    """
    gpus = together * gpus_per_process(config)
    bundle = {"CPU": together * config.cpus} | ({"GPU": ceil(gpus) if gpus > 1 else gpus} if gpus else {})
    reserved = placement_group([bundle] * (processes // together), strategy="PACK")
    if not reserved.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(reserved)
        total = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
        each = "each" if together == 1 else f"for every {together}, which share a node,"
        raise InvalidConfig(
            f"{processes} processes with {bundle} {each} do not fit the cluster: it has {total}, of which {free} are free; a run "
            "continues in a smaller layout too, with --resume"
        )
    return reserved


# The object store


_puts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray.put")


class RayBlobs:
    """A blob store in Ray's object store; see `dataproto.BlobStore`.

    A batch puts its media while Ray pickles it. After a put on the same thread Ray would no longer see which references the
    batch holds, and keep what they refer to until the process ends. Ray's records are a thread's own, so another one puts.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # put through this object

    def put(self, buffer: Any) -> ray.ObjectRef:
        self.num_bytes += buffer.nbytes
        return _puts.submit(ray.put, buffer).result()

    def get(self, ref: ray.ObjectRef) -> Buffer:
        return ray.get(ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayBlobs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RayBlobs, ()


class StepBlobs:
    """The media that the driver has put into the object store in this step; later calls of the step refer to them.

    A program that trains step by step may never end a step. So `open` first releases what is kept if it exceeds the limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """``limit_bytes``: by default `MEDIA_SHARE` of the object store of the driver's node."""
        self._limit = limit_bytes
        self._ahead: SharedBlobs | None = None  # of the next step
        self._sending = threading.Lock()
        self.renew()

    def renew(self) -> None:
        """Begins a new step: releases the media of the previous one, but not those that are sent ahead, for which it waits."""
        with self._sending:
            self._shared, self._ahead = self._ahead or SharedBlobs(RayBlobs()), None
        self._store = cast(RayBlobs, self._shared.store)

    def send_ahead(self, data: DataProto) -> None:
        """Puts the media of a batch of the next step into the store, from any thread, if those of two steps have room."""
        with self._sending:
            # After the end of Ray a put would start another one.
            if self._limit is None or 2 * self._store.num_bytes > self._limit or not ray.is_initialized():
                return
            shared = SharedBlobs(RayBlobs())
            with shared.open():
                ray.put(data)
            self._ahead = shared

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """What is pickled in the block shares its media with what was pickled earlier in the step; see `shared_blobs`."""
        if self._limit is None:
            here = ray.get_runtime_context().get_node_id()
            node = next(node for node in ray.nodes() if node["NodeID"] == here)
            self._limit = int(node["Resources"].get("object_store_memory", 0) * MEDIA_SHARE)
        if self._store.num_bytes > self._limit:
            self.renew()
        with self._shared.open():
            yield


# Processes


class RayHost(Host):
    """A `Host` that returns results through the object store."""

    def __init__(self, monitor: Any, device: torch.device | None = None) -> None:
        super().__init__(lambda phase: monitor.report.remote(self.rank, phase), device)
        log_progress()

    def placement(self) -> Placement:
        """Where this process runs, with an address at which it listens."""
        context, ip = ray.get_runtime_context(), ray.util.get_node_ip_address()
        return Placement(
            ip,
            context.get_node_id(),
            tuple(map(str, ray.get_gpu_ids())),
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            self.listen(ip),
            f"{socket.gethostname()} (process {os.getpid()})",
        )

    def set_num_threads(self, count: int) -> None:
        """Sets the number of threads. Ray's default is the number of CPUs reserved for the process, mostly one."""
        torch.set_num_threads(count)

    def call_and_store(self, role: str, method: str, call: Arguments, wanted: bool) -> ray.ObjectRef | None:
        """Calls a method and puts the result into the object store; ``None`` if it is not ``wanted``."""
        result = self.call(role, method, *call)
        if not wanted:
            return None
        with shared_blobs(RayBlobs()):
            return ray.put(result)


def start_hosts(
    processes: int, config: RayConfig, together: int = 1, device: torch.device | None = None
) -> tuple[list[Any], Any, PlacementGroup]:
    """Starts a `RayHost` for each process, a `PhaseMonitor` that they report to, and the placement group that holds them.

    Args:
        together: so many processes share a node, again and again.
        device: of each process: its first GPU, or the CPU, if ``None``. Ray shows all GPUs to a process that has reserved none.

    Raises:
        InvalidConfig: the cluster has too few CPUs or GPUs.
    """
    reserved = reserve(processes, config, together)
    monitor: Any = ray.remote(num_cpus=0)(PhaseMonitor).remote()
    hosts: list[Any] = [
        ray.remote(RayHost)
        .options(
            num_cpus=config.cpus,
            num_gpus=gpus_per_process(config),
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, process // together),
        )
        .remote(monitor, device)
        for process in range(processes)
    ]
    return hosts, monitor, reserved


def end_processes(actors: Sequence[Any], reserved: PlacementGroup) -> None:
    """Ends Ray actors and removes their placement group; ignores those that have ended."""

    def quietly(end: Callable[[Any], object], what: Any) -> None:
        with contextlib.suppress(RayError):
            end(what)

    ends = [partial(quietly, ray.kill, actor) for actor in actors]
    end_after(None, *ends, partial(quietly, remove_placement_group, reserved))


def last_phases(monitor: Any) -> dict[int, str]:
    """The phase that each rank reported last; empty if the monitor does not answer."""
    with contextlib.suppress(RayError):
        return dict(ray.get(monitor.last_phases.remote(), timeout=REPORT_GRACE_S))
    return {}


def cpus_by_node() -> dict[str, int]:
    """The number of CPUs that Ray counts on each node: the limit of a container, where there is one."""
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}


def lost_nodes(ids: Collection[str]) -> list[str]:
    """Those of the nodes that no longer answer. Ray itself takes seconds to notice that a node is lost."""
    try:
        nodes = ray.nodes()
    except Exception:  # of Ray itself, which may have ended; the failures of the ranks say why
        return []
    return sorted(node["NodeID"] for node in nodes if node["NodeID"] in ids and not _lives(node))


def _lives(node: Mapping[str, Any]) -> bool:
    return bool(node["Alive"]) and answers(node["NodeManagerAddress"], node["NodeManagerPort"])


def get_all(refs: Sequence[ray.ObjectRef]) -> list[Any]:
    """The values of references that are ready."""
    return [ray.get(ref) for ref in refs]


def wait_all(refs: Sequence[ray.ObjectRef], timeout_s: float) -> tuple[dict[int, Failure], list[int]]:
    """Waits for references; after the first failure only for the `grace_period` in which others may report theirs.

    Returns:
        The failures by index in ``refs``, and the indices that are still pending.
    """
    failures: dict[int, Failure] = {}
    index = {ref: number for number, ref in enumerate(refs)}
    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = ray.wait(pending, timeout=left)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                failures[index[ref]] = Failure(cause, isinstance(error, RayActorError), str(error))
                deadline = min(deadline, time.monotonic() + grace_period(cause))
    return failures, sorted(index[ref] for ref in pending)


# Calls


class RayFuture:
    """The result of a call that may still run."""

    def __init__(self, collect: Callable[[], Any], refs: Sequence[ray.ObjectRef]) -> None:
        """``collect`` waits for ``refs`` and returns the result; it is called once."""
        self._collect: Callable[[], Any] | None = collect
        self.refs = list(refs)
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._collect is None or len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[1]) == 0

    def result(self) -> Any:
        """Waits for the call, then returns its result or raises its exception."""
        if self._collect is not None:
            try:
                self._value = self._collect()
            except Exception as error:
                self._error = error
            self._collect = None
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self) -> BaseException | None:
        """Waits for the call and returns its exception, or ``None``."""
        with contextlib.suppress(Exception):
            self.result()
        return self._error


CONTIGUOUS = (split_rows, split_scoring)
"""Splits whose parts are rows of the caller's batch in order, which messages can name."""


class RayGroup:
    """One role on the processes of a pool, with the interface of `LocalGroup`."""

    def __init__(self, pool: Any, role: str, worker_class: type) -> None:
        """``pool`` is a `workers.cluster.ray_launcher.RayPool`, whose processes hold the role."""
        self._pool, self._role, self._class = pool, role, worker_class

    @property
    def closed_reason(self) -> str | None:
        """Why the processes have ended; ``None`` while they run."""
        return self._pool.closed_reason

    def submit(self, method: str, *args: Any, **kwargs: Any) -> RayFuture:
        """Starts the call on every rank that takes part and returns its future.

        Raises:
            InvalidConfig: the role has no such method.
            WorkerFailed: the processes have ended.
        """
        pool, mode, name = self._pool, dispatch_of(self._class, method), f"{self._role}.{method}"
        pool.check_open(name)
        calls = list(mode.split(Arguments(args, kwargs), 1 if mode.rank_zero_only else pool.layout.dp))
        with pool.blobs.open():
            stored = [ray.put(call) for call in calls]
        hosts = pool.hosts[:1] if mode.rank_zero_only else pool.hosts
        refs, parts = [], []
        for rank, host in enumerate(hosts):
            part = pool.layout.coordinates(rank)["dp"]
            wanted = mode.rank_zero_only or returns_result(pool.layout, rank)
            refs.append(host.call_and_store.remote(self._role, method, stored[part], wanted))
            parts.append(part)
        counts = row_counts(calls) if mode.split in CONTIGUOUS else []
        ranges = row_ranges(counts)
        rows = [ranges[part] for part in parts] if ranges else []

        def collect() -> Any:
            result_refs = pool.wait(refs, name, rows)
            ranks = [rank for rank, ref in enumerate(result_refs) if ref is not None]
            results = ray.get([result_refs[rank] for rank in ranks])
            if counts and mode.join is join_rows and (mismatch := find_mismatch(results, counts)):
                position, problem = mismatch
                raise WorkerFailed(f"{name} failed: {pool.rank_name(ranks[position], rows)} {problem}")
            return mode.join(results)

        return RayFuture(collect, refs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        dispatch_of(self._class, name)
        return lambda *args, **kwargs: self.submit(name, *args, **kwargs).result()
