"""Samples of vLLM over HTTP: their log-probs are those of the forward pass, and a snapshot answers by its own weights."""

import json

import numpy as np
import pytest
import tinker

from helpers.served_models import png
from helpers.servers import ENGINE, serving
from recipes.demo.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SECONDS = 600
IMAGES = {(56, 56): 4, (84, 112): 12}  # pixels and tokens: a token covers 28 x 28 pixels
COUNT = 3 + sum(IMAGES.values()) + 2
ANSWER = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vllm")
    engine = {"sampler": "vllm", "max_context_length": 256, "max_num_seqs": 16, "max_lora_rank": 8, "vllm_adapters": 2}
    options = json.dumps({"models": {"tiny": str(make_tiny_model(directory / "tiny"))}} | engine)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with serving(directory / "state", options_of_engine=options, factory=ENGINE) as server:
            yield server


def prompt() -> tinker.ModelInput:
    images = [
        tinker.types.ImageChunk(data=png(*size), format="png", expected_tokens=tokens)
        for size, tokens in IMAGES.items()
    ]
    first, last = (tinker.EncodedTextChunk(tokens=tokens) for tokens in ([5, 6, 7], [8, 9]))
    return tinker.ModelInput(chunks=[first, images[0], images[1], last])


def scored(client, tokens: list[int]) -> np.ndarray:
    """The log-probs of an answer by the client's forward pass."""
    whole = prompt().append(tinker.EncodedTextChunk(tokens=tokens))
    inputs = {
        "target_tokens": [0] * (COUNT - 1) + tokens + [0],
        "weights": [0.0] * (COUNT - 1) + [1.0] * len(tokens) + [0.0],
    }
    datum = tinker.Datum(model_input=whole, loss_fn_inputs=inputs)
    output = client.forward([datum], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs[0]
    return output["logprobs"].to_numpy()[COUNT - 1 : -1]


def test_sampled_log_probs_are_those_of_the_forward_pass_and_a_snapshot_is_not_the_base(server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_lora_training_client("tiny", rank=8, seed=4).result(timeout=SECONDS)
    targets = np.random.default_rng(0).integers(5, 300, COUNT).tolist()
    datum = tinker.Datum(model_input=prompt(), loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * COUNT})
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=SECONDS)
    snapshot = client.save_weights_and_get_sampling_client().result(timeout=SECONDS)
    base = service.create_sampling_client(base_model="tiny")
    drawn = tinker.SamplingParams(max_tokens=ANSWER, seed=1, stop=[])
    greedy = tinker.SamplingParams(max_tokens=ANSWER, temperature=0.0, stop=[])
    sequences = snapshot.sample(prompt(), 3, drawn).result(timeout=SECONDS).sequences
    assert len({tuple(each.tokens) for each in sequences}) == 3
    for each in sequences:
        np.testing.assert_allclose(each.logprobs, scored(client, list(each.tokens)), atol=1e-4, rtol=0)
    whole = prompt().append(tinker.EncodedTextChunk(tokens=list(sequences[0].tokens)))
    prompt_logprobs = snapshot.compute_logprobs(whole).result(timeout=SECONDS)
    np.testing.assert_allclose(prompt_logprobs[-ANSWER:], sequences[0].logprobs, atol=1e-4, rtol=0)
    one, other = (each.sample(prompt(), 1, greedy).result(timeout=SECONDS).sequences[0] for each in (snapshot, base))
    assert list(one.tokens) != list(other.tokens)
    untrained = service.create_lora_training_client("tiny", rank=8, seed=4).result(timeout=SECONDS)
    np.testing.assert_allclose(other.logprobs, scored(untrained, list(other.tokens)), atol=1e-4, rtol=0)
