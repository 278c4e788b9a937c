"""Checks of splitting over workers, and of calls of a worker group on Ray."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from checks import ROOT, check, use_dataproto
from rollout_batch import rollouts


@check
def splitting() -> Any:
    from verl.protocol import BatchData
    from verl.single_controller.base import decorator

    data = rollouts()
    nested = torch.nested.as_nested_tensor([torch.arange(row + 1) for row in range(8)], layout=torch.jagged)
    flat = data.select(["responses"], ["uid"]).to_tensordict()
    flat["tokens"] = nested
    uneven = rollouts()[:5]
    uneven.meta_info["_verl_auto_padding"] = True
    return [
        decorator._split_args_kwargs_data_proto(2, data, second=flat),
        decorator._split_args_kwargs_data_proto_with_auto_padding(2, uneven, second=uneven[:6]),
        BatchData(BatchData(flat).chunk(4)).concat(),
        BatchData(BatchData(data).chunk(4)).concat(),
        [BatchData(value).is_chunkable() for value in (data, flat, [1], 3, None)],
        [BatchData(value).is_concatable() for value in ([data], (flat,), [], [1], data)],
    ]


@check
def worker_group() -> Any:
    import ray

    hook = {"worker_process_setup_hook": use_dataproto} if "dataproto.protocol" in sys.modules else {}
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ray.init(
        "local", num_cpus=100, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here, **hook}
    )
    try:
        return _calls_of_a_worker_group(_adder())
    finally:
        ray.shutdown()


def _adder() -> type:
    """A worker with a method for each way of dispatch."""
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register

    class Adder(Worker):
        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)
            self._register_dispatch_collect_info("tensor_parallel", dp_rank=0, is_collect=self.rank == 0)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, data: Any) -> Any:
            import verl

            assert type(data) is verl.DataProto
            data.batch["x"] += self.rank + 1  # in place, as verl's workers do
            return data

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def add_later(self, data: Any) -> Any:
            data.batch["x"] = data.batch["x"] * 10
            return data

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def fail_later(self, data: Any) -> Any:
            raise ValueError("row 3 is wrong")

        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
        def count(self, data: Any) -> Any:
            return len(data), self.rank

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def tell(self, data: Any) -> Any:
            return data.batch["x"].sum().item(), self.rank

        @register(dispatch_mode=Dispatch.DP_COMPUTE)
        def by_hand(self, data: Any) -> Any:
            return data.repeat(2)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def by_mesh(self, data: Any) -> Any:
            return data

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
        def by_mesh_later(self, data: Any) -> Any:
            return data

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("tensor_parallel"))
        def by_same_rows(self, data: Any) -> Any:
            data.meta_info["metrics"] = {"rank": self.rank}
            return data

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("tensor_parallel"))
        def write_same_rows(self, data: Any) -> Any:
            data.batch["x"] += 1  # every rank, into the object of Ray's that all of them were given
            time.sleep(5)
            return data

    return Adder


def _batch(rows: int, **options: Any) -> Any:
    from verl.protocol import DataProto

    columns = {"x": torch.arange(rows, dtype=torch.float32)}
    return DataProto.from_dict(columns, {"uid": np.array(list(map(str, range(rows))), dtype=object)}, **options)


def _calls_of_a_worker_group(worker: type) -> Any:
    import ray
    from verl.protocol import DataProto, DataProtoFuture
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    def words(self: Any, data: Any) -> Any:
        return DataProto.from_dict(non_tensors={"word": [f"{uid}!" for uid in data.non_tensor_batch["uid"]]})

    made: dict[str, Any] = {}
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(worker)), device_name="cpu")
    made["add"] = group.add(_batch(4))
    made["padded"] = [group.add(_batch(rows, auto_padding=True)) for rows in (5, 1, 2)]
    made["padded by name"] = group.add(data=_batch(3, auto_padding=True))
    future = group.add_later(_batch(4))
    made["future"] = [type(future) is DataProtoFuture, future.get(), future.chunk(2)[1].get()]
    made["future as argument"] = group.add(group.add_later(_batch(4)))
    made["future by mesh"] = group.by_mesh(group.by_mesh_later(_batch(6)))
    try:
        group.fail_later(_batch(4)).get()
    except Exception as error:  # what a worker raised
        made["error"] = isinstance(error, ValueError), "row 3 is wrong" in str(error)
    made["metric"] = group.count(_batch(4))
    made["one to all"] = group.tell(_batch(4))
    made["by hand"] = group.by_hand(_batch(4).chunk(2))
    made["with function"] = group.execute_with_func_generator(words, _batch(4))
    made["by mesh"] = group.by_mesh(_batch(4))
    made["by mesh, tensordict"] = group.by_mesh(_batch(4).to_tensordict())
    made["future of tensordict"] = group.by_mesh_later(_batch(4).to_tensordict()).get()
    made["by same rows"] = group.by_same_rows(_batch(3))
    made["written by all"] = group.write_same_rows(_batch(100_000)).batch["x"].sum().item()
    made["refused"] = _kind_of_error(lambda: group.add(_batch(3)))
    return made


def _kind_of_error(call: Callable[[], Any]) -> Any:
    try:
        call()
    except AssertionError:
        return "AssertionError"
    return "none"
