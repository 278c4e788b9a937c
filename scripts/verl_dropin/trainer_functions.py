"""Checks of the functions that verl's trainer, reward managers and rollouts call on a batch."""

import asyncio
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from checks import check
from rollout_batch import Letters, plain_score, rollouts, score


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
