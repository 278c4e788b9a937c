"""Every public method of the SDK's clients works on the server, or fails as a user's error that names the limit; none hangs."""

import inspect
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tinker
from tinker.lib.api_future_impl import QueueState
from tinker.lib.telemetry import is_user_error

from helpers.served_models import png

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MODEL = "tiny"
SECONDS = 60
HTTP = httpx.Client()
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
IMAGE = tinker.types.ImageChunk(data=png(28, 28), format="png", expected_tokens=1)
DATUM = tinker.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
NOT_HERE = {  # what the hosted service alone has, and what the error says; to the SDK they are errors of the user
    "RestClient.assign_session_project": "404: this server has no PUT /api/v1/sessions/",
    "RestClient.copy_weights": "404: this server has no POST /api/v1/copy_weights",
    "RestClient.export_session_trace": "404: this server has no GET /api/v1/sessions/",
    "RestClient.get_audit_log": "404: this server has no GET /api/v1/audit",
    "RestClient.get_billing_usage": "404: this server has no GET /api/v1/billing",
    "RestClient.get_current_checkpoint_storage_usage": "404: this server has no GET /api/v1/",
    "RestClient.search_sessions": "404: this server has no POST /api/v1/sessions/search",
    "RestClient.whoami": "whoami requires JWT auth",
    "ServiceClient.copy_weights": "404: this server has no POST /api/v1/copy_weights",
}


def public(client: type) -> set[str]:
    names = [name for name in vars(client) if not name.startswith("_") and not name.endswith("_async")]
    return {f"{client.__name__}.{name}" for name in names if callable(getattr(client, name))}


def loss(data: Any, logprobs: Any) -> Any:
    return -sum(each.sum() for each in logprobs), {}


def own_loss(logprobs: Any) -> Any:
    return -logprobs.sum(), {}


def another_loss(logprobs: Any) -> Any:
    return -logprobs.sum(), {"custom/tokens:sum": (logprobs == logprobs).sum()}


def rest_calls(rest: Any, client: Any, session: str, sampler: str) -> dict[str, Callable[[], Any]]:
    path = client.save_state("rest").result().path
    deleted = client.save_state("deleted").result().path
    exported = client.save_weights_external("exported").result().path
    search = tinker.types.SessionSearchRequest()
    return {
        "assign_session_project": lambda: rest.assign_session_project(session, "project"),
        "copy_weights": lambda: rest.copy_weights(path, "project"),
        "delete_checkpoint": lambda: rest.delete_checkpoint(client.model_id, "weights/rest"),
        "delete_checkpoint_from_tinker_path": lambda: rest.delete_checkpoint_from_tinker_path(deleted),
        "export_session_trace": lambda: rest.export_session_trace(session),
        "get_audit_log": lambda: rest.get_audit_log(),
        "get_billing_usage": lambda: rest.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
        "get_current_checkpoint_storage_usage": lambda: rest.get_current_checkpoint_storage_usage(),
        "get_external_weights_urls": lambda: rest.get_external_weights_urls(exported),
        "get_sampler": lambda: rest.get_sampler(sampler),
        "get_server_capabilities": lambda: rest.get_server_capabilities(),
        "get_session": lambda: rest.get_session(session),
        "get_telemetry": lambda: rest.get_telemetry(),
        "get_training_run": lambda: rest.get_training_run(client.model_id),
        "get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(exported),
        "get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(exported),
        "list_checkpoints": lambda: rest.list_checkpoints(client.model_id),
        "list_sessions": lambda: rest.list_sessions(),
        "list_training_runs": lambda: rest.list_training_runs(),
        "list_user_checkpoints": lambda: rest.list_user_checkpoints(),
        "publish_checkpoint_from_tinker_path": lambda: rest.publish_checkpoint_from_tinker_path(exported),
        "search_sessions": lambda: rest.search_sessions(search),
        "set_checkpoint_ttl_from_tinker_path": lambda: rest.set_checkpoint_ttl_from_tinker_path(exported, 3600),
        "unpublish_checkpoint_from_tinker_path": lambda: rest.unpublish_checkpoint_from_tinker_path(exported),
        "whoami": lambda: rest.whoami(),
    }


def service_calls(service: Any, client: Any) -> dict[str, Callable[[], Any]]:
    path = client.save_state("service").result().path
    return {
        "close": lambda: service.close("success"),
        "copy_weights": lambda: service.copy_weights(path),
        "create_custom_loss": lambda: service.create_custom_loss(own_loss, {"logprobs": 1}),
        "create_lora_training_client": lambda: service.create_lora_training_client(MODEL, rank=2),
        "create_rest_client": lambda: service.create_rest_client(),
        "create_sampling_client": lambda: service.create_sampling_client(base_model=MODEL),
        "create_training_client_from_state": lambda: service.create_training_client_from_state(path),
        "create_training_client_from_state_with_optimizer": lambda: (
            service.create_training_client_from_state_with_optimizer(path)
        ),
        "get_console_url": lambda: service.get_console_url(),
        "get_server_capabilities": lambda: service.get_server_capabilities(),
        "get_telemetry": lambda: service.get_telemetry(),
    }


def training_calls(client: Any) -> dict[str, Callable[[], Any]]:
    path = client.save_state("loaded").result().path
    sampled = client.save_weights_for_sampler("opened").result().path
    return {
        "create_sampling_client": lambda: client.create_sampling_client(sampled),
        "forward": lambda: client.forward([DATUM], "cross_entropy"),
        "forward_backward": lambda: client.forward_backward([DATUM], "cross_entropy"),
        "forward_backward_custom": lambda: client.forward_backward_custom([DATUM], loss),
        "get_console_url": lambda: client.get_console_url(),
        "get_info": lambda: client.get_info(),
        "get_telemetry": lambda: client.get_telemetry(),
        "get_tokenizer": lambda: client.get_tokenizer(),
        "load_state": lambda: client.load_state(path),
        "load_state_with_optimizer": lambda: client.load_state_with_optimizer(path),
        "optim_step": lambda: client.optim_step(tinker.AdamParams()),
        "save_state": lambda: client.save_state("saved"),
        "save_weights_and_get_sampling_client": lambda: client.save_weights_and_get_sampling_client(),
        "save_weights_external": lambda: client.save_weights_external("external"),
        "save_weights_for_sampler": lambda: client.save_weights_for_sampler("sampler"),
    }


def sampling_calls(sampler: Any, key: str) -> dict[str, Callable[[], Any]]:
    everything = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    return {
        "compute_logprobs": lambda: sampler.compute_logprobs(PROMPT),
        "create": lambda: tinker.SamplingClient.create(sampler.holder, base_model=MODEL),
        "from_sampler_handle": lambda: tinker.SamplingClient.from_sampler_handle(
            sampler.get_sampler_handle(), api_key=key
        ),
        "get_base_model": lambda: sampler.get_base_model(),
        "get_sampler_handle": lambda: sampler.get_sampler_handle(),
        "get_telemetry": lambda: sampler.get_telemetry(),
        "get_tokenizer": lambda: sampler.get_tokenizer(),
        "on_queue_state_change": lambda: sampler.on_queue_state_change(QueueState.ACTIVE, None),
        "sample": lambda: sampler.sample(PROMPT, 2, tinker.SamplingParams(max_tokens=3), **everything),
    }


def told(error: Exception) -> str:
    return f"{error.status_code}: {error.body['detail']}" if isinstance(error, tinker.APIStatusError) else str(error)


def test_every_public_method_answers(tiny_server, tiny_path, monkeypatch):
    server = tiny_server
    monkeypatch.chdir(tiny_path.parent)  # where the client finds the tokenizer by the name of the model
    for name, value in (("TINKER_TELEMETRY", "0"), ("TINKER_BASE_URL", server.url), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # where it has been imported already
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key, project_id="project")
    client = service.create_lora_training_client(MODEL, rank=2).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    session = client.model_id.partition(":")[0]
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    calls = {
        "RestClient": rest_calls(rest, client, session, f"{session}:sample:0"),
        "TrainingClient": training_calls(client),
        "SamplingClient": sampling_calls(sampler, server.key),
        "ServiceClient": service_calls(service, client),
    }
    named = {f"{kind}.{name}": call for kind, some in calls.items() for name, call in some.items()}
    clients = (tinker.RestClient, tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient)
    assert set(named) == set().union(*map(public, clients))
    refused: dict[str, Exception] = {}
    for name, call in sorted(named.items(), key=lambda pair: pair[0] == "ServiceClient.close"):
        try:
            found = call()
            if hasattr(found, "result") and not inspect.isclass(found):
                found.result(timeout=SECONDS)
        except (tinker.APIStatusError, RuntimeError) as error:
            refused[name] = error
    assert refused.keys() == NOT_HERE.keys(), refused
    for name, message in NOT_HERE.items():
        assert told(refused[name]).startswith(message)
    assert [name for name, error in refused.items() if not is_user_error(error)] == [
        "RestClient.whoami"
    ]  # sends nothing


def test_an_uploaded_loss_runs_in_the_client(tiny_server, monkeypatch):
    """The SDK uploads it only where ``client/config`` says so; its number is refused."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        run = service.create_lora_training_client(MODEL, rank=2).result()
        assert not service.holder.get_client_config().custom_loss_server_side
        with pytest.raises(tinker.RequestFailedError, match="'custom'") as refused:
            run.forward_backward([DATUM], "custom", {"loss_id": "1"}).result(SECONDS)
        assert refused.value.category == tinker.types.RequestErrorCategory.User
        handle = service.create_custom_loss(another_loss, {"logprobs": 1}).result(SECONDS)
        found = run.forward_backward_custom([DATUM], handle).result(SECONDS)
        assert found.metrics["custom/tokens:sum"] == 3


CHECKPOINT = "training_runs/r/checkpoints/weights/n"
TABLE = {  # of the endpoints that recipes, the REST client and the command need
    "POST": "client/config client/dynamic_config create_session session_heartbeat sessions/s/finish telemetry "
    "create_model get_info forward_backward optim_step save_weights save_weights_for_sampler load_weights "
    "create_sampling_session asample retrieve_future cancel_future weights_info save_weights_external "
    f"join_sampling_session {CHECKPOINT}/publish",
    "GET": "samplers/s training_runs/r get_server_capabilities training_runs checkpoints training_runs/r/checkpoints sessions "
    "sessions/s training_runs/r/checkpoints/external_weights/n/external_weights_urls healthz",
    "DELETE": f"{CHECKPOINT} training_runs/r/checkpoints/sampler_weights/n training_runs/r/checkpoints/external_weights/n "
    f"{CHECKPOINT}/publish",
    "PUT": f"{CHECKPOINT}/ttl",
}
ELSEWHERE = {
    "POST": "sessions/search trace_export auth/token copy_weights",
    "GET": "billing audit auth/apikey/me",
    "PUT": "sessions/s/project",
}


def answered(server: Any, method: str, path: str, key: str | None) -> tuple[int, str]:
    headers = {} if key is None else {"X-API-Key": key}
    found = HTTP.request(method, f"{server.url}/api/v1/{path}", headers=headers, timeout=SECONDS)
    return found.status_code, str(found.json().get("detail") if found.content else "")


def test_every_endpoint_of_the_table_is_here_and_needs_a_key(tiny_server):
    """An empty request is answered, or the refusal says what is wrong with it, and not that nothing is there."""
    for method, paths in TABLE.items():
        for path in paths.split():
            status, detail = answered(tiny_server, method, path, tiny_server.key)
            assert "this server has no" not in detail, (method, path, status, detail)
            assert status < 500, (method, path, status, detail)
            assert (status == 404) == detail.startswith("there is no"), (method, path, status, detail)
            assert path == "healthz" or answered(tiny_server, method, path, None)[0] == 401, (method, path)
    for method, paths in ELSEWHERE.items():
        for path in paths.split():
            assert answered(tiny_server, method, path, tiny_server.key)[1].startswith(f"this server has no {method}"), (
                path
            )


def test_what_cannot_be_carried_out_names_the_limit(tiny_server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        client = service.create_lora_training_client(MODEL, rank=2).result()
        sampler = service.create_sampling_client(base_model=MODEL)
        shard = tinker.SamplingParams(max_tokens=1)
        wrong: list[tuple[Callable[[], Any], str]] = [
            (lambda: service.create_lora_training_client(MODEL, rank=65), "max_lora_rank=64"),
            (lambda: client.forward_backward([DATUM], "gspo"), "'gspo' has no public formula"),
            (lambda: sampler.sample(tinker.ModelInput(chunks=[IMAGE] * 65), 1, shard), "--max-images"),
            (lambda: sampler.sample(PROMPT, 1025, shard), "--max-samples"),
            (lambda: sampler.sample(PROMPT, 1, shard, topk_prompt_logprobs=65), "--max-topk"),
            (lambda: sampler.sample(PROMPT, 1, tinker.SamplingParams(max_tokens=10**6)), "exceed the model's context"),
            (lambda: client.save_state("a/b"), "a/b"),
            (lambda: client.load_state("tinker://nobody/weights/x"), "tinker://nobody/weights/x"),
        ]
        for call, limit in wrong:
            with pytest.raises(tinker.RequestFailedError) as caught:
                call().result(timeout=SECONDS)
            assert caught.value.category.value == "user"
            assert limit in str(caught.value)
