"""The bytes that a GRPO step puts into Ray's object store, compared with its distinct images, and the driver's peak memory.

    python benchmarks/ray_traffic.py                       # 32 prompts x 8 samples, images of 512 pixels, 2 processes

The bytes are Ray's count over all processes. A batch whose rows do not share their media would put them once for each sample and
call.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import ray  # noqa: E402
from PIL import Image  # noqa: E402
from ray._private.internal_api import get_memory_info_reply, get_state_from_address  # noqa: E402

from dataproto import DataProto  # noqa: E402
from recipes.grpo import GRPOConfig, grpo_step  # noqa: E402
from recipes.rewards import load_reward  # noqa: E402
from recipes.tiny import tiny_checkpoint  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from workers import ActorConfig, launch  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402

MIB = 2**20


def put_bytes() -> int:
    """All bytes that were put into the object store of this machine."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)


def resident() -> int:
    """Resident bytes of this process, without pages mapped from the object store."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Peak:
    """The largest `resident` within a block, sampled every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.bytes, self._over = resident(), False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.003)

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()


def rows(prompts: int, pixels: int, step: int) -> list[dict[str, Any]]:
    noise = np.random.default_rng(step)
    return [
        {
            "prompt": [{"role": "user", "content": "<image>Find x."}],
            "images": [Image.fromarray(noise.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8))],
            "uid": f"{step}-{number}",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for number in range(prompts)
    ]


def media_bytes(prompts: DataProto) -> int:
    """Bytes of the distinct pixels, as PIL stores them (four bytes each), and patches."""
    pixels = sum(4 * image.width * image.height for row in prompts["multi_modal_data"] for image in row["image"])
    return pixels + sum(tensor.nbytes for row in prompts["multi_modal_inputs"] for tensor in row.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    path = str(tiny_checkpoint(0))
    side = arguments.pixels
    builder = PromptBuilder.from_pretrained(path, 2048, min_pixels=side * side, max_pixels=side * side)
    actor = ActorConfig(path, token_budget=4096)
    config = GRPOConfig(n=arguments.samples, kl_coef=0.01)
    reward = load_reward("geo3k")
    with launch(actor, actor.frozen(), reward, on="ray", layout=Layout(dp=arguments.processes)) as roles:
        print(
            "| step | distinct media, MiB | put, MiB | ratio | driver's peak over its start, MiB |\n|---|---|---|---|---|"
        )
        for step in range(arguments.steps):
            prompts = builder(rows(arguments.prompts, side, step))
            distinct, before, start = media_bytes(prompts), put_bytes(), resident()
            with Peak() as peak:
                grpo_step(roles, prompts, config, config.sampling(16, seed=step))
            put = put_bytes() - before
            figures = distinct / MIB, put / MIB, put / distinct, (peak.bytes - start) / MIB
            print(f"| {step} | " + " | ".join(f"{figure:.3g}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
