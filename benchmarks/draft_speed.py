"""Tokens a second of the vLLM engine with drafts that are kept at a given rate, compared with the engine without drafts.

    python benchmarks/draft_speed.py --size qwen3.5-9b --work WORK --tokens 0 1          # on one GPU; a process for each number
    python benchmarks/draft_speed.py --size qwen3.5-9b --work WORK --tokens 2 3
    python benchmarks/draft_speed.py --size tiny --work WORK --tokens 0 3 --prompts 2 --samples 2 --response 16    # on a CPU

The heads of random weights are never right, so drafts come from the tokens that the run without drafts (0) sampled, which WORK
keeps: each drafted token is the recorded one with the probability of ``--rates``, and else another. The engine does all of its
work and then takes the recorded tokens as its samples, because in half precision a pass over several tokens rounds differently,
and responses would soon be others. So it does not matter here that vLLM's first runner does not keep the states of recurrent
layers right (see ``rollout.vllm.startup.check_states``). That runner does not run a head: its products are computed in its place
once for each drafted token, without its attention to earlier tokens, which ``--without-head`` leaves out. The second runner runs
the head of the checkpoint, if it has one. Prints tokens a second, drafts that were kept, the speed compared with that without
drafts, how many passes had drafts, and the median milliseconds of a pass with drafts and without.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.random_checkpoint import make  # noqa: E402
from benchmarks.rollout import prompts_of, synchronize  # noqa: E402
from rollout.engine import SamplingParams, create_engine  # noqa: E402
from rollout.responses import build_requests  # noqa: E402
from rollout.sampling import draw_tokens  # noqa: E402

RATES = (0.0, 0.5, 0.77, 1.0)


class RecordedTokens:
    """Has a sampler take recorded tokens as its samples."""

    def __init__(self, sampler: Any, recorded: dict[int, list[int]], payoff: Any) -> None:
        """``recorded`` tokens by the seeds of their requests. ``payoff`` decides which passes have drafts, if any decides."""
        self.sampler, self.payoff = sampler, payoff
        self.place = {seed: place for place, seed in enumerate(recorded)}
        self.tokens = torch.tensor(list(recorded.values()), device=sampler.device)
        self.words = int(self.tokens.max()) + 1
        self._seeds = np.zeros(0, dtype=np.uint64)  # of the slots
        self.begin(1.0)
        self._draw, sampler._draw = sampler._draw, self.draw
        self._places, sampler._places = sampler._places, self.places
        if payoff is not None:
            self._passed, payoff.passed = payoff.passed, self.passed

    def begin(self, rate: float) -> None:
        """Drafts are kept at this rate from now on; whether they pay is found out anew."""
        self.rate = rate
        self.passes: dict[str, list[float]] = {"with": [], "without": []}  # drafts; seconds of each
        self._ended = 0.0  # when the last pass ended
        if self.payoff is not None:
            self.payoff._compared.clear()

    def passed(self, rows: int, tokens: int, drafted: bool) -> None:
        """In place of `Payoff.passed`, whose work it does."""
        before, self._ended = self._ended, time.perf_counter()
        if before:
            self.passes["with" if drafted else "without"].append(self._ended - before)
        self._passed(rows, tokens, drafted)

    def places(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """In place of `PolicySampler._places`, whose work it does."""
        self._at = found = self._places(*given)
        return found

    def draw(self, *given: Any) -> Tensor:
        """In place of `PolicySampler._draw`, whose work it does."""
        self._draw(*given)
        slots, places, _ = self._at
        return self.recorded(slots, places - 1)

    def recorded(self, slots: Tensor, numbers: Tensor) -> Tensor:
        """The recorded tokens of the requests in ``slots``, with these numbers."""
        if not np.array_equal(self._seeds, self.sampler.seeds):
            self._seeds = self.sampler.seeds.copy()
            self._of_slot = self.sampler._sent(np.array([self.place.get(seed, 0) for seed in self._seeds.tolist()]))
        return self.tokens[self._of_slot[slots], numbers.clamp(0, self.tokens.shape[1] - 1)]


class HostDrafts(RecordedTokens):
    """Has a sampler that drafts on the host draft the recorded tokens at a rate."""

    def __init__(self, sampler: Any, recorded: dict[int, list[int]], head: Callable[[int, int], Tensor] | None) -> None:
        """``head`` does the work of a number of rows and of drafts."""
        drafts = sampler.drafts
        super().__init__(sampler, recorded, drafts._payoff)
        self.head = head
        self.known: dict[int, int] = {}  # tokens of the request in a slot
        self.on_host = self.tokens.cpu().numpy()
        self._coins = np.random.default_rng(0)
        self._open, drafts.open = drafts.open, self.open
        self._add, drafts.add = drafts.add, self.add
        drafts.next_tokens = self.next_tokens
        self._next_drafts, sampler.next_drafts = sampler.next_drafts, self.next_drafts

    def next_drafts(self, sampled: Sequence[Sequence[int]], most: int) -> list[list[int]] | None:
        """In place of `PolicySampler.next_drafts`, whose work it does next to that of a head."""
        found: list[list[int]] | None = self._next_drafts(sampled, most)
        if self.head is not None and found is not None:
            self.head(len(sampled), most)
        return found

    def open(self, number: int, key: Hashable, prompt: Tensor) -> None:
        """In place of `Drafts.open`, whose work it does."""
        self._open(number, key, prompt)
        self.known[number] = 0

    def add(self, number: int, token_ids: Sequence[int]) -> None:
        """In place of `Drafts.add`, whose work it does."""
        self._add(number, token_ids)
        self.known[number] += len(token_ids)

    def next_tokens(self, number: int, most: int) -> list[int]:
        """The tokens that come next, each with the probability of the rate, and else others."""
        own = self.on_host[self.place[int(self.sampler.seeds[number])]]
        draft = own[self.known[number] : self.known[number] + most]
        draft = np.pad(draft, (0, most - len(draft)))
        found: list[int] = np.where(self._coins.random(most) < self.rate, draft, (draft + 1) % self.words).tolist()
        return found


class HeadDrafts(RecordedTokens):
    """Has a sampler that drafts by the head of the model, on the device, draft the recorded tokens at a rate."""

    def __init__(self, sampler: Any, recorded: dict[int, list[int]], payoff: Any) -> None:
        super().__init__(sampler, recorded, payoff)
        self._propose, sampler._own_propose = sampler._own_propose, self.propose

    def propose(self, *given: Any, dummy_run: bool = False, **options: Any) -> Tensor:
        """In place of vLLM's drafts by the head, whose work it does."""
        drafts: Tensor = self._propose(*given, dummy_run=dummy_run, **options)
        if dummy_run or self.sampler._drawn is None:
            return drafts
        coming = self.sampler._first + self.sampler._drawn[1]
        numbers = coming[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        draft = self.recorded(self.sampler._streams[0][:, None], numbers)
        return draft.where(torch.rand(draft.shape, device=draft.device) < self.rate, (draft + 1) % self.words)


def head_work(config: Any, device: torch.device) -> Callable[[int, int], Tensor]:
    """What computes the products of a head for a number of rows, one drafted token after another."""
    text = config.get_text_config()
    width, inner, words = text.hidden_size, text.intermediate_size, text.vocab_size
    head = getattr(text, "head_dim", None) or width // text.num_attention_heads
    queries, keys = head * text.num_attention_heads, head * text.num_key_value_heads
    sizes = [(2 * width, width), (width, 2 * queries + 2 * keys), (queries, width)]  # queries have gates
    sizes += [(width, 2 * inner), (inner, width), (width, words)]
    weights = [torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.02) for size in sizes]

    def work(rows: int, drafts: int) -> Tensor:
        token = torch.zeros(rows, dtype=torch.int64, device=device)
        for _ in range(drafts):
            for weight in weights:
                found = torch.ones(rows, weight.shape[0], dtype=torch.bfloat16, device=device) @ weight
            token = draw_tokens(found.float().softmax(-1), torch.full((rows,), 0.5, device=device).double())
        return token

    return work


def measure(arguments: argparse.Namespace, drafted: int) -> None:
    """Times an engine that drafts so many tokens, and records what one without drafts samples."""
    path, file = make(arguments.work / arguments.size, arguments.size), arguments.work / f"{arguments.size}.json"
    sampling = SamplingParams(n=arguments.samples, max_tokens=arguments.response, ignore_eos=True)
    requests = build_requests(prompts_of(str(path), arguments.prompts), sampling)
    longest = max(len(request.input_ids) for request in requests) + arguments.response + 16
    options = {"max_num_seqs": len(requests), "max_model_len": longest, "memory_share": 0.8, "dtype": arguments.dtype}
    with mock.patch("rollout.vllm.startup.check_states"):
        engine: Any = create_engine("vllm", str(path), speculate=drafted, **options | json.loads(arguments.options))
    runner = f"{type(engine.sampler).__name__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
    take: RecordedTokens | None = None
    if drafted:
        recorded = {int(seed): ids for seed, ids in json.loads(file.read_text()).items()}
        if engine.sampler.drafts is None:
            take = HeadDrafts(engine.sampler, recorded, engine.engine.engine_core.engine_core.scheduler._payoff)
        else:
            config = engine.llm.model_config.hf_config
            head = None if arguments.without_head else head_work(config, engine.device)
            take = HostDrafts(engine.sampler, recorded, head)
    whole = list(engine.generate(requests, sampling))  # all rows, whatever is timed; builds kernels and graphs
    if take is None:
        file.write_text(json.dumps({requests[each.request].seed: each.token_ids for each in whole}))
    sizes = sorted({min(rows, len(requests)) for rows in arguments.rows})
    for rows, rate in itertools.product(sizes, arguments.rates if take is not None else [0.0]):
        if take is not None:
            take.begin(rate)
        engine._reset_caches()
        synchronize()
        started = time.perf_counter()
        done = list(engine.generate(requests[:rows], sampling))
        synchronize()
        seconds = time.perf_counter() - started
        tokens, kept = sum(len(each.token_ids) for each in done), sum(each.accepted_tokens or 0 for each in done)
        found = {"rows": rows, "drafts": drafted, "rate": rate, "tokens/s": tokens / seconds}
        found |= {"kept a pass": kept / (tokens - kept), "seconds": seconds, "engine": runner}
        if take is not None:
            found["passes"] = {name: len(each) for name, each in take.passes.items()}
            found["ms"] = {name: 1000 * median(each or [0.0]) for name, each in take.passes.items()}
        with results_of(arguments).open("a") as results:
            results.write(f"{json.dumps(found)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="qwen3.5-9b", choices=["qwen3.5-9b", "tiny-qwen3.5", "7b", "3b", "tiny"])
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the checkpoint, of recorded tokens and results"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[0, 1, 2, 3], help="numbers of drafted tokens; 0 first"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="probabilities that a draft is kept")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32, 256], help="numbers of rows that are decoded at a time"
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts with a picture each (default: 32)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt (default: 8)")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response (default: 512)")
    parser.add_argument("--dtype", default="auto", help="of the engine")
    parser.add_argument("--without-head", action="store_true", help="leave out the products of a head")
    parser.add_argument("--options", default="{}", help="JSON: further options of the engine")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one number, in this process
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        measure(arguments, arguments.tokens[0])
        return
    for drafted in arguments.tokens:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--tokens", str(drafted), "--here"], check=True)
        print(table([json.loads(line) for line in results_of(arguments).read_text().splitlines()]), flush=True)


def results_of(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work / f"{arguments.size}.jsonl")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of each number and rate the last measurement, compared with the last one without drafts."""
    last = {(row["rows"], row["drafts"], row["rate"]): row for row in rows}
    lines = [
        f"{rows[-1]['engine']}",
        "| rows | drafts | rate | kept a pass | tokens/s | times | passes with drafts | without | ms with | without |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (count, drafts, rate), row in sorted(last.items()):
        speed, plain = row["tokens/s"], last[count, 0, 0.0]["tokens/s"]
        numbers = [f"{row['passes'][each]}" if drafts else "" for each in ("with", "without")]
        numbers += [f"{row['ms'][each]:.1f}" if drafts else "" for each in ("with", "without")]
        told = f"| {count} | {drafts} | {rate} | {row['kept a pass']:.2f} | {speed:,.0f} | {speed / plain:.2f} |"
        lines.append(f"{told} {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
