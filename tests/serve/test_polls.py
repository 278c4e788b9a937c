"""How results are waited for: by one, by session, with the state of the queue, and not at all."""

import json

import numpy as np
import pytest

from dataproto_server.codec import ForwardBackwardRequest, SampleResponse
from helpers.servers import Served, call, send, serving_in_threads
from helpers.vector_backend import VectorBackend

pytestmark = pytest.mark.slow
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
ROWS, TOKENS = 20, 4000  # of a pass whose result is larger than a quarter of a megabyte


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """Whose passes take half a second, and whose polls a tenth."""
    with serving_in_threads(tmp_path_factory.mktemp("polls"), VectorBackend(0.5), "--poll-seconds", "0.1") as server:
        yield server


def new_run(server: Served) -> tuple[str, str]:
    session = call(server, "create_session", tags=[], sdk_version="0.38.0")[1]["session_id"]
    fields = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/vector", "lora_config": {"rank": 4}}
    return session, call(server, "create_model", **fields)[1]["model_id"]


def polled(server: Served, request: str, **fields) -> tuple[int, bytes]:
    return send(server, "/api/v1/retrieve_future", json.dumps({"request_id": request} | fields).encode())


def finished(server: Served, request: str, **fields) -> bytes:
    status = 408
    while status == 408:
        status, found = polled(server, request, **fields)
    assert status == 200
    return found


def test_a_result_that_takes_long_is_answered_with_the_state_of_the_queue(slow_server):
    _, run = new_run(slow_server)
    assert b'"model_id"' in finished(slow_server, f"{run}:0")  # the engine is there
    message = ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
    for _ in range(ROWS):
        message.data.add().model_input.add().encoded_text.tokens = np.ones(TOKENS, np.int32).tobytes()
    request = json.loads(send(slow_server, "/api/v1/forward_backward", message.SerializeToString())[1])["request_id"]
    status, found = polled(slow_server, request)
    body = json.loads(found)
    assert (status, body["queue_state"], body["request_id"]) == (408, "active", request)
    assert "request 1 is being computed or waits for its turn" in body["queue_state_reason"]
    assert len(finished(slow_server, request, allow_metadata_only=True)) > 4 * ROWS * TOKENS


def test_clients_that_join_a_session_have_numbers_and_samples_of_their_own(server):
    session, _ = new_run(server)
    sampler = call(
        server, "create_sampling_session", session_id=session, sampling_session_seq_id=5, base_model="tiny/vector"
    )[1]
    name = sampler["sampling_session_id"]
    assert call(server, "join_sampling_session", sampling_session_id=name)[1]["client_counter"] == 1
    assert call(server, "join_sampling_session", sampling_session_id=name)[1]["client_counter"] == 2
    numbers = (1, 2, 2_000_000_003)  # the last one of the clone 2
    for seq in numbers:
        fields = {"sampling_session_id": name, "seq_id": seq, "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
        made = call(server, "asample", **fields, num_samples=2)[1]
        assert made["sample_sequence_ids"] == [f"{made['request_id']}:{number}" for number in range(2)]
    for seq in numbers:
        assert len(SampleResponse.FromString(finished(server, f"{name}:{seq}")).sequences) == 2


def test_an_unknown_request_is_gone_and_so_is_a_finished_session(server):
    session, _ = new_run(server)
    assert polled(server, "nobody:1")[0] == 410
    assert call(server, "cancel_future", request_id="nobody:1")[0] == 200
    assert call(server, f"sessions/{session}/finish", reason={"type": "success"})[0] == 200
    assert call(server, f"sessions/{session}/finish", reason={"type": "errored"})[0] == 200  # the first one counts
    assert call(server, "session_heartbeat", session_id=session)[0] == 410
