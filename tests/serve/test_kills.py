"""``kill -9`` of the server's processes: a running client sees a pause, and ends with the adapter of an undisturbed run."""

import json
import random
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load

from helpers.servers import ENGINE, Server, serving
from recipes.demo.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
RATE = tinker.AdamParams(learning_rate=0.001)
SAVED_EVERY, MOST_SAVED = 50, 5  # steps, and checkpoints: a quick machine makes many steps until the last kill
SLOW_ENGINE = "0.02"  # seconds of a call of passes: most kills hit one
TARGETS = (("front",), ("engine",), ("front", "engine"))
SAMPLING = tinker.SamplingParams(max_tokens=4, seed=1)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def datum(step: int, row: int) -> tinker.Datum:
    tokens = [(step * 7 + row * 3 + place) % 60 for place in range(6)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 5}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@dataclass
class Ending:
    """What a client ends with."""

    steps: int
    weights: dict[str, np.ndarray]
    losses: list[float]
    checkpoints: list[str]


def program(server: Server, model: str, seed: int, steps: int, disturbed: threading.Event) -> Ending:
    """An ordinary client, which knows nothing of kills: pipelined steps, samples, checkpoints.

    It makes at least so many steps, and goes on while the server is disturbed.
    """
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_lora_training_client(model, rank=4, seed=seed).result()
    losses, paths, before, step = [], [], None, 0
    while step < steps or disturbed.is_set():
        passed = client.forward_backward([datum(step, row) for row in range(3)], "cross_entropy")
        client.optim_step(RATE)
        if before is not None:
            losses.append(before.result().metrics["loss:sum"])
        before = passed
        if step % SAVED_EVERY == 4 and len(paths) < MOST_SAVED:
            paths.append(client.save_state(f"step-{step}").result().path)
            sampler = client.save_weights_and_get_sampling_client().result()
            answer = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, SAMPLING).result()
            assert len(answer.sequences[0].tokens) <= 4
        step += 1
    losses.append(before.result().metrics["loss:sum"])
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    exported = client.save_weights_external("final").result().path
    urls = rest.get_external_weights_urls(exported).result().urls
    file = urllib.request.urlopen(next(url for name, url in urls.items() if name.endswith(".safetensors"))).read()
    for path in paths:  # a listed checkpoint always loads
        service.create_training_client_from_state_with_optimizer(path).result()
    names = [each.checkpoint_id for each in rest.list_checkpoints(client.model_id).result().checkpoints]
    return Ending(step, load(file), losses, names)


def run_two(server: Server, model: str, steps: Sequence[int], disturbed: threading.Event) -> list[Ending]:
    with ThreadPoolExecutor() as pool:
        tenants = [
            pool.submit(program, server, model, seed, count, disturbed) for seed, count in enumerate(steps, start=1)
        ]
        return [each.result(timeout=3000) for each in tenants]


def kills(server: Server, count: int, longest: float, disturbed: threading.Event) -> int:
    """Kills processes at random moments, whatever they are at, also while they start again; the number of kills."""
    draw, done = random.Random(7), 0
    try:
        while done < count:
            time.sleep(draw.uniform(0.0, longest))
            server.kill(*draw.choice(TARGETS))
            done += 1
    finally:
        disturbed.clear()
    return done


def compare(state: Path, model: str, steps: int, count: int, longest: float, **settings) -> None:
    """The clients of the disturbed server go on until all kills have been; those of the calm one make as many steps."""
    options, disturbed = ("--snapshot-steps", "3"), threading.Event()
    disturbed.set()
    with serving(state / "disturbed", *options, **settings) as server, ThreadPoolExecutor() as pool:
        killer = pool.submit(kills, server, count, longest, disturbed)
        found = run_two(server, model, (steps, steps), disturbed)
        assert killer.result() == count
    with serving(state / "calm", *options, **settings) as server:
        expected = run_two(server, model, [each.steps for each in found], disturbed)
    for one, other in zip(found, expected, strict=True):
        assert (one.steps, one.losses, one.checkpoints) == (other.steps, other.losses, other.checkpoints)
        assert one.weights.keys() == other.weights.keys()
        assert all((one.weights[name] == other.weights[name]).all() for name in one.weights)
    left = list((state / "disturbed" / "runs").glob("*/snapshot-*"))
    assert len(left) <= 16  # one of each run at most: disk does not grow with kills


def test_two_running_clients_end_with_the_adapters_of_undisturbed_runs(tmp_path):
    compare(tmp_path, "tiny/vector", 15, 3, 1.0, options_of_engine=SLOW_ENGINE)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thirty_kills_of_a_server_of_the_tiny_model(tmp_path):
    options = json.dumps({"models": {"tiny": str(make_tiny_model(tmp_path / "tiny"))}})
    settings = {"options_of_engine": options, "factory": ENGINE}
    compare(tmp_path, "tiny", 100, 30, 12.0, **settings)


def test_a_server_that_was_stopped_goes_on_where_it_was(tmp_path):
    with serving(tmp_path) as server:
        port = server.supervisor.port
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        client = service.create_lora_training_client("tiny/vector", rank=4, seed=1).result()
        for step in range(3):
            client.forward_backward([datum(step, 0)], "cross_entropy").result()
            client.optim_step(RATE).result()
    with serving(tmp_path, port=port):
        client.forward_backward([datum(3, 0)], "cross_entropy").result(timeout=120)
        assert client.optim_step(RATE).result(timeout=120).metrics["steps"] == 4
