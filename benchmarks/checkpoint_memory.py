"""Peak memory of each rank while an actor loads a checkpoint, updates and saves, and while one process exports a copy of it.

    python benchmarks/random_checkpoint.py 7b /tmp/7b
    torchrun --nproc-per-node 2 benchmarks/checkpoint_memory.py /tmp/7b --layout dp=2
    torchrun --nproc-per-node 2 benchmarks/checkpoint_memory.py /tmp/7b --layout tp=2 --behind
    torchrun --nproc-per-node 2 benchmarks/checkpoint_memory.py /tmp/tiny --device cpu --size tiny

Prints for each phase the largest values of all ranks in GiB. ``host`` is anonymous memory, without mapped files, whose pages the
kernel can drop at any time; ``host with files`` is all resident memory; ``device`` what torch has allocated. Host memory is
above that of the process before loading, which has imported everything. ``parts`` is what the ranks must hold: their weights in
float32.
"""

# ruff: noqa: E402

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
sys.path.insert(0, str(HERE.parent))

import torch
from transformers import AutoConfig

from benchmarks.workload import make_batch, shape_of
from dataproto import DataProto
from recipes.algorithms.losses import clipped_policy_loss
from recipes.configs.export_config import ModelExportConfig
from recipes.export import export_model
from workers.ranks.layout import Layout
from workers.ranks.mesh import AXES, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.mini_batches import share_out
from workers.weights.hollow_model import local_part

GIB = 2**30
INTERVAL_S = 0.01  # between samples of the memory


def policy_loss(outputs: Any, rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return clipped_policy_loss(outputs.log_probs, rows["old_log_probs"], rows["advantages"])


def resident() -> dict[str, int]:
    """Bytes of this process in memory: anonymous ones and all."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {"host": sizes["RssAnon"], "host with files": sizes["VmRSS"]}


class Phases:
    """The peaks of the phases of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, resident()
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block."""
        ended, peak = threading.Event(), dict.fromkeys(self.before, 0)

        def sample() -> None:
            while True:
                for kind, size in resident().items():
                    peak[kind] = max(peak[kind], size - self.before[kind])
                if ended.wait(INTERVAL_S):
                    return

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        thread, start = threading.Thread(target=sample), time.perf_counter()
        thread.start()
        yield
        seconds = time.perf_counter() - start
        ended.set()
        thread.join()
        self.found[name] = {kind: size / GIB for kind, size in peak.items()} | {"seconds": seconds}
        if self.device.type == "cuda":
            self.found[name]["device"] = torch.cuda.max_memory_allocated() / GIB


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """The largest values of all ranks, by phase."""
    device = torch.device(a.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.init_process_group(device_id=device if device.type == "cuda" else None)
    degrees = dict(pair.split("=") for pair in a.layout.split(",")) if a.layout else {}
    ranks = init_ranks(Layout(**{axis: int(degree) for axis, degree in degrees.items()}), device)
    phases = Phases(device)
    options = ActorConfig(a.checkpoint, token_budget=a.token_budget, activation_checkpointing="full", dtype="bfloat16")
    with phases.phase("load"):
        worker = ActorWorker(options, device, ranks)
    parts = sum(local_part(each.detach())[0].numel() * 4 for each in worker.module.parameters()) / GIB
    config = AutoConfig.from_pretrained(a.checkpoint)
    batch = make_batch(config, shape_of(a.size), 4 * ranks.size("dp"), 1, seed=0)
    mine = share_out(batch, ranks.size("dp"))[ranks.rank("dp")] if ranks.size("dp") > 1 else batch
    with phases.phase("update"):
        worker.update(mine, policy_loss)
    target = Path(a.output or tempfile.gettempdir()) / "checkpoint_memory"
    with phases.phase("save"):
        worker.save(target, behind=a.behind)
        worker.finish_save()
    with phases.phase("export"):
        if ranks.is_first:
            (target / "actor").mkdir()
            (target / "huggingface").rename(target / "actor" / "huggingface")
            export_model(ModelExportConfig(target, target / "exported", a.export_dtype))
    everybody = ranks.all_gather((parts, phases.found), *AXES)
    if ranks.is_first:
        shutil.rmtree(target)
    largest = {
        phase: {kind: round(max(found[phase][kind] for _, found in everybody), 3) for kind in values}
        for phase, values in phases.found.items()
    }
    return {"layout": a.layout, "behind": a.behind, "parts": round(max(each for each, _ in everybody), 3)} | largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a directory, for example of random_checkpoint.py")
    parser.add_argument("--layout", default="", help="degrees, such as dp=2 or dp=2,tp=2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="7b", help="of the rows; tiny for a tenth")
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--behind", action="store_true", help="save in the background")
    parser.add_argument(
        "--export-dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the exported copy"
    )
    parser.add_argument("--output", help="directory for the checkpoint, which is deleted; default: a temporary one")
    found = measured(parser.parse_args())
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
