"""Groups of workers in Ray processes, on one machine or many. The only module that imports Ray.

A `RayPool` is a set of processes, one for each rank of a `Layout`; each holds the workers of one or more roles
(`workers.cluster.host`). A `RayGroup` calls one role on all of them. Batches pass through Ray's object store: each distinct
image and pixel tensor is put there once a step and memory-mapped by its readers.
"""

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataproto.errors import DataProtoError, InvalidConfig, WorkerFailed
from dataproto.serialization.wire import Buffer, shared_blobs
from workers.cluster.host import Host, PhaseMonitor
from workers.cluster.placement import Placement, rank_order, thread_shares
from workers.cluster.ray_config import RayConfig
from workers.cluster.step_blobs import StepBlobs
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
from workers.ranks.failures import (
    REPORT_GRACE_S,
    Failure,
    describe_call,
    describe_failure,
    first_line,
    grace_period,
    is_secondary,
    root_causes,
)
from workers.ranks.layout import Layout

log = logging.getLogger(__name__)
LOCALHOST = "127.0.0.1"
PLACEMENT_TIMEOUT_S = 60  # for a cluster to reserve its resources
MEDIA_SHARE = 0.25  # of the object store, for media that the calls of a step share


# Starting Ray


@contextlib.contextmanager
def running_ray(config: RayConfig, processes: int) -> Iterator[None]:
    """Starts Ray or connects to a cluster, and shuts it down after the block; does nothing if Ray already runs."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if config.address is None:
        _bind_to_localhost()
        options |= {
            "num_cpus": max(os.cpu_count() or 1, int(processes * config.cpus) + 1),
            "include_dashboard": False,
            "_node_ip_address": LOCALHOST,
        }
        if config.object_store_gib is not None:
            options["object_store_memory"] = int(config.object_store_gib * 2**30)
    ray.init(address=config.address or "local", **options)
    try:
        yield
    finally:
        ray.shutdown()


def _bind_to_localhost() -> None:
    """Opens the ports of a Ray started here to this machine only. Ray's processes read the variable, this one the constant."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def pickle_unimportable_modules_by_value() -> None:
    """Lets functions of modules that other processes cannot import, such as those of a reward file, be sent with their code."""
    finders = [finder.find_spec for finder in sys.meta_path]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name and name != "__main__" and not any(find(name, None) for find in finders):
            ray.cloudpickle.register_pickle_by_value(module)


def gpus_per_process(config: RayConfig) -> float:
    """The configured number of GPUs of a process; by default 1 if the cluster has any."""
    return float(ray.cluster_resources().get("GPU", 0) > 0) if config.gpus is None else config.gpus


def _reserve(processes: int, config: RayConfig) -> PlacementGroup:
    """A placement group with a bundle for each process.

    Raises:
        InvalidConfig: the cluster has too few CPUs or GPUs.
    """
    bundle = {"CPU": config.cpus} | ({"GPU": gpus} if (gpus := gpus_per_process(config)) else {})
    reserved = placement_group([bundle] * processes, strategy="PACK")
    if not reserved.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(reserved)
        total = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
        raise InvalidConfig(
            f"{processes} processes with {bundle} each do not fit the cluster: it has {total}, of which {free} are free"
        )
    return reserved


# The object store


class RayBlobs:
    """A blob store in Ray's object store; see `dataproto.BlobStore`."""

    def __init__(self) -> None:
        self.num_bytes = 0  # put through this object

    def put(self, buffer: Any) -> ray.ObjectRef:
        self.num_bytes += buffer.nbytes
        return ray.put(buffer)

    def get(self, ref: ray.ObjectRef) -> Buffer:
        return ray.get(ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayBlobs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RayBlobs, ()


def new_step_blobs() -> StepBlobs:
    """The media that the driver shares between the calls of a step, limited to `MEDIA_SHARE` of its node's object store."""
    return StepBlobs(RayBlobs, _media_limit_bytes)


def _media_limit_bytes() -> int:
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return int(node["Resources"].get("object_store_memory", 0) * MEDIA_SHARE)


# Processes


class RayHost(Host):
    """A `Host` that returns results through the object store."""

    def __init__(self, monitor: Any) -> None:
        super().__init__(lambda phase: monitor.report.remote(self.rank, phase))

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


class RayPool:
    """The processes of one layout. The roles built on it share them and their devices."""

    def __init__(self, layout: Layout, config: RayConfig, blobs: StepBlobs) -> None:
        """Starts the processes and connects them.

        Raises:
            InvalidConfig: the cluster has too few CPUs or GPUs.
        """
        started = time.perf_counter()
        self.layout, self.config, self.blobs = layout, config, blobs
        self.closed_reason: str | None = None  # why no more calls are possible
        self.placement_group = _reserve(layout.world_size, config)
        self.monitor: Any = ray.remote(num_cpus=0)(PhaseMonitor).remote()
        self.hosts: list[Any] = [
            ray.remote(RayHost)
            .options(
                num_cpus=config.cpus,
                num_gpus=gpus_per_process(config),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement_group, bundle),
            )
            .remote(self.monitor)
            for bundle in range(layout.world_size)
        ]
        self.placements = [Placement("", "", (), 1)] * layout.world_size
        placements = self.wait([host.placement.remote() for host in self.hosts], "start")
        order = rank_order(placements)
        self.hosts, self.placements = [self.hosts[each] for each in order], [placements[each] for each in order]
        address, timeout = self.placements[0].address, config.timeout_s
        connected = [
            host.init_distributed.remote(layout, rank, address, timeout) for rank, host in enumerate(self.hosts)
        ]
        self.wait(connected, "start")
        log.info("connected %d processes in %.1f s", layout.world_size, time.perf_counter() - started)

    def build(self, role: str, make: Callable[[Host], Any]) -> "RayGroup":
        """Builds a role's worker in every process by ``make(host)``."""
        started = time.perf_counter()
        classes = self.wait([host.build.remote(role, make) for host in self.hosts], f"build {role}")
        log.info("built %s in %d processes in %.1f s", role, len(self.hosts), time.perf_counter() - started)
        return RayGroup(self, role, classes[0])

    def open_channel(self, receivers: "RayPool") -> None:
        """Opens a weight channel from the first process of this pool to all processes of another."""
        size, timeout = 1 + len(receivers.hosts), self.config.timeout_s
        address = self.wait([self.hosts[0].placement.remote()], "open channel")[0].address
        ends = [self.hosts[0].open_channel.remote(address, 0, size, timeout)]
        for number, host in enumerate(receivers.hosts, start=1):
            ends.append(host.open_channel.remote(address, number, size, timeout))
        self.wait(ends[:1], "open channel")
        receivers.wait(ends[1:], "open channel")

    def transfer_weights(self, role: str, receivers: "RayGroup", dtype: torch.dtype | None = None) -> None:
        """Sends a role's weights, in ``dtype``, through the channel, while the other group's `refresh` receives them.

        Raises:
            WorkerFailed, DataProtoError: as `wait`, for the side that failed first. Both pools are closed then.
        """
        received, call = receivers.submit("refresh"), f"{role}: sending weights"
        refs = [host.send_weights.remote(role, dtype) for host in self.hosts]
        sent = RayFuture(lambda: self.wait(refs, call), refs)
        failures, pending = _wait_all([*refs, *received.refs], self.config.timeout_s)
        hanging = pending if all(is_secondary(failure.error) for failure in failures.values()) else []
        first = next(iter([*hanging, *root_causes(failures)]), 0)
        receiver_failed = first >= len(refs)
        try:
            if hanging:  # the ranks that wait for them report first
                pool, offset = (receivers._pool, len(refs)) if receiver_failed else (self, 0)
                late = [rank - offset for rank in hanging if (rank >= len(refs)) == receiver_failed]
                pool._close_on_failure(call, {}, late, ())
            for future in [received, sent] if receiver_failed else [sent, received]:
                future.result()
        except DataProtoError as error:
            for pool in (self, receivers._pool):
                pool.close(f"{call} failed: {first_line(error)}")
            raise

    def wait(self, refs: Sequence[ray.ObjectRef], call: str, rows: Sequence[str] = ()) -> list[Any]:
        """The values of ``refs``, one for each rank. Closes the pool if a rank dies or does not finish.

        Args:
            call: its name in messages.
            rows: which rows each rank has, for messages.

        Raises:
            WorkerFailed: a rank died, raised or took longer than ``timeout_s``; or the pool is closed.
            DataProtoError: the error of a rank, if it is one of this library and all ranks finished; a note names the rank.
        """
        self.check_open(call)
        failures, pending = _wait_all(refs, self.config.timeout_s)
        if pending or any(failure.died for failure in failures.values()):
            self._close_on_failure(call, failures, pending, rows)
        if failures:
            for host in self.hosts:
                host.resync.remote()
            raise self._error(call, failures, rows)
        return [ray.get(ref) for ref in refs]

    def check_open(self, call: str) -> None:
        """Checks that the processes still run.

        Raises:
            WorkerFailed: they have ended; the message says why.
        """
        if self.closed_reason is not None:
            raise WorkerFailed(f"{call}: the worker processes have ended: {self.closed_reason}")

    def _close_on_failure(
        self, call: str, failures: Mapping[int, Failure], pending: Sequence[int], rows: Sequence[str]
    ) -> None:
        """Ends all processes, since those that wait for others would wait for ever, and raises `WorkerFailed`."""
        phases, causes = self._last_phases(), root_causes(failures)
        lines = [
            describe_failure(self.rank_name(rank, rows), call, phases.get(rank), failures[rank]) for rank in causes
        ]
        lines += [
            f"{self.rank_name(rank, rows)} did not finish {describe_call(call, phases.get(rank))}" for rank in pending
        ]
        limit = "" if failures else f" within {self.config.timeout_s:g} s"
        self.close(f"{call} failed{limit}: " + "; ".join(lines))
        trace = failures[causes[0]].traceback if causes else ""
        raise WorkerFailed(f"{self.closed_reason}\n{trace}".rstrip())

    def _error(self, call: str, failures: Mapping[int, Failure], rows: Sequence[str]) -> Exception:
        """The error for the caller: of the first rank whose failure is not a consequence of another's."""
        rank = root_causes(failures)[0]
        failure, name = failures[rank], self.rank_name(rank, rows)
        if isinstance(failure.error, DataProtoError):
            failure.error.add_note(f"in {call} at {name}")
            return failure.error
        headline = describe_failure(name, call, self._last_phases().get(rank), failure)
        return WorkerFailed(f"{headline}\n{failure.traceback}")

    def rank_name(self, rank: int, rows: Sequence[str]) -> str:
        """A rank, its process and its rows, for messages."""
        share = f", {rows[rank]}" if rows else ""
        return f"rank {rank} on {self.placements[rank].name}{share}"

    def _last_phases(self) -> dict[int, str]:
        """The phase that each rank reported last."""
        with contextlib.suppress(RayError):
            return dict(ray.get(self.monitor.last_phases.remote(), timeout=REPORT_GRACE_S))
        return {}

    def close(self, reason: str = "the group was closed") -> None:
        """Ends the processes. Later calls raise with the reason; closing again does nothing."""
        if self.closed_reason is None:
            self.closed_reason = reason
            for actor in [*self.hosts, self.monitor]:
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            with contextlib.suppress(RayError):
                remove_placement_group(self.placement_group)


def _wait_all(refs: Sequence[ray.ObjectRef], timeout_s: float) -> tuple[dict[int, Failure], list[int]]:
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


def share_cores(groups: Sequence["RayGroup"]) -> None:
    """Gives the processes of all ``groups`` equal shares of their nodes' cores as threads.

    Does nothing if ``OMP_NUM_THREADS`` is set.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    pools = list(dict.fromkeys(group._pool for group in groups))
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}  # the limit of a container
    placements = [replace(each, cores=min(each.cores, cpus[each.node])) for pool in pools for each in pool.placements]
    shares = iter(thread_shares(placements))
    for pool in pools:
        pool.wait([host.set_num_threads.remote(next(shares)) for host in pool.hosts], "start")


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


class RayGroup:
    """One role on the processes of a pool, with the interface of `LocalGroup`."""

    def __init__(self, pool: RayPool, role: str, worker_class: type) -> None:
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
        counts = row_counts(calls) if mode.split is split_rows else []
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
