"""An error that comes while another is handled never hides it: what is closed at the end of each block fails here as well."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import distributed

from dataproto import DataProto
from dataproto.distributed import GroupRanks
from dataproto.errors import RankFailure, WorkerFailed, describe, ending, not_hiding, note_later
from dataproto.vlm import family_of
from helpers.batches import prompt_batch
from helpers.checkpoints import write_checkpoint
from helpers.environments import Drawing
from helpers.episodes import RandomEngine, play_episodes, renderer_of, starts_of
from helpers.tiny_models import tiny_model
from rollout.continuation import Tokens, WholeGroups, decode_groups
from rollout.engine import SamplingParams
from rollout.engine_ranks import drive
from rollout.environments import EpisodeLimits
from rollout.hf.engine import HFEngine
from rollout.responses import build_requests
from rollout.vllm.engine import VLLMEngine
from rollout.vllm.process_settings import process_settings_kept
from workers import launch
from workers.cluster.ray_config import RayConfig
from workers.cluster.ray_group import end_processes, running_ray
from workers.model.packed_model import PackedVLM
from workers.parallel.fsdp import FullySharded
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
from workers.training import memory
from workers.training.checkpoint import Saving
from workers.training.memory import PhaseMemory
from workers.training.optimizer import Optimizer, OptimizerConfig
from workers.weights.sharded_export import ShardedExport

CPU = torch.device("cpu")
SAMPLING = SamplingParams(n=2, max_tokens=4, seed=3)


class Cause(RuntimeError):
    """The first error."""


class Later(RuntimeError):
    """What is closed after it fails as well."""


def fails(error: type[BaseException], text: str = "CUDA Error: invalid argument") -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error(text)

    return fail


def notes_of(act: Callable[[], object]) -> list[str]:
    """What is noted beside the cause, which `act` must raise, not what came later."""
    with pytest.raises(Cause) as caught:
        act()
    return [note for note in caught.value.__notes__ if note.startswith("and ")]


NOTE = "and Later: CUDA Error: invalid argument"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def actor(path: str) -> ActorWorker:
    return ActorWorker(ActorConfig(path), CPU)


@pytest.fixture
def rollout(path: str, actor: ActorWorker) -> RolloutWorker:
    return RolloutWorker(RolloutConfig(path), actor.named_weights)


@pytest.fixture
def prompts(actor: ActorWorker) -> DataProto:
    return prompt_batch(actor.module.model.config, [[], []], [5, 3])


# The helpers


def test_every_end_is_called_and_the_first_error_is_raised() -> None:
    called: list[str] = []
    with (
        pytest.raises(Later, match="one") as caught,
        ending(fails(Later, "one"), partial(called.append, "two"), fails(Later, "three")),
    ):
        called.append("block")
    assert called == ["block", "two"]
    assert caught.value.__notes__ == ["and Later: three"]


def test_an_end_that_fails_of_the_same_cause_says_nothing_more() -> None:
    """A damaged file is met by the run and again by its report."""
    with pytest.raises(Later) as caught, ending(fails(Later, "line 8"), fails(Later, "line 9")):
        fails(Later, "line 8")()
    assert caught.value.__notes__ == ["and Later: line 9"]


def test_a_reader_that_stops_is_no_error() -> None:
    def numbers() -> Iterator[int]:
        with ending(fails(Later)):
            yield from range(3)

    reader = numbers()
    assert next(reader) == 0
    with pytest.raises(Later):
        reader.close()


def test_an_interrupt_is_not_hidden_either() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, ending(fails(Later)):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [NOTE]


def test_an_error_is_noted_once() -> None:
    cause = Cause()
    with pytest.raises(Cause) as caught, not_hiding(cause):
        raise cause
    assert not hasattr(caught.value, "__notes__")


# Engines


@pytest.mark.parametrize("at", ["generate", "load_weights", "wake"])
def test_a_call_of_the_engine_that_fails_is_told_though_the_engine_cannot_sleep(
    at: str, rollout: RolloutWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.engine, at, fails(Cause))
    monkeypatch.setattr(rollout.engine, "sleep", fails(Later))
    before = torch.get_rng_state()
    assert notes_of(lambda: rollout.generate(prompts, SAMPLING)) == [NOTE]
    assert torch.equal(torch.get_rng_state(), before)  # training continues with its own
    monkeypatch.undo()
    assert len(rollout.generate(prompts, SAMPLING)) == 4  # the phase of its memory has ended as well


def test_an_engine_that_cannot_sleep_is_told_where_nothing_else_failed(
    rollout: RolloutWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.engine, "sleep", fails(Later))
    with pytest.raises(Later):
        rollout.generate(prompts, SAMPLING)


def test_random_states_of_a_device_that_is_lost_hide_nothing(
    rollout: RolloutWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        monkeypatch.setattr("workers.roles.sharding_manager.random_states", fails(Later))
        raise Cause

    monkeypatch.setattr(rollout.engine, "generate", fail)
    slept: list[int] = []
    monkeypatch.setattr(rollout.engine, "sleep", lambda: slept.append(1))
    assert notes_of(lambda: rollout.generate(prompts, SAMPLING)) == [NOTE]
    assert slept == [1]


def test_weights_that_other_ranks_gather_hide_no_error_of_the_engine(
    rollout: RolloutWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(1)
        raise Later("CUDA Error: invalid argument")

    def refuse(found: Iterator[tuple[str, torch.Tensor]]) -> None:
        next(found)
        raise Cause

    monkeypatch.setattr(rollout.sharding, "weights", weights)
    monkeypatch.setattr(rollout.engine, "load_weights", refuse)
    assert notes_of(lambda: rollout.generate(prompts, SAMPLING)) == [NOTE]


@pytest.mark.parametrize(("fails_at", "ends_with"), [("_step", "_suspend"), ("_step", "abort"), ("poll", "abort")])
def test_an_engine_of_hugging_face_tells_why_it_stopped(
    fails_at: str, ends_with: str, path: str, actor: ActorWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine(path, device=CPU)
    requests = build_requests(prompts, SAMPLING)
    stopped: list[int] = []

    def later(*numbers: int) -> None:
        stopped.extend(numbers)
        raise Later("CUDA Error: invalid argument")

    monkeypatch.setattr(engine, fails_at, fails(Cause))
    monkeypatch.setattr(engine, ends_with, later)
    for run in (
        lambda: list(engine.generate(requests, SAMPLING)),
        lambda: decode_groups(
            engine,
            requests,
            [Tokens() for _ in requests],
            SAMPLING,
            WholeGroups(["a", "a", "b", "b"], 2),
            family_of("qwen2_5_vl"),
            1,
        ),
    ):
        stopped.clear()
        assert notes_of(run)[0] == NOTE
        assert len(set(stopped)) == (0 if ends_with == "_suspend" else 4)  # each of them, though none can be stopped


def test_episodes_tell_why_the_engine_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of("qwen2_5_vl")
    engine = RandomEngine(renderer)
    forgotten: list[int] = []
    monkeypatch.setattr(engine, "poll", fails(Cause))
    monkeypatch.setattr(engine, "abort", fails(Later), raising=False)
    monkeypatch.setattr(renderer, "forget", lambda: forgotten.append(1))
    play = partial(play_episodes, engine, renderer, starts_of(2), Drawing, SAMPLING, EpisodeLimits(2))
    assert NOTE in notes_of(play)[0]
    assert forgotten == [1]


def test_the_first_rank_of_an_engine_tells_its_error_though_the_others_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollout import engine_ranks

    monkeypatch.setattr(engine_ranks._Channel, "broadcast", fails(Later))
    monkeypatch.setattr(engine_ranks.distributed, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(engine_ranks.distributed, "get_rank", lambda group=None: 0)
    assert notes_of(lambda: drive(SimpleNamespace(), SimpleNamespace(), fails(Cause))) == [NOTE]


# Training


def loss(outputs: Any, data: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -outputs.log_probs, {}


@pytest.mark.parametrize("ends_with", ["drop_gradients", "_reshard"])
@pytest.mark.parametrize("call", ["update", "accumulate"])
def test_a_loss_that_fails_is_told_though_the_model_cannot_clean_up(
    call: str,
    ends_with: str,
    actor: ActorWorker,
    rollout: RolloutWorker,
    prompts: DataProto,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rollout.generate(prompts, SAMPLING)
    monkeypatch.setattr(actor.model, ends_with, fails(Later))
    monkeypatch.setattr(actor.module, "forget_features", fails(Later))
    assert NOTE in notes_of(lambda: getattr(actor, call)(rows, fails(Cause)))


def test_a_pass_without_gradients_tells_its_error(
    actor: ActorWorker, rollout: RolloutWorker, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rollout.generate(prompts, SAMPLING)
    monkeypatch.setattr(actor.model, "_inputs", fails(Cause))
    monkeypatch.setattr(actor.model, "_reshard", fails(Later))
    assert NOTE in notes_of(lambda: actor.log_probs(rows, into="old_log_probs"))


def test_weights_that_cannot_be_sharded_again_hide_nothing(actor: ActorWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = object.__new__(FullySharded)
    monkeypatch.setattr(sharded, "options", SimpleNamespace(leaves_unsharded=lambda what: True), raising=False)
    monkeypatch.setattr(sharded, "reshard", fails(Later), raising=False)

    def run() -> None:
        with sharded.keep_gathered(actor.module, backward=True):
            raise Cause

    assert notes_of(run) == [NOTE]


def test_memory_that_cannot_be_measured_or_moved_hides_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    residence = ActorWorker(ActorConfig(path, offload_idle=True), CPU).model.residence
    monkeypatch.setattr(residence, "_park", fails(Later))
    for name in ("is_initialized", "current_device", "reset_peak_memory_stats"):  # as with a device
        monkeypatch.setattr(torch.cuda, name, lambda *_: 1)
    monkeypatch.setattr(memory.DeviceMemory, "of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", fails(Later))
    phases = PhaseMemory()

    def run(block: Any) -> None:
        with block:
            raise Cause

    assert notes_of(lambda: run(residence.using())) == [NOTE]
    assert notes_of(lambda: run(phases.phase("gen"))) == [NOTE]
    with pytest.raises(Later), phases.phase("gen"):  # it is not open for ever
        pass
    monkeypatch.setattr(memory.os, "environ", {})
    monkeypatch.setattr(memory, "_count", lambda change: None if change > 0 else fails(Later)())
    assert notes_of(lambda: run(memory.expandable_segments(torch.device("cuda")))) == [NOTE]


def test_a_checkpoint_tells_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2_5_vl")
    module, saving = PackedVLM(model, family_of(model), 1.0), Saving()
    optimizer = Optimizer(module.parameters(), OptimizerConfig())
    monkeypatch.setattr(saving, "save_training", fails(Cause))
    monkeypatch.setattr(ShardedExport, "finish", fails(Later))
    assert notes_of(lambda: saving.save_all(tmp_path, module, optimizer, Ranks(), in_background=False)) == [NOTE]


def test_an_export_whose_ranks_are_gone_tells_why_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2_5_vl")
    export = ShardedExport(tmp_path / "huggingface", model, family_of(model), Ranks(), None)
    monkeypatch.setattr(export, "_write", fails(OSError, "No space left on device"))
    export.collect(in_background=False)
    monkeypatch.setattr(export, "_gather", fails(Later))
    with pytest.raises(Exception, match=r"could not be written: .*No space left on device") as caught:
        export.finish()
    assert caught.value.__notes__ == [NOTE]


# Collectives and Ray


def test_a_rank_tells_its_error_though_the_others_cannot_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr(type(ranks), "all_gather", fails(Later))

    def run() -> None:
        with ranks.fail_together():
            raise Cause

    assert notes_of(run) == [NOTE]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather_object"])
def test_a_batch_that_cannot_be_sent_is_told_though_the_others_are_gone(
    collective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exchange = GroupRanks.of(None)
        monkeypatch.setattr(distributed, collective, fails(Later))
        assert notes_of(lambda: exchange.agreed(fails(Cause))) == [NOTE]
        monkeypatch.undo()
        with pytest.raises(RankFailure, match="Cause"):
            exchange.agreed(fails(Cause))
    finally:
        distributed.destroy_process_group()


def test_roles_that_cannot_be_closed_hide_no_error_of_a_step(path: str) -> None:
    roles = launch(actor=ActorConfig(path), reward=lambda rows: [0.0] * len(rows), rollout=RolloutConfig(path))
    roles.close = fails(Later)

    def step() -> None:
        with roles:
            raise Cause

    assert notes_of(step) == [NOTE]
    with pytest.raises(Later), roles:
        pass


def test_ray_that_cannot_be_shut_down_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *args, **options: None)
    monkeypatch.setattr(ray, "shutdown", fails(Later))
    ended: list[int] = []

    def run() -> None:
        with ExitStack() as stack:
            stack.enter_context(running_ray(RayConfig(), 1))
            stack.enter_context(ending(fails(Later, "kill"), partial(ended.append, 1)))
            raise Cause

    assert notes_of(run) == ["and Later: kill", NOTE]
    assert ended == [1]


def test_each_process_is_ended_though_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []

    def kill(actor: int) -> None:
        ended.append(actor)
        raise Later(str(actor))

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr("workers.cluster.ray_group.remove_placement_group", ended.append)
    with pytest.raises(Later, match="1") as caught:
        end_processes([1, 2], "reserved")  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["and Later: 2"]
    assert ended == [1, 2, "reserved"]


def test_a_failed_call_is_told_though_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.cluster.ray_launcher import RayPool
    from workers.ranks.failures import Failure

    pool = object.__new__(RayPool)
    pool.closed_reason, pool.monitor, pool.hosts, pool.placement_group = None, None, [None], None
    pool.placements = [SimpleNamespace(name="node", node="node", ip="")]
    monkeypatch.setattr("workers.cluster.ray_launcher.last_phases", lambda monitor: {})
    monkeypatch.setattr(ray, "nodes", fails(Later))
    monkeypatch.setattr("workers.cluster.ray_launcher.end_processes", fails(Later))
    cause = Cause("no memory")
    note_later(cause, Later("no sleep"))
    told = r"actor.update failed: rank 0 .* Cause: no memory; and Later: no sleep\n"
    with pytest.raises(WorkerFailed, match=told) as caught:
        pool._close_on_failure("actor.update", {0: Failure(cause)}, [], [])
    assert caught.value.__notes__ == [NOTE]
    assert pool.closed_reason is not None


# Engines of vLLM, without vLLM: the engine around it is the real one


def vllm_engine() -> VLLMEngine:
    engine = object.__new__(VLLMEngine)
    engine._numbers, engine._coming, engine._done = itertools.count(), None, []
    return engine


def test_an_engine_of_vllm_tells_why_it_stopped(prompts: DataProto, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm_engine()
    monkeypatch.setattr(engine, "_begin", fails(Cause), raising=False)
    monkeypatch.setattr(engine, "_end_run", fails(Later), raising=False)
    assert notes_of(lambda: list(engine.generate(build_requests(prompts, SAMPLING), SAMPLING))) == [NOTE]


def test_an_engine_of_vllm_tells_why_weights_or_prompts_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm_engine()
    cleared: list[int] = []
    engine.memory = SimpleNamespace(load=fails(Cause))
    engine.prompts = SimpleNamespace(last=SimpleNamespace(clear=lambda: cleared.append(1)))
    engine.llm = SimpleNamespace(reset_mm_cache=fails(Later))
    monkeypatch.setattr(engine, "_suspend", lambda: None, raising=False)
    monkeypatch.setattr(engine, "_checkpoint_weights", lambda weights, of_head: weights, raising=False)
    monkeypatch.setattr(engine, "_reset_caches", fails(Later), raising=False)
    assert notes_of(lambda: engine.load_weights([])) == [NOTE]

    def render() -> None:
        with engine._image_caches_in_sync():
            raise Cause

    monkeypatch.setattr(engine, "_drop_coming", fails(Later, "threads"), raising=False)
    assert notes_of(render) == ["and Later: threads", NOTE]
    assert cleared == [1]


def test_an_engine_that_does_not_start_is_told_though_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_rng_state", fails(Later))

    def start() -> None:
        with process_settings_kept():
            torch.set_num_threads(threads + 1)
            raise Cause

    assert notes_of(start) == [NOTE]
    assert torch.get_num_threads() == threads


def test_a_long_message_is_told_by_its_beginning_and_end() -> None:
    told = describe(ValueError("picture " + "x" * 100_000 + " is broken"))
    assert len(told) == 2005
    assert told.startswith("ValueError: picture xxx")
    assert told.endswith("xxx is broken")
    assert " ... " in told
