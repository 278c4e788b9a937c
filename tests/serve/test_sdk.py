"""The real, unmodified SDK drives a real server of two processes."""

import asyncio
import io
import json
import multiprocessing
import pickle
import urllib.request

import numpy as np
import pytest
import tinker
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import load
from tinker._exceptions import RequestFailedError
from tinker.cli.__main__ import main_cli as cli
from tinker.types import RequestErrorCategory

from helpers.servers import OTHER_KEY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
MODEL = "tiny/vector"
RATE = tinker.AdamParams(learning_rate=0.1)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as client:
        yield client


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url, api_key=server.key)


@pytest.fixture
def client(service):
    return service.create_lora_training_client(MODEL, rank=4, seed=3, user_metadata={"who": "me"}).result()


def datum(*tokens: int) -> tinker.Datum:
    inputs = {"target_tokens": [token + 1 for token in tokens], "weights": [1.0] * len(tokens)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def learn(client, steps: int, loss: str = "cross_entropy") -> list[float]:
    """Losses of steps, all submitted before the first result is read."""
    passes = []
    for step in range(steps):
        passes.append(client.forward_backward([datum(1, 2, 3), datum(4 + step, 5)], loss))
        client.optim_step(RATE)
    return [each.result().metrics["loss:sum"] for each in passes]


def failure(future) -> str:
    with pytest.raises(RequestFailedError) as caught:
        future.result(timeout=60)
    assert caught.value.category is RequestErrorCategory.User
    return str(caught.value)


def test_training_forward_custom_loss_and_info(client):
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (MODEL, 4, True)
    before = client.forward([datum(1, 2, 3)], "cross_entropy").result()
    assert client.forward([datum(1, 2, 3)], "cross_entropy").result().metrics == before.metrics  # nothing learned
    assert before.loss_fn_outputs[0]["logprobs"].shape == [3]
    losses = learn(client, 3)
    assert losses[0] > losses[-1]

    def custom(data, logprobs):
        total = -sum((each * 2).sum() for each in logprobs)
        return total, {"own:sum": float(total.detach())}

    found = client.forward_backward_custom([datum(1, 2, 3)], custom).result()
    assert found.metrics["own:sum"] == pytest.approx(2 * found.metrics["loss:sum"] / 2)
    assert client.optim_step(RATE).result().metrics["steps"] == 4


def test_a_pass_in_many_chunks_comes_back_whole_and_in_order(client):
    data = [
        datum(number % 60, 1) for number in range(2500)
    ]  # the SDK sends 1,024 at a time, at once, the first one last
    found = client.forward_backward(data, "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 2500
    assert found.metrics["rows:sum"] == 2500
    single = client.forward([data[2400]], "cross_entropy").result()
    assert found.loss_fn_outputs[2400]["logprobs"].tolist() == single.loss_fn_outputs[0]["logprobs"].tolist()


def test_checkpoints_come_back_with_and_without_the_optimizer(service, client, rest):
    learn(client, 2)
    path = client.save_state("two", ttl_seconds=3600).result().path
    expected = learn(client, 2)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert learn(again, 2) == expected
    assert again.optim_step(RATE).result().metrics["steps"] == 5
    assert service.create_training_client_from_state(path).result().optim_step(RATE).result().metrics["steps"] == 1
    client.load_state(path).result()
    client.load_state_with_optimizer(path).result()
    assert learn(client, 2) == expected
    assert "there is a checkpoint weights/two already" in failure(client.save_state("two"))
    client.save_state("two", overwrite=True).result()
    assert "there is no checkpoint" in failure(client.load_state("tinker://nobody/weights/two"))
    assert "letters, digits" in failure(client.save_state("../two"))
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (MODEL, 4, True)


def test_samplers_are_snapshots_inflight_ones_move_and_the_base_model_is_one(service, client):
    prompt, sampling = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=6, seed=1)
    first = client.save_weights_and_get_sampling_client().result()
    one = first.sample(prompt, 3, sampling).result()
    assert [len(each.tokens) for each in one.sequences] == [6, 6, 6]
    learn(client, 2)
    second = client.save_weights_and_get_sampling_client().result()
    assert [each.tokens for each in first.sample(prompt, 3, sampling).result().sequences] == [
        e.tokens for e in one.sequences
    ]
    assert second.sample(prompt, 1, sampling).result().sequences[0].tokens != one.sequences[0].tokens
    path = client.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(path).result()
    assert (
        named.sample(prompt, 1, sampling).result().sequences[0].tokens
        == second.sample(prompt, 1, sampling).result().sequences[0].tokens
    )
    assert named.get_base_model() == MODEL
    base = service.create_sampling_client(base_model=MODEL).result()
    scored = base.compute_logprobs(prompt).result()
    assert scored[0] is None
    assert all(value < 0 for value in scored[1:])
    found = base.sample(prompt, 1, sampling, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert found.prompt_logprobs == scored


def test_an_inflight_sampler_follows_its_run(client):
    prompt, sampling = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=6, seed=1)
    moving = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = moving.sample(prompt, 1, sampling).result().sequences[0].tokens
    learn(client, 2)
    assert moving.sample(prompt, 1, sampling).result().sequences[0].tokens == before
    fresh = client.save_weights_and_get_sampling_client(kind="inflight").result()
    after = fresh.sample(prompt, 1, sampling).result().sequences[0].tokens
    assert after != before
    assert moving.sample(prompt, 1, sampling).result().sequences[0].tokens == after


def test_mistakes_fail_their_own_request_by_name_and_the_run_goes_on(client):
    assert "has no public formula" in failure(client.forward_backward([datum(1)], "gspo"))
    bad = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]}
    )
    assert "datum 0: 1 targets for 2 tokens" in failure(client.forward_backward([bad], "cross_entropy"))
    assert "learning_rate=-1.0: must be at least 0" in failure(client.optim_step(tinker.AdamParams(learning_rate=-1)))
    assert "there is adamw" in failure(client.optim_step(tinker.types.DimuonParams(learning_rate=0.1)))
    assert "encrypt" in failure(client.save_weights_external("out", age_encryption_recipients=["age1x"]))
    assert learn(client, 1)
    sampler = client.save_weights_and_get_sampling_client().result()
    assert "is not in the vocabulary" in failure(
        sampler.sample(tinker.ModelInput.from_ints([10**6]), 1, tinker.SamplingParams(max_tokens=1))
    )


def test_a_run_does_not_load_an_adapter_of_another_shape(service, client):
    other = service.create_lora_training_client(MODEL, rank=8, seed=5, train_mlp=False).result()
    path = other.save_state("other").result().path
    message = failure(client.load_state(path))
    assert f"{path} is an adapter with {{'rank': 8, 'train_attn': True, 'train_mlp': False" in message
    assert "create_training_client_from_state makes a run of it" in message
    assert "/state/" not in message


def test_a_run_does_not_load_a_checkpoint_of_another_base_model(service, client):
    other = service.create_lora_training_client("Qwen/Qwen3-4B-Instruct-2507", rank=4, seed=5).result()
    path, before = other.save_state("state").result().path, client.forward([datum(1, 2)], "cross_entropy").result()
    message = f"{path} is an adapter of Qwen/Qwen3-4B-Instruct-2507, not of {MODEL}"
    assert message in failure(client.load_state(path))
    assert message in failure(client.load_state_with_optimizer(path))
    assert client.forward([datum(1, 2)], "cross_entropy").result().metrics == before.metrics


def test_a_model_that_cannot_be_made_fails_at_its_creation(service):
    assert "rank of at most 32" in failure(service.create_lora_training_client(MODEL, rank=1000))


def test_runs_sessions_and_checkpoints_are_listed_published_deleted_and_downloaded(server, service, client, rest):
    path = client.save_state("kept", user_metadata={"step": "1"}).result().path
    client.save_weights_for_sampler("sampled").result()
    exported = client.save_weights_external("out").result().path
    run_id = client.model_id
    run = rest.get_training_run(run_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata, run.model_owner) == (MODEL, 4, {"who": "me"}, "ann")
    assert run.last_checkpoint.checkpoint_id == "weights/kept"
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == run_id
    assert run_id in [each.training_run_id for each in rest.list_training_runs(limit=100).result().training_runs]
    kinds = {each.checkpoint_id: each.checkpoint_type for each in rest.list_checkpoints(run_id).result().checkpoints}
    assert kinds == {
        "weights/kept": "training",
        "sampler_weights/sampled": "sampler",
        "external_weights/out": "external",
    }
    assert rest.list_user_checkpoints(limit=1).result().cursor.total_count >= 3
    session = run_id.partition(":")[0]
    assert session in rest.list_sessions().result().sessions
    assert rest.get_session(session).result().training_run_ids == [run_id]
    urls = rest.get_external_weights_urls(exported).result().urls
    assert load(urllib.request.urlopen(urls["adapter_model.safetensors"]).read())["weights"].size == 32
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urls["adapter_model.safetensors"].replace("signature=", "signature=0"))
    other = tinker.RestClient(base_url=server.url, api_key=OTHER_KEY)
    with pytest.raises(tinker.NotFoundError):
        other.get_training_run(run_id).result()
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert other.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    with pytest.raises(tinker.NotFoundError):
        other.delete_checkpoint_from_tinker_path(path).result()
    with tinker.ServiceClient(base_url=server.url, api_key=OTHER_KEY) as theirs:
        assert theirs.create_training_client_from_state(path).result().get_info().lora_rank == 4
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint(run_id, exported.split("/", 3)[3]).result()
    assert [each.checkpoint_id for each in rest.list_checkpoints(run_id).result().checkpoints] == [
        "sampler_weights/sampled"
    ]


def test_what_this_server_lacks_is_refused_and_nothing_hangs(rest):
    for call in (
        lambda: rest.assign_session_project("s", "p"),
        lambda: rest.search_sessions("x"),
        lambda: rest.get_billing_usage(),
    ):
        with pytest.raises(Exception):  # noqa: B017
            call().result(timeout=60)


def sample_elsewhere(pickled: bytes) -> list[int]:
    sampler = pickle.loads(pickled)
    return list(
        sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=3, seed=2))
        .result()
        .sequences[0]
        .tokens
    )


def test_a_sampling_client_works_in_another_process(server, client, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    sampler = client.save_weights_and_get_sampling_client().result()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(sample_elsewhere, (pickle.dumps(sampler),))
    assert there == sample_elsewhere(pickle.dumps(sampler))


def test_the_command_line_of_the_sdk_lists_runs_and_checkpoints(server, client, monkeypatch):
    path = client.save_state("cli").result().path
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli, ["--format", "json", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert client.model_id in run("run", "list")
    assert json.loads(run("run", "info", client.model_id))
    assert path in run("checkpoint", "list", "--run-id", client.model_id)
    assert path in run("checkpoint", "info", path)
    run("checkpoint", "publish", path)
    run("checkpoint", "unpublish", path)
    run("checkpoint", "delete", "-y", path)
    assert path not in run("checkpoint", "list", "--run-id", client.model_id)


def test_images_are_counted_and_many_samples_are_drawn_at_once(client):
    file = io.BytesIO()
    Image.new("RGB", (20, 30), "blue").save(file, "png")
    image = tinker.types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=4)
    prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1, 2]), image]).append_int(7)
    inputs = {"target_tokens": list(range(7)), "weights": [1.0] * 7}
    found = client.forward_backward([tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)], "cross_entropy").result()
    assert found.loss_fn_outputs[0]["logprobs"].shape == [7]
    sampler = client.save_weights_and_get_sampling_client().result()
    sampling = tinker.SamplingParams(max_tokens=2)
    futures = [sampler.sample(prompt, 2, sampling) for _ in range(200)]
    assert sum(len(each.result().sequences) for each in futures) == 400
    assert len(sampler.compute_logprobs(prompt).result()) == 7


def test_a_session_ends_with_its_client_and_its_runs_with_it(server, rest):
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        client = service.create_lora_training_client(MODEL, rank=2).result()
        learn(client, 1)
        path = client.save_state("last").result().path
        run_id = client.model_id
    assert rest.get_training_run(run_id).result().last_checkpoint.tinker_path == path
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        assert service.create_training_client_from_state(path).result().get_info().lora_rank == 2


def test_four_tenants_at_once_get_what_each_gets_alone(service):
    def drive(client, losses):
        return [client.forward_backward([datum(1, 2, seed) for seed in range(3)], loss) for loss in losses]

    losses = [
        ("cross_entropy",) * 3,
        ("importance_sampling",) * 3,
        ("ppo",) * 3,
        ("cross_entropy", "ppo", "cross_entropy"),
    ]
    ranks = (4, 8, 8, 16)
    together = [service.create_lora_training_client(MODEL, rank=rank, seed=rank).result() for rank in ranks]
    futures = [drive(client, names) for client, names in zip(together, losses)]
    steps = [client.optim_step(RATE) for client in together]
    found = [[each.result().metrics for each in of_one] for of_one in futures]
    norms = [step.result().metrics["grad_norm"] for step in steps]
    for place, rank in enumerate(ranks):
        alone = service.create_lora_training_client(MODEL, rank=rank, seed=rank).result()
        assert [each.result().metrics for each in drive(alone, losses[place])] == found[place]
        assert alone.optim_step(RATE).result().metrics["grad_norm"] == norms[place]


def test_the_metrics_ask_for_the_key(server):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/metrics")
    request = urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key})
    assert "dataproto_serve_engine_connected 1" in urllib.request.urlopen(request).read().decode()


def test_asynchronous_calls_work_too(client):
    async def drive():
        forward = await client.forward_backward_async([datum(1, 2)], "cross_entropy")
        step = await client.optim_step_async(RATE)
        return (await forward.result_async()).metrics, (await step.result_async()).metrics

    metrics, stepped = asyncio.run(drive())
    assert np.isfinite(metrics["loss:sum"])
    assert stepped["steps"] == 1
