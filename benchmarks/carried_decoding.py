"""What samples that go on after their step save: seconds of decoding of a step, with ``over_ask`` and without, on one device.

    python benchmarks/carried_decoding.py --size 7b               # 128 prompts x 5 samples: a quarter of geo3k_step.py's step
    python benchmarks/carried_decoding.py --size tiny --engine hf --prompts 8 --max-tokens 64          # anywhere

The prompts and the lengths of the responses are those of ``geo3k_step.py``: log-normal with mean 400, at most 2,048. Nothing
learns, but before each step the engine gets its weights again, as after an update: what was cached is gone, and samples that go
on are read anew. Taking the weights does not count. All values of ``--over-ask`` run through one engine, one after the other,
with the same groups. The figures leave out the first step of each, in which no sample goes on.
"""

import argparse
import json
import logging
import math
import os
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from geo3k_step import OF_DRAWN_LENGTHS, Steps, rows  # noqa: E402

from dataproto import DataProto  # noqa: E402
from recipes.configs.shared.carrying_config import CarryingConfig  # noqa: E402
from recipes.run.carried_rollouts import CarryingRollout, LookAhead  # noqa: E402
from rollout.engine import SamplingParams, cpu_or_cuda, slots_for  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from workers.cluster.local_group import LocalGroup  # noqa: E402
from workers.model.named_weights import named_weights  # noqa: E402
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker  # noqa: E402
from workers.training.loading import checkpoint_family  # noqa: E402

TARGET = 2 / 3
"""The largest share of the time without over-asking that is a third less."""


@dataclass(frozen=True)
class DecodedStep:
    """What one step's decoding took and gave."""

    seconds: float
    groups: int  # that are whole
    tokens: int  # sampled in their rows
    carried: int  # groups that have begun and go on
    polls: int  # decoding steps: tokens that one row can have sampled


def rollout_worker(path: str, engine: str, options: dict[str, Any]) -> RolloutWorker:
    """A rollout role whose engine takes the weights of a model that lies beside it."""
    device = cpu_or_cuda()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = checkpoint_family(path).model_class().from_pretrained(path, dtype=dtype).to(device)
    config = RolloutConfig(path, OF_DRAWN_LENGTHS[engine], options)
    return RolloutWorker(config, lambda dtype: named_weights(model, dtype), shares_device=False)


class Decoding:
    """Steps of a run that learns nothing."""

    def __init__(self, worker: RolloutWorker, prompts: DataProto, sampling: SamplingParams, over_ask: float) -> None:
        self.worker, self.sampling = worker, sampling
        self.done = 0
        self.carried: CarryingRollout | None = None
        self.rollout: Any = LocalGroup(worker)
        self.loader: Any = LookAhead(Steps(prompts))
        if over_ask > 1:
            config = CarryingConfig(over_ask=over_ask)
            self.carried = CarryingRollout(self.rollout, self.loader, config, lambda: self.done)
            self.rollout = self.loader = self.carried

    def step(self) -> DecodedStep:
        """Decodes as many whole groups as there are prompts, with weights that the engine has just got."""
        self.worker.mark_stale()
        self.worker.refresh()
        prompts = next(self.loader)
        synchronize()
        with counted_polls(self.worker.engine) as polls:
            started = time.perf_counter()
            data = self.rollout.generate(prompts, self.sampling)
            synchronize()
            seconds = time.perf_counter() - started
        self.done += 1
        carried = 0 if self.carried is None else sum(since > 0 for since in self.carried.samples.since.values())
        return DecodedStep(seconds, len(set(data["uid"])), int(data["response_mask"].sum()), carried, len(polls))


@contextmanager
def counted_polls(engine: Any) -> Iterator[list[None]]:
    """A list that gets an entry for each poll of the engine."""
    poll, polls = engine.poll, []

    def counted() -> Any:
        polls.append(None)
        return poll()

    engine.poll = counted
    try:
        yield polls
    finally:
        del engine.poll


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(found: dict[float, Sequence[DecodedStep]]) -> str:
    """Means over the steps but the first, in Markdown, and each time as a share of the first one's.

    >>> print(table({1.0: [DecodedStep(9.0, 4, 100, 0, 20), DecodedStep(3.0, 4, 90, 0, 20)],
    ...              1.25: [DecodedStep(9.0, 4, 80, 1, 12), DecodedStep(1.5, 4, 90, 1, 12)]}))
    | over_ask | s a step | decoding steps | whole groups/s | tokens of them/s | groups that go on | time |
    |---|---|---|---|---|---|---|
    | 1 | 3.00 (3.0 to 3.0) | 20 | 1.33 | 30 | 0.0 | 1.000 |
    | 1.25 | 1.50 (1.5 to 1.5) | 12 | 2.67 | 60 | 1.0 | 0.500, at least a third less |
    """
    names = "over_ask", "s a step", "decoding steps", "whole groups/s", "tokens of them/s", "groups that go on", "time"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    first = None
    for over_ask, steps in found.items():
        counted = steps[1:]
        total = sum(step.seconds for step in counted)
        mean = total / len(counted)
        first = first or mean
        seconds = [step.seconds for step in counted]
        verdict = "" if mean == first else ", at least a third less" if mean <= TARGET * first else ", not a third less"
        cells = [
            f"{over_ask:g}",
            f"{mean:.2f} ({min(seconds):.1f} to {max(seconds):.1f})",
            f"{sum(step.polls for step in counted) / len(counted):.0f}",
            f"{sum(step.groups for step in counted) / total:.2f}",
            f"{sum(step.tokens for step in counted) / total:,.0f}",
            f"{sum(step.carried for step in counted) / len(counted):.1f}",
            f"{mean / first:.3f}{verdict}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=["tiny", "3b", "7b"])
    parser.add_argument("--engine", default="vllm", choices=sorted(OF_DRAWN_LENGTHS))
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--over-ask", type=float, nargs="+", default=[1.0, 1.25])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each, after a first one (default: 4)")
    parser.add_argument("--rollout", default="{}", help="JSON: options of the engine, such as max_num_seqs")
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/random-checkpoints"), help="folder for the checkpoints"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: must be at least 1")
    return arguments


def main() -> None:
    arguments = parse()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    path = str(
        runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](arguments.model / arguments.size, arguments.size)
    )
    prompts = PromptBuilder.from_pretrained(path, 1024)(rows(arguments.prompts))
    samples = math.ceil(arguments.prompts * max(arguments.over_ask)) * arguments.samples
    options = {"max_num_seqs": slots_for(samples)}
    if arguments.engine == "vllm":
        options |= {"max_model_len": 1024 + arguments.max_tokens}
        options |= {"memory_share": 0.6}  # the model whose weights it takes lies beside it
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the checkpoint's making
    started = time.perf_counter()
    worker = rollout_worker(path, arguments.engine, options | json.loads(arguments.rollout))
    print(f"engine up: {time.perf_counter() - started:.0f} s", flush=True)
    sampling = SamplingParams(n=arguments.samples, max_tokens=arguments.max_tokens, ignore_eos=True)
    found: dict[float, Sequence[DecodedStep]] = {}
    for over_ask in arguments.over_ask:
        decoding, steps = Decoding(worker, prompts, sampling, over_ask), []
        for number in range(1 + arguments.steps):
            steps.append(decoding.step())
            print(f"over_ask {over_ask:g}, step {number}: {steps[-1]}", flush=True)
        found[over_ask] = steps
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
