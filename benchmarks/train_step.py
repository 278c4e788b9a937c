"""Speed of a training step: packed rows with `ActorWorker.update`, padded rows with plain Hugging Face, and a bare text loop.

    python benchmarks/train_step.py --device cpu --size tiny
    python benchmarks/train_step.py --size 3b                                             # one H200
    python benchmarks/train_step.py --size 7b --parts ours --lora-rank 16 --load-in-4bit --checkpointing full --prompts 8
    torchrun --nproc-per-node 2 benchmarks/train_step.py --size 7b --parts ours           # two, by FSDP2
    torchrun --nproc-per-node 4 benchmarks/train_step.py --size 7b --parts ours --layout tp=2,pp=2
    torchrun --nproc-per-node 2 benchmarks/train_step.py --size 7b --parts ours --layout sp=2 --rows long --prompts 1 \
        --checkpointing selective --token-budget 16384
    torchrun --nproc-per-node 4 benchmarks/train_step.py --size 30b-a3b --layers 16 --parts ours --layout dp=4,ep=4
    python benchmarks/train_step.py --size qwen3.5-9b --parts ours --checkpointing selective --token-budget 6144

Weights are random, sizes those of Qwen2.5-VL, of Qwen3.5-9B and of Qwen3-VL-30B-A3B, of which ``--layers`` chooses as many
decoder layers as fit: with the optimizer a layer takes 10 GB of all devices together, embedding, head and tower 18 GB. Prompts
have 50 to 300 text tokens and 1 to 3 images of 300 to 1,000 pixels a side, responses 100 to 2,048 tokens (log-normal), both at
most 4,096 together; at size ``tiny`` a tenth of that; with ``--rows geo3k`` prompts have 361 tokens with one image, responses
512, and with ``--rows long`` responses have about 30,000. MFU counts the operations that the step requires
(`workers.training.accounting`) over the time of the whole step and the device's peak in bfloat16.

Parts: ``ours`` whole updates with a clipped policy loss; ``shared`` the same with several samples of each prompt; ``padded`` the
rows as TRL computes them: padded to the longest prompt and response, Hugging Face's model with sdpa and full logits of the
completion; ``text`` the ceiling, a bare loop of the decoder and head over packed text of the same lengths, already on the
device, no vision, loss or optimizer; ``tower`` the vision tower alone, forward and backward, on 64 images of 448 pixels.
"""

# ruff: noqa: E402

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # its dataproto.py is not the library
sys.path.insert(0, str(HERE.parent))

import torch
import transformers
from torch import Tensor

from benchmarks.trace_summary import device_time, read_trace, time_table
from benchmarks.workload import SIZES, counted_recurrence, make_batch, model_config, random_weights, shape_of
from dataproto import DataProto
from dataproto.vlm import family_of
from recipes.algorithms.losses import clipped_policy_loss
from workers.model.model_config import UNSHARDED
from workers.model.packed_model import PackedVLM
from workers.ranks.layout import Layout
from workers.ranks.mesh import AXES, init_ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.accounting import peak_flops, required_work, whole_work
from workers.training.forward_pass import pack, sharing
from workers.training.micro_batches import micro_batches
from workers.training.mini_batches import share_out
from workers.training.optimizer import OptimizerConfig


def policy_loss(outputs: Any, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_policy_loss(outputs.log_probs, rows["old_log_probs"], rows["advantages"])


class Bench:
    """One model on its device, and the results of the parts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config = model_config(arguments.size, arguments.layers)
        self.shape = shape_of(arguments.size, arguments.rows)
        self.device = torch.device(arguments.device)
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        if arguments.trace and self.device.type != "cuda":
            raise SystemExit("--trace: a trace of kernels needs a CUDA device")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.world > 1:
            torch.distributed.init_process_group(device_id=self.device if self.device.type == "cuda" else None)
        degrees = (
            dict(pair.split("=") for pair in arguments.layout.split(",")) if arguments.layout else {"dp": self.world}
        )
        self.ranks = init_ranks(Layout(**{axis: int(degree) for axis, degree in degrees.items()}), self.device)
        self.figures: list[dict[str, Any]] = []

    def actor(self) -> ActorWorker:
        """A worker with random weights, created on the device."""
        a = self.arguments
        options = ActorConfig(
            model_path=str(Path(tempfile.mkdtemp())),
            token_budget=a.token_budget,
            dtype=a.dtype,
            activation_checkpointing=a.checkpointing,
            compile=a.compile,
            unsharded=a.unsharded,
            scoring_token_budget=a.scoring_token_budget,
            freeze_vision=a.freeze_vision,
            flash_attention=a.flash_attention,
            lora_rank=a.lora_rank,
            load_in_4bit=a.load_in_4bit,
            optimizer=OptimizerConfig(kind=a.optimizer_kind),
        )
        self.config.save_pretrained(options.model_path)
        with random_weights():
            worker = ActorWorker(options, self.device, self.ranks)
        if not a.optimizer:
            for rule in worker.model.optimizer.rules:
                rule.step = lambda *_: None  # its state does not fit; gradients are clipped and cleared
        return worker

    def update(self, worker: ActorWorker, name: str, samples: int) -> None:
        """Full updates on batches that were generated before."""
        a = self.arguments
        batches = [
            make_batch(self.config, self.shape, a.prompts * self.world, samples, seed=1000 * step)
            for step in range(a.steps + a.warmup)
        ]
        found = []
        for step, batch in enumerate(batches):
            share = self.share(batch)
            seconds, metrics = self.timed(lambda share=share: worker.update(share, policy_loss))
            work = whole_work(self.ranks.all_gather(required_work(worker.module, batch), "pp"))
            self.say(f"{name} {step}: {seconds:.3f} s, {work.tokens} tokens, norm {metrics['actor/grad_norm']:.3g}")
            found.append({"seconds": seconds, "tokens": work.tokens, **self.mfu(work, seconds), "metrics": metrics})
        self.record(name, found[a.warmup :])
        if a.trace:
            share = self.share(batches[-1])
            self.traced(name, lambda: worker.update(share, policy_loss))

    def timed(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a step on all devices, and its result."""
        self.synchronize()
        start = time.perf_counter()
        result = step()
        self.synchronize()
        return time.perf_counter() - start, result

    def traced(self, name: str, step: Callable[[], Any]) -> None:
        """Runs a step once more, writes each rank's trace to the folder ``--trace``, and prints what its device did."""
        from torch.profiler import ProfilerActivity, profile

        folder = Path(self.arguments.trace)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{''.join(each if each.isalnum() else '-' for each in name)}-rank{self.rank}.json.gz"
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            seconds, _ = self.timed(step)
        recorded.export_chrome_trace(str(path))
        rows = self.ranks.all_gather((path.name, device_time(read_trace(path), seconds)), *AXES)
        self.say(time_table(rows))

    def share(self, batch: DataProto) -> DataProto:
        """This rank's rows, split as by a group."""
        shares = self.ranks.size("dp")
        return batch if shares == 1 else share_out(batch, shares)[self.ranks.rank("dp")]

    def mfu(self, work: Any, seconds: float) -> dict[str, float]:
        """The MFU of all devices together."""
        peak = peak_flops(self.device)
        if peak is None:
            return {"GFLOP/s": work.total / seconds / 1e9}
        seconds *= self.world
        return {"mfu": work.total / seconds / peak, "mfu_language": work.language / seconds / peak}

    def text(self, worker: ActorWorker) -> None:
        """An upper bound: decoder and head over packed text."""
        batch = make_batch(self.config, self.shape, self.arguments.prompts, 1, seed=1000)
        module = worker.module
        family, model = module.family, module.model
        packs = []
        for part in micro_batches(batch, module, self.arguments.token_budget):
            rows = pack(module, part.rows, sharing(module, part.rows))
            packs.append(rows.to(self.device))

        def step() -> None:
            with worker.model.precision.compute():
                for rows in packs:
                    hidden = family.decode(
                        model,
                        model.get_submodule(family.embedding)(rows.input_ids % (self.config.image_token_id - 8)),
                        rows.position_ids,
                        cu_seq_lens_q=rows.cu_seqlens,
                        cu_seq_lens_k=rows.key_cu_seqlens,
                        max_length_q=rows.max_length,
                        max_length_k=rows.key_max_length,
                    )
                    head = family.lm_head(model).weight
                    log_probs, _ = module.score(hidden[0, rows.predictors], head, rows.targets, 1.0, module.banned_ids)
                    log_probs.sum().backward()

        work = required_work(module, batch)
        work = replace(work, vision=0.0)
        self.repeat("text, bare loop", step, work, worker)

    def tower(self, worker: ActorWorker) -> None:
        """Only the vision tower."""
        merged, count = (16, 64) if self.arguments.size != "tiny" else (4, 16)
        vision = self.config.vision_config
        grids = torch.tensor([[1, 2 * merged, 2 * merged]] * count)
        dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        media = {
            "pixel_values": torch.randn(int(grids.prod(1).sum()), dim, device=self.device),
            "image_grid_thw": grids,  # on the host, as the worker leaves them
        }
        module = worker.module

        def step() -> None:
            with worker.model.precision.compute():
                module.family.features(module.model, media).float().square().mean().backward()

        flops = 3 * int(module.family.vision_flops(self.config, grids).sum())
        self.repeat("vision tower", step, required_work(module, self.no_rows()), worker, flops)

    def no_rows(self) -> DataProto:
        return make_batch(self.config, self.shape, 1, 1, seed=0)[:0]

    def repeat(self, name: str, step: Callable[[], None], work: Any, worker: ActorWorker, vision: float = 0.0) -> None:
        """Times a step with constant work and discards its gradients."""
        found = []
        for number in range(self.arguments.steps + self.arguments.warmup):
            seconds, _ = self.timed(step)
            worker.model.optimizer.clear_gradients()
            self.say(f"{name} {number}: {seconds:.3f} s")
            done = replace(work, vision=work.vision + vision)
            found.append({"seconds": seconds, "tokens": work.tokens, **self.mfu(done, seconds)})
            if vision:
                found[-1]["TFLOP/s"] = vision / seconds / 1e12
        self.record(name, found[self.arguments.warmup :])

    def padded(self) -> None:
        """As TRL: left-padded prompts, right-padded completions, full logits of the completion, gradients in bfloat16."""
        a = self.arguments
        half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with self.device:
            model = transformers.AutoModelForImageTextToText.from_config(
                self.config, attn_implementation="sdpa", dtype=half
            )
        model.train()
        if a.padded_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module = PackedVLM.__new__(PackedVLM)  # for the count of operations alone
        torch.nn.Module.__init__(module)
        module.family, module.model = family_of(self.config), model
        found = []
        for step in range(a.padded_steps + 1):
            batch = make_batch(self.config, self.shape, a.prompts, 1, seed=1000 * step)
            parts = [batch[first : first + a.padded_rows] for first in range(0, len(batch), a.padded_rows)]
            seconds, _ = self.timed(lambda parts=parts: padded_update(model, parts, self.device))
            self.say(f"padded {step}: {seconds:.3f} s")
            work = required_work(module, batch)
            found.append({"seconds": seconds, "tokens": work.tokens, **self.mfu(work, seconds)})
        self.record("padded, plain Hugging Face", found[1:])

    def record(self, name: str, found: list[dict[str, Any]]) -> None:
        """Records medians over the steps, and the metrics of the last step."""
        figure: dict[str, Any] = {"part": name, "tokens/s": median(f["tokens"] / f["seconds"] for f in found)}
        for key in ("seconds", "mfu", "mfu_language", "GFLOP/s", "TFLOP/s"):
            if key in found[0]:
                figure[key] = median(f[key] for f in found)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            figure["GB"] = max(self.ranks.all_gather(peak, *AXES))
            torch.cuda.reset_peak_memory_stats(self.device)
        figure["metrics"] = {
            key: value for key, value in found[-1].get("metrics", {}).items() if key.startswith(("timing_s/", "perf/"))
        }
        self.figures.append(figure)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Continues with the other parts if one runs out of memory."""
        self.free()
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.say(f"{name}: {error}")
            self.figures.append({"part": f"{name}: out of memory", "metrics": {}})
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world > 1:
            torch.distributed.barrier()

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def padded_update(model: Any, parts: list[DataProto], device: torch.device) -> None:
    for part in parts:
        padded_loss(model, part, device).backward()
    model.zero_grad(set_to_none=True)


def padded_loss(model: Any, rows: DataProto, device: torch.device) -> Tensor:
    width = rows["response_mask"].shape[1]
    media = {
        name: torch.cat([row[name] for row in rows["multi_modal_inputs"]]).to(device)
        for name in ("pixel_values", "image_grid_thw")
    }
    ids, mask = rows["input_ids"].to(device), rows["response_mask"].to(device)
    logits = model(
        input_ids=ids,
        attention_mask=rows["attention_mask"].to(device),
        mm_token_type_ids=rows["mm_token_type_ids"].to(device).int(),
        logits_to_keep=width + 1,
        use_cache=False,
        **media,
    ).logits[:, :-1]
    log_probs = torch.stack(  # row by row, as TRL's selective_log_softmax does for bfloat16
        [
            row.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
            for row, targets in zip(logits, ids[:, -width:], strict=True)
        ]
    )
    loss, _ = clipped_policy_loss(log_probs.float(), rows["old_log_probs"].to(device), rows["advantages"].to(device))
    return (loss * mask).sum() / mask.sum()


@contextlib.contextmanager
def profiled(bench: Bench, path: str | None) -> Iterator[None]:
    """Writes the time of each kernel to a file."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (bench.device.type == "cuda")
    with profile(activities=kinds) as recorded:
        yield
    key = "self_cuda_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    Path(path).write_text(recorded.key_averages().table(sort_by=key, row_limit=80, max_name_column_width=90))


def table(figures: list[dict[str, Any]]) -> str:
    columns = {"seconds": ".3f", "tokens/s": ",.0f", "mfu": ".3f", "mfu_language": ".3f", "GFLOP/s": ",.1f"}
    columns |= {"TFLOP/s": ".0f", "GB": ".1f"}
    used = [name for name in columns if any(name in figure for figure in figures)]
    lines = [["part", *used], ["---"] * (1 + len(used))]
    for figure in figures:
        lines.append([figure["part"], *(format(figure[n], columns[n]) if n in figure else "" for n in used)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def common_parser(description: str | None, token_budget: int, prompts: int) -> argparse.ArgumentParser:
    """The options of every benchmark that trains a model of random weights.

    Args:
        token_budget, prompts: defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=prompts, help="on each device (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=token_budget, help="of a micro-batch, on each rank")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--flash-attention", default="torch", choices=["torch", "fa4"])
    parser.add_argument("--layout", help="degrees, such as tp=2,pp=2 (default: dp over all processes)")
    parser.add_argument("--trace", help="folder for a trace of one more step of each part by each rank, with a table")
    return parser


def arguments_of() -> argparse.Namespace:
    parser = common_parser(__doc__, token_budget=8192, prompts=32)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--layers", type=int, help="decoder layers (default: those of the size)")
    parser.add_argument("--rows", default="mixed", choices=["mixed", "geo3k", "long"], help="see above")
    parser.add_argument("--parts", default="ours,shared,text,tower,padded", help="comma-separated, see above")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt in part `shared` (default: 8)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each part (default: 5)")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps before them (default: 3)")
    parser.add_argument("--checkpointing", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--compile", action=flag, default=None, help="default: on CUDA")
    parser.add_argument("--optimizer", action=flag, default=None, help="AdamW's step (default: where it fits)")
    parser.add_argument("--unsharded", default="nothing", choices=UNSHARDED, help="between micro-batches")
    parser.add_argument("--scoring-token-budget", type=int, help="default: twice --token-budget")
    parser.add_argument("--freeze-vision", action="store_true")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--load-in-4bit", action="store_true", help="the base under adapters")
    parser.add_argument("--optimizer-kind", default="adamw", choices=["adamw", "adamw8bit", "muon"])
    parser.add_argument("--padded-rows", type=int, default=2, help="rows of a padded micro-batch (default: 2)")
    parser.add_argument("--padded-steps", type=int, default=1)
    parser.add_argument("--padded-checkpointing", action=flag, default=None, help="default: on CUDA, as TRL's default")
    parser.add_argument("--profile", help="file for the time of each kernel in one more step")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    world = int(os.environ.get("WORLD_SIZE", 1))
    for name, value in (
        ("compile", on_gpu),
        ("optimizer", arguments.size not in ("7b", "qwen3.5-9b") or world > 1 or arguments.lora_rank > 0),
        ("padded_checkpointing", on_gpu),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> None:
    arguments = arguments_of()
    bench, parts = Bench(arguments), arguments.parts.split(",")
    if set(parts) & {"ours", "shared", "text", "tower"}:
        worker = bench.actor()
        if "ours" in parts:
            with bench.attempt("ours, packed"):
                bench.update(worker, "ours, packed", 1)
                if arguments.profile:
                    batch = make_batch(bench.config, bench.shape, arguments.prompts * bench.world, 1, seed=7)
                    with profiled(bench, arguments.profile if bench.rank == 0 else None):
                        worker.update(bench.share(batch), policy_loss)
        if "shared" in parts:
            name = f"ours, {arguments.samples} samples of each prompt"
            with bench.attempt(name):
                bench.update(worker, name, arguments.samples)
        worker.model.optimizer.restore({}, 0, 0)
        if "text" in parts and bench.world == 1:
            with bench.attempt("text, bare loop"):
                bench.text(worker)
        if "tower" in parts and bench.world == 1:
            with bench.attempt("vision tower"):
                bench.tower(worker)
        del worker
    if "padded" in parts and bench.world == 1:
        with bench.attempt("padded, plain Hugging Face"):
            bench.padded()
    if bench.rank == 0:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(bench.figures, indent=1))
        for figure in bench.figures:
            if figure["metrics"]:
                print(figure["part"], {name: round(value, 4) for name, value in figure["metrics"].items()})
        name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
        print(f"{bench.world} x {name}, torch {torch.__version__}: {vars(arguments)}")
        print("\n".join(filter(None, (table(bench.figures), counted_recurrence(bench.config)))))
    if bench.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
