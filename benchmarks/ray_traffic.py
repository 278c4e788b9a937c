"""The bytes that each call of a GRPO step puts into Ray's object store, and the peak memory of the driver and its workers.

    python benchmarks/ray_traffic.py                       # 32 prompts x 8 samples, images of 512 pixels, 2 processes
    python benchmarks/ray_traffic.py --prompts 16 --samples 4 --frames 32 --pixels 224      # videos of 32 frames instead
    python benchmarks/verl_traffic.py --prompts 16 --samples 4 --frames 32 --pixels 224     # of verl, in its environment

The bytes are Ray's count over all processes. A batch whose rows do not share their media would put them once for each sample and
call. Memory is that over the start of the first step; pages mapped from the object store are not in it.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.store_traffic import MIB, Traffic, store_bytes  # noqa: E402
from dataproto import DataProto  # noqa: E402
from recipes.demo.tiny_model import tiny_checkpoint  # noqa: E402
from recipes.grpo import GRPOConfig, grpo_step  # noqa: E402
from recipes.rewards import load_reward  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from workers import ActorConfig, launch  # noqa: E402
from workers.cluster.ray_group import RayFuture, RayGroup  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402

TEXT = 256  # tokens of a row besides those of its medium, at most


def rows(prompts: int, pixels: int, frames: int | None, step: int) -> list[dict[str, Any]]:
    noise = np.random.default_rng(step)

    def medium() -> Any:
        made = noise.integers(0, 256, (frames or 1, pixels, pixels, 3), dtype=np.uint8)
        return made if frames else Image.fromarray(made[0])

    return [
        {
            "prompt": [{"role": "user", "content": f"<{'video' if frames else 'image'}>Find x."}],
            "videos" if frames else "images": [medium()],
            "uid": f"{step}-{number}",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for number in range(prompts)
    ]


def media_bytes(prompts: DataProto) -> int:
    """Bytes of the distinct pixels and patches; PIL stores four bytes for each pixel of an image."""
    media = prompts["multi_modal_data"]
    pixels = sum(4 * image.width * image.height for row in media for image in row.get("image", ()))
    pixels += sum(frames.nbytes for row in media for frames, _ in row.get("video", ()))
    return pixels + sum(tensor.nbytes for row in prompts["multi_modal_inputs"] for tensor in row.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--frames", type=int, help="of a video in each prompt; default: an image")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    path, side, frames = str(tiny_checkpoint(0)), arguments.pixels, arguments.frames
    longest = TEXT + (side // 28) ** 2 * ((frames or 1) + 1) // (2 if frames else 1)
    builder = PromptBuilder.from_pretrained(path, longest, min_pixels=side * side, max_pixels=side * side)
    actor = ActorConfig(path, token_budget=max(4096, longest))
    config = GRPOConfig(n=arguments.samples, kl_coef=0.01)
    reward = load_reward("geo3k")
    with launch(actor, actor.frozen(), reward, on="ray", layout=Layout(dp=arguments.processes)) as roles:
        traffic, submit = Traffic("RayHost"), RayGroup.submit

        def measured(group: RayGroup, method: str, *args: Any, **kwargs: Any) -> RayFuture:
            traffic.begin(f"{group._role}.{method}")
            future = submit(group, method, *args, **kwargs)
            traffic.sent()
            return future

        with mock.patch.object(RayGroup, "submit", measured):
            for step in range(arguments.steps):
                traffic.calls.clear()
                before = store_bytes()[0]
                with traffic.measured():
                    prompts = builder(rows(arguments.prompts, side, frames, step))
                    grpo_step(roles, prompts, config, config.sampling(16, seed=step))
                distinct, put = media_bytes(prompts) / MIB, (store_bytes()[0] - before) / MIB
                print(
                    f"\nstep {step}: {distinct:.0f} MiB of distinct media, {put:.0f} MiB put, {put / distinct:.2f} times"
                )
                print(traffic, flush=True)
                del prompts  # or the next are made while these are there


if __name__ == "__main__":
    main()
