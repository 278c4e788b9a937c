"""Groups of real Ray processes: dispatch of calls, transfer of media, and failures of workers."""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import ray
import torch
from PIL import Image
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from torch import distributed

from dataproto import DataProto
from dataproto.errors import InvalidColumn, InvalidConfig, RankFailure, WorkerFailed
from workers.cluster.host import Host
from workers.cluster.placement import Placement
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import RayGroup, RayHost, StepBlobs, running_ray
from workers.cluster.ray_launcher import PlannedPool, RayPool, share_cores
from workers.ranks.dispatch_modes import dispatch
from workers.ranks.layout import Layout


class Worker:
    """A worker with one method for each behaviour that the tests need."""

    def __init__(self, host: Host) -> None:
        self.host = host

    @dispatch("dp")
    def add(self, data: DataProto, number: int) -> DataProto:
        rows = [self.host.rank] * len(data)
        return DataProto.from_dict({"sum": data["x"] + number}, {"rank": rows}) if len(data) else DataProto()

    @dispatch("all")
    def ranks(self) -> int:
        total = torch.tensor([float(self.host.rank + 1)])
        if distributed.is_initialized():
            distributed.all_reduce(total)
        return int(total)

    @dispatch("all")
    def threads(self) -> int:
        return torch.get_num_threads()

    @dispatch(split=lambda call, parts: [call] * parts, join=list)
    def process(self) -> tuple[int, int]:
        return self.host.rank, os.getpid()

    @dispatch("rank_zero")
    def first(self) -> int:
        return self.host.rank

    @dispatch(split=lambda call, parts: [call._replace(args=(part,)) for part in range(parts)], join=list)
    def own_way(self, part: int) -> int:
        return 10 * part

    @dispatch("dp")
    def same_media(self, data: DataProto) -> DataProto:
        return data.select(non_tensor_batch_keys=["media"])

    @dispatch("dp")
    def sizes(self, data: DataProto) -> DataProto:
        pixels = [image.getpixel((0, 0)) for image in data["media"]]
        return DataProto.from_dict(non_tensors={"pixel": np.array(pixels, dtype=object)})

    @dispatch("dp")
    def refuse(self, data: DataProto) -> DataProto:
        if self.host.rank == 1:
            raise InvalidColumn("row 0: not this one")
        return data

    @dispatch("all")
    def fail(self) -> None:
        if self.host.rank == 1:
            raise OverflowError("too much")
        distributed.barrier()

    @dispatch("all")
    def fail_alike(self) -> None:
        raise OverflowError("too much")

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(2**26, dtype=torch.uint8)  # more than a socket buffers

    @dispatch("all")
    def refresh(self) -> None:
        raise OverflowError("no room for weights")

    @dispatch("dp")
    def return_answer(self, data: DataProto, answers: list[object]) -> object:
        answer = answers[self.host.rank]
        return numbers_of(answer) if isinstance(answer, int) else answer

    @dispatch("rank_zero")
    def listens_on(self) -> list[str]:
        """Addresses on which this process listens, in the notation of the kernel."""
        mine = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)}
        tables = [Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:] for kind in ("tcp", "tcp6")]
        sockets = [line.split() for table in tables for line in table]
        return [cells[1].split(":")[0] for cells in sockets if cells[3] == "0A" and f"socket:[{cells[9]}]" in mine]

    @dispatch("dp")
    def die(self, data: DataProto) -> DataProto:
        if self.host.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    @dispatch("all")
    def hang(self) -> None:
        if self.host.rank == 1:
            time.sleep(1000)


class WhereCUDAIs(RayHost):
    """As on a machine with GPUs."""

    def __init__(self, device: torch.device | None) -> None:
        with patch("torch.cuda.is_available", lambda: True):
            super().__init__(None, device)

    def device_name(self) -> str:
        return str(self.device)


class Hanging(Worker):
    """Never finishes `refresh`."""

    @dispatch("all")
    def refresh(self) -> None:
        time.sleep(1000)


def numbers_of(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes cannot import a test
    with running_ray(RayConfig(object_store_gib=0.2), processes=3):
        yield


@pytest.mark.parametrize(
    "late", [{"env_vars": {"NAME": "1"}}, {"pip": ("six",)}, {"working_dir": "/"}, {"show_logs": True}]
)
def test_what_only_a_start_of_ray_can_set_is_refused_afterwards(late):
    message = f"ray: {next(iter(late))} cannot be set since Ray already runs"
    with pytest.raises(InvalidConfig, match=message), running_ray(RayConfig(**late), processes=1):
        pass
    with running_ray(RayConfig(timeout_s=3.0), processes=1):
        assert ray.is_initialized()


def start(layout: Layout | None = None, kind: type[Worker] = Worker, **options: float) -> RayGroup:
    pool = RayPool(PlannedPool(layout or Layout(dp=2), RayConfig(**options)), StepBlobs())
    pool.connect()
    return pool.build("worker", kind)


@pytest.mark.parametrize(("device", "name"), [(torch.device("cpu"), "cpu"), (None, "cuda:0")])
def test_a_process_takes_a_gpu_that_ray_shows_unless_it_is_told_otherwise(device, name):
    host = ray.remote(num_cpus=0)(WhereCUDAIs).remote(device)
    assert ray.get(host.device_name.remote()) == name
    ray.kill(host)


BUNDLES: list[Placement] = []  # of the processes of `group`, in the order of Ray's bundles


@pytest.fixture(scope="module")
def group() -> Iterator[RayGroup]:
    """Two ranks, in the reverse order of Ray's bundles."""
    with patch("workers.cluster.ray_launcher.rank_order", lambda places: BUNDLES.extend(places) or [1, 0]):
        made = start()
    yield made
    made._pool.close()


@pytest.fixture(scope="module")
def one() -> Iterator[RayGroup]:
    """One process, which `test_an_engine_that_fails_to_receive_weights_is_named_and_ends_the_transfer` ends."""
    made = start(Layout(), timeout_s=3000.0)
    yield made
    made._pool.close()


def numbers(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


@pytest.mark.parametrize("rows", [5, 2, 1])
def test_rows_are_split_and_joined_in_order(group, rows):
    found = group.add(numbers(rows), number=10)
    assert found["sum"].tolist() == list(range(10, 10 + rows))
    assert found["rank"].tolist() == sorted(found["rank"].tolist())
    assert len(set(found["rank"].tolist())) == min(rows, 2)


def test_modes_reach_the_ranks_they_name(group):
    assert group.ranks() == 3
    assert group.first() == 0
    assert group.own_way() == [0, 10]
    with pytest.raises(InvalidConfig, match=r"no method 'nothing'"):
        group.nothing()


def test_futures_overlap_and_keep_what_came(group):
    futures = [group.submit("add", numbers(3), 1), group.submit("ranks")]
    assert futures[1].result() == 3
    assert futures[0].result()["sum"].tolist() == [1, 2, 3]
    assert futures[0].done()
    assert futures[0].exception() is None


def test_a_refused_batch_keeps_its_error_and_the_group_goes_on(group):
    with pytest.raises(InvalidColumn, match="row 0: not this one") as caught:
        group.refuse(numbers(5))
    notes = "\n".join(caught.value.__notes__)
    assert "worker.refuse at rank 1 on " in notes
    assert "rows 2 to 4" in notes
    assert "raise InvalidColumn" in notes  # the worker's own traceback
    assert group.ranks() == 3


def test_after_the_same_failure_on_all_ranks_queued_calls_are_refused_and_the_group_stays_usable(group):
    failing, behind = group.submit("fail_alike"), group.submit("ranks")
    with pytest.raises(WorkerFailed, match=r"(?s)rank 0 on .*OverflowError: too much\n.*in fail_alike"):
        failing.result()
    with pytest.raises(RankFailure, match=r"refused worker.ranks after its failure in worker.fail_alike"):
        behind.result()
    assert group.ranks() == 3


def test_media_are_put_once_a_step_and_come_back_by_reference(group, monkeypatch):
    put, plain_put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: put.append(getattr(value, "nbytes", 0)) or plain_put(value))
    images = [Image.new("RGB", (200, 200), (number, 0, 0)) for number in range(4)]
    data = DataProto.from_dict(non_tensors={"media": np.array([*images, None], dtype=object)[:4]})
    back = group.same_media(data)
    found = group.sizes(back.repeat(3))
    assert [pixel[0] for pixel in found["pixel"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sum(size >= 200 * 200 * 3 for size in put) == 4
    group._pool.blobs.renew()
    group.sizes(data)
    assert sum(size >= 200 * 200 * 3 for size in put) == 8


def test_media_that_were_sent_ahead_are_not_put_again_by_the_next_step(group, monkeypatch):
    put, plain_put, blobs = [], ray.put, group._pool.blobs
    monkeypatch.setattr(ray, "put", lambda value: put.append(getattr(value, "nbytes", 0)) or plain_put(value))

    def of_step(number: int) -> DataProto:
        images = [Image.new("RGB", (200, 200), (number, place, 0)) for place in range(4)]
        return DataProto.from_dict(non_tensors={"media": np.array([*images, None], dtype=object)[:4]})

    def puts() -> int:
        found = sum(size >= 200 * 200 * 3 for size in put)
        put.clear()
        return found

    first, second = of_step(1), of_step(2)
    blobs.renew()
    group.sizes(first)
    assert puts() == 4
    thread = threading.Thread(target=blobs.send_ahead, args=(second,))
    thread.start()
    thread.join()
    assert puts() == 4
    group.sizes(first)
    assert puts() == 0  # of the step that runs
    blobs.renew()
    second["media"][3].putpixel((0, 0), (9, 9, 9))
    assert [pixel[0] for pixel in group.sizes(second)["pixel"]] == [2, 2, 2, 9]
    assert puts() == 1
    blobs.renew()
    group.sizes(second)
    assert puts() == 4
    with monkeypatch.context() as ended:  # a put would start another Ray
        ended.setattr(ray, "is_initialized", lambda: False)
        blobs.send_ahead(of_step(3))
    assert puts() == 0
    monkeypatch.setattr(blobs, "_limit", 7 * 200 * 200 * 3)  # without room for two steps
    blobs.send_ahead(of_step(3))
    assert puts() == 0


def test_a_step_that_ends_waits_for_the_media_that_are_being_sent(group, monkeypatch):
    """They were put once more by the next step, and those of the thread were kept for a step that did not need them."""
    images = [Image.new("RGB", (200, 200), (7, place, 0)) for place in range(4)]
    data = DataProto.from_dict(non_tensors={"media": np.array([*images, None], dtype=object)[:4]})
    put, plain_put, begun, go_on, blobs = [], ray.put, threading.Event(), threading.Event(), group._pool.blobs

    def slow_put(value):
        put.append(getattr(value, "nbytes", 0))
        if value is data:
            begun.set()
            go_on.wait(60)
        return plain_put(value)

    monkeypatch.setattr(ray, "put", slow_put)
    thread = threading.Thread(target=blobs.send_ahead, args=(data,))
    thread.start()
    assert begun.wait(60)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    blobs.renew()
    assert [pixel[0] for pixel in group.sizes(data)["pixel"]] == [7] * 4
    thread.join()
    timer.join()
    assert sum(size >= 200 * 200 * 3 for size in put) == 4
    assert blobs._ahead is None


def stored_bytes() -> int:
    """What the object store holds now."""
    address = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(address).store_stats.object_store_bytes_used)


def test_the_store_frees_the_media_of_a_step_that_ended(group):
    """Ray keeps what a reference refers to for ever if it is pickled where Ray does not see it."""
    size = 400 * 400 * 4
    for number in range(6):
        images = [Image.new("RGB", (400, 400), (number, place, 0)) for place in range(4)]
        data = DataProto.from_dict(non_tensors={"media": np.array([*images, None], dtype=object)[:4]})
        if number % 2:
            thread = threading.Thread(target=group._pool.blobs.send_ahead, args=(data,))
            thread.start()
            thread.join()
            group._pool.blobs.renew()
        assert len(group.sizes(group.same_media(data))) == 4
        group._pool.blobs.renew()
    deadline = time.monotonic() + 20
    while stored_bytes() >= 4 * size and time.monotonic() < deadline:  # Ray frees in the background
        time.sleep(0.05)
    assert stored_bytes() < 4 * size  # of one step, of six


def test_media_are_released_above_the_limit_if_a_step_never_ends(group, monkeypatch):
    """A program that trains step by step sends new images with every call and never ends a step."""
    blobs, size = StepBlobs(3 * 200 * 200 * 3), 200 * 200 * 3
    monkeypatch.setattr(group._pool, "blobs", blobs)
    kept = []
    for number in range(12):
        image = Image.new("RGB", (200, 200), (number, 0, 0))
        media = np.array([image, None], dtype=object)[:1]
        kept.append(weakref.ref(image))
        del image
        assert group.sizes(DataProto.from_dict(non_tensors={"media": media}))["pixel"][0][0] == number
    del media
    assert blobs._store.num_bytes <= 4 * size
    assert sum(each() is not None for each in kept) <= 4


@pytest.mark.parametrize(
    ("layout", "answering"), [(Layout(tp=2), 0), pytest.param(Layout(pp=2), 1, marks=pytest.mark.long)]
)
def test_ranks_of_one_data_parallel_position_get_the_same_rows_and_one_that_hangs_is_named(layout, answering):
    """The first rank that shares the rows, in the last pipeline stage, returns the result."""
    group = start(layout, timeout_s=300.0)  # long enough for two processes on a busy machine
    found = group.add(numbers(3), 0)
    assert found["sum"].tolist() == [0, 1, 2]
    assert found["rank"].tolist() == [answering] * 3
    assert group.first() == 0
    object.__setattr__(group._pool.config, "timeout_s", 5.0)
    with pytest.raises(WorkerFailed, match=r"within 5 s: rank 1 on .* did not finish 'worker.hang'"):
        group.hang()


def test_processes_get_the_ranks_of_their_placements(group):
    ranks, processes = zip(*group.process())
    assert ranks == (0, 1)
    assert group._pool.placements == BUNDLES[::-1]
    for place, process in zip(group._pool.placements, processes, strict=True):
        assert place.name.endswith(f"(process {process})")


def test_processes_share_the_cores_of_their_node(group, one, monkeypatch):
    """Ray's default is one thread for each process, too few for AdamW under ``offload``."""
    cores = len(os.sched_getaffinity(0))
    given = one.threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_cores([one])
    assert one.threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    with monkeypatch.context() as patched:
        patched.setattr(one._pool, "config", RayConfig(env_vars={"OMP_NUM_THREADS": "4"}))
        share_cores([one, group])
        assert one.threads() == given
    share_cores([one])
    assert one.threads() == cores
    share_cores([one, group, group])
    assert one.threads() == group.threads() == max(1, cores // 3)


@pytest.mark.long
def test_a_rank_that_raises_while_others_wait_ends_the_group():
    group = start()
    with pytest.raises(WorkerFailed, match=r"(?s)rank 1 on .*OverflowError: too much"):
        group.fail()
    group._pool.close()


def test_an_engine_that_fails_to_receive_weights_is_named_and_ends_the_transfer(one):
    sender, receiver = one, start(Layout(), timeout_s=3000.0)
    sender._pool.open_channel(receiver._pool)
    with pytest.raises(WorkerFailed, match=r"worker.refresh.*OverflowError: no room for weights"):
        sender._pool.transfer_weights("worker", receiver, torch.float32, ("named_weights",))
    for group in (sender, receiver):
        with pytest.raises(WorkerFailed, match=r"the worker processes have ended: .*no room for weights"):
            group.ranks()


@pytest.mark.long
def test_an_engine_that_hangs_while_receiving_weights_is_named_instead_of_the_sender():
    sender, receiver = start(Layout(), timeout_s=100.0), start(Layout(), kind=Hanging, timeout_s=100.0)
    object.__setattr__(sender._pool.config, "timeout_s", 2.0)  # of the channel: the sender gives up first
    sender._pool.open_channel(receiver._pool)
    object.__setattr__(sender._pool.config, "timeout_s", 4.0)
    with pytest.raises(WorkerFailed, match=r"rank 0 on .* did not finish .*'worker.refresh'"):
        sender._pool.transfer_weights("worker", receiver, torch.float32, ("named_weights",))
    for group in (sender, receiver):
        with pytest.raises(WorkerFailed, match="the worker processes have ended"):
            group.ranks()


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([3, 1], r"rank 1 on .*, rows 3 to 5 returned 1 rows for the 3 it was given"),
        ([2, 4], r"rank 0 on .*, rows 0 to 2 returned 2 rows for the 3 it was given"),
        ([0, 0], r"rank 0 on .* returned 0 rows"),
        ([None, 3], r"rank 0 on .* returned a NoneType instead of a batch"),
        ([3, "text"], r"rank 1 on .*, rows 3 to 5 returned a str instead of a batch"),
    ],
)
def test_a_rank_with_an_invalid_result_is_named(group, answers, wrong):
    with pytest.raises(WorkerFailed, match=f"worker.return_answer failed: {wrong}"):
        group.return_answer(numbers(6), answers)
    assert len(group.return_answer(numbers(6), [6, 6])) == 12  # two samples of each
    assert group.return_answer(numbers(6), ["a", "b"]) == "a"


def test_ranks_listen_on_this_machine_only(group):
    here = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(group.listens_on()) <= here  # 127.0.0.1, ::1 and ::ffff:127.0.0.1


def test_processes_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("workers.cluster.ray_group.PLACEMENT_TIMEOUT_S", 1)
    with pytest.raises(InvalidConfig, match="do not fit the cluster"):
        start(cpus=100)


def test_a_rank_that_dies_is_named(group):
    """The last test, since it ends the group of the others."""
    with pytest.raises(WorkerFailed, match=r"rank 1 on .*, rows 2 to 4 died in 'worker.die'"):
        group.die(numbers(5))
    with pytest.raises(WorkerFailed, match="the worker processes have ended"):
        group.ranks()
