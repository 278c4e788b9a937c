"""What verl 0.9.1 sends for the videos of one step, with the rows and the calls of `ray_traffic.py`.

    /path/to/verl-venv/bin/python benchmarks/verl_traffic.py --prompts 16 --samples 4 --frames 32 --pixels 224

The rows are as verl's agent loops return them: a `DataProto` in which each sample has processed its own video into its
``multi_modal_inputs``. The frames stay in the agent loops. As in verl's trainer, the batch becomes a tensor dict without padding
for each call; verl's functions split it over the ranks and put each part into Ray's store. A rank is a process that reads its
part and computes nothing. Values are random, and no model is loaded.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.base.decorator import _split_args_kwargs_data_proto  # noqa: E402
from verl.utils.ray_utils import parallel_put  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

from benchmarks.store_traffic import MIB, Traffic, store_bytes  # noqa: E402

CALLS = ("old_log_prob", "ref_log_prob", "update_actor")
PATCH, STEP, RESPONSE = 14, 2, 16  # of Qwen2.5-VL's patches, in pixels and frames; tokens of a response
"""Sizes as in `ray_traffic.py`."""


class AgentLoops:
    """Stands for verl's agent loops, which return the rows of a rank's share."""

    def rows(self, samples: int, frames: int, pixels: int) -> DataProto:
        times, side = -(-frames // STEP), pixels // PATCH
        tokens = 24 + times * side * side // 4
        length = tokens + RESPONSE
        inputs = [
            {
                "pixel_values_videos": torch.rand(times * side * side, 3 * STEP * PATCH * PATCH),
                "video_grid_thw": torch.tensor([[times, side, side]]),
            }
            for _ in range(samples)
        ]
        mask = torch.ones(samples, length, dtype=torch.int64)
        tensors = {
            "prompts": mask[:, :tokens],
            "responses": mask[:, tokens:],
            "response_mask": mask[:, tokens:],
            "input_ids": mask,
            "attention_mask": mask,
            "position_ids": mask[:, None].repeat(1, 4, 1),
        }
        return DataProto.from_dict(tensors, non_tensors={"multi_modal_inputs": np.array(inputs, dtype=object)})


class VerlRank:
    """Reads its part of a call."""

    def call(self, part: object) -> int:
        return len(part)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--processes", type=int, default=2)
    a = parser.parse_args()
    ray.init(num_cpus=2 * a.processes, include_dashboard=False, log_to_driver=False)
    loops = [ray.remote(AgentLoops).remote() for _ in range(a.processes)]
    ranks = [ray.remote(VerlRank).remote() for _ in range(a.processes)]
    ray.get([each.__ray_ready__.remote() for each in (*loops, *ranks)])
    traffic, share = Traffic("VerlRank"), a.prompts * a.samples // a.processes
    with traffic.measured():
        traffic.begin("generate")
        batch = DataProto.concat(ray.get([each.rows.remote(share, a.frames, a.pixels) for each in loops]))
        for name in CALLS:
            traffic.begin(name)
            whole = left_right_2_no_padding(batch.to_tensordict())
            (parts,), _ = _split_args_kwargs_data_proto(a.processes, whole)
            stored = parallel_put(parts, max_workers=a.processes)
            traffic.sent()
            ray.get([rank.call.remote(part) for rank, part in zip(ranks, stored, strict=True)])
            del whole, parts, stored
    patches = sum(each["pixel_values_videos"].nbytes for each in batch.non_tensor_batch["multi_modal_inputs"]) / MIB
    print(f"\n{len(batch)} rows, {patches:.0f} MiB of patches, {store_bytes()[0] / MIB:.0f} MiB put")
    print(traffic)


if __name__ == "__main__":
    main()
