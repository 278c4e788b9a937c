"""An engine in a worker gives what the engine gives in this process. That of Ray is tested over HTTP."""

from contextlib import ExitStack

import pytest

from dataproto.errors import InvalidConfig
from dataproto_server.backend import Backend, Datum, LoraSpec, Pass, SampleRequest, Sampling
from dataproto_server.config import EngineOptions
from dataproto_server.engine import InProcessEngine, PlacedEngine
from helpers.checkpoints import write_checkpoint
from helpers.served_models import ADAM, chunks, length, random_inputs, until_done
from workers.cluster.launcher import launch_worker


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def used(engine: Backend, data: list[Datum], directory) -> list:
    """Training and sampling; the samples are in flight while a pass of several parts is computed."""
    engine.create("m", "tiny", LoraSpec(4, seed=1))
    found = []
    for _ in range(2):
        (result,) = engine.passes([Pass("m", data, "cross_entropy")])
        found += [result.metrics, engine.optim_step("m", ADAM)]
    for name in ("export", "save"):
        (directory / name).mkdir(parents=True)
        getattr(engine, name)("m", directory / name)
    engine.load("m", directory / "save", optimizer=True)
    engine.open_sampler("s", "tiny", directory / "export")
    engine.submit(SampleRequest("r", "s", data[0].chunks, 2, Sampling(max_tokens=4, seed=1, stop=[])))
    engine.submit(SampleRequest("dropped", "s", data[0].chunks, 1, Sampling(max_tokens=4)))
    engine.abort(["dropped"])
    (result,) = engine.passes([Pass("m", data, "cross_entropy", replayed=True)])
    (sampled,) = until_done(engine, 1)
    engine.close_sampler("s")
    engine.release("m")
    return [*found, result.metrics, [(each.tokens.tolist(), each.logprobs.tolist()) for each in sampled.samples]]


def test_a_worker_gives_what_the_engine_gives(path, tmp_path):
    options = EngineOptions(token_budget=10)
    alone, placed = InProcessEngine({"tiny": path}, options), PlacedEngine({"tiny": path}, options, "local")
    prompts = [chunks(alone, "see", (24, 16), "angle"), chunks(alone, "Find the angle"), chunks(alone, "Find it")]
    data = [Datum(each, random_inputs(length(alone, each), "cross_entropy", seed=1)) for each in prompts]
    assert placed.describe() == alone.describe()
    assert used(placed, data, tmp_path / "placed") == used(alone, data, tmp_path / "alone")
    with pytest.raises(InvalidConfig, match="model 'm' is unknown"):
        placed.optim_step("m", ADAM)
    placed.close()


def test_a_request_that_is_dropped_behind_its_end_is_never_polled(path):
    """It ends between two parts of a pass, and the worker still has its result."""
    engine = PlacedEngine({"tiny": path}, EngineOptions(token_budget=10), "local")
    engine.create("m", "tiny", LoraSpec(4, seed=1))
    engine.open_sampler("s", "tiny", None)
    model = InProcessEngine({"tiny": path})
    prompt = chunks(model, "Find the angle")
    for name in ("dropped", "kept"):
        engine.submit(SampleRequest(name, "s", prompt, 1, Sampling(max_tokens=1, stop=[])))
    data = [Datum(prompt, random_inputs(length(model, prompt), "cross_entropy", seed=seed)) for seed in range(4)]
    engine.passes([Pass("m", data, "cross_entropy")])
    engine.abort(["dropped"])
    assert [each.request_id for each in engine.poll()] == ["kept"]
    engine.close()


def test_a_worker_that_cannot_be_started_is_told():
    with pytest.raises(InvalidConfig, match="on='moon' is unknown"):
        launch_worker(lambda device: None, ExitStack(), "moon")
