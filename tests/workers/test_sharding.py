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
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataproto import DataProto, object_array
from dataproto.errors import DataProtoError, InvalidConfig, RowCountMismatch
from dataproto.packing import equally_wide
from helpers.batches import prompt_batch
from helpers.tiny_models import tiny_model
from helpers.tiny_prompts import tiny_tokenizer
from rollout.engine import SamplingParams
from rollout.hf.engine import HFEngine
from rollout.responses import attach_responses, build_requests, number_occurrences
from workers.ranks.dispatch_modes import Arguments
from workers.ranks.layout import Layout
from workers.ranks.mesh import Ranks, init_ranks
from workers.roles.carried_groups import split_groups
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
from workers.roles.sharding_manager import Neighbours, ShardingManager, joined_blocks, neighbours

SIZE = 4
ROWS = ((3, 1, 0, 4), (0, 5, 2, 1))  # of each dp position, in two batches
N = 2
LAYOUTS = [
    *(Layout(dp=4), Layout(dp=2, tp=2), Layout(dp=2, sp=2), Layout(sp=2, tp=2)),
    *(Layout(pp=2, dp=2), Layout(pp=2, sp=2), Layout(pp=2, tp=2), Layout(pp=4)),
]
CASES = [(layout, tensor_parallel) for layout in LAYOUTS for tensor_parallel in (1, 2, 4)]
GENERATED = [(layout, tensor_parallel) for layout in (Layout(dp=4), Layout(pp=2, dp=2)) for tensor_parallel in (1, 2)]
HELD = {4: [0, 1, 1, 3, 4], 2: [0, 3, 4]}  # bounds of the prompts of each dp position
CPU = torch.device("cpu")
SHORT = SamplingParams(n=N, max_tokens=9, seed=3, stop_token_ids=tuple(range(60)))  # responses of different lengths
COLUMNS = ("responses", "rollout_log_probs", "position_ids", "attention_mask")


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


def rows_of(dp, counts):
    """Row k of position d holds 10 d + k in every column; a row of an odd number has no image."""
    numbers = 10 * dp + torch.arange(counts[dp])
    media = [
        {"image": [Image.new("RGB", (3, 2), (number, 0, 0))]} if number % 2 == 0 else {} for number in numbers.tolist()
    ]
    return DataProto.from_dict(
        {"ids": numbers, "mask": torch.stack([numbers, numbers], 1)},
        {
            "name": np.array([f"row {number}" for number in numbers.tolist()], dtype=object),
            "multi_modal_data": np.array([*media, None], dtype=object)[:-1],
        },
        {"position": dp},
    )


def exchanges_rows(layout, tensor_parallel):
    """What this rank's engine saw of each batch, and what came back: checked here, the former told to the test."""
    ranks = init_ranks(layout, CPU)
    manager = ShardingManager(Engine(), list, neighbours(ranks, tensor_parallel))
    return [exchanged(manager, rows_of(ranks.rank("dp"), counts)) for counts in ROWS]


def exchanged(manager, mine):
    with manager:
        seen = manager.preprocess_data(mine)
        answers = seen.repeat(N, interleave=True)
        answers["answer"] = answers["ids"] * 100 + torch.arange(len(answers)) % N
        if len(answers):  # as the numbers of drafted tokens, which an engine without rows does not know
            answers["drafted"] = answers["ids"] + 1
        back = manager.postprocess_data(answers)
    assert back["ids"].tolist() == [number for number in mine["ids"].tolist() for _ in range(N)]
    assert back["answer"].tolist() == [100 * number + k for number in mine["ids"].tolist() for k in range(N)]
    assert back.meta_info == mine.meta_info
    if len(back):
        assert torch.equal(back["drafted"], back["ids"] + 1)
    for data in (seen, back):
        assert list(data["name"]) == [f"row {number}" for number in data["ids"].tolist()]
        for number, media in zip(data["ids"].tolist(), data["multi_modal_data"], strict=True):
            assert [image.getpixel((2, 1)) for image in media.get("image", [])] == [(number, 0, 0)] * (number % 2 == 0)
    return seen["ids"].tolist()


def differs_from_its_other_stage():
    """What is said where two stages of one dp position come with different rows."""
    ranks = init_ranks(Layout(pp=2, dp=2), CPU)
    manager = ShardingManager(Engine(), list, neighbours(ranks, 1))
    with pytest.raises(RowCountMismatch) as refused:
        manager.preprocess_data(rows_of(0, [3 + ranks.rank("pp")]))
    return str(refused.value)


def generates(layout, tensor_parallel, path):
    """The same responses as one process alone, by engines of one rank or of two."""
    ranks = init_ranks(layout, CPU)
    engine = HFEngine(path, device=CPU)
    manager = ShardingManager(engine, engine.model.named_parameters, neighbours(ranks, tensor_parallel))
    everything = prompts(engine.model.config)
    torch.manual_seed(dist.get_rank())
    random.seed(5 + dist.get_rank())
    np.random.seed(dist.get_rank())
    before = torch.get_rng_state(), random.getstate()
    with manager:
        draw = float(torch.rand(())), random.random(), float(np.random.rand())
        dp, bounds = ranks.rank("dp"), HELD[layout.dp]
        shared = manager.preprocess_data(everything[bounds[dp] : bounds[dp + 1]])
        done = engine.generate(build_requests(shared, SHORT), SHORT)
        back = manager.postprocess_data(attach_responses(shared, done, SHORT, engine.family, 0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    with manager:
        assert float(torch.rand(())) != draw[0]  # the rollout's own stream goes on
    return draw, {name: back[name].numpy() for name in COLUMNS}, [str(uid) for uid in back["uid"]]


def refuses(path):
    """What each rank says of a row that one engine refuses, and of stages with different rows; what all generate next."""
    ranks = init_ranks(Layout(pp=2, dp=2), CPU)
    worker = RolloutWorker(RolloutConfig(path, "hf"), lambda dtype: [], ranks)
    worker.sharding.stale = False  # the engine has read its weights from the checkpoint
    everything, sampling = prompts(worker.engine.model.config), SamplingParams(n=N, max_tokens=4, seed=3)
    bounds, dp = HELD[2], ranks.rank("dp")
    wrong = everything.select(deepcopy=True)
    wrong["multi_modal_inputs"][0] = {}
    with pytest.raises(DataProtoError) as refused:
        worker.generate(wrong[bounds[dp] : bounds[dp + 1]], sampling)
    with pytest.raises(DataProtoError) as uneven:  # the stages of position 0 come with one row and with two
        worker.generate(everything[: 1 + (ranks.rank("pp") if dp == 0 else 0)], sampling)
    back = worker.generate(everything[bounds[dp] : bounds[dp + 1]], sampling)
    errors = [(type(each.value).__name__, str(each.value)) for each in (refused, uneven)]
    return *errors, [str(uid) for uid in back["uid"]]


def repeats(path):
    """What each of four ranks generates that brings two rows of two prompts repeated four times: uids first, then without."""
    ranks = init_ranks(Layout(dp=4), CPU)
    worker = RolloutWorker(RolloutConfig(path, "hf"), lambda dtype: [], ranks)
    worker.sharding.stale = False
    repeated, sampling = prompts(worker.engine.model.config)[:2].repeat(4), SamplingParams(max_tokens=4, seed=3)
    mine = repeated[2 * ranks.rank("dp") :][:2]
    named = worker.generate(mine, sampling)["responses"].tolist()
    mine.pop(non_tensor_batch_keys=["uid"])
    return named, worker.generate(mine, sampling)["responses"].tolist()


def advances(path):
    """Samples decoded until some groups are whole, and to their end, by two stages of two positions with an engine each."""
    ranks = init_ranks(Layout(pp=2, dp=2), CPU)
    worker = RolloutWorker(RolloutConfig(path, "hf"), lambda dtype: [], ranks)
    worker.sharding.stale = False
    samples = samples_of(worker.engine.model.config)
    calls = split_groups(Arguments((samples,), {}), 2)
    mine, found = calls[ranks.rank("dp")].args[0], []
    for wanted in (2, 4):
        rows = worker.advance(mine, SHORT, wanted, 1)
        done = rows["_finished"].tolist()
        found.append([(str(uid), ids if whole else None) for uid, ids, whole in zip(rows["uid"], sampled(rows), done)])
        mine["_begun"] = object_array([[] if whole else begun for begun, whole in zip(rows["_begun"], done)])
    return found


def samples_of(config):
    """Three samples of each of four prompts."""
    samples = number_occurrences(prompts(config).repeat(3, interleave=True))
    samples["_begun"] = object_array([[] for _ in range(len(samples))])
    return samples


def sampled(rows):
    return [ids[mask.bool()].tolist() for ids, mask in zip(rows["responses"], rows["response_mask"], strict=True)]


def prompts(config):
    return prompt_batch(config, [[(4, 6), (8, 4)], [(6, 6)], [], [(4, 4)]], texts=[4, 7, 3, 5])


def work(rank, store, path, results):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    jobs = {case: lambda case=case: exchanges_rows(*case) for case in CASES}
    jobs |= {("generates", *case): lambda case=case: generates(*case, path) for case in GENERATED}
    jobs["refuses"] = lambda: refuses(path)
    jobs["repeats"] = lambda: repeats(path)
    jobs["advances"] = lambda: advances(path)
    jobs["mismatch"] = differs_from_its_other_stage
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
    tiny_tokenizer("qwen2_5_vl").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, checkpoint):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.roles.rollout_worker", "rollout.hf.engine", "helpers.batches"])
    results = context.Queue()
    store = str(Path(tmp_path_factory.mktemp("store")) / "file")
    processes = [
        context.Process(target=work, args=(rank, store, checkpoint, results), daemon=True) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    found = {}
    for _ in range(SIZE * (len(CASES) + len(GENERATED) + 4)):
        name, rank, outcome = results.get(timeout=120)
        found.setdefault(name, [None] * SIZE)[rank] = outcome
    for process in processes:
        process.join(timeout=60)
    return found


def case_name(value):
    return f"{value}".replace(" ", "")


@pytest.mark.parametrize(("layout", "tensor_parallel"), CASES, ids=case_name)
def test_engines_see_every_row_once_and_ranks_get_their_own_back(outcomes, layout, tensor_parallel):
    found = outcomes[layout, tensor_parallel]
    assert not any(isinstance(one, str) for one in found), "\n".join(map(str, found))
    for batch, counts in enumerate(ROWS):
        seen = [one[batch] for one in found]
        engines = [seen[rank : rank + tensor_parallel] for rank in range(0, SIZE, tensor_parallel)]
        assert all(one == engine[0] for engine in engines for one in engine)
        expected = [number for dp in range(layout.dp) for number in rows_of(dp, counts)["ids"].tolist()]
        assert sorted(number for engine in engines for number in engine[0]) == expected
        assert all(engine[0] == sorted(engine[0]) for engine in engines)


def test_who_generates_what(outcomes):
    """Rows 0 to 2 are dp position 0's, row 10 is position 1's; then rows 10 to 14 are position 1's, and 0 has none."""
    shares = {case: [[one[batch] for one in outcomes[case]] for batch in (0, 1)] for case in CASES}
    pipelined = Layout(pp=2, dp=2)  # ranks 0 and 2 are the stages of position 0
    assert shares[pipelined, 1] == [[[0], [], [1, 2], [10]], [[], [10, 11], [], [12, 13, 14]]]
    assert shares[pipelined, 2] == [[[0, 1]] * 2 + [[2, 10]] * 2, [[10, 11]] * 2 + [[12, 13, 14]] * 2]
    assert shares[pipelined, 4] == [[[0, 1, 2, 10]] * 4, [[10, 11, 12, 13, 14]] * 4]
    assert shares[Layout(pp=2, tp=2), 1][0] == shares[Layout(pp=2, sp=2), 1][0] == [[], [0], [1], [2]]
    assert shares[Layout(pp=2, tp=2), 2][0] == [[0], [0], [1, 2], [1, 2]]
    assert shares[Layout(dp=4), 1] == [
        [[0, 1, 2], [10], [], [30, 31, 32, 33]],
        [[], [10, 11, 12, 13, 14], [20, 21], [30]],
    ]


@pytest.mark.parametrize(("layout", "tensor_parallel"), GENERATED, ids=case_name)
def test_several_ranks_generate_what_one_does(outcomes, checkpoint, layout, tensor_parallel):
    everybody = outcomes["generates", layout, tensor_parallel]
    assert not any(isinstance(one, str) for one in everybody), "\n".join(map(str, everybody))
    engine = HFEngine(checkpoint, device=CPU)
    data = prompts(engine.model.config)
    whole = attach_responses(data, engine.generate(build_requests(data, SHORT), SHORT), SHORT, engine.family, 0)
    assert len(set(whole["response_mask"].sum(1).tolist())) > 2
    for stage in range(layout.pp):
        found = everybody[stage * layout.dp : (stage + 1) * layout.dp]
        assert [uid for _, _, uids in found for uid in uids] == list(whole["uid"])
        parts = [{name: torch.from_numpy(column) for name, column in columns.items()} for _, columns, _ in found]
        if layout.pp == tensor_parallel == 1:  # ranks that share no rows
            assert len({part["responses"].shape[1] for part in parts}) > 1
        joined = DataProto.concat(equally_wide([DataProto.from_dict(part) for part in parts]))
        for name in ("responses", "position_ids", "attention_mask"):
            assert torch.equal(joined[name], whole[name]), name
        torch.testing.assert_close(joined["rollout_log_probs"], whole["rollout_log_probs"], atol=1e-5, rtol=0)
    draws = [draw for draw, _, _ in everybody]  # ranks of an engine agree, engines differ
    assert draws == [draws[rank // tensor_parallel * tensor_parallel] for rank in range(SIZE)]
    assert len(set(draws)) == SIZE // tensor_parallel


def test_a_row_that_one_engine_refuses_ends_the_call_on_all_and_no_more(outcomes):
    told = outcomes["refuses"]
    assert not any(isinstance(one, str) for one in told), "\n".join(map(str, told))
    assert [name for (name, _), _, _ in told] == ["MediaMismatch", "RankFailure", "RankFailure", "RankFailure"]
    assert all("rank 0: MediaMismatch" in said for (_, said), _, _ in told[1:])
    assert [name for _, (name, _), _ in told] == ["RowCountMismatch", "RankFailure"] * 2
    assert [uids for _, _, uids in told] == 2 * [[f"prompt-{row}" for row in (0, 0, 1, 1, 2, 2)], ["prompt-3"] * 2]


def test_repeated_prompts_on_several_ranks_are_samples_of_one(outcomes, checkpoint):
    told = outcomes["repeats"]
    assert not any(isinstance(one, str) for one in told), "\n".join(map(str, told))
    named, unnamed = ([answer for part in answers for answer in part] for answers in zip(*told))
    worker = RolloutWorker(RolloutConfig(checkpoint, "hf"), lambda dtype: [])
    worker.sharding.stale = False
    data, sampling = prompts(worker.engine.model.config)[:2], SamplingParams(n=4, max_tokens=4, seed=3)
    assert named == worker.generate(data, sampling)["responses"].tolist()
    assert len({tuple(answer) for answer in unnamed}) == 8
    assert not {tuple(answer) for answer in unnamed} & {tuple(answer) for answer in named}


def test_ranks_that_share_rows_decode_their_shares_of_the_groups(outcomes, checkpoint):
    found = outcomes["advances"]
    assert not any(isinstance(one, str) for one in found), "\n".join(map(str, found))
    worker = RolloutWorker(RolloutConfig(checkpoint, "hf"), lambda dtype: [])
    worker.sharding.stale = False
    rows = worker.advance(samples_of(worker.engine.model.config), SHORT, 4, 1)
    expected = sorted(zip(map(str, rows["uid"]), sampled(rows), strict=True))
    assert found[:2] == found[2:]  # the stages of a position return the same rows
    first, second = ([row for one in found[:2] for row in one[call]] for call in (0, 1))
    whole = {uid for uid, _ in first if all(ids is not None for other, ids in first if other == uid)}
    assert 2 <= len(whole) < 4
    assert sorted(second) == expected


def test_stages_that_come_with_different_rows_are_told(outcomes):
    for told in outcomes["mismatch"]:
        assert "ranks of one dp position have to get the same rows" in told
        assert "have 3 and 4" in told


@given(st.data())
def test_blocks_are_the_smallest_that_hold_groups_wholly(data):
    degrees = {axis: data.draw(st.integers(1, 3), axis) for axis in ("pp", "dp", "sp", "tp")}
    layout = Layout(**degrees)
    world = layout.world_size
    engine = data.draw(st.sampled_from([size for size in range(1, world + 1) if world % size == 0]), "engine")
    holders = np.array([layout.coordinates(rank)["dp"] for rank in range(world)])
    engines = np.arange(world) // engine
    together = (holders[:, None] == holders) | (engines[:, None] == engines)
    for _ in range(world):  # who reaches whom, by one step more each time
        together = together @ together
    expected = sorted({tuple(np.flatnonzero(row).tolist()) for row in together})
    assert [tuple(block) for block in joined_blocks(holders.tolist(), engines.tolist())] == expected


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


def test_an_engine_with_a_device_of_its_own_keeps_the_weights_it_was_sent():
    """Nobody would send them again before the next hand-over."""
    engine = Engine(keeps_weights=False)
    engine.wake = lambda: engine.loaded != [] and not engine.asleep
    manager = ShardingManager(engine, list, shares_device=False)
    engine.asleep = False
    for _ in range(3):
        with manager:
            pass
        assert not engine.asleep
    assert len(engine.loaded) == 1
    manager.mark_stale()
    with manager:
        pass
    assert len(engine.loaded) == 2


def test_a_hand_over_that_fails_is_tried_again():
    def weights():
        raise OSError("gone")

    manager = ShardingManager(Engine(), weights)
    with pytest.raises(OSError, match="gone"), manager:
        pass
    assert manager.stale
    assert manager.engine.asleep


@pytest.mark.parametrize(
    ("tensor_parallel", "why"), [(0, "at least 1"), (3, "must divide the 4"), (8, "must divide the 4")]
)
def test_sizes_that_do_not_fit_are_refused(tensor_parallel, why):
    config = RolloutConfig("unread", options={"tensor_parallel": tensor_parallel})
    with pytest.raises(InvalidConfig, match=rf"tensor_parallel={tensor_parallel}.*{why}"):
        RolloutWorker(config, list, Ranks(Layout(pp=2, dp=2)))


def test_a_rank_alone_keeps_its_rows():
    block = neighbours(Ranks(), 1)
    assert block == Neighbours(None, holders=(0,), engines=(0,))
    mine = rows_of(0, [3])
    assert ShardingManager(Engine(), list, block).preprocess_data(mine) is mine
