"""The bytes that the calls of a GRPO step send between the driver and its workers, beside those of their padded columns.

    python benchmarks/wire_bytes.py                        # 64 rows, responses of up to 32,768 tokens

Lengths of responses are drawn log-normal, and at least one is the longest. Seconds are those of the processor.
"""

import argparse
import math
import pickle
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import torch  # noqa: E402

from dataproto import DataProto, shared_blobs  # noqa: E402

MIB = 2**20


class NoStore:
    """The store of a message to another process that has no media."""


def rollouts(rows: int, prompt: int, longest: int, mean: float, sigma: float) -> DataProto:
    """Rollouts as an engine returns them: prompts left-padded, responses right-padded."""
    noise = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, generator=noise) * sigma + math.log(mean) - sigma**2 / 2
    lengths = normal.exp().round().clamp(1, longest)
    lengths[0] = longest
    prompts = torch.randint(prompt // 2, prompt + 1, (rows,), generator=noise)
    attended = torch.cat(
        [torch.arange(prompt) >= prompt - prompts[:, None], torch.arange(longest) < lengths[:, None]], 1
    )
    ids = torch.randint(5, 150_000, attended.shape, generator=noise) * attended
    text = torch.where(attended[:, :prompt], attended[:, :prompt].cumsum(1) - 1, 0)
    positions = torch.cat([text, text[:, -1:] + torch.arange(1, longest + 1)], 1)
    response = attended[:, prompt:]
    columns = {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "input_ids": ids,
        "attention_mask": attended.long(),
        "position_ids": positions[:, None].repeat(1, 4, 1),
        "mm_token_type_ids": torch.zeros_like(ids, dtype=torch.int8),
        "response_mask": response.long(),
        "rollout_log_probs": scores(response, noise),
    }
    return DataProto.from_dict({name: column.contiguous() for name, column in columns.items()})


def scores(response: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    return torch.randn(response.shape, generator=noise).where(response, 0.0)


def sent(data: DataProto) -> tuple[int, float, float]:
    """The bytes of a message, and the seconds to write and to read it."""
    buffers: list[pickle.PickleBuffer] = []
    start = time.process_time()
    with shared_blobs(NoStore()):
        text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw().tobytes() for buffer in buffers]
    written = time.process_time()
    back = pickle.loads(text, buffers=raw)
    read = time.process_time()
    assert all(torch.equal(back[name], data[name]) for name in data.names())
    return len(text) + sum(map(len, raw)), written - start, read - written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--mean", type=float, default=6000.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    arguments = parser.parse_args()
    data = rollouts(**vars(arguments))
    response, noise = data["response_mask"].bool(), torch.Generator().manual_seed(1)
    print(
        f"{arguments.rows} rows, {response.sum(1).float().mean():.0f} of {arguments.longest} response tokens on average"
    )
    print("| call | padded columns, MiB | message, MiB | share | write, s | read, s |\n|---|---|---|---|---|---|")
    calls = [("actor.log_probs, rows", data[:])]
    calls.append(("actor.log_probs, result", DataProto.from_dict({"old_log_probs": scores(response, noise)})))
    for name in ("old_log_probs", "ref_log_prob", "token_level_rewards"):
        data[name] = scores(response, noise)
    data["advantages"] = torch.randn(len(data), 1, generator=noise) * response
    calls.append(("actor.update, rows", data))
    for name, batch in calls:
        padded = sum(column.nbytes for column in batch.batch.values())
        size, write, read = sent(batch)
        print(
            f"| {name} | {padded / MIB:.1f} | {size / MIB:.1f} | {size / padded:.3f} | {write:.2f} | {read:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
