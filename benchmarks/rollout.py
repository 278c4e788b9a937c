"""Our vLLM engine beside bare vLLM on one GPU: tokens/s, weight hand-over, sleep and wake, memory, and the actor's log-probs.

    python benchmarks/rollout.py --size 7b                  # ours, and bare vLLM in a process of its own after it
    python benchmarks/rollout.py --size tiny --requests 8 --max-tokens 32         # on a CPU build of vLLM

Prompts have one image and about 350 tokens; random weights end no response, so every one has ``--max-tokens`` tokens. Bare vLLM
gets the same token ids and images, without log-probs, once with and once without a seed for each request.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from rollout.engine import SamplingParams, create_engine  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from rollout.responses import attach_responses, build_requests  # noqa: E402

ROUNDS = 3


def seconds(work: Callable[[], Any]) -> float:
    """How long ``work`` takes, the device's part included."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_gib() -> float:
    """Memory of the device that is taken, by whatever."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def say(name: str, value: float, unit: str) -> None:
    print(f"FOUND {json.dumps([name, value, unit])}", flush=True)


def prompts_of(path: str, count: int) -> Any:
    rows = runpy.run_path(str(HERE / "geo3k_step.py"), run_name="rows")["rows"]
    return PromptBuilder.from_pretrained(path, 1024)(rows(count))


def ours(path: str, arguments: argparse.Namespace) -> None:
    """The engine beside an actor that holds the same weights."""
    from workers import ActorConfig, ActorWorker

    prompts = prompts_of(path, arguments.requests)
    actor = ActorWorker(ActorConfig(path))
    before = used_gib()
    started = time.perf_counter()
    options = {
        "max_model_len": 1024 + arguments.max_tokens,
        "max_num_seqs": 256,
        "memory_share": arguments.memory_share,
    }
    engine = create_engine("vllm", path, **options)
    say("engine up", time.perf_counter() - started, "s")
    say("device memory: actor alone", before, "GiB")
    say("device memory: engine awake", used_gib(), "GiB")
    say("first hand-over", 1000 * seconds(lambda: engine.load_weights(actor.named_weights())), "ms")
    again = [1000 * seconds(lambda: engine.load_weights(actor.named_weights())) for _ in range(5)]
    say("hand-over in place", median(again), "ms")
    say("weights that differ after it", len(engine.differing_weights(actor.named_weights())), "")

    cycles: dict[str, list[float]] = {"sleep": [], "wake, hand-over and KV cache": []}
    for _ in range(ROUNDS):
        cycles["sleep"].append(seconds(engine.sleep))
        asleep = used_gib()
        cycles["wake, hand-over and KV cache"].append(seconds(lambda: wake(engine, actor)))
    for name, found in cycles.items():
        say(name, 1000 * median(found), "ms")
    say("device memory: engine asleep", asleep, "GiB")

    sampling = SamplingParams(max_tokens=arguments.max_tokens)
    requests = build_requests(prompts, sampling)
    completions: list[Any] = []
    rates = []
    for _ in range(1 + ROUNDS):
        taken = seconds(lambda: completions.__setitem__(slice(None), list(engine.generate(requests, sampling))))
        rates.append(sum(len(each.token_ids) for each in completions) / taken)
    say("generation", median(rates[1:]), "tokens/s")
    data = attach_responses(prompts, completions, sampling, engine.family, 0)
    difference = (actor.log_probs(data)["old_log_probs"] - data["rollout_log_probs"]).abs()[
        data["response_mask"].bool()
    ]
    for name, value in (("mean", difference.mean()), ("99 %", difference.quantile(0.99)), ("max", difference.max())):
        say(f"log-prob difference to the actor, {name}", float(value), "nats")


def wake(engine: Any, actor: Any) -> None:
    if not engine.wake():
        engine.load_weights(actor.named_weights())
    engine._wake_kv_cache()


def bare(path: str, arguments: argparse.Namespace) -> None:
    """vLLM as it comes."""
    from rollout import vllm_versions

    vllm_versions.set_environment()
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
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the device, for the engine")
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/random-checkpoints"), help="folder for the checkpoints"
    )
    parser.add_argument("--side", choices=["ours", "bare"], help="only this side")
    arguments = parser.parse_args()
    path = str(
        runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](arguments.model / arguments.size, arguments.size)
    )
    if arguments.side:
        {"ours": ours, "bare": bare}[arguments.side](path, arguments)
        return
    print("| figure | value |\n| --- | --- |")
    for side in ("ours", "bare"):
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout or ():
            if line.startswith("FOUND "):
                name, value, unit = json.loads(line.removeprefix("FOUND "))
                print(f"| {name} | {value:,.4g} {unit} |", flush=True)
        if process.wait():
            sys.exit(process.returncode)


if __name__ == "__main__":
    main()
