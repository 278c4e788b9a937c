"""What the SDK gets over HTTP is what the engine computes in process, and what it samples is what it scores."""

import io

import numpy as np
import pytest
import tinker
from PIL import Image

from dataproto.chunks import EncodedTextChunk, ImageChunk
from dataproto_server.backend import Datum, LoraSpec, Pass
from dataproto_server.engine import InProcessEngine
from workers.model.model_config import AdamParams

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
STEPS = 5
RATE = {"learning_rate": 1e-2, "grad_clip_norm": 1.0}


def picture(width: int, height: int, colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "png")
    return file.getvalue()


IMAGES = (picture(56, 56, "red"), picture(84, 112, "blue"))
EXPECTED = (4, 12)  # tokens: a token covers 28 x 28 pixels
TEXTS = ([5, 6, 7], [8, 9], [10, 11, 12])
COUNT = sum(map(len, TEXTS)) + sum(EXPECTED)


@pytest.fixture
def client(tiny_server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        yield service.create_lora_training_client("tiny", rank=8, seed=4).result()


def prompt() -> tinker.ModelInput:
    texts = [tinker.EncodedTextChunk(tokens=each) for each in TEXTS]
    images = [tinker.types.ImageChunk(data=data, format="png", expected_tokens=n) for data, n in zip(IMAGES, EXPECTED)]
    return tinker.ModelInput(chunks=[texts[0], images[0], texts[1], images[1], texts[2]])


def rows(step: int) -> list[tuple[bool, list[int], list[float]]]:
    """With images or without, targets and weights; unequal rows."""
    draw = np.random.default_rng(step)
    lengths = (COUNT, len(TEXTS[0]))
    return [
        (n == COUNT, draw.integers(5, 300, n).tolist(), draw.random(n).astype(np.float32).tolist()) for n in lengths
    ]


def over_http(client, step: int):
    data = []
    for images, targets, weights in rows(step):
        given = prompt() if images else tinker.ModelInput.from_ints(TEXTS[0])
        data.append(tinker.Datum(model_input=given, loss_fn_inputs={"target_tokens": targets, "weights": weights}))
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(tinker.AdamParams(**RATE))
    result = passed.result()
    return [each["logprobs"].to_numpy() for each in result.loss_fn_outputs], result.metrics, stepped.result().metrics


def in_process(engine, step: int):
    text = [EncodedTextChunk(each) for each in TEXTS]
    images = [ImageChunk(data, "png", n) for data, n in zip(IMAGES, EXPECTED)]
    mixed = [text[0], images[0], text[1], images[1], text[2]]
    data = [
        Datum(
            mixed if shown else [text[0]],
            {"target_tokens": np.array(targets), "weights": np.array(weights, np.float32)},
        )
        for shown, targets, weights in rows(step)
    ]
    (result,) = engine.passes([Pass("m", data, "cross_entropy")])
    return [each["logprobs"] for each in result.outputs], result.metrics, engine.optim_step("m", AdamParams(**RATE))


def test_five_steps_over_http_equal_those_in_process_bit_for_bit(client, tiny_path):
    engine = InProcessEngine({"tiny": tiny_path})
    engine.create("m", "tiny", LoraSpec(8, seed=4))
    for step in range(STEPS):
        found, expected = over_http(client, step), in_process(engine, step)
        assert [each.tobytes() for each in found[0]] == [each.tobytes() for each in expected[0]]
        assert found[1] == expected[1]
        assert found[2] == expected[2]


def test_sampled_and_scored_log_probs_equal_the_forward_pass_with_two_images(client):
    over_http(client, 0)
    sampler = client.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=8, seed=1, stop=[])).result().sequences[0]
    assert len(answer.tokens) == 8
    whole = prompt().append(tinker.EncodedTextChunk(tokens=list(answer.tokens)))
    placeholder = [0] * COUNT
    targets = [*placeholder[: COUNT - 1], *answer.tokens, 0]
    weights = [0.0] * (COUNT - 1) + [1.0] * 8 + [0.0]
    datum = tinker.Datum(model_input=whole, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    forward = (
        client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()[COUNT - 1 : -1]
    )
    assert np.abs(forward - np.array(answer.logprobs)).max() < 1e-4
    scored = sampler.compute_logprobs(whole).result()
    assert len(scored) == COUNT + 8
    assert scored[0] is None
    assert None not in scored[1:]
    assert np.abs(forward - np.array(scored[-8:])).max() < 1e-4


def test_a_custom_cross_entropy_equals_the_built_in_one(client):
    targets, weights = rows(1)[1][1:]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TEXTS[0]), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    built_in = client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    norm = client.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]

    def cross_entropy(data, logprobs):
        loss = -sum((each * each.new_tensor(weights)).sum() for each in logprobs)
        return loss, {"own:sum": loss.item()}

    custom = client.forward_backward_custom([datum], cross_entropy).result().metrics
    assert custom["own:sum"] == pytest.approx(built_in, abs=1e-6)
    assert client.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == pytest.approx(
        norm, rel=1e-6
    )


def test_a_wrong_number_of_image_tokens_is_told_by_training_and_sampling_alike(client):
    image = tinker.types.ImageChunk(data=IMAGES[0], format="png", expected_tokens=5)
    given = tinker.ModelInput(chunks=[image]).append_int(3)
    datum = tinker.Datum(model_input=given, loss_fn_inputs={"target_tokens": [1] * 6, "weights": [1.0] * 6})
    sampler = client.save_weights_and_get_sampling_client().result()
    for future in (
        client.forward_backward([datum], "cross_entropy"),
        sampler.sample(given, 1, tinker.SamplingParams(max_tokens=2)),
        sampler.compute_logprobs(given),
    ):
        with pytest.raises(tinker.RequestFailedError, match=r"chunk 0.*(4.*5|5.*4)") as caught:
            future.result(timeout=100)
        assert caught.value.category.value == "user"
