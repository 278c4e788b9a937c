"""The SDK's samplers on the real engine: snapshots, a moving one, the base, and all weights of a model."""

import numpy as np
import pytest
import tinker

from helpers.served_models import png

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
SECONDS = 60
IMAGES = {(56, 56): 4, (84, 112): 12}  # pixels and tokens: a token covers 28 x 28 pixels
TEXTS = ([5, 6, 7], [8, 9], [10, 11, 12])
LENGTH = 24
WHOLE = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def prompt() -> tinker.ModelInput:
    texts = [tinker.EncodedTextChunk(tokens=tokens) for tokens in TEXTS]
    images = [
        tinker.types.ImageChunk(data=png(*size), format="png", expected_tokens=tokens)
        for size, tokens in IMAGES.items()
    ]
    return tinker.ModelInput(chunks=[texts[0], images[0], texts[1], images[1], texts[2]])


def learn(client, steps: int, rate: float = 1e-2) -> None:
    targets = np.random.default_rng(0).integers(5, 300, LENGTH).tolist()
    datum = tinker.Datum(model_input=prompt(), loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * LENGTH})
    for _ in range(steps):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=rate)).result(timeout=SECONDS)


def scored(client) -> np.ndarray:
    """The log-probs of the last two tokens of the prompt by the client's forward pass."""
    inputs = {"target_tokens": [0] * (LENGTH - 3) + [11, 12, 0], "weights": [1.0] * LENGTH}
    datum = tinker.Datum(model_input=prompt(), loss_fn_inputs=inputs)
    output = client.forward([datum], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs[0]
    return output["logprobs"].to_numpy()[-3:-1]


def answers(sampler, **sampling) -> tuple:
    """All that a request is answered."""
    params = tinker.SamplingParams(**{"max_tokens": 6, "seed": 1, "stop": []} | sampling)
    targets = tinker.TensorData(data=list(range(5, 4 + LENGTH)), dtype="int64", shape=[LENGTH - 1, 1])
    found = sampler.sample(prompt(), 3, params, target_prompt_logprobs=targets, **WHOLE).result(timeout=SECONDS)
    drawn = [(list(each.tokens), list(each.logprobs), each.topk_logprobs) for each in found.sequences]
    return drawn, found.prompt_logprobs, found.topk_prompt_logprobs, list(found.target_prompt_logprobs.data)


@pytest.mark.parametrize("rank", [8, 0])
def test_a_snapshot_keeps_its_weights_and_a_moving_one_has_those_of_the_last_save(tiny_server, rank):
    """Of an adapter and of all weights, one model of which there may be."""
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        base = service.create_sampling_client(base_model="tiny")
        of_base = answers(base)
        client = service.create_lora_training_client("tiny", rank=rank, seed=4).result(timeout=SECONDS)
        assert client.get_info().lora_rank == rank
        learn(client, 2)
        first = client.save_weights_and_get_sampling_client().result(timeout=SECONDS)
        moving = client.save_weights_and_get_sampling_client(kind="inflight").result(timeout=SECONDS)
        kept = answers(first)
        np.testing.assert_allclose(kept[1][-2:], scored(client), atol=1e-4, rtol=0)
        assert answers(moving) == kept != of_base
        learn(client, 2)
        assert answers(first) == answers(moving) == kept
        again = client.save_weights_and_get_sampling_client(kind="inflight").result(timeout=SECONDS)
        moved = answers(moving)
        np.testing.assert_allclose(moved[1][-2:], scored(client), atol=1e-4, rtol=0)
        assert answers(again) == moved != kept
        assert answers(first) == kept
        assert answers(base) == of_base
        if rank == 0:
            with pytest.raises(tinker.RequestFailedError, match="trains all weights already, and there may be one"):
                service.create_lora_training_client("tiny", rank=0).result(timeout=SECONDS)


def test_placeholders_have_0_and_the_rest_of_a_prompt_its_log_probs(tiny_server):
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        base = service.create_sampling_client(base_model="tiny")
        drawn, prompt_logprobs, top, targets = answers(base)
        shown = [False] * 3 + [True] * 4 + [False] * 2 + [True] * 12 + [False] * 3
        assert prompt_logprobs[0] is None
        assert [value == 0 for value in prompt_logprobs[1:]] == shown[1:]
        assert [not each for each in top] == [True, *shown[1:]]
        assert len(targets) == LENGTH - 1
        assert all(value < 0 for value in targets)
        assert len({tuple(tokens) for tokens, *_ in drawn}) == 3
        assert base.compute_logprobs(prompt()).result(timeout=SECONDS) == prompt_logprobs


def test_a_text_of_several_tokens_ends_a_sample_and_an_empty_list_nothing(tiny_server, tiny_path, monkeypatch):
    monkeypatch.chdir(tiny_path.parent)  # where the client finds the tokenizer by the name of the model
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result(timeout=SECONDS)
        tokenizer = client.get_tokenizer()
        sampler = client.save_weights_and_get_sampling_client().result(timeout=SECONDS)

        def tokens(stop) -> tuple[str, list[int]]:
            params = tinker.SamplingParams(max_tokens=30, seed=5, stop=stop)
            (found,) = sampler.sample(prompt(), 1, params).result(timeout=SECONDS).sequences
            return found.stop_reason, list(found.tokens)

        reason, free = tokens([])
        assert (reason, len(free)) == ("length", 30)
        text = tokenizer.decode(free[6:9])
        for stop in (text, [text, "never"]):
            reason, stopped = tokens(stop)
            assert reason == "stop"
            assert stopped == free[: len(stopped)]
            assert text in tokenizer.decode(stopped)
            assert text not in tokenizer.decode(stopped[:-1])
        reason, stopped = tokens([free[4]])
        assert (reason, stopped) == ("stop", free[: free.index(free[4]) + 1])


def test_rows_with_two_unequal_images_and_text_alone_are_each_alone(tiny_server):
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result(timeout=SECONDS)
        learn(client, 2)
        chunks = prompt().chunks
        rows = [prompt(), tinker.ModelInput.from_ints(TEXTS[0]), tinker.ModelInput(chunks=[chunks[3], *chunks[:3]])]
        data = []
        for number, row in enumerate(rows):
            targets = np.random.default_rng(number).integers(5, 300, row.length).tolist()
            inputs = {"target_tokens": targets, "weights": [1.0] * row.length}
            data.append(tinker.Datum(model_input=row, loss_fn_inputs=inputs))
        together = client.forward(data, "cross_entropy").result(timeout=SECONDS).loss_fn_outputs
        for one, datum in zip(together, data, strict=True):
            (alone,) = client.forward([datum], "cross_entropy").result(timeout=SECONDS).loss_fn_outputs
            np.testing.assert_allclose(one["logprobs"].to_numpy(), alone["logprobs"].to_numpy(), atol=1e-5, rtol=0)
