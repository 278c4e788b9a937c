"""Many requests at once: all are answered, and heartbeats are heard while they are."""

import io
import json
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from PIL import Image

from helpers.servers import ENGINE, Server, serving
from recipes.demo.tiny_model import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]
SESSIONS, SAMPLES = 4, 128  # 512 samples in all
ROW = 1000  # tokens


@dataclass(frozen=True)
class Load:
    """What a session sends."""

    passes: int
    tokens: int  # of a pass, in rows of 1,000


NUMPY = Load(50, 250_000)  # 200 passes in all, of 3 MB each with targets as int64
TINY = Load(5, 10_000)  # what the small model computes in half a minute


def heartbeats(server: Server, ended: threading.Event) -> list[float]:
    """Seconds that heartbeats of a fifth session took; all of them were heard."""
    body = json.dumps({"tags": [], "sdk_version": "0.38.0"}).encode()
    headers = {"X-API-Key": server.key}
    request = urllib.request.Request(f"{server.url}/api/v1/create_session", body, headers)
    session = json.load(urllib.request.urlopen(request))["session_id"]
    body, spent = json.dumps({"session_id": session}).encode(), []
    while not ended.wait(0.05):
        began = time.perf_counter()
        request = urllib.request.Request(f"{server.url}/api/v1/session_heartbeat", body, headers)
        assert json.load(urllib.request.urlopen(request, timeout=60))["type"] == "session_heartbeat"
        spent.append(time.perf_counter() - began)
    return spent


def picture(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (56, 56, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def drive(server: Server, number: int, load: Load) -> tuple[int, int]:
    """Passes and samples of a session, all in flight at once; the numbers of results."""
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    client = service.create_lora_training_client("tiny/vector", rank=8, seed=number).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    row = tinker.ModelInput.from_ints([1] * ROW)
    inputs = {"target_tokens": np.ones(ROW, np.int64), "weights": np.ones(ROW, np.float32)}
    datum = tinker.Datum(model_input=row, loss_fn_inputs=inputs)
    passes = [client.forward_backward([datum] * (load.tokens // ROW), "cross_entropy") for _ in range(load.passes)]
    image = tinker.types.ImageChunk(data=picture(number), format="png", expected_tokens=4)
    prompt = tinker.ModelInput(chunks=[image]).append_int(5)
    samples = [sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=8)) for _ in range(SAMPLES)]
    drawn = sum(len(each.result().sequences) for each in samples)
    return drawn, sum(len(each.result().loss_fn_outputs) for each in passes)


@pytest.mark.parametrize("load", [NUMPY, TINY], ids=["numpy", "tiny"])
def test_four_sessions_with_all_their_requests_in_flight(tmp_path, monkeypatch, load):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    ended, began, settings = threading.Event(), time.perf_counter(), {}
    if load is TINY:
        options = json.dumps({"models": {"tiny/vector": str(make_tiny_model(tmp_path / "tiny"))}})
        settings = {"options_of_engine": options, "factory": ENGINE}
    with serving(tmp_path / "state", "--session-seconds", "60", **settings) as server, ThreadPoolExecutor() as pool:
        beats = pool.submit(heartbeats, server, ended)
        try:
            found = list(pool.map(drive, [server] * SESSIONS, range(SESSIONS), [load] * SESSIONS))
        finally:
            ended.set()
        spent = np.array(beats.result())
        text = (
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/metrics", headers={"X-API-Key": server.key}))
            .read()
            .decode()
        )
    assert found == [(SAMPLES, load.passes * load.tokens // ROW)] * SESSIONS
    polls = sum(
        float(line.split()[-1]) for line in text.splitlines() if 'requests_total{route="retrieve_future"' in line
    )
    seconds, results = time.perf_counter() - began, SESSIONS * (SAMPLES + load.passes)
    quick = 1000 * np.quantile(spent, 0.95)
    print(f"{seconds:.1f} s; heartbeats: 95 % within {quick:.0f} ms; polls per result: {polls / results:.2f}")
    print("\n".join(line for line in text.splitlines() if "pass_" in line or "sample" in line))


@pytest.mark.parametrize("words", ["load --samples 64 --passes 16 --repeats 2", "tenants --repeats 8"])
def test_the_rates_of_engine_and_server_are_measured(words):
    """Prints them: a busy machine says little of them. All requests of both ways have results, and no heartbeat is lost."""
    program = Path(__file__).parents[2] / "benchmarks" / "serve_rates.py"
    done = subprocess.run([sys.executable, str(program), *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    print("\n".join(done.stdout.splitlines()[-4:]))
    *_, figures = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    expected = 80 if words.startswith("load") else 8  # samples and passes, or rows
    assert figures["first results"] == figures["second results"] == expected
