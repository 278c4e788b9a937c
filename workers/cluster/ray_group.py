"""Groups of workers in Ray processes, on one machine or many. The only file that knows Ray.

A `RayPool` is a set of processes, one for each rank of a `Layout`, each of which holds the workers of one or more roles
(`workers.cluster.host`). A `RayGroup` calls one role on all of them. Batches travel through Ray's object store, where
every distinct image and pixel tensor is put once a step and mapped by its readers.
"""

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataproto.errors import DataProtoError, InvalidConfig, WorkerFailed
from dataproto.serialization.wire import Buffer, SharedBlobs, shared_blobs
from workers.cluster.host import Host, Monitor
from workers.cluster.placement import Place, rank_order, thread_shares
from workers.cluster.ray_config import RayConfig
from workers.ranks.dispatch_modes import Arguments, dispatch_of, join_rows, misfit, row_counts, row_ranges, split_rows
from workers.ranks.failures import GRACE_S, first_line, patience, place_of, tells_of_another
from workers.ranks.layout import Layout

log = logging.getLogger(__name__)
LOCALHOST = "127.0.0.1"
PLACEMENT_TIMEOUT_S = 60  # that a cluster has to find room
STORE_SHARE = 0.25  # of the object store, for media that a step's calls have in common


@contextlib.contextmanager
def running_ray(config: RayConfig, processes: int) -> Any:
    """Ray, started here unless it runs already; what was started is ended with the block."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if config.address is None:
        stay_on_localhost()
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


def stay_on_localhost() -> None:
    """Ports of a Ray started here are open to this machine alone. Its processes read the variable; this one did so before."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def send_code_of_lone_modules() -> None:
    """Functions of modules that no other process could import, as those of a reward file, travel with their code."""
    finders = [finder.find_spec for finder in sys.meta_path]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name and name != "__main__" and not any(find(name, None) for find in finders):
            ray.cloudpickle.register_pickle_by_value(module)


class RayBlobs:
    """Where parts of a batch keep what they share: Ray's object store."""

    def __init__(self) -> None:
        self.bytes = 0  # put through this object

    def put(self, buffer: Any) -> ray.ObjectRef:
        self.bytes += buffer.nbytes
        return ray.put(buffer)

    def get(self, ref: ray.ObjectRef) -> Buffer:
        return ray.get(ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayBlobs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RayBlobs, ()


class StepBlobs:
    """What the driver has put into the object store in this step, so that the next call of the step need not.

    A program that trains step by step may go on for long without an end of a step: what is kept is then let go of before a call
    that finds more of it than ``limit_bytes``, by default `STORE_SHARE` of the store.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.renew()

    def renew(self) -> None:
        """A new step: lets go of the old one's media."""
        self._store = RayBlobs()
        self._shared = SharedBlobs(self._store)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside, what is pickled shares its media with what was pickled before in this step; see `shared_blobs`."""
        if self.limit_bytes is None:
            here = ray.get_runtime_context().get_node_id()  # what the driver puts lies in its own node's store
            node = next(node for node in ray.nodes() if node["NodeID"] == here)
            self.limit_bytes = int(node["Resources"].get("object_store_memory", 0) * STORE_SHARE)
        if self._store.bytes > self.limit_bytes:
            self.renew()
        with self._shared.open():
            yield


class RayHost(Host):
    """A `Host` that hands back results through the object store."""

    def __init__(self, monitor: Any) -> None:
        super().__init__(lambda phase: monitor.report.remote(self.rank, phase))

    def place(self) -> Place:
        """Where this process runs, and can be met."""
        context, ip = ray.get_runtime_context(), ray.util.get_node_ip_address()
        return Place(
            ip,
            context.get_node_id(),
            tuple(map(str, ray.get_gpu_ids())),
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            self.address(ip),
            f"{socket.gethostname()} (process {os.getpid()})",
        )

    def use_threads(self, count: int) -> None:
        """Ray gives a process as many threads as CPUs are reserved for it, by default one."""
        torch.set_num_threads(count)

    def call_and_store(self, role: str, method: str, call: Arguments, answers: bool) -> ray.ObjectRef | None:
        """The result in the object store; nothing from a rank whose result is not wanted."""
        result = self.call(role, method, *call)
        if not answers:
            return None
        with shared_blobs(RayBlobs()):
            return ray.put(result)


class RayPool:
    """The processes of one layout. Roles built on it share them, and their devices."""

    def __init__(self, layout: Layout, config: RayConfig, blobs: StepBlobs) -> None:
        """Starts the processes and lets them meet.

        Raises:
            InvalidConfig: the cluster has too few CPUs or GPUs.
        """
        started = time.perf_counter()
        self.layout, self.config, self.blobs = layout, config, blobs
        self.ended: str | None = None  # why no more calls are possible
        self.placement = reserve(layout.world_size, config)
        self.monitor: Any = ray.remote(num_cpus=0)(Monitor).remote()
        self.hosts: list[Any] = [
            ray.remote(RayHost)
            .options(
                num_cpus=config.cpus,
                num_gpus=gpus_of(config),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, bundle),
            )
            .remote(self.monitor)
            for bundle in range(layout.world_size)
        ]
        self.places = [Place("", "", (), 1)] * layout.world_size
        found = self.wait([host.place.remote() for host in self.hosts], "start")
        order = rank_order(found)  # bundles lie on nodes in any order
        self.hosts, self.places = [self.hosts[each] for each in order], [found[each] for each in order]
        address, timeout = self.places[0].address, config.timeout_s
        meetings = [host.meet.remote(layout, rank, address, timeout) for rank, host in enumerate(self.hosts)]
        self.wait(meetings, "start")
        log.info("%d processes have met after %.1f s", layout.world_size, time.perf_counter() - started)

    def build(self, role: str, make: Callable[[Host], Any]) -> "RayGroup":
        """Makes a role's worker in every process, from its `Host`."""
        started = time.perf_counter()
        classes = self.wait([host.build.remote(role, make) for host in self.hosts], f"build {role}")
        log.info("%s: %d processes ready after %.1f s", role, len(self.hosts), time.perf_counter() - started)
        return RayGroup(self, role, classes[0])

    def open_channel(self, receivers: "RayPool") -> None:
        """Lets weights go from the first process of this pool to all of another."""
        size, timeout = 1 + len(receivers.hosts), self.config.timeout_s
        address = self.wait([self.hosts[0].place.remote()], "meet")[0].address
        ends = [self.hosts[0].open_channel.remote(address, 0, size, timeout)]
        for number, host in enumerate(receivers.hosts, start=1):
            ends.append(host.open_channel.remote(address, number, size, timeout))
        self.wait(ends[:1], "meet")
        receivers.wait(ends[1:], "meet")

    def hand_over(self, role: str, receivers: "RayGroup", dtype: torch.dtype | None = None) -> None:
        """Sends a role's weights, in ``dtype``, through the channel; the other group takes them at the same time.

        Raises:
            WorkerFailed, DataProtoError: as `wait`, of whichever failed first; both groups have ended then.
        """
        taken, what = receivers.submit("refresh"), f"{role}: sending weights"
        refs = [host.send_weights.remote(role, dtype) for host in self.hosts]
        sent = RayFuture(lambda: self.wait(refs, what), refs)
        failures, pending = settle([*refs, *taken.refs], self.config.timeout_s)
        hanging = pending if all(tells_of_another(cause_of(error)) for error in failures.values()) else []
        first = next(iter([*hanging, *causing(failures)]), 0)
        theirs = first >= len(refs)
        try:
            if hanging:  # those that wait for them tell of it first
                pool, before = (receivers._pool, len(refs)) if theirs else (self, 0)
                pool._end(what, {}, [rank - before for rank in hanging if (rank >= len(refs)) == theirs], ())
            for future in [taken, sent] if theirs else [sent, taken]:
                future.result()
        except DataProtoError as error:
            for pool in (self, receivers._pool):
                pool.close(f"{what} failed: {first_line(error)}")
            raise

    def wait(self, refs: Sequence[ray.ObjectRef], what: str, rows: Sequence[str] = ()) -> list[Any]:
        """The values of one reference a rank. The first failure ends the wait, and the pool if ranks do not come back.

        Raises:
            WorkerFailed: a rank died, raised or took longer than ``timeout_s``; or the group has ended.
            DataProtoError: what a rank raised, if it is one of ours and all ranks came back; its notes say where.
        """
        self.check_open(what)
        failures, pending = settle(refs, self.config.timeout_s)
        if pending or any(isinstance(error, RayActorError) for error in failures.values()):
            self._end(what, failures, pending, rows)
        if failures:
            for host in self.hosts:
                host.rejoin.remote()
            raise self._error(what, failures, rows)
        return [ray.get(ref) for ref in refs]

    def check_rows(
        self, what: str, ranks: Sequence[int], results: Sequence[Any], counts: Sequence[int], rows: Sequence[str]
    ) -> None:
        """Refuses to join results of which one is not what the rank was asked for.

        Raises:
            WorkerFailed: names the rank and what it returned.
        """
        if found := misfit(results, counts):
            place, wrong = found
            raise WorkerFailed(f"{what} failed: {self._name(ranks[place], rows)} {wrong}")

    def check_open(self, what: str) -> None:
        """Refuses a call to processes that are no more.

        Raises:
            WorkerFailed: they have ended; says why.
        """
        if self.ended is not None:
            raise WorkerFailed(f"{what}: no worker is left: {self.ended}")

    def _end(self, what: str, failures: dict[int, Exception], pending: list[int], rows: Sequence[str]) -> None:
        """Ends all processes; those that wait for others would wait for ever."""
        phases = self.last_phases()
        told = [self._tell(what, rank, failures[rank], phases, rows) for rank in causing(failures)]
        late = [f"{self._name(rank, rows)} has not ended {place_of(what, phases.get(rank))}" for rank in pending]
        limit = "" if failures else f" within {self.config.timeout_s:g} s"
        self.close(f"{what} failed{limit}: " + "; ".join([*(head for head, _ in told), *late]))
        raise WorkerFailed("\n".join([str(self.ended), *(trace for _, trace in told[:1])]).rstrip())

    def _error(self, what: str, failures: dict[int, Exception], rows: Sequence[str]) -> Exception:
        """What the user is told: the first failure that is not about another rank's."""
        rank = causing(failures)[0]
        cause = cause_of(failures[rank])
        if isinstance(cause, DataProtoError):
            cause.add_note(f"in {what} at {self._name(rank, rows)}")
            return cause
        return WorkerFailed("\n".join(self._tell(what, rank, failures[rank], self.last_phases(), rows)))

    def _tell(
        self, what: str, rank: int, error: Exception, phases: dict[int, str], rows: Sequence[str]
    ) -> tuple[str, str]:
        """Which rank failed, where and of what, in one line; and its traceback."""
        where, place, cause = self._name(rank, rows), place_of(what, phases.get(rank)), cause_of(error)
        if isinstance(error, RayActorError):
            return f"{where} died in {place}: {first_line(error)}", ""
        trace = "\n".join(getattr(cause, "__notes__", ())) or str(error)
        return f"{where} failed in {place}: {type(cause).__name__}: {first_line(cause)}", trace

    def _name(self, rank: int, rows: Sequence[str]) -> str:
        share = f", {rows[rank]}" if rows else ""
        return f"rank {rank} on {self.places[rank].name}{share}"

    def last_phases(self) -> dict[int, str]:
        """What each rank said last that it does."""
        with contextlib.suppress(RayError):
            return dict(ray.get(self.monitor.last.remote(), timeout=GRACE_S))
        return {}

    def close(self, reason: str = "the group has been closed") -> None:
        """Ends the processes; later calls are told the reason. Calling it again does nothing."""
        if self.ended is None:
            self.ended = reason
            for actor in [*self.hosts, self.monitor]:
                with contextlib.suppress(RayError):
                    ray.kill(actor)
            with contextlib.suppress(RayError):
                remove_placement_group(self.placement)


class RayFuture:
    """A call under way."""

    def __init__(self, collect: Callable[[], Any], refs: Sequence[ray.ObjectRef]) -> None:
        self._collect: Callable[[], Any] | None = collect
        self.refs = list(refs)
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._collect is None or len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[1]) == 0

    def result(self) -> Any:
        """Waits; returns what the call returned or raises what it raised."""
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
        """Waits; returns what the call raised."""
        with contextlib.suppress(Exception):
            self.result()
        return self._error


class RayGroup:
    """One role on the processes of a pool, called as if it were one worker; the surface of `LocalGroup`."""

    def __init__(self, pool: RayPool, role: str, worker_class: type) -> None:
        self._pool, self._role, self._class = pool, role, worker_class

    @property
    def ended(self) -> str | None:
        """Why the processes are no more, ``None`` while they are there."""
        return self._pool.ended

    def submit(self, method: str, *args: Any, **kwargs: Any) -> RayFuture:
        """Starts the call on every rank that takes part and returns its future.

        Raises:
            InvalidConfig: the role has no such method.
            WorkerFailed: the group has ended.
        """
        pool, how = self._pool, dispatch_of(self._class, method)
        pool.check_open(f"{self._role}.{method}")
        layout = pool.layout
        calls = list(how.split(Arguments(args, kwargs), 1 if how.rank_zero_only else layout.dp))
        hosts = pool.hosts[:1] if how.rank_zero_only else pool.hosts
        places = [layout.coordinates(rank) for rank in range(len(hosts))]
        with pool.blobs.open():
            stored = [ray.put(call) for call in calls]
        refs = [
            host.call_and_store.remote(
                self._role, method, stored[place["dp"]], how.rank_zero_only or answers(place, layout)
            )
            for host, place in zip(hosts, places)
        ]
        counts = row_counts(calls) if how.split is split_rows else []
        shares = row_ranges(counts)
        rows = [shares[place["dp"]] for place in places] if shares else []

        def collect() -> Any:
            what = f"{self._role}.{method}"
            stored_at = pool.wait(refs, what, rows)
            ranks = [rank for rank, result in enumerate(stored_at) if result is not None]
            results = ray.get([stored_at[rank] for rank in ranks])
            if counts and how.join is join_rows:
                pool.check_rows(what, ranks, results, counts, rows)
            return how.join(results)

        return RayFuture(collect, refs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        dispatch_of(self._class, name)
        return lambda *args, **kwargs: self.submit(name, *args, **kwargs).result()


def share_cores(groups: Sequence[RayGroup]) -> None:
    """Gives the processes of all ``groups`` equal shares of their nodes' cores as threads.

    Nothing changes where ``OMP_NUM_THREADS`` says how many they use.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    pools = list(dict.fromkeys(group._pool for group in groups))
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}  # that containers are held to
    places = [replace(place, cores=min(place.cores, cpus[place.node])) for pool in pools for place in pool.places]
    shares = iter(thread_shares(places))
    for pool in pools:
        pool.wait([host.use_threads.remote(next(shares)) for host in pool.hosts], "start")


def settle(refs: Sequence[ray.ObjectRef], timeout_s: float) -> tuple[dict[int, Exception], list[int]]:
    """Waits for references; after the first failure no longer than others may take to tell of theirs.

    Returns:
        What failed, and what has not come, by place in ``refs``.
    """
    failures: dict[int, Exception] = {}
    places = {ref: place for place, ref in enumerate(refs)}
    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = ray.wait(pending, timeout=left)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                failures[places[ref]] = error
                deadline = min(deadline, time.monotonic() + patience(cause_of(error)))
    return failures, sorted(places[ref] for ref in pending)


def cause_of(error: Exception) -> Exception:
    """What a rank itself raised."""
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error
    return cause


def causing(failures: dict[int, Exception]) -> list[int]:
    """The ranks on which others' failures depend: the dead ones, else those that do not tell of another's."""
    dead = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
    own = [rank for rank, error in failures.items() if not tells_of_another(cause_of(error))]
    return sorted(dead or own or failures)


def answers(place: dict[str, int], layout: Layout) -> bool:
    """Whether a rank's result counts: the first of its data-parallel position, in the last pipeline stage."""
    return place["tp"] == place["sp"] == 0 and place["pp"] == layout.pp - 1


def reserve(processes: int, config: RayConfig) -> PlacementGroup:
    """A place for each process.

    Raises:
        InvalidConfig: the cluster cannot hold them.
    """
    bundle = {"CPU": config.cpus} | ({"GPU": gpus} if (gpus := gpus_of(config)) else {})
    placement = placement_group([bundle] * processes, strategy="PACK")
    if not placement.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(placement)
        have = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
        raise InvalidConfig(
            f"{processes} processes with {bundle} each do not fit the cluster: it has {have}, free {free}"
        )
    return placement


def gpus_of(config: RayConfig) -> float:
    """GPUs of one process."""
    return float(ray.cluster_resources().get("GPU", 0) > 0) if config.gpus is None else config.gpus
