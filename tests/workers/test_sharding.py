"""Rows on their way between training layouts and rollout layouts, over gloo, and generation by several ranks."""

import multiprocessing
import random
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from helpers.batches import prompt_batch
from helpers.tiny_models import tiny_model
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.responses import attach_responses, build_requests
from workers.layout import Layout
from workers.mesh import Ranks, join
from workers.sharding import Neighbours, ShardingManager, neighbours

SIZE = 4
ROWS = (3, 1, 0, 4)  # of each dp position
N = 2
LAYOUTS = [Layout(dp=4), Layout(dp=2, tp=2), Layout(dp=2, sp=2), Layout(sp=2, tp=2)]
CASES = [(layout, tensor_parallel) for layout in LAYOUTS for tensor_parallel in (1, 2, 4)]
CPU = torch.device("cpu")


class Engine:
    """What the manager asks of an engine, counted."""

    def __init__(self, keeps_weights=True):
        self.loaded, self.asleep, self.keeps_weights = [], True, keeps_weights

    def wake(self):
        self.asleep = False
        return self.keeps_weights

    def load_weights(self, weights):
        self.loaded.append(list(weights))

    def sleep(self):
        self.asleep = True


def rows_of(dp):
    """Row k of position d holds 10 d + k in every column."""
    numbers = 10 * dp + torch.arange(ROWS[dp])
    return DataProto.from_dict(
        {"ids": numbers, "mask": torch.stack([numbers, numbers], 1)},
        {"name": np.array([f"row {number}" for number in numbers.tolist()], dtype=object)},
        {"position": dp},
    )


def exchanges_rows(layout, tensor_parallel):
    """What this rank's engine saw, and what came back: checked here, the former told to the test."""
    ranks = join(layout, CPU)
    mine = rows_of(ranks.rank("dp"))
    manager = ShardingManager(Engine(), list, neighbours(ranks, tensor_parallel))
    with manager:
        seen = manager.preprocess_data(mine)
        answers = seen.repeat(N, interleave=True)
        answers["answer"] = answers["ids"] * 100 + torch.arange(len(answers)) % N
        back = manager.postprocess_data(answers)
    assert back["ids"].tolist() == [number for number in mine["ids"].tolist() for _ in range(N)]
    assert back["answer"].tolist() == [100 * number + k for number in mine["ids"].tolist() for k in range(N)]
    assert list(back["name"]) == [f"row {number}" for number in back["ids"].tolist()]
    assert back.meta_info == {"position": ranks.rank("dp")}
    return seen["ids"].tolist(), list(seen["name"])


def generates(tensor_parallel, path):
    """The same responses as one process alone, by engines of one rank or of two; ranks have 1, 0, 2 and 1 rows."""
    ranks = Ranks(Layout(dp=SIZE), join(Layout(dp=SIZE), CPU).mesh)
    block = neighbours(ranks, tensor_parallel)
    engine = HFEngine(path, device=CPU)
    manager = ShardingManager(engine, engine.model.named_parameters, block, dist.get_rank() // tensor_parallel)
    everything, sampling = prompts(engine.model.config), SamplingParams(n=N, max_tokens=4, seed=3)
    torch.manual_seed(dist.get_rank())
    random.seed(5 + dist.get_rank())
    np.random.seed(dist.get_rank())
    before = torch.get_rng_state(), random.getstate()
    with manager:
        draw = float(torch.rand(())), random.random(), float(np.random.rand())
        shared = manager.preprocess_data(everything[[0, 1, 1, 3][dist.get_rank()] : [1, 1, 3, 4][dist.get_rank()]])
        done = engine.generate(build_requests(shared, sampling), sampling)
        back = manager.postprocess_data(attach_responses(shared, done, sampling, engine.family, 0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    with manager:
        assert float(torch.rand(())) != draw[0]  # the rollout's own stream goes on
    columns = ("responses", "rollout_log_probs", "position_ids", "attention_mask")
    return draw, {name: back[name].numpy() for name in columns}, [str(uid) for uid in back["uid"]]


def prompts(config):
    return prompt_batch(config, [[(4, 6), (8, 4)], [(6, 6)], [], [(4, 4)]], texts=[4, 7, 3, 5])


def work(rank, store, path, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    jobs = {case: lambda case=case: exchanges_rows(*case) for case in CASES}
    jobs |= {tensor_parallel: lambda size=tensor_parallel: generates(size, path) for tensor_parallel in (1, 2)}
    for name, job in jobs.items():
        try:
            outcome = job()
        except BaseException:  # told to the test, so that nobody waits without a word
            outcome = traceback.format_exc()
        results.put((name, rank, outcome))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2_5_vl").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, checkpoint):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.sharding", "rollout.hf", "helpers.tiny_models"])
    results = context.Queue()
    store = str(Path(tmp_path_factory.mktemp("store")) / "file")
    processes = [
        context.Process(target=work, args=(rank, store, checkpoint, results), daemon=True) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    found = {}
    for _ in range(SIZE * (len(CASES) + 2)):
        name, rank, outcome = results.get(timeout=120)
        found.setdefault(name, [None] * SIZE)[rank] = outcome
    for process in processes:
        process.join(timeout=60)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}".replace(" ", ""))
def test_engines_see_every_row_once_and_ranks_get_their_own_back(outcomes, case):
    layout, tensor_parallel = case
    seen = outcomes[case]
    assert not any(isinstance(one, str) for one in seen), "\n".join(map(str, seen))
    engines = [seen[rank : rank + tensor_parallel] for rank in range(0, SIZE, tensor_parallel)]
    assert all(one == engine[0] for engine in engines for one in engine)
    expected = [number for dp in range(layout.dp) for number in rows_of(dp)["ids"].tolist()]
    assert [number for engine in engines for number in engine[0][0]] == expected
    assert [name for engine in engines for name in engine[0][1]] == [f"row {number}" for number in expected]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_several_ranks_generate_what_one_does(outcomes, checkpoint, tensor_parallel):
    found = outcomes[tensor_parallel]
    assert not any(isinstance(one, str) for one in found), "\n".join(map(str, found))
    engine = HFEngine(checkpoint, device=CPU)
    data, sampling = prompts(engine.model.config), SamplingParams(n=N, max_tokens=4, seed=3)
    whole = attach_responses(
        data, engine.generate(build_requests(data, sampling), sampling), sampling, engine.family, 0
    )
    assert [uid for _, _, uids in found for uid in uids] == list(whole["uid"])
    for name in ("responses", "position_ids", "attention_mask"):
        assert np.array_equal(np.concatenate([columns[name] for _, columns, _ in found]), whole[name].numpy()), name
    log_probs = np.concatenate([columns["rollout_log_probs"] for _, columns, _ in found])
    np.testing.assert_allclose(log_probs, whole["rollout_log_probs"].numpy(), atol=1e-5)
    draws = [draw for draw, _, _ in found]  # ranks of an engine agree, engines differ
    assert draws == [draws[rank // tensor_parallel * tensor_parallel] for rank in range(SIZE)]
    assert len(set(draws)) == SIZE // tensor_parallel


def test_weights_are_streamed_once_and_again_where_sleep_dropped_them():
    asked = []
    manager = ShardingManager(Engine(), lambda: asked.append(1) or [("w", torch.ones(1))])
    for _ in range(2):
        with manager:
            assert not manager.engine.asleep
        assert manager.engine.asleep
    assert len(asked) == 1
    manager.mark_stale()
    with manager:
        pass
    assert len(asked) == 2
    forgetful = ShardingManager(Engine(keeps_weights=False), list)
    for _ in range(3):
        with forgetful:
            pass
    assert len(forgetful.engine.loaded) == 3


def test_a_hand_over_that_fails_is_tried_again():
    def weights():
        raise OSError("gone")

    manager = ShardingManager(Engine(), weights)
    with pytest.raises(OSError, match="gone"), manager:
        pass
    assert manager.stale
    assert manager.engine.asleep


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidConfig, match="tensor_parallel=3 does not fit"):
        neighbours(Ranks(), 3)
    with pytest.raises(InvalidConfig, match="no whole number"):
        Neighbours(None, sharing=1, engine=2)
