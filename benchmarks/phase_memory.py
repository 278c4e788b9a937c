"""Peak host and device memory of each rank in each phase: loading, generating, scoring, updating, saving.

    python benchmarks/random_checkpoint.py 7b /tmp/7b
    python benchmarks/phase_memory.py 7b-dp2 --checkpoint /tmp/7b     # two devices
    python benchmarks/phase_memory.py 7b-tp2 --checkpoint /tmp/7b
    python benchmarks/phase_memory.py 7b-4bit --checkpoint /tmp/7b    # one device, as of 24 GiB: torch may use 23
    python benchmarks/phase_memory.py 7b-32k-sp2                      # rows of 32,000 tokens, whose ranks share them
    python benchmarks/phase_memory.py 7b-32k-dp2                      # the same rows, a rank each
    python benchmarks/phase_memory.py 32b-dp2                         # as many layers as fit, and the forecast of all
    python benchmarks/phase_memory.py 7b-dp2 --device cpu             # the calls of a case with a tiny model

Starts one process for each rank of the case. Prints a line for each phase as it ends: the largest values of all ranks in GiB.
``host`` is memory of the process that only it has, above that before loading, when everything is imported; pages of mapped
files, which the kernel can drop, are not in it. ``device`` is what torch has allocated, beside the forecast of `dataproto plan`
for an H200; the first line says what FSDP spreads, the rank's own weights in float32. Weights are random: those of a checkpoint,
or made on the device, so that loading says nothing of reading. Of a training state the bytes are counted and not kept: 7B
writes 100 GB. ``--keep-files`` writes them.
"""

# ruff: noqa: E402

import argparse
import io
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
sys.path.insert(0, str(HERE.parent))
LOCAL_RANK = os.environ.get("LOCAL_RANK")
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
if LOCAL_RANK is not None and VISIBLE:  # as in a run on Ray, a process sees its own device alone
    os.environ |= {"CUDA_VISIBLE_DEVICES": VISIBLE.split(",")[int(LOCAL_RANK)], "LOCAL_RANK": "0"}

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystem
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.forecasts import batch_sizes
from benchmarks.geo3k_step import rows as drawn_rows
from benchmarks.random_checkpoint import make
from benchmarks.workload import TINY, Shape, make_batch, model_config, random_weights
from dataproto import DataProto
from recipes.algorithms.losses import clipped_policy_loss
from recipes.plan.forecast import forecast
from recipes.plan.setting import DEVICES, Setting
from rollout.prompts import PromptBuilder
from rollout.sampling import SamplingParams
from workers.ranks.layout import Layout
from workers.ranks.mesh import AXES, Ranks, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker
from workers.training.memory import PhaseMemory
from workers.training.mini_batches import share_out
from workers.weights.hollow_model import local_part

GIB = 2**30
INTERVAL_S = 0.01  # between samples of the memory
LONG = Shape(response=(31_000, 32_000), typical_response=31_500, total=32_768)
LONG_TINY = replace(TINY, response=(300, 320), typical_response=310, total=410)


@dataclass(frozen=True)
class Case:
    """A model in its layout, and what it is given to do."""

    size: str
    layout: Layout
    actor: dict[str, Any] = field(default_factory=dict)  # options
    prompts: int = 16  # on all ranks together
    samples: int = 5  # generated for each prompt
    shape: Shape = field(default_factory=Shape)
    layers: int | None = None  # of the decoder, if not all
    limit_gib: float | None = None  # of the device
    generates: bool = True

    def tiny(self) -> "Case":
        """The same calls, of a size for a CPU."""
        actor = self.actor | {"token_budget": 512, "dtype": "bfloat16"}
        shape = LONG_TINY if self.shape is LONG else TINY
        return replace(self, size="tiny", actor=actor, prompts=4, samples=2, shape=shape, layers=self.layers and 2)


FULL = {"activation_checkpointing": "full"}
ADAPTERS = FULL | {"token_budget": 8192, "lora_rank": 16, "load_in_4bit": True}
CASES = {
    "7b-dp2": Case("7b", Layout(dp=2), FULL),
    "7b-tp2": Case("7b", Layout(tp=2), FULL),
    "7b-4bit": Case("7b", Layout(), ADAPTERS, prompts=8, limit_gib=23, generates=False),
    "7b-32k-sp2": Case("7b", Layout(sp=2), FULL, prompts=2, shape=LONG, generates=False),
    "7b-32k-dp2": Case("7b", Layout(dp=2), FULL | {"token_budget": 32_768}, 2, shape=LONG, generates=False),
    "32b-dp2": Case("32b", Layout(dp=2), FULL, layers=22, generates=False),
}


def policy_loss(outputs: Any, rows: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return clipped_policy_loss(outputs.log_probs, rows["old_log_probs"], rows["advantages"])


def host_bytes() -> int:
    """Memory that this process alone has: anonymous pages, and shared ones, which pinned memory can be."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Phases:
    """Measures and prints the phases of one case."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device, self.before = ranks, device, host_bytes()

    @contextmanager
    def phase(self, name: str, forecast_gib: Callable[[], float] | None = None) -> Iterator[None]:
        """Measures the block on all ranks and prints a line.

        Args:
            forecast_gib: of the device's memory in this phase.
        """
        ended, highest = threading.Event(), [0]

        def sample() -> None:
            while not ended.wait(INTERVAL_S):
                highest[0] = max(highest[0], host_bytes())

        memory = PhaseMemory()
        thread, start = threading.Thread(target=sample), time.perf_counter()
        thread.start()
        try:
            with memory.phase(
                "gen" if name == "generate" else name
            ):  # an engine that is awake counts as torch counts it
                yield
        finally:
            seconds = time.perf_counter() - start
            ended.set()
            thread.join()
        left = host_bytes()
        found = {"s": seconds, "host": (max(highest[0], left) - self.before) / GIB, "left": (left - self.before) / GIB}
        if self.device.type == "cuda":
            peak, rest = memory.taken().values()
            found |= {"device": peak / GIB, "device_left": rest / GIB}
        found = {kind: max(each[kind] for each in self.ranks.all_gather(found, *AXES)) for kind in found}
        device = "| - | - " if "device" not in found else f"| {found['device']:.2f} | {found['device_left']:.2f} "
        expected = "-" if forecast_gib is None else f"{forecast_gib():.1f}"
        self.say(f"| {name} | {found['s']:.1f} | {found['host']:.2f} | {found['left']:.2f} {device}| {expected} |")

    def say(self, line: str) -> None:
        if self.ranks.is_first:
            print(line, flush=True)


class Discarded(io.RawIOBase):
    """A file that only counts what is written to it."""

    size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self.size += written
        return written


@contextmanager
def training_state_discarded() -> Iterator[None]:
    """In here torch's distributed checkpoints keep their tables of contents alone."""
    create_stream = FileSystem.create_stream

    @contextmanager
    def counting(files: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        if str(path).endswith(".distcp"):
            yield Discarded()
        else:
            with create_stream(files, path, mode) as stream:
                yield stream

    with mock.patch.object(FileSystem, "create_stream", counting), mock.patch("os.sync"):
        yield


def connect(case: Case, kind: str) -> tuple[Ranks, torch.device]:
    """This process's place in the layout."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        if case.limit_gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(case.limit_gib * GIB / total, device)
    if case.layout.world_size > 1:
        distributed.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    return init_ranks(case.layout, device), device


def setting_of(case: Case, config: Any, batch: DataProto, compute: ActorConfig, a: argparse.Namespace) -> Setting:
    """What the forecast of the updates depends on."""
    sizes, engine = batch_sizes(batch, config, 1), a.engine if case.generates else None
    fixed = {"old_log_probs": 1.0, "variation": 0, "optimizer": compute.optimizer.kind}
    return Setting(config, sizes, DEVICES["h200"], compute, case.layout, engine, **fixed)


def forecast_gib(setting: Setting) -> dict[str, float]:
    """Phase -> GiB that its roles take on the fullest device."""
    return {phase.name: phase.memory / GIB for phase in forecast(setting).phases}


def generate(case: Case, phases: Phases, worker: ActorWorker, ranks: Ranks, a: argparse.Namespace) -> None:
    """Starts an engine beside the actor and generates with its weights."""
    degree = ranks.size("tp")
    options: dict[str, Any] = {"max_num_seqs": case.prompts * case.samples}
    if a.engine == "vllm":
        options |= {"tensor_parallel": degree, "kv_cache_bytes": int(a.kv_cache_gib * GIB), "enforce_eager": True}
        options |= {"max_model_len": 1024 + a.max_tokens}
    side = {"min_pixels": 56 * 56, "max_pixels": 56 * 56} if case.size == "tiny" else {}
    builder = PromptBuilder.from_pretrained(a.checkpoint, 1024, **side)
    if a.engine == "vllm":
        options["image_options"] = builder.image_options
    with phases.phase(f"start {a.engine}"):
        rollout = RolloutWorker(RolloutConfig(a.checkpoint, a.engine, options), worker.named_weights, ranks)
    prompts = builder(drawn_rows(case.prompts))
    mine = prompts.chunk(ranks.size("dp"))[ranks.rank("dp")]
    sampling = SamplingParams(n=case.samples, max_tokens=a.max_tokens, ignore_eos=True)
    with phases.phase("generate"):
        rollout.generate(mine, sampling)


def measure(case: Case, a: argparse.Namespace) -> None:
    """Runs the phases of a case on this rank."""
    ranks, device = connect(case, a.device)
    phases, made = Phases(ranks, device), ExitStack()
    config = model_config(case.size, case.layers) if a.checkpoint is None else AutoConfig.from_pretrained(a.checkpoint)
    target = Path(a.output or tempfile.gettempdir()) / "phase_memory"
    if a.checkpoint is None:
        made.enter_context(random_weights())
        config.save_pretrained(hollow := tempfile.mkdtemp())
    compute = ActorConfig(a.checkpoint or hollow, unsharded="nothing", compile=False, **case.actor)
    batch = make_batch(config, case.shape, case.prompts, 1, seed=0)
    mine = share_out(batch, ranks.size("dp"))[ranks.rank("dp")] if ranks.size("dp") > 1 else batch
    setting = setting_of(case, config, batch, compute, a)
    expected = forecast_gib(setting)
    tokens = int(batch["attention_mask"].sum())
    phases.say(f"{a.case}, {case.layout}, {tokens} tokens in {len(batch)} rows, the longest {widest(batch)}")
    phases.say("| phase | s | host | left | device | left | forecast |\n|---|---|---|---|---|---|---|")
    with made, phases.phase("load"):
        worker = ActorWorker(compute, device, ranks)
    if not compute.load_in_4bit:
        own = sum(local_part(each.detach())[0].numel() * 4 for each in worker.module.parameters()) / GIB
        phases.say(f"| its own weights in float32 | - | - | - | {max(ranks.all_gather(own, *AXES)):.2f} | - | - |")
    if case.generates:
        generate(case, phases, worker, ranks, a)
    with phases.phase("score", lambda: expected["old_log_prob"]):
        worker.log_probs(mine)
    for number in (1, 2):
        with phases.phase(f"update {number}", lambda: expected["update_actor"]):
            worker.update(mine, policy_loss)
    if a.save:
        save(case, phases, worker, target, a)
    if case.layers is not None and case.size != "tiny":
        phases.say(whole_forecast(case, compute, setting))


def save(case: Case, phases: Phases, worker: ActorWorker, target: Path, a: argparse.Namespace) -> None:
    """Writes the training state and the export."""
    name = "save in the background" if a.in_background else "save"
    with ExitStack() as stack:
        if not a.keep_files:
            stack.enter_context(training_state_discarded())
        with phases.phase(name):
            worker.save(target, in_background=a.in_background)
            worker.finish_save()
    if phases.ranks.is_first:
        shutil.rmtree(target)


def widest(batch: DataProto) -> int:
    return int(batch["attention_mask"].sum(1).max())


def whole_forecast(case: Case, compute: ActorConfig, setting: Setting) -> str:
    """The forecast of all layers over more devices."""
    config, lines = model_config(case.size), []
    for devices in (2, 4, 8, 16):
        rows = make_batch(config, case.shape, case.prompts * devices // 2, 1, seed=0)
        whole = replace(
            setting, config=config, batch=batch_sizes(rows, config, 1), layout=replace(case.layout, dp=devices)
        )
        found = forecast_gib(replace(whole, compute=compute))
        lines.append(f"dp {devices}: {found['update_actor']:.0f} GiB")
    return f"forecast of an update with all {config.text_config.num_hidden_layers} layers: {', '.join(lines)}"


def tiny_checkpoint() -> str:
    """A checkpoint whose words divide over ranks of tensor parallelism."""
    path = Path(tempfile.gettempdir()) / "phase_memory_tiny"
    if not path.is_dir():
        draft = make(Path(tempfile.mkdtemp()), "tiny")
        model = AutoModelForImageTextToText.from_pretrained(draft)
        model.resize_token_embeddings(pad_to_multiple_of=8)
        model.save_pretrained(draft)
        draft.rename(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--checkpoint", help="a directory of random_checkpoint.py; default: weights made on the device")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--kv-cache-gib", type=float, default=8.0, help="of vLLM")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a generated response")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of the case's")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--in-background", action="store_true", help="save in the background")
    parser.add_argument("--keep-files", action="store_true", help="write the training state")
    parser.add_argument("--output", help="directory for the checkpoint, which is deleted; default: a temporary one")
    a = parser.parse_args()
    case = CASES[a.case] if a.device == "cuda" else CASES[a.case].tiny()
    case = replace(case, layers=a.layers or case.layers)
    if a.device == "cpu" and case.generates:
        a.checkpoint = tiny_checkpoint()
    if a.checkpoint is None and case.generates:
        parser.error(f"{a.case} generates: it needs a --checkpoint, with a tokenizer")
    if LOCAL_RANK is None:
        ranks = ["--standalone", "--nproc-per-node", str(case.layout.world_size)]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *ranks, *sys.argv])
    measure(case, a)
    if distributed.is_initialized() and a.engine != "vllm":  # which does it itself
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
