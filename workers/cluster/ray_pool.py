"""The Ray processes of one layout: start, connections, weight transfer between pools, and failures."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import torch

from dataproto.errors import DataProtoError, WorkerFailed, end_after
from workers.cluster.host import Host
from workers.cluster.placement import Placement, first_ranks, rank_order, thread_shares
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import (
    RayFuture,
    RayGroup,
    StepBlobs,
    cpus_by_node,
    end_processes,
    get_all,
    last_phases,
    lost_nodes,
    start_hosts,
    wait_all,
)
from workers.ranks.failures import Failure, describe_call, describe_failure, first_line, is_secondary, root_causes
from workers.ranks.layout import Layout

log = logging.getLogger(__name__)


class RayPool:
    """The processes of one layout. The roles built on it share them and their devices."""

    def __init__(
        self,
        layout: Layout,
        config: RayConfig,
        blobs: StepBlobs,
        together: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """Starts the processes; `connect` waits for them.

        Args:
            together: so many consecutive ranks share a node; those of a tp group always do.
            device: see `start_hosts`.

        Raises:
            InvalidConfig: the cluster has too few CPUs or GPUs.
        """
        self.layout, self.config, self.blobs = layout, config, blobs
        self.closed_reason: str | None = None  # why no more calls are possible
        self.hosts, self.monitor, self.placement_group = start_hosts(
            layout.world_size, config, lcm(layout.tp, together), device
        )
        self.placements = [Placement("", "", (), 1)] * layout.world_size

    def connect(self) -> None:
        """Connects the processes to each other."""
        layout, config, started = self.layout, self.config, time.perf_counter()
        placements = self.wait([host.placement.remote() for host in self.hosts], "start")
        order = rank_order(placements)
        self.hosts, self.placements = [self.hosts[each] for each in order], [placements[each] for each in order]
        address, timeout = self.placements[0].address, config.timeout_s
        connected = [
            host.init_distributed.remote(layout, rank, address, timeout) for rank, host in enumerate(self.hosts)
        ]
        self.wait(connected, "start")
        log.info("connected %d processes in %.1f s", layout.world_size, time.perf_counter() - started)

    def build(self, role: str, make: Callable[[Host], Any]) -> RayGroup:
        """Builds a role's worker in every process by ``make(host)``."""
        return self.begin_build(role, make)()

    def begin_build(self, role: str, make: Callable[[Host], Any]) -> Callable[[], RayGroup]:
        """As `build`, but returns at once; the result waits for the workers and returns their group."""
        started = time.perf_counter()
        refs = [host.build.remote(role, make) for host in self.hosts]

        def finish() -> RayGroup:
            classes = self.wait(refs, f"build {role}")
            log.info("built %s in %d processes in %.1f s", role, len(self.hosts), time.perf_counter() - started)
            return RayGroup(self, role, classes[0])

        return finish

    def prepare(self, work: Callable[[], None]) -> None:
        """Runs ``work``, which is to begin something and not to wait for it, in the first process of each node."""
        first = first_ranks(self.placements)
        refs = [host.prepare.remote(work if rank in first else _do_nothing) for rank, host in enumerate(self.hosts)]
        self.wait(refs, "start")

    def open_channel(self, receivers: "RayPool") -> None:
        """Opens a weight channel from the first process of this pool to all processes of another."""
        size, timeout = 1 + len(receivers.hosts), self.config.timeout_s
        address = self.wait([self.hosts[0].placement.remote()], "open channel")[0].address
        ends = [self.hosts[0].open_channel.remote(address, 0, size, timeout)]
        for number, host in enumerate(receivers.hosts, start=1):
            ends.append(host.open_channel.remote(address, number, size, timeout))
        self.wait(ends[:1], "open channel")
        receivers.wait(ends[1:], "open channel")

    def transfer_weights(
        self,
        role: str,
        receivers: RayGroup,
        dtype: torch.dtype | None = None,
        streams: Sequence[str] = ("named_weights",),
    ) -> None:
        """Sends a role's weights, in ``dtype``, through the channel, while the other group's `refresh` receives them.

        Args:
            streams: see `Host.send_weights`.

        Raises:
            WorkerFailed, DataProtoError: as `wait`, for the side that failed first. Both pools are closed then.
        """
        received, call = receivers.submit("refresh"), f"{role}: sending weights"
        refs = [host.send_weights.remote(role, dtype, streams) for host in self.hosts]
        sent = RayFuture(lambda: self.wait(refs, call), refs)
        failures, pending = wait_all([*refs, *received.refs], self.config.timeout_s)
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

    def wait(self, refs: Sequence[Any], call: str, rows: Sequence[str] = ()) -> list[Any]:
        """The values of ``refs``, one for each rank. Closes the pool if a rank dies or does not finish.

        Args:
            call: its name in messages.
            rows: which rows each rank has, for messages.

        Raises:
            WorkerFailed: a rank died, raised or took longer than ``timeout_s``; or the pool is closed.
            DataProtoError: the error of a rank, if it is one of this library and all ranks finished; a note names the rank.
        """
        self.check_open(call)
        failures, pending = wait_all(refs, self.config.timeout_s)
        if pending or any(failure.died for failure in failures.values()):
            self._close_on_failure(call, failures, pending, rows)
        if failures:
            for host in self.hosts:
                host.resync.remote()
            raise self._error(call, failures, rows)
        return get_all(refs)

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
        phases, causes = last_phases(self.monitor), root_causes(failures)
        lost = lost_nodes({self.placements[rank].node for rank in (*failures, *pending)})
        gone = [rank for rank in pending if self.placements[rank].node in lost]  # Ray does not know yet that they died
        if gone:
            causes = [rank for rank in causes if not is_secondary(failures[rank].error)]
        lines = [
            describe_failure(self.rank_name(rank, rows), call, phases.get(rank), failures[rank]) for rank in causes
        ]
        for rank in sorted(pending, key=lambda rank: rank not in gone):
            how = "died in" if rank in gone else "did not finish"
            lines.append(f"{self.rank_name(rank, rows)} {how} {describe_call(call, phases.get(rank))}")
        lines += [f"{self.node_name(node)} is lost" for node in lost]
        limit = "" if failures else f" within {self.config.timeout_s:g} s"
        reason = f"{call} failed{limit}: " + "; ".join(lines)
        trace = failures[causes[0]].traceback if causes else ""
        error = WorkerFailed(f"{reason}\n{trace}".rstrip())
        end_after(error, partial(self.close, reason))
        raise error

    def _error(self, call: str, failures: Mapping[int, Failure], rows: Sequence[str]) -> Exception:
        """The error for the caller: of the first rank whose failure is not a consequence of another's."""
        rank = root_causes(failures)[0]
        failure, name = failures[rank], self.rank_name(rank, rows)
        if isinstance(failure.error, DataProtoError):
            failure.error.add_note(f"in {call} at {name}")
            return failure.error
        headline = describe_failure(name, call, last_phases(self.monitor).get(rank), failure)
        return WorkerFailed(f"{headline}\n{failure.traceback}")

    def rank_name(self, rank: int, rows: Sequence[str]) -> str:
        """A rank, its process and its rows, for messages."""
        share = f", {rows[rank]}" if rows else ""
        return f"rank {rank} on {self.placements[rank].name}{share}"

    def node_name(self, node: str) -> str:
        """A node and the ranks on it, for messages."""
        ranks = [rank for rank, place in enumerate(self.placements) if place.node == node]
        return f"node {node[:8]} at {self.placements[ranks[0]].ip} with rank {', '.join(map(str, ranks))}"

    def close(self, reason: str = "the group was closed") -> None:
        """Ends the processes. Later calls raise with the reason; closing again does nothing."""
        if self.closed_reason is None:
            self.closed_reason = reason
            end_processes([*self.hosts, self.monitor], self.placement_group)


def _do_nothing() -> None:
    """The work of a process that has none."""


def share_cores(groups: Sequence[RayGroup]) -> None:
    """Gives the processes of all ``groups`` equal shares of their nodes' cores as threads.

    Does nothing if ``OMP_NUM_THREADS`` is set, here or in the ``env_vars`` of the processes.
    """
    pools = list(dict.fromkeys(group._pool for group in groups))
    if any("OMP_NUM_THREADS" in environment for environment in (os.environ, *(pool.config.env_vars for pool in pools))):
        return
    cpus = cpus_by_node()
    placements = [replace(each, cores=min(each.cores, cpus[each.node])) for pool in pools for each in pool.placements]
    shares = iter(thread_shares(placements))
    for pool in pools:
        pool.wait([host.set_num_threads.remote(next(shares)) for host in pool.hosts], "start")
