"""What many adapters in one packed pass cost, against one adapter with the same rows.

    python benchmarks/adapters.py [MODEL_PATH]

Prints the processor seconds of a forward and backward pass over 8 rows of text and images: of one model, of four models with two
rows each and ranks 4, 8, 8, 16, and of the same four one after the other, as a server that swaps adapters has to.
"""

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk  # noqa: E402
from dataproto_server.backend import Datum, LoraSpec, Pass, PassResult  # noqa: E402
from dataproto_server.engine import InProcessEngine  # noqa: E402
from recipes.demo.tiny_model import make_tiny_model  # noqa: E402

ROWS, TEXT, REPEATS = 8, 96, 15
RANKS = (4, 8, 8, 16)


def main(path: str) -> None:
    """Prints the table."""
    engine = InProcessEngine({"model": path}, device=torch.device("cpu"))
    for number, rank in enumerate(RANKS):
        engine.create(f"tenant{number}", "model", LoraSpec(rank))
    engine.create("alone", "model", LoraSpec(8))
    data = [datum(engine, row) for row in range(ROWS)]
    own = ROWS // len(RANKS)
    parts = [Pass(f"tenant{n}", data[n * own : (n + 1) * own], "cross_entropy") for n in range(len(RANKS))]
    cases: dict[str, list[list[Pass]]] = {
        "one model, 8 rows": [[Pass("alone", data, "cross_entropy")]],
        "four models, 2 rows each, one pass": [parts],
        "four models, 2 rows each, four passes": [[part] for part in parts],
    }
    found = medians({name: (lambda calls=calls: run(engine, calls)) for name, calls in cases.items()})
    first = next(iter(found.values()))
    tokens = sum(len(each.inputs["weights"]) for each in data)
    print(f"{tokens} tokens in {ROWS} rows, {torch.get_num_threads()} thread(s)")
    for name, seconds in found.items():
        print(f"{name:40} {seconds * 1e3:8.1f} ms  {seconds / first:5.2f}")


def datum(engine: InProcessEngine, row: int) -> Datum:
    """A row of text after an image."""
    base, random = engine.base("model"), np.random.default_rng(row)
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 255, (112, 84, 3), dtype=np.uint8)).save(buffer, format="PNG")
    tokens = random.integers(0, 256, TEXT).tolist()
    chunks: list[Chunk] = [EncodedTextChunk([5]), ImageChunk(buffer.getvalue(), "png"), EncodedTextChunk(tokens)]
    count = len(base.rendered(chunks))
    inputs = {"target_tokens": random.integers(0, 256, count), "weights": np.ones(count, dtype=np.float32)}
    return Datum(chunks, inputs)


def run(engine: InProcessEngine, calls: Sequence[Sequence[Pass]]) -> None:
    """The passes of each call in one batch."""
    for passes in calls:
        for result in engine.passes(passes):
            if not isinstance(result, PassResult):
                raise SystemExit(result.message)


def medians(cases: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Processor seconds of each case, the cases in turn so that all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(REPEATS + 2):
        for name, case in cases.items():
            start = time.process_time()
            case()
            if repeat > 1:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            main(str(make_tiny_model(made)))
