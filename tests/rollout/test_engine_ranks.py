"""An engine of two ranks: what the first rank's clock decides happens on both."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dataproto.errors import InvalidConfig, InvalidPrompt, RankFailure
from helpers.batches import prompt_batch
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_model
from helpers.turns import next_turn
from rollout.engine import SamplingParams
from rollout.engine_ranks import drive
from rollout.hf import HFEngine
from rollout.responses import build_requests

SAMPLED = SamplingParams(temperature=0.8, max_tokens=6, seed=1)


def engine_of(path):
    return HFEngine(str(path), device=torch.device("cpu"))


def requests_of(engine):
    prompts = prompt_batch(engine.model.config, [[(4, 6)], [(6, 6)], []], texts=[4, 7, 3])
    return build_requests(prompts, SAMPLED)


def two_turns(engine, config, requests):
    """Tokens of both turns of each request; they join and leave at different times, and a refused one is in between."""
    running, found = {}, {}
    for place, request in enumerate(requests):
        running[engine.submit(request, SAMPLED, True)] = place, request
        engine.poll()
    while engine.unfinished:
        for done in engine.poll():
            place, request = running[done.request]
            found.setdefault(place, []).append(done)
            if len(found[place]) == 1:
                with pytest.raises(InvalidPrompt):
                    engine.fork(done.request, requests[place - 1], SAMPLED)
                later = next_turn(config, request, done, [5, 6], (4, 4))
                running[engine.fork(done.request, later, SAMPLED)] = place, later
                engine.abort(done.request)
    return [[done.token_ids for done in found[place]] for place in sorted(found)]


def failing(engine, requests):
    engine.submit(requests[0], SAMPLED)
    engine.poll()
    raise InvalidConfig("the clock")


def plays():
    engine, config = engine_of(os.environ["TINY_MODEL"]), None
    config, requests = engine.model.config, requests_of(engine)
    played = drive(engine, dist.group.WORLD, lambda led: two_turns(led, config, requests))
    sent = engine.prefilled_tokens
    try:
        drive(engine, dist.group.WORLD, lambda led: failing(led, requests))
    except (InvalidConfig, RankFailure) as error:
        return played, sent, f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_calls_of_the_first_rank_are_repeated_on_the_other(tmp_path: Path, monkeypatch):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TINY_MODEL", str(tmp_path / "model"))
    (first, second) = run_ranks(2, {"plays": plays}, tmp_path)["plays"]
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    engine = engine_of(tmp_path / "model")
    config, requests = engine.model.config, requests_of(engine)
    alone = drive(engine, None, lambda own: two_turns(own, config, requests))
    assert first[0] == second[0] == alone
    assert first[1] == second[1] == engine.prefilled_tokens  # both computed it
    assert first[2] == "InvalidConfig: the clock"
    assert second[2] == "RankFailure: the first rank of the engine failed: InvalidConfig: the clock"
