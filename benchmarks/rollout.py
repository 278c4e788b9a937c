"""Our vLLM engine compared with bare vLLM on one GPU: tokens/s, weight transfer, sleep and wake, memory, and log-probs.

    python benchmarks/rollout.py --size 7b                  # ours, then bare vLLM in a separate process
    python benchmarks/rollout.py --size 7b --gpus 2 --tensor-parallel 2     # ours only, the actor sharded by FSDP over the GPUs
    python benchmarks/rollout.py --size tiny --requests 8 --max-tokens 32         # on a CPU build of vLLM

Prompts have one image and about 350 tokens; random weights never end a response, so each has ``--max-tokens`` tokens. Bare vLLM
gets the same token ids and images, without log-probs, once with and once without a seed for each request.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import distributed  # noqa: E402

from benchmarks.engine_weights import differing_weights  # noqa: E402
from rollout.engine import SamplingParams, cpu_or_cuda, create_engine  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from rollout.responses import attach_responses, build_requests  # noqa: E402
from workers import ActorConfig, ActorWorker  # noqa: E402
from workers.model.named_weights import full_tensor  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402
from workers.ranks.mesh import init_ranks  # noqa: E402

ROUNDS = 3
TRACED = 16
"""Steps whose kernels are timed."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_gib() -> float:
    """Used memory of the device, of all processes."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def say(name: str, value: float, unit: str) -> None:
    print(f"FOUND {json.dumps([name, value, unit])}", flush=True)


def prompts_of(path: str, count: int) -> Any:
    rows = runpy.run_path(str(HERE / "geo3k_step.py"), run_name="rows")["rows"]
    return PromptBuilder.from_pretrained(path, 1024)(rows(count))


class Ours:
    """The engine beside an actor that holds the same weights; over several processes the actor is sharded."""

    def __init__(self, path: str, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        device = cpu_or_cuda()
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        if self.world > 1:
            distributed.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
        prompts = prompts_of(path, arguments.requests)
        engines = self.world // arguments.tensor_parallel
        self.prompts = prompts[self.rank // arguments.tensor_parallel :: engines]
        self.actor = ActorWorker(ActorConfig(path), device, init_ranks(Layout(dp=self.world), device))
        self.say("device memory: actor alone", used_gib(), "GiB")
        started = time.perf_counter()
        self.engine: Any = create_engine(
            "vllm",
            path,
            **{
                "max_model_len": 1024 + arguments.max_tokens,
                "max_num_seqs": 256,
                "memory_share": arguments.memory_share,
                "tensor_parallel": arguments.tensor_parallel,
            }
            | json.loads(arguments.options),
        )
        self.say("engine up", time.perf_counter() - started, "s")
        self.say("device memory: engine awake", used_gib(), "GiB")

    def say(self, name: str, value: float, unit: str) -> None:
        if self.rank == 0:
            say(name, value, unit)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of ``work`` on all ranks, including the work of the devices."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        synchronize()
        if self.world > 1:
            distributed.barrier()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.actor.named_weights(self.engine.dtype)

    def hand_over(self) -> None:
        self.engine.load_weights(self.weights())

    def one_by_one(self) -> None:
        """Weight transfer of a plain program: one full tensor after the other."""
        model = self.actor.module.model
        self.engine.load_weights((name, full_tensor(weight)) for name, weight in model.named_parameters())

    def wake(self) -> None:
        if not self.engine.wake():
            self.hand_over()
        self.engine.wake_kv_cache()

    def weights_and_memory(self) -> None:
        self.say("first hand-over", 1000 * self.seconds(self.hand_over), "ms")
        if self.world > 1:
            self.say("plain loop of full tensors", 1000 * median(self.seconds(self.one_by_one) for _ in range(3)), "ms")
        self.say("hand-over in place", 1000 * median(self.seconds(self.hand_over) for _ in range(5)), "ms")
        self.say("weights that differ after it", len(differing_weights(self.engine, self.weights())), "")
        cycles: dict[str, list[float]] = {"sleep": [], "wake, hand-over and KV cache": []}
        asleep = []
        for _ in range(self.arguments.cycles):
            cycles["sleep"].append(self.seconds(self.engine.sleep))
            asleep.append(used_gib())
            cycles["wake, hand-over and KV cache"].append(self.seconds(self.wake))
        for name, found in cycles.items():
            self.say(name, 1000 * median(found), "ms")
        self.say(
            "weights and buffers that differ after sleeping", len(differing_weights(self.engine, self.weights())), ""
        )
        self.say("device memory: engine asleep, first time", asleep[0], "GiB")
        self.say("device memory: engine asleep, last time", asleep[-1], "GiB")

    def generation(self) -> None:
        sampling = SamplingParams(max_tokens=self.arguments.max_tokens)
        requests = build_requests(self.prompts, sampling)
        completions: list[Any] = []
        rates = []
        for _ in range(1 + ROUNDS):
            taken = self.seconds(
                lambda: completions.__setitem__(slice(None), list(self.engine.generate(requests, sampling)))
            )
            tokens = sum(len(each.token_ids) for each in completions)
            rates.append(tokens * (self.world // self.arguments.tensor_parallel) / taken)
        self.say("generation", median(rates[1:]), "tokens/s")
        self.decoding()
        data = attach_responses(self.prompts, completions, sampling, self.engine.family, 0)
        if self.arguments.tensor_parallel > 1:
            others: list[Any] = [None] * self.world
            distributed.all_gather_object(others, data["responses"].tolist())
            size = self.arguments.tensor_parallel
            same = all(found == others[rank // size * size] for rank, found in enumerate(others))
            self.say("ranks of an engine sampled the same", float(same), "")
        scored = self.actor.log_probs(data)["old_log_probs"]
        difference = (scored - data["rollout_log_probs"]).abs()[data["response_mask"].bool()]
        for name, value in (
            ("mean", difference.mean()),
            ("99 %", difference.quantile(0.99)),
            ("max", difference.max()),
        ):
            self.say(f"log-prob difference to the actor, {name}", float(value), "nats")

    def exhaust(self, requests: list[Any], sampling: SamplingParams) -> None:
        for _ in self.engine.generate(requests, sampling):
            pass

    def decoding(self) -> None:
        """Milliseconds of a step that decodes all requests: of the second half of the responses, prompts left out."""
        lengths = self.arguments.max_tokens // 2, self.arguments.max_tokens
        taken = []
        for tokens in lengths:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            requests = build_requests(self.prompts, sampling)
            taken.append(median(self.seconds(partial(self.exhaust, requests, sampling)) for _ in range(ROUNDS)))
        self.say("decoding step", 1000 * (taken[1] - taken[0]) / (lengths[1] - lengths[0]), "ms")
        if torch.cuda.is_available():
            self.say("of it the device computes", 1000 * self.device_seconds(requests, sampling), "ms")

    def device_seconds(self, requests: list[Any], sampling: SamplingParams) -> float:
        """Seconds of the device's kernels in a step that decodes all requests, the mean of `TRACED` steps."""
        completions = self.engine.generate(requests, sampling)
        poll, done = self.engine.poll, 0
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

        def traced() -> Any:
            nonlocal done
            found, done = poll(), done + 1
            if done == sampling.max_tokens // 2:
                synchronize()
                profiler.start()
            elif done == sampling.max_tokens // 2 + TRACED:
                synchronize()
                profiler.stop()
            return found

        self.engine.poll = traced
        try:
            for _ in completions:
                pass
        finally:
            self.engine.poll = poll
        return sum(event.self_device_time_total for event in profiler.key_averages()) / TRACED / 1e6


def ours(path: str, arguments: argparse.Namespace) -> None:
    side = Ours(path, arguments)
    side.weights_and_memory()
    side.generation()


def bare(path: str, arguments: argparse.Namespace) -> None:
    """vLLM without our engine."""
    from rollout.vllm.process_settings import set_environment

    set_environment()
    from vllm import LLM
    from vllm import SamplingParams as Params

    prompts = prompts_of(path, arguments.requests)
    on_cuda = torch.cuda.is_available()
    options = {} if on_cuda else {"enforce_eager": True, "skip_mm_profiling": True, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(
        path,
        dtype="bfloat16" if on_cuda else "float32",
        max_model_len=1024 + arguments.max_tokens,
        max_num_seqs=256,
        gpu_memory_utilization=arguments.memory_share,
        limit_mm_per_prompt={"image": 1, "video": 0},
        **options,
    )
    inputs = [
        {"prompt_token_ids": list(ids), "multi_modal_data": media}
        for ids, media in zip(prompts["raw_prompt_ids"], prompts["multi_modal_data"], strict=True)
    ]
    for name, seeded in (("bare vLLM", False), ("bare vLLM, a seed for each request", True)):
        rates = []
        for _ in range(1 + ROUNDS):
            params = [
                Params(
                    max_tokens=arguments.max_tokens, ignore_eos=True, seed=number if seeded else None, detokenize=False
                )
                for number in range(len(inputs))
            ]
            synchronize()
            started = time.perf_counter()
            made = llm.generate(inputs, params, use_tqdm=False)
            rates.append(sum(len(each.outputs[0].token_ids) for each in made) / (time.perf_counter() - started))
        say(f"generation, {name}", median(rates[1:]), "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", choices=["tiny", "3b", "7b"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--cycles", type=int, default=ROUNDS, help="number of sleep and wake cycles (default: 3)")
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the device, for the engine")
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/random-checkpoints"), help="folder for the checkpoints"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="processes of our side; with several, bare vLLM is left out"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of an engine")
    parser.add_argument("--options", default="{}", help="JSON: further options of our engine, such as speculate")
    parser.add_argument("--side", choices=["ours", "bare"], help="only this side")
    arguments = parser.parse_args()
    path = str(
        runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](arguments.model / arguments.size, arguments.size)
    )
    if arguments.side:
        {"ours": ours, "bare": bare}[arguments.side](path, arguments)
        return
    print("| figure | value |\n| --- | --- |")
    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(arguments.gpus)] if arguments.gpus > 1 else []
    for side in ("ours",) if several else ("ours", "bare"):
        command = [sys.executable, *several, __file__, *sys.argv[1:], "--side", side]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout or ():
            if line.startswith("FOUND "):
                name, value, unit = json.loads(line.removeprefix("FOUND "))
                print(f"| {name} | {value:,.4g} {unit} |", flush=True)
        if process.wait():
            sys.exit(process.returncode)


if __name__ == "__main__":
    main()
