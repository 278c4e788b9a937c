"""1,024 rows of `tinker`-like data to training columns, compared with a loop over tokens: ``python benchmarks/collation.py``.

Rollouts and packed rows are timed in ``benchmarks/dataproto.py``. The outputs are compared before they are timed.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:] = [
    place for place in sys.path if Path(place or ".").resolve() != HERE
]  # its dataproto.py is not the library

from dataproto.chunks import Datum, EncodedTextChunk, ModelInput  # noqa: E402
from recipes.demo.tiny_model import make_tiny_model  # noqa: E402
from rollout.prompts import ChunkRenderer, PromptBuilder  # noqa: E402

ROWS, REPEATS = 1024, 5


def drawn_data() -> list[Datum]:
    """Rows of 64 to 1,024 tokens in two chunks, with the last two thirds of the tokens trained on."""
    draw = random.Random(0)
    data = []
    for _ in range(ROWS):
        ids = [draw.randrange(1, 250) for _ in range(draw.randint(64, 1024))]
        asked = len(ids) // 3
        chunks = ModelInput([EncodedTextChunk(ids[:asked]), EncodedTextChunk(ids[asked:-1])])
        weights = [0.0] * (asked - 1) + [1.0] * (len(ids) - asked)
        data.append(Datum(chunks, {"target_tokens": ids[1:], "weights": weights}))
    return data


def loop_over_tokens(data: list[Datum], builder: PromptBuilder) -> dict[str, torch.Tensor]:
    """The same columns, built token by token."""
    width = max(len(datum.loss_fn_inputs["target_tokens"]) for datum in data) + 1
    columns: dict[str, list[list[Any]]] = {
        name: [] for name in ("input_ids", "attention_mask", "response_mask", "loss_weights")
    }
    for datum in data:
        ids, seen, learnt, weights = [], [], [], []
        for chunk in datum.model_input.chunks:
            for token in chunk.tokens:
                ids.append(token)
                seen.append(1)
        ids.append(datum.loss_fn_inputs["target_tokens"][-1])
        seen.append(1)
        for place, weight in enumerate(datum.loss_fn_inputs["weights"]):
            assert datum.loss_fn_inputs["target_tokens"][place] == ids[place + 1]
            learnt.append(1 if weight != 0 else 0)
            weights.append(weight)
        rest = width - len(ids)
        for name, row, fill in zip(columns, (ids, seen, learnt, weights), (builder.pad_token_id, 0, 0, 0.0)):
            columns[name].append(row + [fill] * rest)
    made = {name: torch.tensor(rows) for name, rows in columns.items()}
    made["mm_token_type_ids"] = torch.zeros(made["input_ids"].shape, dtype=torch.int8)
    made["position_ids"] = builder.family.position_ids(
        made["mm_token_type_ids"], made["attention_mask"], None, None, None, config=builder.config
    )
    return made


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of the fastest of several runs, since other processes may use this machine."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        builder = PromptBuilder.from_pretrained(make_tiny_model(folder), 4096)
    data, renderer = drawn_data(), ChunkRenderer(builder)
    ours, theirs = renderer.rows(data), loop_over_tokens(data, builder)
    for name, column in theirs.items():
        assert torch.equal(ours[name], column), name
    mine = seconds(lambda: renderer.rows(data))
    loop = seconds(lambda: loop_over_tokens(data, builder))
    print(
        f"data to training rows, {ROWS:,} rows: {mine:.3f} s; a loop over tokens: {loop:.3f} s; {loop / mine:.1f} times"
    )


if __name__ == "__main__":
    main()
