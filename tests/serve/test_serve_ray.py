"""The engine in a process of Ray: the same results, and a pause when that process is killed."""

import json

import numpy as np
import psutil
import pytest
import tinker

from helpers.servers import ENGINE, Server, serving
from recipes.demo.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]
OPTIONS = {"local": {}, "ray": {"ray": {"cpus": 1.0, "object_store_gib": 0.2}}}
TOKENS = [5, 6, 7, 8, 9, 10]


def datum(number: int) -> tinker.Datum:
    inputs = {"target_tokens": [*TOKENS[1:], 11 + number], "weights": [1.0] * len(TOKENS)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def step(client, number: int) -> float:
    passed = client.forward_backward([datum(number)], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=600)
    return passed.result(timeout=600).metrics["loss:sum"]


def kill_ray_worker(server: Server) -> None:
    engine = psutil.Process(server.supervisor.engine.process.pid)
    workers = [each for each in engine.children(recursive=True) if each.name().startswith("ray::RayHost")]
    assert len(workers) == 1
    workers[0].kill()


def program(server: Server, disturbed: bool) -> tuple[list[float], list[list[float]], list[int]]:
    """Losses of six updates, and samples; the process that computes is killed between the updates."""
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result(timeout=600)
    losses = [step(client, number) for number in range(3)]
    if disturbed:
        kill_ray_worker(server)
    losses += [step(client, number) for number in range(3, 6)]
    with pytest.raises(tinker.RequestFailedError, match="no public formula"):
        client.forward_backward([datum(0)], "gspo").result(timeout=600)
    sampler = client.save_weights_and_get_sampling_client().result(timeout=600)
    sampling = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
    answer = sampler.sample(tinker.ModelInput.from_ints(TOKENS), 2, sampling).result(timeout=600)
    return losses, [list(each.logprobs) for each in answer.sequences], list(answer.sequences[0].tokens)


def test_a_run_on_ray_is_the_run_of_this_machine_and_goes_on_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    path, found = str(make_tiny_model(tmp_path / "tiny")), {}
    for on, more in OPTIONS.items():
        options = json.dumps({"models": {"tiny": path}} | more)
        with serving(tmp_path / on, options_of_engine=options, factory=ENGINE) as server:
            found[on] = program(server, disturbed=on == "ray")
    (losses, logprobs, tokens), (same_losses, same_logprobs, same_tokens) = found["ray"], found["local"]
    np.testing.assert_allclose(losses, same_losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(logprobs, same_logprobs, atol=1e-5, rtol=0)
    assert tokens == same_tokens
