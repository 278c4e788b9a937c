"""How much of an engine's rate its server gives to clients, and what four tenants at once cost. On the small model, on a CPU.

    python benchmarks/serve_rates.py load        # 512 samples with an image each and 200 passes of 3 MB, from four sessions
    python benchmarks/serve_rates.py tenants     # passes of four tenants over HTTP, beside one tenant with the same rows

``load``: the same requests go to an engine in this process, and by clients of the real Tinker SDK to ``dataproto serve``, in
turn. Passes have eight rows with a picture of their own, which make the 3 MB; all passes and samples of a turn are in flight at
once. ``tenants``: four adapters of the ranks 4, 8, 8, 16 with four losses and two rows each, beside one of rank 8 with all eight
rows, in turn. A turn is a pass and an update of each. This is done with rows of three sizes: what a request costs by itself, in
the clients too, weighs most where the rows are small. All clients are in this process, which counts in the wall clock.

Both print wall-clock seconds and processor seconds. Where other programs run, compare processor seconds: on a quiet machine with
a core for each process the server takes as long as the busier of its two processes. Torch has as many threads in this process as
in the server's: one for each core that they may use, or ``OMP_NUM_THREADS``.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ["TINKER_TELEMETRY"] = "0"

from benchmarks.served_processes import Served, limit_threads, served  # noqa: E402

CORES = limit_threads()  # before torch is imported

import httpx  # noqa: E402
import numpy as np  # noqa: E402
import tinker  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from dataproto.chunks import EncodedTextChunk, ImageChunk  # noqa: E402
from dataproto_server.backend import Datum, LoraSpec, Pass, SampleRequest, Sampling, Snapshot  # noqa: E402
from dataproto_server.config import EngineOptions  # noqa: E402
from dataproto_server.engine import InProcessEngine  # noqa: E402
from recipes.demo.tiny_model import make_tiny_model  # noqa: E402

MODEL, RANK, SESSIONS = "tiny", 8, 4
ROWS, TEXT, PIXELS = 8, 96, 354  # a file of a noisy picture of this size has 3 / 8 MB
TENANT_ROWS = ((96, 112), (384, 224), (1024, 448))  # tokens of text, and the side of the picture
TENANTS = ((4, "cross_entropy"), (8, "importance_sampling"), (8, "ppo"), (16, "cispo"))
Turn = dict[str, float]


def picture(number: int, size: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


class Row:
    """A row with a picture, as the engine and as the SDK take it."""

    def __init__(
        self, engine: InProcessEngine, number: int, size: int, loss: str = "cross_entropy", length: int = TEXT
    ) -> None:
        random, image = np.random.default_rng(number), picture(number, size)
        text = random.integers(0, 256, length).tolist()
        self.chunks = [EncodedTextChunk([5]), ImageChunk(image, "png"), EncodedTextChunk(text)]
        self.tokens = count = len(engine.base(MODEL).rendered(self.chunks))
        self.inputs: dict[str, Any] = {"target_tokens": random.integers(0, 256, count)}
        if loss == "cross_entropy":
            self.inputs["weights"] = np.ones(count, np.float32)
        else:
            self.inputs["logprobs"] = np.full(count, -5, np.float32)
            self.inputs["advantages"] = np.ones(count, np.float32)
        pieces = [tinker.EncodedTextChunk(tokens=[5]), tinker.types.ImageChunk(data=image, format="png")]
        self.given = tinker.ModelInput(chunks=[*pieces, tinker.EncodedTextChunk(tokens=text)])

    @property
    def datum(self) -> Datum:
        return Datum(self.chunks, self.inputs)

    @property
    def sent(self) -> tinker.Datum:
        return tinker.Datum(model_input=self.given, loss_fn_inputs=self.inputs)


# The load


class Load:
    """The requests of all sessions, by both ways."""

    def __init__(self, engine: InProcessEngine, arguments: argparse.Namespace, directory: Path) -> None:
        self.engine, self.arguments = engine, arguments
        self.rows = [[Row(engine, 100 * session + row, PIXELS) for row in range(ROWS)] for session in range(SESSIONS)]
        self.passes, self.samples = arguments.passes // SESSIONS, arguments.samples // SESSIONS
        self.snapshots: list[Snapshot] = []
        for session in range(SESSIONS):
            engine.create(str(session), MODEL, LoraSpec(RANK, seed=session))
            adapter = directory / str(session)
            adapter.mkdir()
            engine.export(str(session), adapter)
            self.snapshots.append(Snapshot(MODEL, adapter))

    def in_process(self) -> int:
        """All samples together, and then passes as the server groups them; the number of results."""
        found = 0
        for session in range(SESSIONS):
            for number in range(self.samples):
                chunks = self.rows[session][number % ROWS].chunks
                sampling = Sampling(max_tokens=self.arguments.max_tokens, stop=[])
                self.engine.submit(SampleRequest(f"{session}:{number}", self.snapshots[session], chunks, 1, sampling))
        while found < SESSIONS * self.samples:
            found += len(self.engine.poll())
        for _ in range(self.passes):
            given = [Pass(str(n), [row.datum for row in self.rows[n]], "cross_entropy") for n in range(SESSIONS)]
            found += len(self.engine.passes(given))
        return found

    def over_http(self, pool: ThreadPoolExecutor, clients: Sequence[Any], samplers: Sequence[Any]) -> int:
        return sum(pool.map(self._session, range(SESSIONS), clients, samplers))

    def _session(self, number: int, client: Any, sampler: Any) -> int:
        rows, params = self.rows[number], tinker.SamplingParams(max_tokens=self.arguments.max_tokens, stop=[])
        passes = [client.forward_backward([row.sent for row in rows], "cross_entropy") for _ in range(self.passes)]
        samples = [sampler.sample(rows[each % ROWS].given, 1, params) for each in range(self.samples)]
        return len([each.result() for each in samples]) + len([each.result() for each in passes])


def measure_load(engine: InProcessEngine, server: Served, arguments: argparse.Namespace, directory: Path) -> Turn:
    load = Load(engine, arguments, directory)
    clients = [new_client(server, RANK, session) for session in range(SESSIONS)]
    samplers = [client.save_weights_and_get_sampling_client().result() for client in clients]
    ended, beats = threading.Event(), list[float]()
    with ThreadPoolExecutor(SESSIONS + 1) as pool:
        beating = pool.submit(heartbeats, server, ended, beats)
        turns = [
            alternate(
                server, load.in_process, lambda: load.over_http(pool, clients, samplers), number < arguments.warmup
            )
            for number in range(arguments.warmup + arguments.repeats)
        ][arguments.warmup :]
        ended.set()
        beating.result()
    megabytes = sum(len(row.chunks[1].data) for row in load.rows[0]) / 1e6
    print(
        f"{arguments.samples} samples of {arguments.max_tokens} tokens and {arguments.passes} passes of {megabytes:.2f} MB a turn"
    )
    print(f"{len(beats)} heartbeats, none lost: 95 % within {1000 * np.quantile(beats, 0.95):.0f} ms")
    return summary(turns)


def heartbeats(server: Served, ended: threading.Event, spent: list[float]) -> None:
    """Heartbeats of a session of its own; all of them are heard."""
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key}, timeout=10) as client:
        session = client.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        while not ended.wait(0.1):
            began = time.perf_counter()
            client.post("/api/v1/session_heartbeat", json={"session_id": session}).raise_for_status()
            spent.append(time.perf_counter() - began)


# Tenants


def measure_tenants(engine: InProcessEngine, server: Served, arguments: argparse.Namespace, directory: Path) -> Turn:
    """Prints a table with a line for each size of rows; the figures of the smallest."""
    alone = new_client(server, RANK, 0)
    tenants = [new_client(server, rank, seed) for seed, (rank, _) in enumerate(TENANTS)]
    with ThreadPoolExecutor(len(TENANTS)) as pool:
        found = [measure_size(engine, server, arguments, pool, alone, tenants, *size) for size in TENANT_ROWS]
    heads = ["one, ms", "four, ms", "four / one, wall clock", "the same, server's CPU", "CPU of clients, ms"]
    print(" | ".join(["| tokens of a row", *heads]) + " |\n" + "| --- " * (1 + len(heads)) + "|")
    for turn in found:
        one, four = (turn[f"{name} front"] + turn[f"{name} engine"] for name in ("first", "second"))
        clients = " and ".join(f"{1000 * turn[f'{name} here']:.0f}" for name in ("first", "second"))
        times = f"{1000 * turn['first']:.0f} | {1000 * turn['second']:.0f} | {1 / turn['ratio']:.2f}"
        print(f"| {turn['tokens']:.0f} | {times} | {four / one:.2f} | {clients} |")
    return found[0]


def measure_size(
    engine: InProcessEngine,
    server: Served,
    arguments: argparse.Namespace,
    pool: ThreadPoolExecutor,
    alone: Any,
    tenants: Sequence[Any],
    text: int,
    size: int,
) -> Turn:
    own, losses = ROWS // len(TENANTS), [loss for _, loss in TENANTS]
    everything = [Row(engine, number, size, length=text) for number in range(ROWS)]
    shares = [[Row(engine, n * own + k, size, loss, text).sent for k in range(own)] for n, loss in enumerate(losses)]
    sent = [row.sent for row in everything]

    def together() -> int:
        return sum(pool.map(update, tenants, shares, losses))

    turns = [
        alternate(server, lambda: update(alone, sent, "cross_entropy"), together, number < arguments.warmup)
        for number in range(arguments.warmup + arguments.repeats)
    ][arguments.warmup :]
    return summary(turns) | {"tokens": mean(row.tokens for row in everything)}


def update(client: Any, data: Sequence[tinker.Datum], loss: str) -> int:
    passed = client.forward_backward(list(data), loss)
    stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
    stepped.result()
    return len(passed.result().loss_fn_outputs)


# Both


def new_client(server: Served, rank: int, seed: int) -> Any:
    """A run in a session of its own."""
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    return service.create_lora_training_client(MODEL, rank=rank, seed=seed).result()


def alternate(server: Served, first: Callable[[], int], second: Callable[[], int], silent: bool) -> Turn:
    """Both ways once: seconds, and processor seconds of this process, of the front process and of the engine process."""
    turn: Turn = {}
    for name, work in (("first", first), ("second", second)):
        clock, own, others = time.perf_counter(), time.process_time(), server.processor_seconds()
        results = work()
        turn[name] = time.perf_counter() - clock
        turn[f"{name} here"] = time.process_time() - own
        front, engine = (after - before for before, after in zip(others, server.processor_seconds(), strict=True))
        turn |= {f"{name} front": front, f"{name} engine": engine, f"{name} results": results}
    if not silent:
        print(json.dumps({name: round(value, 3) for name, value in turn.items()}), flush=True)
    return turn


def summary(turns: Sequence[Turn]) -> Turn:
    """Means over the turns, whose processor seconds are counted in hundredths, and the median ratio of both ways."""
    return {name: mean(turn[name] for turn in turns) for name in turns[0]} | {
        "ratio": median(turn["first"] / turn["second"] for turn in turns)
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "tenants"])
    parser.add_argument("--samples", type=int, default=512, help="of a turn, over all sessions")
    parser.add_argument("--passes", type=int, default=200, help="of a turn, over all sessions")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of every sample")
    parser.add_argument("--repeats", type=int, help="turns that count: 3 of the load, 15 of tenants")
    parser.add_argument("--warmup", type=int, default=1, help="turns that do not")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.repeats = arguments.repeats or (3 if arguments.what == "load" else 15)
    with tempfile.TemporaryDirectory() as made:
        path = make_tiny_model(Path(made) / "tiny")
        engine = InProcessEngine({MODEL: path}, EngineOptions(), torch.device("cpu"))
        with served(Path(made) / "log", model=f"{MODEL}={path}") as server:
            measure = measure_load if arguments.what == "load" else measure_tenants
            found = measure(engine, server, arguments, Path(made))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    where = f", on {CORES} cores with OMP_NUM_THREADS={torch.get_num_threads()}"
    if arguments.what == "load":
        busier = max(found["second engine"], found["second front"])
        print(f"rate of the server / rate of the engine: {found['ratio']:.2f} (wall clock)")
        print(
            f"processor seconds: engine alone {found['first here']:.2f}, the busier process {busier:.2f}: "
            f"{found['first here'] / busier:.2f}{where}"
        )
    else:
        one, four = (found[f"{name} front"] + found[f"{name} engine"] for name in ("first", "second"))
        print(
            f"four tenants / one tenant: {1 / found['ratio']:.2f} (wall clock), {four / one:.2f} (the server's processor seconds)"
            f"{where}"
        )


if __name__ == "__main__":
    main()
