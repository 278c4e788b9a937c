"""Runs verl's own code twice, on verl's `DataProto` and on this project's in its place, and compares the results exactly.

    PYTHONPATH=PLACE_OF_VERL python scripts/verl_dropin.py [CHECK ...]

verl 0.9.1 must be importable there. What differs on purpose (docs/dataproto.md, "Differences from verl") is compared with what is
written here for each side. A call through verl's TransferQueue is left out, and named, where that package is not installed.
Ends with 1 where a result is not as expected.
"""

import argparse
import asyncio
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
CHECKS: dict[str, Callable[[], Any]] = {}
EXPECTED: dict[str, dict[str, Any]] = {}  # of checks that differ on purpose, by side


def use_dataproto() -> None:
    """The drop-in: in every process, before verl is imported."""
    import sys

    import dataproto.protocol

    sys.modules["verl.protocol"] = dataproto.protocol


def plain(value: Any) -> Any:
    """Batches, tables and arrays as values that do not depend on the class: they are compared with their dtypes and shapes."""
    if all(hasattr(value, name) for name in ("batch", "non_tensor_batch", "meta_info")):
        tensors = {} if value.batch is None else {name: value.batch[name] for name in sorted(value.batch.keys())}
        return "batch", plain(tensors), plain(dict(sorted(value.non_tensor_batch.items()))), plain(value.meta_info)
    if hasattr(value, "batch_size"):
        return "table", list(value.batch_size), {name: plain(value[name]) for name in sorted(value.keys())}
    if isinstance(value, torch.Tensor):
        return ["nested", *value.unbind()] if value.is_nested else value
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "LinkedList":
        return [plain(each) for each in value]
    return value


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def differs(verl: Any, dataproto: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A check whose results are these."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        EXPECTED[function.__name__] = {"verl": plain(verl), "dataproto": plain(dataproto)}
        return check(function)

    return add


def rollouts(rows: int = 8) -> Any:
    """Columns as verl's trainer has them before the advantages, from a fixed seed."""
    from verl import DataProto

    draw = torch.Generator().manual_seed(7)
    mask = (torch.arange(6) < torch.tensor([3, 6, 1, 4, 5, 2, 6, 3]).repeat(rows // 8 + 1)[:rows, None]).long()
    prompt_mask = (torch.arange(4) >= torch.tensor([0, 2, 1, 3]).repeat(rows // 4 + 1)[:rows, None]).long()
    scores = torch.zeros(rows, 6).scatter(1, mask.sum(1, keepdim=True) - 1, torch.rand(rows, 1, generator=draw))
    tensors = {
        "prompts": torch.randint(5, 90, (rows, 4), generator=draw) * prompt_mask,
        "responses": torch.randint(5, 90, (rows, 6), generator=draw) * mask,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        **{
            name: -torch.rand(rows, 6, generator=draw)
            for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "entropys")
        },
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    tensors["reward_baselines"] = torch.rand(rows, generator=draw)
    rewards = [{"style": "rule", "ground_truth": str(row)} for row in range(rows)]
    arrays = {
        "uid": np.array([f"p{row // 2}" for row in range(rows)], dtype=object),
        "data_source": np.array(["geo3k"] * rows, dtype=object),
        "reward_model": np.array(rewards, dtype=object),
        "extra_info": np.array([{"index": row} for row in range(rows)], dtype=object),
    }
    return DataProto.from_dict(tensors, arrays, {"temperature": 1.0, "global_token_num": [1] * rows})


class Letters:
    """What a reward manager asks of a tokenizer."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(each)) for each in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


def score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> dict[str, float]:
    return {"score": len(solution_str) / 10 + int(ground_truth), "acc": float(len(solution_str) % 2)}


def plain_score(*args: Any, **kwargs: Any) -> float:
    return 0.5


# The trainer's functions


@check
def advantages() -> Any:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    names = ("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "gpg")
    made = {}
    for name in (*names, "grpo_passk", "rloo_vectorized", "grpo_vectorized"):
        data = rollouts()
        if name != "remax":  # others do not take baselines
            data.pop(["reward_baselines"])
        data = compute_advantage(data, name, gamma=0.9, lam=0.8, config=AlgoConfig(adv_estimator=name))
        made[name] = data.select(["advantages", "returns"])
    return made


@check
def pf_ppo_resampling() -> Any:
    from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

    torch.manual_seed(3)
    return [compute_pf_ppo_reweight_data(rollouts(), method) for method in ("pow", "max_min", "max_random")]


@check
def kl_penalty() -> Any:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    return [
        apply_kl_penalty(rollouts(), core_algos.FixedKLController(0.1), kind) for kind in ("kl", "abs", "mse", "k3")
    ]


@check
def metrics() -> Any:
    from verl.trainer.ppo import metric_utils
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.utils.debug.metrics import calculate_debug_metrics

    data = compute_advantage(rollouts(), "grpo")
    times = {"gen": 2.0, "update_actor": 1.0, "step": 4.0}
    return [
        metric_utils.compute_data_metrics(data, use_critic=True),
        metric_utils.compute_timing_metrics(data, times),
        metric_utils.compute_throughout_metrics(data, times, n_gpus=2),
        metric_utils.compute_variance_proxy_metrics(data, gradient_norm=1.5),
        calculate_debug_metrics(data),
    ]


@check
def balancing() -> Any:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    made = []
    for keep in (False, True):
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor={"ppo_mini_batch_size": 4}))
        trainer = SimpleNamespace(config=config, actor_rollout_wg=None, _get_dp_size=lambda *_: 2)
        data, facts = rollouts(), {}
        RayPPOTrainer._balance_batch(trainer, data, facts, keep_minibatch=keep)
        made += [data, facts]
    return made


@check
def dynamic_batches() -> Any:
    from verl.utils.seqlen_balancing import prepare_dynamic_batch, restore_dynamic_batch

    parts, index = prepare_dynamic_batch(rollouts(), max_token_len=20)
    return parts, index, restore_dynamic_batch(torch.cat([part.batch["old_log_probs"] for part in parts]), index)


@check
def rollout_correction() -> Any:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    configs = [RolloutCorrectionConfig.decoupled_token_is(), RolloutCorrectionConfig.decoupled_geo_rs()]
    return [compute_rollout_correction_and_add_to_batch(rollouts(), config) for config in configs]


@check
def padding_free_and_back() -> Any:
    """What `_compute_old_log_prob` and its like do around a worker's call."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    flat = left_right_2_no_padding(rollouts().to_tensordict())
    ids = tu.get(flat, "input_ids")
    log_probs = torch.nested.nested_tensor_from_jagged(ids.values().float() / 10, ids.offsets())
    padded = no_padding_2_padding(log_probs, flat)
    return DataProto.from_tensordict(tu.get_tensordict({"old_log_probs": padded.float()}, {"step": 3}))


@check
def reward_managers() -> Any:
    from verl.workers.reward_manager import (
        BatchRewardManager,
        DAPORewardManager,
        NaiveRewardManager,
        PrimeRewardManager,
    )

    def scores(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
        return [score(None, text, truth) for text, truth in zip(solution_strs, ground_truths)]

    managers = [
        NaiveRewardManager(Letters(), 0, score),
        DAPORewardManager(SimpleNamespace(decode=Letters().decode, eos_token="."), 0, score),
        BatchRewardManager(Letters(), 0, scores),
        PrimeRewardManager(Letters(), 0, plain_score),
    ]
    return [manager(rollouts(), return_dict=True) for manager in managers]


@check
def reward_loop_managers() -> Any:
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    async def run() -> Any:
        settings = SimpleNamespace(reward=SimpleNamespace(get=lambda *_: {}))
        naive = NaiveRewardManager(settings, Letters(), score)
        single = [await naive.run_single(rollouts()[row : row + 1]) for row in range(8)]
        return single, naive.assemble_rm_scores(rollouts(), [0.5 * row for row in range(8)]), DAPORewardManager.__name__

    return asyncio.run(run())


@check
def asynchronous_assembly() -> Any:
    """`fully_async_policy` puts lists among the arrays."""
    from verl import DataProto
    from verl.experimental.fully_async_policy.detach_utils import addition_process

    parts = rollouts().chunk(2)
    for number, part in enumerate(parts):
        part.meta_info = {"metrics": [{"generate_sequences": 1.0 + number, "tool_calls": row} for row in range(4)]}
    return DataProto.concat([addition_process(part) for part in parts])


@check
def naive_rollout() -> Any:
    from verl.workers.rollout.naive.naive_rollout import NaiveRollout

    torch.manual_seed(0)
    table = torch.nn.Embedding(100, 100)

    class Model(torch.nn.Module):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            return SimpleNamespace(logits=table(input_ids))

    config = SimpleNamespace(response_length=5, temperature=1.0, top_k=20, do_sample=True)
    data = rollouts()
    data.meta_info["eos_token_id"] = [2]
    rollout = SimpleNamespace(
        module=Model(), config=config
    )  # verl's own class cannot be built: it lacks methods of its base
    return NaiveRollout.generate_sequences(rollout, data)


@check
def skipped_rollouts() -> Any:
    """Saved by verl's `RolloutSkip`, and loaded again."""
    from omegaconf import OmegaConf
    from verl.utils.skip.rollout_skip import RolloutSkip

    with tempfile.TemporaryDirectory() as place:
        everything = OmegaConf.create({"trainer": {}, "data": {"train_batch_size": 8}})
        local = OmegaConf.create({"dump_dir": place, "action": "cache", "steps": [1], "enable": True})
        skip = RolloutSkip(local, everything)
        skip.prepare_data(1, rollouts())
        return skip.meet_precondition(1, None), skip.warp_function(1, None)


@check
def sequence_parallel_sharding() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from verl.plugin.platform import get_platform
    from verl.utils.ulysses import FSDPUlyssesShardingManager

    get_platform().current_device = lambda: "cpu"  # verl gathers on an accelerator only
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        manager = FSDPUlyssesShardingManager(init_device_mesh("cpu", (1,), mesh_dim_names=("sp",)))
        with manager:
            gathered = manager.preprocess_data(rollouts())
            return manager.postprocess_data(gathered)
    finally:
        dist.destroy_process_group()


@check
def iterating() -> Any:
    made = [list(rollouts().make_iterator(4, 2, seed=1, dataloader_kwargs={"shuffle": True}))]
    made.append(list(rollouts().make_iterator(2, 2, seed=1)))
    return [[each.select(non_tensor_batch_keys=["uid"]) for each in parts] for parts in made]


# Dispatch


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
        return _calls_of_a_worker_group()
    finally:
        ray.shutdown()


def _calls_of_a_worker_group() -> Any:
    import ray
    from verl.protocol import DataProto, DataProtoFuture
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

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

    def batch(rows: int, **options: Any) -> Any:
        columns = {"x": torch.arange(rows, dtype=torch.float32)}
        return DataProto.from_dict(columns, {"uid": np.array(list(map(str, range(rows))), dtype=object)}, **options)

    def words(self: Any, data: Any) -> Any:
        return DataProto.from_dict(non_tensors={"word": [f"{uid}!" for uid in data.non_tensor_batch["uid"]]})

    made: dict[str, Any] = {}
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Adder)), device_name="cpu")
    made["add"] = group.add(batch(4))
    made["padded"] = [group.add(batch(rows, auto_padding=True)) for rows in (5, 1, 2)]
    made["padded by name"] = group.add(data=batch(3, auto_padding=True))
    future = group.add_later(batch(4))
    made["future"] = [type(future) is DataProtoFuture, future.get(), future.chunk(2)[1].get()]
    made["future as argument"] = group.add(group.add_later(batch(4)))
    made["future by mesh"] = group.by_mesh(group.by_mesh_later(batch(6)))
    try:
        group.fail_later(batch(4)).get()
    except Exception as error:  # what a worker raised
        made["error"] = isinstance(error, ValueError), "row 3 is wrong" in str(error)
    made["metric"] = group.count(batch(4))
    made["one to all"] = group.tell(batch(4))
    made["by hand"] = group.by_hand(batch(4).chunk(2))
    made["with function"] = group.execute_with_func_generator(words, batch(4))
    made["by mesh"] = group.by_mesh(batch(4))
    made["by mesh, tensordict"] = group.by_mesh(batch(4).to_tensordict())
    made["future of tensordict"] = group.by_mesh_later(batch(4).to_tensordict()).get()
    made["by same rows"] = group.by_same_rows(batch(3))
    made["written by all"] = group.write_same_rows(batch(100_000)).batch["x"].sum().item()
    made["refused"] = _kind_of_error(lambda: group.add(batch(3)))
    if find_spec("transfer_queue"):
        made["queue"] = _through_the_queue(group, batch)
    return made


def _through_the_queue(group: Any, batch: Any) -> Any:
    """A call whose rows travel through verl's TransferQueue: dispatch sees handles only."""
    import transfer_queue
    from verl.protocol import BatchData

    transfer_queue.init()
    try:
        columns = batch(4).select(["x"]).batch
        meta = transfer_queue.kv_batch_put(keys=list("abcd"), partition_id="train", fields=columns)
        known = BatchData(meta).is_chunkable(), BatchData([meta]).is_concatable()
        done = group.by_mesh(meta)
        return known, type(done).__name__, list(done.keys), transfer_queue.kv_batch_get_by_meta(done)
    finally:
        transfer_queue.close()


def _kind_of_error(call: Callable[[], Any]) -> Any:
    try:
        call()
    except AssertionError:
        return "AssertionError"
    return "none"


# Differences on purpose: rows of the table in docs/dataproto.md


def small(**facts: Any) -> Any:
    from verl import DataProto

    return DataProto.from_dict({"x": torch.arange(4)}, {"uid": np.array(list("abcd"), dtype=object)}, facts)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the word "refused"."""
    try:
        return call()
    except Exception:
        return "refused"


def taken_or_refused(call: Callable[[], Any]) -> str:
    made = outcome(call)
    return "refused" if isinstance(made, str) and made == "refused" else "taken"


@differs(verl=[True] * 4, dataproto=[False] * 4)
def one_dict_of_facts() -> Any:
    data = small(step=1)
    made = [data[0], data[1:], data.repeat(2), data.chunk(2)[0]]
    return [each.meta_info is data.meta_info for each in made]


@differs(verl=[True, True], dataproto=[False, False])
def selection_shares_its_containers() -> Any:
    data = small()
    chosen = data.select()
    chosen.batch["y"] = torch.zeros(4)
    chosen.non_tensor_batch["z"] = np.zeros(4)
    return ["y" in data.batch, "z" in data.non_tensor_batch]


@differs(verl=["ndarray", True, (2, 2), [2, 2]], dataproto=["list", False, (4,), [2]])
def arguments_are_written() -> Any:
    from verl.protocol import DataProto, fold_batch_dim, unfold_batch_dim

    arrays, facts = {"uid": ["a"]}, {}
    DataProto.from_dict({"x": torch.zeros(1)}, arrays, facts, auto_padding=True)
    data, folded = small(), DataProto.from_dict({"x": torch.zeros(2, 2)})
    fold_batch_dim(data, 2)
    unfold_batch_dim(folded)
    return [type(arrays["uid"]).__name__, bool(facts), data.non_tensor_batch["uid"].shape, folded.batch.batch_size]


@differs(verl=[False, "object"], dataproto=[True, "int64"])
def mini_batches_in_order_are_views() -> Any:
    data = small()
    data.non_tensor_batch["n"] = np.arange(4)
    first = next(data.make_iterator(2, 1))
    return [first.batch["x"].data_ptr() == data.batch["x"].data_ptr(), str(first.non_tensor_batch["n"].dtype)]


@differs(verl=[(2, 1), (2, 3), (2, 1)], dataproto=[(2,), (2,), (2,)])
def lists_of_equal_length() -> Any:
    from verl.protocol import DataProto, collate_fn

    message = [{"role": "user", "content": "?"}]
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"messages": [message, message], "t": [np.zeros(3), np.ones(3)]})
    one = np.empty(2, dtype=object)
    one[:] = [message] * 2
    items = DataProto.from_dict({"x": torch.zeros(2)}, {"messages": one})
    collated = collate_fn([items[0], items[1]])
    arrays = [*data.non_tensor_batch.values(), collated.non_tensor_batch["messages"]]
    return [array.shape for array in arrays]


@differs(verl={"loss": [1.0, 1.0]}, dataproto={"loss": 1.0})
def padding_merges_metrics() -> Any:
    from verl.protocol import pad_dataproto_to_divisor

    return pad_dataproto_to_divisor(small(metrics={"loss": 1.0}), 3)[0].meta_info["metrics"]


@differs(verl=["refused", "refused", False], dataproto=["taken", "taken", True])
def equality_in_union() -> Any:
    from verl import DataProto

    nan = [DataProto.from_dict({"x": torch.tensor([float("nan")])}) for _ in range(2)]
    objects = [DataProto.from_dict({"x": torch.zeros(1)}, {"o": np.array([{"t": torch.ones(2)}])}) for _ in range(2)]
    left, right = small(), small()
    array = left.non_tensor_batch["uid"]
    left.union(right)
    made = [taken_or_refused(partial(two[0].union, two[1])) for two in (nan, objects)]
    return [*made, left.non_tensor_batch["uid"] is array]


@differs(verl=["refused", "refused"], dataproto=[{"gen": 2.0}, {"a": [1], "b": [2]}])
def facts_in_concat() -> Any:
    from verl import DataProto

    times = [small(timing={"gen": seconds}) for seconds in (1.0, 2.0)]
    names = [small(metrics={"a": 1}), small(metrics={"b": 2})]
    return [
        outcome(lambda: DataProto.concat(times).meta_info["timing"]),
        outcome(lambda: DataProto.concat(names).meta_info["metrics"]),
    ]


@differs(verl=["batch", "nested"], dataproto=["non_tensor_batch", "ragged"])
def nested_tensors_in_a_tensordict() -> Any:
    from tensordict import TensorDict
    from verl import DataProto

    nested = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    data = DataProto.from_tensordict(TensorDict({"r": nested, "x": torch.zeros(2)}, batch_size=[2]))
    inside = "r" in data.batch
    return ["batch" if inside else "non_tensor_batch", "nested" if inside and data.batch["r"].is_nested else "ragged"]


@differs(verl=True, dataproto=False)
def deepcopy_keeps_tensors() -> Any:
    data = small()
    return data.select(deepcopy=True).batch["x"].data_ptr() == data.batch["x"].data_ptr()


@differs(verl=["bytes", True], dataproto=["tuple", False])
def pickles_and_files() -> Any:
    data = small()
    with tempfile.TemporaryDirectory() as place:
        data.save_to_disk(f"{place}/data")
        return [type(data.__getstate__()[0]).__name__, Path(f"{place}/data").read_bytes()[:1] == b"\x80"]


@differs(verl=["refused", "refused"], dataproto=[False, True])
def equality() -> Any:
    return [outcome(lambda: small() == small()), outcome(lambda: hash(small()) is not None)]


@differs(verl=["taken"] * 5, dataproto=["refused"] * 5)
def stricter() -> Any:
    from verl.protocol import DataProto, unpad_dataproto

    calls: list[Callable[[], Any]] = [
        lambda: small()[True],
        lambda: small()[[0.9]],
        lambda: unpad_dataproto(small(), 9),
        lambda: DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]}),
        lambda: small().union(DataProto.from_dict({"uid": torch.zeros(4)})),
    ]
    return [taken_or_refused(call) for call in calls]


@differs(verl=["refused"] * 6, dataproto=["taken"] * 6)
def more_is_accepted() -> Any:
    from verl.protocol import DataProto

    words = DataProto.from_dict(non_tensors={"word": ["a", "b"]})
    uneven = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    calls: list[Callable[[], Any]] = [
        lambda: words.union(DataProto.from_dict(non_tensors={"n": [1, 2]})),
        lambda: words.to_tensordict(),
        lambda: list(words.make_iterator(1, 1)),
        lambda: small().reorder([3, 2, 1, 0]),
        lambda: small().rename("uid", "id"),
        lambda: uneven.chunk(4),
    ]
    return [taken_or_refused(call) for call in calls]


@differs(verl=4, dataproto="mine")
def collect_function_of_a_future() -> Any:
    import ray
    from verl.protocol import DataProtoFuture

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        future = DataProtoFuture(collect_fn=lambda parts: "mine", futures=[ray.put(small())])
        made = future.get()
        return made if isinstance(made, str) else len(made)
    finally:
        ray.shutdown()


# Running and comparing


def run(side: str, names: list[str], output: str) -> None:
    if side == "dataproto":
        use_dataproto()
    results = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = "result", plain(CHECKS[name]())
        except Exception as error:
            import traceback

            results[name] = "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    Path(output).write_bytes(pickle.dumps(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--side", choices=["verl", "dataproto"], help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.checks or list(CHECKS)
    if options.side:
        run(options.side, names, options.output)
        return 0

    from dataproto._ops.equality import same_value

    results = {}
    for side in ("verl", "dataproto"):
        with tempfile.TemporaryDirectory() as place:
            output = f"{place}/results"
            command = [sys.executable, __file__, *names, "--side", side, "--output", output]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_PLUGINS": "none"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr)
                return 1
            results[side] = pickle.loads(Path(output).read_bytes())
    failed = 0
    for name in names:
        (theirs, expected), (ours, found) = results["verl"][name], results["dataproto"][name]
        good = theirs == ours == "result"
        if name in EXPECTED:
            good &= same_value({"verl": expected, "dataproto": found}, EXPECTED[name])
        else:
            good &= same_value(expected, found)
        failed += not good
        print(f"{name:32} {'FAILED' if not good else 'differs as documented' if name in EXPECTED else 'the same'}")
        for side, kind, value in (("verl", theirs, expected), ("dataproto", ours, found)):
            if not good:
                print(f"  {side} {kind}: {value}")
    if not find_spec("transfer_queue"):
        print("left out: TransferQueue is not installed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
