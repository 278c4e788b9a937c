"""Launches the roles of a run in Ray processes: start, connections, weight transfer between pools, and failures."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil, lcm
from pathlib import Path
from typing import Any

import torch

from dataproto.errors import DataProtoError, InvalidConfig, WorkerFailed, end_after, ending
from rollout.engine import engine_ranks
from workers.cluster import ray_group
from workers.cluster.host import Host
from workers.cluster.placement import Placement, rank_order, thread_shares
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import RayFuture, RayGroup, StepBlobs, end_processes, last_phases, wait_all
from workers.cluster.role_groups import LaunchPlan, Phase, Roles, start_phase, worker_makers
from workers.model.model_config import ModelConfig
from workers.ranks.failures import Failure, describe_call, describe_failure, first_line, is_secondary, root_causes
from workers.ranks.layout import Layout
from workers.roles.reward import ModelReward, uses_device
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker, lora_streams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedPool:
    """The processes of a pool before they start; so many ``together``, with consecutive ranks, share a node; those of a
    tp group always do.

    ``device``: of each, its first GPU, or the CPU, if ``None``.
    """

    layout: Layout
    config: RayConfig
    together: int = 1
    device: torch.device | None = None


class RayPool:
    """The processes of one layout. The roles built on it share them and their devices."""

    def __init__(self, planned: PlannedPool, blobs: StepBlobs) -> None:
        """Starts the processes; `connect` waits for them.

        Raises:
            InvalidConfig: the cluster has too few CPUs or GPUs.
        """
        self.layout, self.config, self.blobs = planned.layout, planned.config, blobs
        self.closed_reason: str | None = None  # why no more calls are possible
        self.hosts, self.monitor, self.placement_group = ray_group.start_hosts(
            self.layout.world_size, self.config, lcm(self.layout.tp, planned.together), planned.device
        )
        self.placements = [Placement("", "", (), 1)] * self.layout.world_size

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

    def open_channel(self, receivers: "RayPool") -> None:
        """Opens a weight channel from the first process of this pool to all processes of another."""
        size, timeout = 1 + len(receivers.hosts), self.config.timeout_s
        address = self.wait([self.hosts[0].placement.remote()], "open channel")[0].address
        hosts = enumerate([self.hosts[0], *receivers.hosts])
        ends = [host.open_channel.remote(address, number, size, timeout) for number, host in hosts]
        self.wait(ends[:1], "open channel")
        receivers.wait(ends[1:], "open channel")

    def transfer_weights(self, role: str, receivers: RayGroup, dtype: torch.dtype, streams: Sequence[str]) -> None:
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
        return ray_group.get_all(refs)

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
        lost = ray_group.lost_nodes({self.placements[rank].node for rank in (*failures, *pending)})
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


def share_cores(groups: Sequence[RayGroup]) -> None:
    """Gives the processes of all ``groups`` equal shares of their nodes' cores as threads.

    Does nothing if ``OMP_NUM_THREADS`` is set, here or in the ``env_vars`` of the processes.
    """
    pools = list(dict.fromkeys(group._pool for group in groups))
    if any("OMP_NUM_THREADS" in environment for environment in (os.environ, *(pool.config.env_vars for pool in pools))):
        return
    cpus = ray_group.cpus_by_node()
    placements = [replace(each, cores=min(each.cores, cpus[each.node])) for pool in pools for each in pool.placements]
    shares = iter(thread_shares(placements))
    for pool in pools:
        pool.wait([host.set_num_threads.remote(next(shares)) for host in pool.hosts], "start")


def start_roles(plan: LaunchPlan, phase: Phase, **options: Any) -> Roles:
    """Starts one process for each rank of the layout, which holds that rank of actor, reference, critic and rollout.

    Engines get separate processes if the layout has ``rollout``, and start while the actor is loaded. A reward function gets
    processes without a device.

    Raises:
        InvalidConfig: an option is unknown, ``tensor_parallel`` does not divide the engines' processes, or the cluster is too
            small.
    """
    config, plan = _config(options), with_absolute_paths(plan)
    processes = sum(pool.layout.world_size for pool in planned_pools(plan, config).values())
    ray_group.pickle_unimportable_modules_by_value()
    with ExitStack() as stack:
        with phase("starting Ray"):
            stack.enter_context(ray_group.running_ray(config, processes))
            pools, makers = _start_pools(plan, config, stack), worker_makers(plan)
            begun: dict[str, Callable[[], RayGroup]] = {}  # built in processes of their own while the others are
            if plan.rollout is not None and "engines" in pools:
                begun["rollout"] = pools["engines"].begin_build(
                    "rollout", partial(_engine_apart, plan.actor, plan.rollout)
                )
            if "scorers" in pools:
                begun["reward"] = pools["scorers"].begin_build("reward", makers["reward"])
                makers["reward"] = makers.pop("reward")  # waited for last
        pool, groups, transfer_weights = pools["models"], dict[str, RayGroup](), lambda: None
        for role, make in makers.items():
            with phase(start_phase(role, plan)):
                groups[role] = begun[role]() if role in begun else pool.build(role, make)
                if role == "rollout":
                    transfer_weights = _weight_transfer(pools, groups[role])
        for each in pools.values() if plan.libraries else ():
            each.wait([host.keep_libraries_aside.remote(plan.libraries) for host in each.hosts], "start")
        share_cores(list(groups.values()))

        def after_sync() -> None:
            pool.blobs.renew()
            transfer_weights()

        devices = _num_devices(plan.layout.world_size + plan.layout.rollout, ray_group.gpus_per_process(config))
        apart = "scorers" in pools and not uses_device(plan.reward)  # type: ignore[arg-type]
        ends = stack.pop_all().close
        actor, engines = groups.pop("actor"), groups.pop("rollout", None)
        release = (lambda: None) if engines is None else engines.release
        send = pool.blobs.send_ahead
        return Roles(actor, engines, groups, ends, after_sync, release, devices, scores_apart=apart, send_ahead=send)


def with_absolute_paths(plan: LaunchPlan) -> LaunchPlan:
    """The plan with absolute paths of local checkpoints, since processes may begin in another folder than this one."""

    def located(config: Any) -> Any:
        local = config is not None and Path(config.model_path).exists()
        return replace(config, model_path=str(Path(config.model_path).absolute())) if local else config

    reward = plan.reward
    if isinstance(reward, ModelReward):
        directory = None if reward.directory is None else Path(reward.directory).absolute()
        reward = ModelReward(located(reward.critic), directory)
    roles = {name: located(getattr(plan, name)) for name in ("actor", "reference", "critic", "rollout")}
    return replace(plan, reward=reward, **roles)


def planned_pools(plan: LaunchPlan, config: RayConfig) -> dict[str, PlannedPool]:
    """The processes of a run: ``models``, ``engines`` unless these share the models', and ``scorers`` of a reward function.

    Raises:
        InvalidConfig: the engine's ``tensor_parallel`` does not divide the processes that have engines.
    """
    apart = plan.layout.rollout
    parallel = 1 if plan.rollout is None else engine_ranks(plan.rollout.options, apart or plan.layout.world_size)
    pools = {"models": PlannedPool(plan.layout, config, lcm(plan.layout.tp, 1 if apart else parallel))}
    if apart:
        pools["engines"] = PlannedPool(Layout(dp=apart), config, parallel)
    if plan.reward is not None and not isinstance(plan.reward, ModelReward):
        without_device = replace(config, gpus=0.0, timeout_s=config.reward_timeout_s)
        scorers = Layout(dp=config.reward_processes)
        pools["scorers"] = PlannedPool(scorers, without_device, device=torch.device("cpu"))
    return pools


def _config(options: dict[str, Any]) -> RayConfig:
    """Raises `InvalidConfig` for an unknown option."""
    unknown = sorted(options.keys() - {field.name for field in fields(RayConfig)})
    if unknown:
        raise InvalidConfig(f"on='ray' has no options {unknown}: it has {[field.name for field in fields(RayConfig)]}")
    return RayConfig(**options)


def _num_devices(processes: int, gpus: float) -> int:
    """GPUs of ``processes`` with ``gpus`` each (several may share one), or the number of processes if they have none.

    >>> _num_devices(4, 1.0), _num_devices(4, 0.5), _num_devices(4, 0.0)
    (4, 2, 4)
    """
    return ceil(processes * gpus) if 0 < gpus < 1 else processes


Pools = dict[str, RayPool]
"""The pools of `planned_pools`, started."""


def _start_pools(plan: LaunchPlan, config: RayConfig, stack: ExitStack) -> Pools:
    """Starts all processes at once, and waits for them."""
    blobs, pools = StepBlobs(), Pools()
    for name, planned in planned_pools(plan, config).items():
        pools[name] = RayPool(planned, blobs)
        stack.enter_context(ending(pools[name].close))
    for pool in pools.values():
        pool.connect()
    return pools


def _engine_apart(actor: ModelConfig, config: RolloutConfig, host: Host) -> RolloutWorker:
    """An engine with devices of its own, which gets the actor's weights through the channel."""

    def receive(dtype: torch.dtype) -> Any:
        return host.receive_weights()

    return RolloutWorker(config, receive, host.ranks, shares_device=False, lora=lora_streams(actor, receive, receive))


def _weight_transfer(pools: Pools, rollout: RayGroup) -> Callable[[], None]:
    """A function that sends separate engines the actor's weights at the end of a step; they get them now for the first time."""
    if "engines" not in pools:
        return lambda: None  # these engines read the actor's weights before they next generate
    pools["models"].open_channel(pools["engines"])
    dtype = rollout.weights_dtype()

    def transfer_weights() -> None:
        pools["models"].transfer_weights("actor", rollout, dtype, rollout.wanted_streams())

    transfer_weights()
    return transfer_weights
