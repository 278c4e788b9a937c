"""Two training ranks, sharded by FSDP or stages of a pipeline, that run one vLLM together."""

import multiprocessing
import os
import socket
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.engine_weights import differing_of_worker
from helpers.checkpoints import write_checkpoint
from helpers.engines import GREEDY, ROWS, SAMPLED
from helpers.turns import observed_turn
from rollout.engine import SamplingParams
from rollout.engine_ranks import drive
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests
from workers.ranks.layout import Layout
from workers.ranks.mesh import init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker, lora_streams

pytestmark = [pytest.mark.vllm, pytest.mark.long]

CPU = torch.device("cpu")
SIZE = 2
TURNS = SamplingParams(temperature=0.8, max_tokens=8, seed=1)
LAYOUTS = {
    "fsdp": Layout(dp=SIZE),
    "pipeline": Layout(pp=SIZE),
    "experts": Layout(dp=SIZE),
    "adapters": Layout(dp=SIZE),
}
TYPES = {"fsdp": "qwen2_5_vl", "pipeline": "qwen2_5_vl", "experts": "kimi_k25", "adapters": "qwen2_5_vl"}


def prompts_of(builder):
    return builder([{**row, "uid": f"prompt {number}"} for number, row in enumerate(ROWS)])


def rows_of(case, rank):
    """Of dp positions, the first comes with one prompt and the second with the others; both stages come with all."""
    return slice(None) if case == "pipeline" else [slice(0, 1), slice(1, None)][rank]


def work(rank, case, port, path, results):
    """The engine's weights change once."""
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(SIZE)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=SIZE)
        ranks = init_ranks(LAYOUTS[case], CPU)
        lora_rank = 3 if case == "adapters" else 0
        actor = ActorWorker(ActorConfig(path, temperature=SAMPLED.temperature, lora_rank=lora_rank), CPU, ranks)
        builder = PromptBuilder.from_pretrained(path, 300)
        options = {"tensor_parallel": SIZE, "max_model_len": 400, "kv_cache_bytes": 1 << 26, "max_num_seqs": 16}
        config = RolloutConfig(path, "vllm", options | {"image_options": builder.image_options})
        lora = lora_streams(actor.config, actor.base_weights, actor.adapter_weights)
        rollout = RolloutWorker(config, actor.named_weights, ranks, lora=lora)
        mine = prompts_of(builder)[rows_of(case, rank)]
        first, greedy = rollout.generate(mine, SAMPLED), rollout.generate(mine, GREEDY)
        requests = build_requests(prompts_of(builder), TURNS)
        with rollout.sharding:
            played = drive(rollout.engine, dist.group.WORLD, lambda engine: two_turns(engine, builder, requests))
        with torch.no_grad():
            for parameter in actor.module.parameters():
                if lora_rank == 0:
                    parameter.mul_(1.5)
                elif parameter.requires_grad:
                    parameter.mul_(1.5).add_(0.1)  # B was zero
        assert differing_of_worker(rollout)
        rollout.mark_stale()
        second = rollout.generate(mine, SAMPLED)
        found = read(first), read(greedy), read(second), differing_of_worker(rollout), scores(actor, second), played
        results.put((rank, found))
    except BaseException:  # passed to the test, which would otherwise wait for ever
        results.put((rank, traceback.format_exc()))


def two_turns(engine, builder, requests):
    """Tokens of both turns of each request, which join at different times."""
    running, found = {}, {}
    for place, request in enumerate(requests):
        running[engine.submit(request, TURNS, keep=True)] = place, request
        engine.poll()
    while engine.unfinished:
        for done in engine.poll():
            place, request = running[done.request]
            found.setdefault(place, []).append(done.token_ids)
            if len(found[place]) == 1:
                later = observed_turn(builder, request, done, ROWS[place - 1])
                running[engine.fork(done.request, later, TURNS)] = place, later
    return [found[place] for place in sorted(found)]


def read(data):
    return data["responses"].numpy(), data["rollout_log_probs"].numpy(), list(data["uid"])


def scores(actor, data):
    mask = data["response_mask"].bool()
    return float((actor.log_probs(data)["old_log_probs"] - data["rollout_log_probs"])[mask].abs().max())


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(case, tmp_path_factory):
    return write_checkpoint(TYPES[case], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def found(case, checkpoint):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=work, args=(rank, case, port, checkpoint, results), daemon=True) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=240) for _ in range(SIZE))
    for process in processes:
        process.join(timeout=30)
        process.kill()
    for outcome in outcomes.values():
        assert not isinstance(outcome, str), outcome
    return [outcomes[rank] for rank in range(SIZE)]


def test_both_get_their_own_rows_as_one_process_samples_them(found, case, checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, 300)
    engine, prompts = HFEngine(checkpoint, device=CPU), prompts_of(builder)
    for number, sampling in enumerate((SAMPLED, GREEDY)):
        done, pad = engine.generate(build_requests(prompts, sampling), sampling), builder.tokenizer.pad_token_id
        whole = attach_responses(prompts, done, sampling, builder.family, pad)
        for rank in range(SIZE):
            expected = read(whole[np.arange(len(whole)).reshape(len(ROWS), -1)[rows_of(case, rank)].reshape(-1)])
            responses, _, uids = found[rank][number]
            assert uids == expected[2]
            assert (responses == expected[0]).all()


def test_each_holds_its_part_of_the_new_weights(found):
    for first, _, second, differing, largest, _ in found:
        assert not (first[1] == second[1]).all()
        assert differing == []
        assert largest < 1e-4


def test_turns_that_the_first_rank_plays_are_those_of_one_process(found, checkpoint):
    builder = PromptBuilder.from_pretrained(checkpoint, 300)
    engine = HFEngine(checkpoint, device=CPU)
    alone = two_turns(engine, builder, build_requests(prompts_of(builder), TURNS))
    assert [each[5] for each in found] == [alone, alone]
