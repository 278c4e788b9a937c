"""Hostile requests: each is refused, the server lives, and its memory does not grow."""

import base64
import io
import json
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataproto_server.codec import ForwardBackwardRequest
from helpers.servers import ENGINE, OTHER_KEY, Server, call, send, serving
from recipes.demo.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
REQUESTS = 150
MEGABYTE = 1 << 20
SAMPLE_FIELDS = [
    "num_samples",
    "seq_id",
    "prompt",
    "topk_prompt_logprobs",
    "sampling_params",
    "prompt_logprobs",
    "what",
]
ENDPOINTS = [
    "create_model",
    "load_weights",
    "optim_step",
    "create_sampling_session",
    "retrieve_future",
    "weights_info",
]


def result(server: Server, request_id: str) -> dict:
    return json.loads(answer_of(server, request_id))


def answer_of(server: Server, request_id: str) -> bytes:
    status = 408
    while status == 408:
        status, found = send(server, "/api/v1/retrieve_future", json.dumps({"request_id": request_id}).encode())
    assert status == 200, found
    return found


@pytest.fixture(scope="module", params=["numpy", pytest.param("tiny", marks=pytest.mark.long)])
def server(request, tmp_path_factory):
    """With the backend in NumPy, and with the real engine."""
    directory, settings = tmp_path_factory.mktemp("hostile"), {}
    if request.param == "tiny":
        options = json.dumps({"models": {"tiny/vector": str(make_tiny_model(directory / "tiny"))}})
        settings = {"options_of_engine": options, "factory": ENGINE}
    limits = ("--gap-seconds", "1", "--max-body-mb", "8", "--poll-seconds", "3")
    with serving(directory / "state", *limits, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def names(server):
    """Session, run and sampler; the engine has loaded its model."""
    session = call(server, "create_session", tags=[], sdk_version="0.38.0")[1]["session_id"]
    made = call(
        server, "create_model", session_id=session, model_seq_id=0, base_model="tiny/vector", lora_config={"rank": 4}
    )[1]
    assert result(server, made["request_id"])["model_id"] == made["model_id"]
    sampler = call(
        server, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny/vector"
    )[1]
    warm = call(server, "asample", **sample_fields(sampler["sampling_session_id"], 10**6))[1]
    assert b'"error"' not in answer_of(server, warm["request_id"])
    return session, made["model_id"], sampler["sampling_session_id"]


def a_pass(run: str, seq: int) -> ForwardBackwardRequest:
    message = ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(8, dtype=np.int32).tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = np.arange(8, dtype=np.int64).tobytes(), 2
    tensor.shape.extend([8])
    return message


def png_bomb() -> bytes:
    """A PNG that claims 50,000 x 50,000 pixels."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", header)
        + part(b"IDAT", zlib.compress(bytes(MEGABYTE)))
        + part(b"IEND", b"")
    )


def sample_fields(sampler: str, seq: int, **changes) -> dict:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 2},
    } | changes


def fuzzed(draw: random.Random, run: str, seq: int) -> bytes:
    """A pass with random bytes changed, cut off or put in."""
    body = bytearray(a_pass(run, seq).SerializeToString())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(2 + len(run) + 2, len(body))  # after the name of the run
        kind = draw.choice(("change", "cut", "insert"))
        if kind == "change":
            body[place] = draw.randrange(256)
        elif kind == "cut":
            del body[place:]
            return bytes(body)
        else:
            body[place:place] = draw.randbytes(draw.randint(1, 64))
    return bytes(body)


def memory(server: Server) -> int:
    processes = (server.supervisor.front.process, server.supervisor.engine.process)
    pages = (int(Path(f"/proc/{each.pid}/statm").read_text().split()[1]) for each in processes)
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def fuzzed_request(draw: random.Random, number: int, session: str, run: str, sampler: str) -> tuple[str, bytes]:
    """An endpoint and a body for it; the kinds of requests take turns."""
    kind = number % 6
    if kind in (0, 1):
        return "forward_backward", fuzzed(draw, run, 1 + number)
    if kind == 2:
        return "asample", draw.randbytes(draw.randint(0, 300))
    if kind == 3:
        strange = draw.choice([-1, 10**9, 10**18, 0.5, "4", None, [], {}, "../..", "\0", float("nan")])
        return "asample", json.dumps(sample_fields(sampler, number) | {draw.choice(SAMPLE_FIELDS): strange}).encode()
    if kind == 4:
        path = draw.choice(["../../etc/passwd", "a/b", "..", "", "x" * 999, "\0"])
        seq = draw.choice([0, -1, 2**70, "1", None])
        return "save_weights", json.dumps({"model_id": run, "seq_id": seq, "path": path}).encode()
    endpoint = draw.choice(ENDPOINTS)
    field = draw.choice(["session_id", "model_id", "path", "request_id"])
    return endpoint, json.dumps({field: draw.choice([session, run, "tinker://a/b/c", 5, "\n"])}).encode()


def test_fuzzed_requests_are_refused_and_the_server_lives(server, names):
    draw = random.Random(0)
    before, refused, failed, carried_out = memory(server), 0, 0, 0
    processes = [server.supervisor.front.process.pid, server.supervisor.engine.process.pid]
    for number in range(REQUESTS):
        endpoint, body = fuzzed_request(draw, number, *names)
        headers = {"Content_Type": "application/x-protobuf"} if endpoint == "forward_backward" else {}
        status, found = send(server, f"/api/v1/{endpoint}", body, **headers)
        assert status < 500, (number, status, found)
        refused += status >= 400
        if status == 200 and "request_id" in json.loads(found):
            # It has a place in the order, and fails in its turn, by its sender's fault, or is valid.
            outcome = answer_of(server, json.loads(found)["request_id"])
            if outcome.startswith(b'{"error"'):
                assert json.loads(outcome)["category"] == "user", (number, outcome)
                failed += 1
            else:
                carried_out += 1
    assert refused > REQUESTS / 3
    assert carried_out < REQUESTS / 10
    print(f"{refused} refused at once, {failed} failed in their turn, {carried_out} were valid all the same")
    assert [server.supervisor.front.process.pid, server.supervisor.engine.process.pid] == processes
    assert memory(server) - before < 200 * MEGABYTE
    assert call(server, "session_heartbeat", session_id=names[0])[0] == 200


def test_bombs_are_refused_at_the_limit(server, names):
    _, _run, sampler = names
    before = memory(server)
    for encoding in ("zstd", "gzip"):
        assert send(server, "/api/v1/forward_backward", b"x", Content_Encoding=encoding)[0] == 415
    status, found = send(server, "/api/v1/telemetry", bytes(9 * MEGABYTE))
    assert (status, b"--max-body-mb" in found) == (413, True)
    image = {"type": "image", "data": base64.b64encode(png_bomb()).decode(), "format": "png"}
    made = call(server, "asample", **sample_fields(sampler, 1000, prompt={"chunks": [image]}))[1]
    assert "--max-image-megapixels" in result(server, made["request_id"])["error"]
    tokens = {"type": "encoded_text", "tokens": [10**9] * 100_000}
    made = call(server, "asample", **sample_fields(sampler, 1001, prompt={"chunks": [tokens]}))[1]
    assert result(server, made["request_id"])["category"] == "user"
    assert memory(server) - before < 200 * MEGABYTE


def test_a_number_holds_one_request(server, names):
    session, _, sampler = names
    made = call(
        server, "create_model", session_id=session, model_seq_id=7, base_model="tiny/vector", lora_config={"rank": 4}
    )[1]
    run = made["model_id"]
    body = a_pass(run, 1).SerializeToString()
    first = send(server, "/api/v1/forward_backward", body)
    assert send(server, "/api/v1/forward_backward", body) == first
    other = a_pass(run, 1)
    other.loss_fn = "ppo"
    status, found = send(server, "/api/v1/forward_backward", other.SerializeToString())
    assert (status, b"with another content" in found) == (400, True)
    one = call(server, "asample", **sample_fields(sampler, 50))
    assert call(server, "asample", **sample_fields(sampler, 50)) == one
    assert call(server, "asample", **sample_fields(sampler, 50, num_samples=2))[0] == 400


def test_another_key_sees_nothing(server, names):
    session, run, sampler = names
    assert call(server, "session_heartbeat", "tml-nobody", session_id=session)[0] == 401
    for name, fields in (
        ("session_heartbeat", {"session_id": session}),
        ("get_info", {"model_id": run}),
        ("asample", sample_fields(sampler, 9)),
        ("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}}),
    ):
        assert call(server, name, OTHER_KEY, **fields)[0] == 404
    assert call(server, "retrieve_future", OTHER_KEY, request_id=f"{run}:0")[0] == 410
    assert send(server, "/api/v1/forward_backward", a_pass(run, 1).SerializeToString(), OTHER_KEY)[0] == 404


def test_images_of_a_request_are_counted(server, names):
    """64 images are allowed, 65 are not, whatever their size."""
    _, _, sampler = names
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "png")
    image = {"type": "image", "data": base64.b64encode(file.getvalue()).decode(), "format": "png"}
    made = call(server, "asample", **sample_fields(sampler, 2000, prompt={"chunks": [image] * 64}))[1]
    status, _ = send(server, "/api/v1/retrieve_future", json.dumps({"request_id": made["request_id"]}).encode())
    assert status == 200
    made = call(server, "asample", **sample_fields(sampler, 2001, prompt={"chunks": [image] * 65}))[1]
    assert "--max-images" in result(server, made["request_id"])["error"]
