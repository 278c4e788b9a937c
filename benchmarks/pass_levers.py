"""Scoring passes and updates of one step, before and after each lever: seconds, MFU and memory, in one table.

    OMP_NUM_THREADS=1 python benchmarks/pass_levers.py --device cpu --size tiny --prompts 4
    python benchmarks/pass_levers.py --size 3b --compile                                            # one H200
    torchrun --nproc-per-node 2 benchmarks/pass_levers.py --size 7b --compile --checkpointing full  # two
    torchrun --nproc-per-node 2 benchmarks/pass_levers.py --size qwen3.5-9b --parts step --prompts 16 --compile \
        --checkpointing selective --token-budget 6144 --unsharded weights  # 32 prompts x 5 samples, but for generation

Rows are those of a Geometry3K step: prompts of 361 tokens with one image of 225, five samples of 512 tokens each, in four
mini-batches. Weights are random. ``--parts scoring,update`` chooses; ``step`` is what a step does after generation, with one
mini-batch: the reference's log-probs and one update. ``--trace FOLDER`` also prints how much of one more call
each device computes, communicates beside that or alone, and idles (`benchmarks/trace_summary.py`). MFU counts what a pass over
the rows that it is given requires. A part that runs out of memory says so, and the others go on.
"""

# ruff: noqa: E402

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # its dataproto.py is not the library
sys.path.insert(0, str(HERE.parent))

import numpy as np
import torch

from benchmarks.train_step import Bench, common_parser, policy_loss, table
from benchmarks.workload import counted_recurrence, make_batch, random_weights, shape_of
from dataproto import DataProto
from dataproto.planning import cut_minibatches
from workers.model.model_config import UNSHARDED, ModelConfig
from workers.roles.actor import ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training.accounting import required_work, whole_work
from workers.training.mini_batches import share_out

MINIBATCHES = 4


class Levers(Bench):
    """One actor, whose options change between the lines of the table."""

    def rows(self) -> DataProto:
        shape = shape_of(self.arguments.size, "geo3k")
        return make_batch(self.config, shape, self.arguments.prompts * self.world, self.arguments.samples, seed=1)

    def reference(self) -> ReferenceWorker:
        """A frozen model with random weights."""
        a = self.arguments
        config = PolicyConfig(
            self.model_path,
            token_budget=a.token_budget,
            dtype=a.dtype,
            compile=a.compile,
            flash_attention=a.flash_attention,
        )
        with random_weights():
            return ReferenceWorker(config, self.device, self.ranks)

    def line(self, name: str, worker: Any, rows: DataProto, forwards: int, call: Callable[[DataProto], Any]) -> None:
        """A line of the table: medians of ``call`` on this rank's rows, after warm-up."""
        with self.attempt(name):
            share, seconds = share_out(rows, self.ranks.size("dp"), self.minibatch)[self.ranks.rank("dp")], []
            for number in range(self.arguments.warmup + self.arguments.steps):
                seconds.append(self.timed(lambda: call(share))[0])
                self.say(f"{name} {number}: {seconds[-1]:.3f} s")
            work = whole_work(self.ranks.all_gather(required_work(worker.module, rows), "pp"))
            passes = 1 if worker.model._optimizer is None else 3  # of the work that it counts
            work = replace(work, vision=work.vision / passes * forwards, language=work.language / passes * forwards)
            if not worker.trains:
                work = replace(work, language=work.language / 2)  # it counts gradients that pass through
            taken = median(seconds[self.arguments.warmup :])
            self.record(name, [{"seconds": taken, "tokens": work.tokens, **self.mfu(work, taken)}])
            if self.arguments.trace:
                self.traced(name, lambda: call(share))

    def scoring(self, actor: ActorWorker, rows: DataProto) -> None:
        budget, later = self.arguments.token_budget, later_rows(rows, self.minibatch)
        once = {"scoring_token_budget": 2 * budget, "unsharded": "scoring"}
        lines: list[tuple[str, dict[str, Any], DataProto, bool]] = [
            ("as before: the host waits each micro-batch", {"scoring_token_budget": budget}, rows, True),
            ("results stay on the device", {"scoring_token_budget": budget}, rows, False),
            ("twice the budget", {"scoring_token_budget": 2 * budget}, rows, False),
            ("and weights gathered once", once, rows, False),
            ("four times the budget, gathered once", once | {"scoring_token_budget": 4 * budget}, rows, False),
            ("and only the mini-batches after the first", once, later, False),
        ]
        for name, options, chosen, waits in lines:
            if self.world > 1 or "gathered once" not in name:
                with changed(actor, **options), waiting(actor, waits):
                    self.line(f"old log-probs, {name}", actor, chosen, 1, actor.log_probs)
        reference = self.reference()
        with changed(reference, **once):
            self.line("reference, bfloat16 weights, all of this", reference, rows, 1, reference.log_probs)

    def update(self, actor: ActorWorker, rows: DataProto) -> None:  # type: ignore[override]
        lines = {
            "four updates, nothing unsharded": "nothing",
            "and weights gathered once": "weights",
            "and gradients reduced once": "gradients",
        }
        for name, kept in list(lines.items())[: None if self.world > 1 else 1]:
            with changed(actor, unsharded=kept):
                self.line(name, actor, rows, 3, lambda share: actor.update(share, policy_loss, entropy=True))

    def step(self, actor: ActorWorker, rows: DataProto) -> None:
        """What a step of GRPO does after generation, with one optimizer step: the update computes its old log-probs itself."""
        before = len(self.figures)
        self.minibatch = self.arguments.prompts * self.world
        reference = self.reference()
        with changed(reference, unsharded="scoring"):
            self.line("reference", reference, rows, 1, reference.log_probs)
        with changed(actor, unsharded=self.arguments.unsharded):
            self.line(
                "update, one optimizer step",
                actor,
                rows,
                3,
                lambda share: actor.update(share, policy_loss, entropy=True),
            )
        seconds = [figure["seconds"] for figure in self.figures[before:] if "seconds" in figure]
        prompts = len(rows) // self.arguments.samples
        self.say(f"{prompts} prompts x {self.arguments.samples} samples: {sum(seconds):.2f} s without generation")


def later_rows(rows: DataProto, minibatch: int) -> DataProto:
    return rows[np.sort(np.concatenate(cut_minibatches(rows["uid"], minibatch)[1:]))]


@contextmanager
def changed(worker: Any, **options: Any) -> Iterator[None]:
    """The worker with other options; those named here are read at each call."""
    model = worker.model
    before = model.config
    set_options(model, replace(before, **options))
    try:
        yield
    finally:
        set_options(model, before)


def set_options(model: Any, options: ModelConfig) -> None:
    model.config = options
    for transform in model.transforms:
        transform.options = options


@contextmanager
def waiting(worker: Any, waits: bool) -> Iterator[None]:
    """With ``waits`` the host waits for the device after each forward pass, as a copy to the host does."""
    hook = None
    if waits and worker.model.device.type == "cuda":
        hook = worker.module.register_forward_hook(lambda *_: torch.cuda.synchronize())
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def arguments_of() -> argparse.Namespace:
    parser = common_parser(__doc__, token_budget=16_384, prompts=64)
    parser.add_argument("--parts", default="scoring,update", help="comma-separated, see above")
    parser.add_argument("--samples", type=int, default=5, help="of each prompt (default: 5)")
    parser.add_argument("--steps", type=int, default=3, help="measured, of each line (default: 3)")
    parser.add_argument("--warmup", type=int, default=1, help="before them (default: 1)")
    parser.add_argument("--checkpointing", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--layers", type=int, help="decoder layers (default: those of the size)")
    parser.add_argument(
        "--unsharded", default="weights", choices=UNSHARDED, help="between micro-batches of part `step`"
    )
    fixed: dict[str, Any] = {"optimizer": True, "freeze_vision": False, "scoring_token_budget": None}
    fixed |= {"lora_rank": 0, "load_in_4bit": False, "optimizer_kind": "adamw", "rows": "geo3k"}
    parser.set_defaults(**fixed)
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    if (
        arguments.size in ("7b", "qwen3.5-9b")
        and arguments.layers is None
        and int(os.environ.get("WORLD_SIZE", 1)) == 1
    ):
        arguments.optimizer = False  # its state does not fit on one device
    bench = Levers(arguments)
    bench.minibatch = -(-arguments.prompts * bench.world // MINIBATCHES)
    actor, rows = bench.actor(), bench.rows()
    bench.model_path = actor.config.model_path
    if "scoring" in arguments.parts:
        bench.scoring(actor, rows)
    if "update" in arguments.parts:
        bench.update(actor, rows)
    if "step" in arguments.parts:
        bench.step(actor, rows)
    if bench.rank == 0:
        name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
        print(f"{bench.world} x {name}, torch {torch.__version__}: {vars(arguments)}")
        print("\n".join(filter(None, (table(bench.figures), counted_recurrence(bench.config)))))
    if bench.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
