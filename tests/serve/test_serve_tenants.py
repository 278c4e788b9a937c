"""Four clients at once on the real engine: each gets what it gets alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tinker

from helpers.served_models import png
from helpers.servers import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]
SECONDS = 600
STEPS = 4
TENANTS = ((4, "cross_entropy"), (8, "ppo"), (8, "dro"), (16, "cispo"))
IMAGE_TOKENS = 4
ADAM = tinker.AdamParams(learning_rate=2e-3, eps=1e-6, grad_clip_norm=1.0)
"""With the default eps the first steps of a weight are as large for a rounding error as for a gradient."""


def data(number: int, loss: str) -> list[tinker.Datum]:
    """Rows of unequal length, one with an image."""
    draw, found = np.random.default_rng(number), []
    for length in (6 + number, 9):
        image = tinker.types.ImageChunk(
            data=png(56, 56, (50 * number, 9, 99)), format="png", expected_tokens=IMAGE_TOKENS
        )
        text = tinker.EncodedTextChunk(tokens=draw.integers(5, 300, length).tolist())
        given = tinker.ModelInput(chunks=[image, text] if length == 9 else [text])
        inputs = {"target_tokens": draw.integers(5, 300, given.length).tolist()}
        if loss == "cross_entropy":
            inputs["weights"] = draw.random(given.length).tolist()
        else:
            inputs |= {
                "logprobs": (-5 * draw.random(given.length)).tolist(),
                "advantages": draw.normal(size=given.length).tolist(),
            }
        found.append(tinker.Datum(model_input=given, loss_fn_inputs=inputs))
    return found


def train(server: Server, number: int) -> tuple[list[float], list[np.ndarray], np.ndarray]:
    """Losses, log-probs at the end, and those of a greedy answer of the snapshot."""
    rank, loss = TENANTS[number]
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        client = service.create_lora_training_client("tiny", rank=rank, seed=number).result(timeout=SECONDS)
        rows, passed = data(number, loss), []
        for _ in range(STEPS):
            passed.append(client.forward_backward(rows, loss))
            client.optim_step(ADAM)
        losses = [each.result(timeout=SECONDS).metrics["loss:sum"] for each in passed]
        outputs = client.forward(rows, loss).result(timeout=SECONDS).loss_fn_outputs
        sampler = client.save_weights_and_get_sampling_client().result(timeout=SECONDS)
        sampling = tinker.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
        answer = sampler.sample(rows[1].model_input, 1, sampling).result(timeout=SECONDS).sequences[0]
        return losses, [each["logprobs"].to_numpy() for each in outputs], np.array(answer.logprobs)


def test_four_tenants_at_once_get_what_each_gets_alone(tiny_server, monkeypatch):
    """Within 1e-5; the losses, which are sums over tokens, within 1e-4."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    alone = [train(tiny_server, number) for number in range(len(TENANTS))]
    with ThreadPoolExecutor(len(TENANTS)) as pool:
        together = list(pool.map(lambda number: train(tiny_server, number), range(len(TENANTS))))
    for (losses, outputs, answer), (same_losses, same_outputs, same_answer) in zip(together, alone, strict=True):
        assert losses[0] != losses[-1]
        np.testing.assert_allclose(losses, same_losses, atol=1e-4, rtol=0)
        for one, other in zip(outputs, same_outputs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)
        np.testing.assert_allclose(answer, same_answer, atol=1e-5, rtol=0)
