"""``kill -9`` of the server's processes: a running client sees a pause, and ends with the adapter of an undisturbed run."""

import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load

from helpers.servers import Server, serving
from recipes.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
RATE = tinker.AdamParams(learning_rate=0.01)
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


def program(server: Server, model: str, seed: int, steps: int) -> tuple[dict[str, np.ndarray], list[float], list[str]]:
    """An ordinary client, which knows nothing of kills: pipelined steps, samples, checkpoints."""
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_lora_training_client(model, rank=4, seed=seed).result()
    losses, paths, before = [], [], None
    for step in range(steps):
        passed = client.forward_backward([datum(step, row) for row in range(3)], "cross_entropy")
        client.optim_step(RATE)
        if before is not None:
            losses.append(before.result().metrics["loss:sum"])
        before = passed
        if step % max(5, steps // 4) == 4:
            paths.append(client.save_state(f"step-{step}").result().path)
            sampler = client.save_weights_and_get_sampling_client().result()
            answer = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, SAMPLING).result()
            assert len(answer.sequences[0].tokens) <= 4
    losses.append(before.result().metrics["loss:sum"])
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    exported = client.save_weights_external("final").result().path
    urls = rest.get_external_weights_urls(exported).result().urls
    file = urllib.request.urlopen(next(url for name, url in urls.items() if name.endswith(".safetensors"))).read()
    for path in paths:  # a listed checkpoint always loads
        service.create_training_client_from_state_with_optimizer(path).result()
    return (
        load(file),
        losses,
        [each.checkpoint_id for each in rest.list_checkpoints(client.model_id).result().checkpoints],
    )


def run_two(server: Server, model: str, steps: int) -> list:
    with ThreadPoolExecutor() as pool:
        tenants = [pool.submit(program, server, model, seed, steps) for seed in (1, 2)]
        return [each.result(timeout=1500) for each in tenants]


def kills(server: Server, count: int, seed: int, ended: threading.Event) -> int:
    """Kills processes at random moments, as often as there is time."""
    moments, done = random.Random(seed), 0
    while done < count and not ended.is_set():
        ended.wait(moments.uniform(0.05, 1.0))
        server.kill(*TARGETS[done % 3])
        done += 1
        wait_for_engine(server)
    return done


def wait_for_engine(server: Server) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if json.load(urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=60))["engine"]:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not come back")


def compare(state: Path, model: str, steps: int, count: int, **settings) -> None:
    options = ("--snapshot-steps", "3")
    with serving(state / "calm", *options, **settings) as server:
        expected = run_two(server, model, steps)
    ended = threading.Event()
    with serving(state / "disturbed", *options, **settings) as server, ThreadPoolExecutor() as pool:
        killer = pool.submit(kills, server, count, 7, ended)
        found = run_two(server, model, steps)
        ended.set()
        assert killer.result() >= count // 2
    for (weights, losses, names), (same_weights, same_losses, same_names) in zip(found, expected):
        assert losses == same_losses
        assert names == same_names
        assert weights.keys() == same_weights.keys()
        assert all((weights[name] == same_weights[name]).all() for name in weights)
    left = list((state / "disturbed" / "runs").glob("*/snapshot-*"))
    assert len(left) <= 16  # one of each run at most: disk does not grow with kills


def test_two_running_clients_end_with_the_adapters_of_undisturbed_runs(tmp_path):
    compare(tmp_path, "tiny/vector", 15, 3, options_of_engine=SLOW_ENGINE)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_kills_of_a_server_of_the_tiny_model(tmp_path):
    options = json.dumps({"models": {"tiny": str(make_tiny_model(tmp_path / "tiny"))}})
    compare(tmp_path, "tiny", 300, 30, options_of_engine=options, factory="recipes.serve.engine:engine_from_json")


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


def test_a_request_that_always_ends_the_engine_fails_and_the_run_goes_on(tmp_path):
    with serving(tmp_path, factory="helpers.vector_backend:open_fragile_backend") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        client = service.create_lora_training_client("tiny/vector", rank=4).result()
        with pytest.raises(tinker._exceptions.RequestFailedError, match="failed 3 times at this request"):
            client.forward_backward([datum(0, 0)], "ppo").result(timeout=120)
        client.forward_backward([datum(0, 0)], "cross_entropy").result(timeout=120)
        assert client.optim_step(RATE).result(timeout=120).metrics["steps"] == 1
