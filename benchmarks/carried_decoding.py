"""What carried samples save: the seconds that a step decodes, by ``--rollout.staleness``, on one device.

    python benchmarks/carried_decoding.py --size 7b               # 128 prompts x 5 samples: a quarter of geo3k_step.py's step
    python benchmarks/carried_decoding.py --size tiny --engine hf --prompts 8 --max-tokens 64          # anywhere

The prompts and the lengths of the responses are those of ``geo3k_step.py``: log-normal with mean 400, at most 2,048. Nothing
learns, but before each step the engine gets its weights again, as after an update: what was cached is gone, and samples that go
on are read anew. Taking the weights does not count. All values of ``--staleness`` run through one engine, one after the other.

What is compared is seconds of decoding a step, in the steady state. Each step gives the same number of whole groups, so these are
also seconds a sample that is learned from. A run reaches that state after a few steps, once as many long samples are carried into
a step as out of it. These ``--settling`` steps are not decoded: their samples get made-up tokens, in the number that they would
have got. The engine itself is warmed up by responses of a few tokens. With staleness 0 at most two steps are measured, since
they hardly differ: each lasts as long as its longest response.
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
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, cast

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from geo3k_step import OF_DRAWN_LENGTHS, Steps, rest_of, rows  # noqa: E402

from dataproto import DataProto  # noqa: E402
from recipes.configs.shared.rollout_options import AT_A_TIME  # noqa: E402
from recipes.run.carrying import CarryingRollout  # noqa: E402
from recipes.run.look_ahead import LookAhead  # noqa: E402
from rollout.continuation import BEGUN  # noqa: E402
from rollout.engine import Completion, FinishReason, Request, SamplingParams, cpu_or_cuda, slots_for  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from workers.cluster.local import LocalGroup  # noqa: E402
from workers.model.named_weights import named_weights  # noqa: E402
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker  # noqa: E402
from workers.training.loading import checkpoint_family  # noqa: E402

TARGET = 2 / 3
"""The largest share of the time with staleness 0 that is a third less."""

WARM_TOKENS = 32
"""The largest number of tokens of the responses that warm up the engine."""


@dataclass(frozen=True)
class DecodedStep:
    """What one step's decoding took and gave."""

    seconds: float
    groups: int  # that are whole
    tokens: int  # sampled in their rows
    carried: int  # groups that have begun and go on
    polls: int  # decoding steps: tokens that one row can have sampled
    read_again: int  # tokens that samples which go on had been given before


def rollout_worker(path: str, engine: str, options: dict[str, Any]) -> RolloutWorker:
    """A rollout role whose engine takes the weights of a model that lies beside it."""
    device = cpu_or_cuda()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = checkpoint_family(path).model_class().from_pretrained(path, dtype=dtype).to(device)
    config = RolloutConfig(path, OF_DRAWN_LENGTHS[engine], options)
    return RolloutWorker(config, lambda dtype: named_weights(model, dtype), shares_device=False)


class Decoding:
    """Steps of a run that learns nothing."""

    def __init__(
        self,
        worker: RolloutWorker,
        prompts: DataProto,
        sampling: SamplingParams,
        staleness: int,
    ) -> None:
        self.worker, self.sampling = worker, sampling
        self.done = 0
        self.carried: CarryingRollout | None = None
        self.rollout: Any = LocalGroup(worker)
        self.loader: Any = LookAhead(Steps(prompts))
        if staleness:
            self.carried = CarryingRollout(self.rollout, self.loader, staleness, lambda: self.done)
            self.rollout = self.loader = self.carried

    def settle(self, steps: int) -> None:
        """Makes steps whose tokens are made up, after which as many samples are carried into a step as out of it."""
        engine: Any = self.worker.engine
        self.worker.engine = cast(Any, MadeUpTokens())
        try:
            for _ in range(steps if self.carried else 0):
                self.rollout.generate(next(self.loader), self.sampling)
                self.done += 1
        finally:
            self.worker.engine = engine

    def step(self) -> DecodedStep:
        """Decodes as many whole groups as there are prompts, with weights that the engine has just got."""
        self.worker.mark_stale()
        self.worker.refresh()
        prompts = next(self.loader)
        read_again = self._begun_tokens()
        synchronize()
        with counted_polls(self.worker.engine) as polls:
            started = time.perf_counter()
            data = self.rollout.generate(prompts, self.sampling)
            synchronize()
            seconds = time.perf_counter() - started
        self.done += 1
        carried = 0 if self.carried is None else sum(since > 0 for since in self.carried.samples.since.values())
        tokens = int(data["response_mask"].sum())
        return DecodedStep(seconds, len(set(data["uid"])), tokens, carried, len(polls), read_again)

    def _begun_tokens(self) -> int:
        """Tokens of the samples that go on."""
        unfinished = None if self.carried is None else self.carried.samples.unfinished
        turns = [] if unfinished is None else [turn for begun in unfinished[BEGUN] for turn in begun]
        return sum(len(turn["token_ids"]) for turn in turns)


class MadeUpTokens:
    """An engine that samples nothing: each response has token 0 as often as it is long."""

    def __init__(self) -> None:
        self.left: dict[int, list[int]] = {}  # of each request the tokens so far, and those that are left
        self.numbers = count()

    def submit(self, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        number = next(self.numbers)
        self.left[number] = [0, rest_of(request.seed, request.drawn, sampling.max_tokens)]
        return number

    def poll(self) -> list[Completion]:
        for lengths in self.left.values():
            lengths[0] += 1
            lengths[1] -= 1
        return [self._ended(number, "length") for number in [each for each, (_, left) in self.left.items() if not left]]

    def abort(self, number: int) -> Completion | None:
        return self._ended(number, "abort") if number in self.left else None

    def _ended(self, number: int, reason: FinishReason) -> Completion:
        tokens, _ = self.left.pop(number)
        return Completion(number, [0] * tokens, [0.0] * tokens, reason)


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


def table(found: dict[int, Sequence[DecodedStep]]) -> str:
    """Means over the steps, in Markdown, and each time as a share of the first one's.

    >>> print(table({0: [DecodedStep(3.0, 4, 90, 0, 20, 0)],
    ...              1: [DecodedStep(1.0, 4, 80, 1, 12, 30), DecodedStep(2.0, 4, 100, 1, 14, 20)]}))
    | staleness | s a step | decoding steps | tokens read again | ms a sampled token | carried groups | time |
    |---|---|---|---|---|---|---|
    | 0 | 3.00 | 20 | 0 | 33.333 | 0.0 | 1.000 |
    | 1 | 1.50 (1.0 to 2.0) | 13 | 25 | 16.667 | 1.0 | 0.500, at least a third less |
    """
    names = (
        "staleness",
        "s a step",
        "decoding steps",
        "tokens read again",
        "ms a sampled token",
        "carried groups",
        "time",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    first = None
    for staleness, steps in found.items():
        seconds = [step.seconds for step in steps]
        mean = fmean(seconds)
        spread = "" if len(steps) == 1 else f" ({min(seconds):.1f} to {max(seconds):.1f})"
        verdict = "" if first is None else ", at least a third less" if mean <= TARGET * first else ", not a third less"
        first = first or mean
        cells = [
            str(staleness),
            f"{mean:.2f}{spread}",
            f"{fmean(step.polls for step in steps):.0f}",
            f"{fmean(step.read_again for step in steps):,.0f}",
            f"{1e3 * sum(seconds) / sum(step.tokens for step in steps):.3f}",
            f"{fmean(step.carried for step in steps):.1f}",
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
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], help="see --rollout.staleness")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each (default: 3)")
    parser.add_argument(
        "--settling", type=int, default=12, help="steps before them, which are not decoded (default: 12)"
    )
    parser.add_argument("--rollout", default="{}", help="JSON: options of the engine, such as max_num_seqs")
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/random-checkpoints"), help="folder for the checkpoints"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.settling < 0:
        parser.error(f"--steps {arguments.steps} must be at least 1, and --settling {arguments.settling} at least 0")
    return arguments


def main() -> None:
    arguments = parse()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    path = str(
        runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](arguments.model / arguments.size, arguments.size)
    )
    prompts = PromptBuilder.from_pretrained(path, 1024)(rows(arguments.prompts))
    samples = math.ceil(arguments.prompts * AT_A_TIME) * arguments.samples
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
    Decoding(worker, prompts, replace(sampling, max_tokens=min(arguments.max_tokens, WARM_TOKENS)), 0).step()
    found: dict[int, Sequence[DecodedStep]] = {}
    for staleness in arguments.staleness:
        decoding, steps = Decoding(worker, prompts, sampling, staleness), []
        decoding.settle(arguments.settling)
        for number in range(1, 1 + (arguments.steps if staleness else min(arguments.steps, 2))):
            steps.append(decoding.step())
            print(f"staleness {staleness}, step {number}: {steps[-1]}", flush=True)
        found[staleness] = steps
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
