"""Eight tenants of `dataproto serve` with images, beside a GRPO loop of one program on the same shapes: tokens/s of both.

    python benchmarks/serve_tenants.py --size 3b --sampler vllm                  # on one GPU
    python benchmarks/serve_tenants.py --size tiny --sampler hf --prompts 8 --samples 2 --max-tokens 8      # anywhere

Both sides have the same checkpoint (random weights), prompts (one image and about 350 tokens), samples and lengths: nothing ends
a response. Both train adapters of the same rank on the same layers, those of the decoder: the loop one (it needs the extra
``lora``), the server one of each tenant. The tenants are clients of the real Tinker SDK over HTTP. They sample together, train
together and take snapshots together, so that the phases compare with those of the loop. Warm-up steps, in which engines start,
are not counted. Each side is a process of its own, one after the other: ``--first server`` begins with the server.

Each phase is printed when it ends, and the last line of the server's log every 15 s until the first step. ``--output`` gets the
steps of both sides as they come, the log of the server and the table.
"""

import argparse
import gc
import io
import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TINKER_TELEMETRY": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.update(ENVIRONMENT)

from benchmarks.served_processes import served, told  # noqa: E402

TENANTS, RANK = 8, 16
MODEL = "random"
STEPS = "steps.jsonl"
BEGAN = time.perf_counter()
Step = dict[
    str, Any
]  # its side; seconds of "sampling", "training" and the whole "step"; "sampled" and "trained" tokens


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def keep(arguments: argparse.Namespace, number: int, figures: Step) -> None:
    """Prints a step, and adds it to the file of steps unless it is a warm-up."""
    say(f"{arguments.side}: step {number} {json.dumps(figures)}")
    if number >= arguments.warmup:
        with (arguments.output / STEPS).open("a") as file:
            file.write(json.dumps({"side": arguments.side} | figures) + "\n")


def checkpoint(arguments: argparse.Namespace) -> Path:
    """Random weights of the size; nothing ends a response."""
    path: Path = runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](
        arguments.model / arguments.size, arguments.size
    )
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    return path


def problems(count: int) -> list[dict[str, Any]]:
    """Rows for `PromptBuilder`."""
    rows: list[dict[str, Any]] = runpy.run_path(str(HERE / "geo3k_step.py"), run_name="rows")["rows"](count)
    return rows


# The loop


def measure_loop(arguments: argparse.Namespace) -> None:
    """Steps of GRPO in this process."""
    from recipes.grpo import GRPOConfig, grpo_step
    from recipes.run.metrics import timed
    from rollout.prompts import PromptBuilder
    from workers import ActorConfig, OptimizerConfig, launch
    from workers.roles.rollout_worker import RolloutConfig

    path = str(checkpoint(arguments))
    say("loop: the checkpoint is written")
    prompts = PromptBuilder.from_pretrained(path, arguments.max_prompt)(problems(arguments.prompts))
    actor = ActorConfig(
        path, token_budget=arguments.token_budget, lora_rank=RANK, optimizer=OptimizerConfig(lr=arguments.learning_rate)
    )
    options: dict[str, Any] = {"max_num_seqs": arguments.max_num_seqs}
    if arguments.sampler == "vllm":
        options |= {
            "max_model_len": arguments.max_prompt + arguments.max_tokens,
            "memory_share": arguments.memory_share,
        }
    config = GRPOConfig(n=arguments.samples)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s loop %(levelname)s %(message)s")
    rollout = RolloutConfig(path, arguments.sampler, options)
    with launch(
        actor, reward=lambda rows: [{"score": float(number % 2)} for number in range(len(rows))], rollout=rollout
    ) as roles:
        say("loop: model and engine are up")
        for number in range(arguments.warmup + arguments.steps):
            seconds: dict[str, float] = {}
            with timed(seconds, "step"):
                data, metrics = grpo_step(roles, prompts, config, config.sampling(arguments.max_tokens, seed=number))
            step, sampling = seconds["timing_s/step"], metrics["timing_s/gen"]
            tokens = {"sampled": int(data["response_mask"].sum()), "trained": int(data["attention_mask"].sum())}
            keep(arguments, number, {"step": step, "sampling": sampling, "training": step - sampling} | tokens)


# The server


class Tenant:
    """A client with a run of its own and a share of the prompts."""

    def __init__(self, url: str, key: str, number: int, arguments: argparse.Namespace, prompts: Sequence[Any]) -> None:
        import tinker

        self.arguments, self.prompts = arguments, prompts
        self.sampling = tinker.SamplingParams(max_tokens=arguments.max_tokens, stop=[])
        self.first = tinker.SamplingParams(max_tokens=1, stop=[])
        self.adam = tinker.AdamParams(learning_rate=arguments.learning_rate)
        service = tinker.ServiceClient(base_url=url, api_key=key)
        self.client = service.create_lora_training_client(MODEL, rank=RANK, seed=number, train_unembed=False).result()
        say(f"server: tenant {number} has its adapter")
        self.data: list[Any] = []
        self.difference = 0.0  # of the last update, see `log_prob_difference`
        self.snapshot()
        say(f"server: tenant {number} has its first sample")

    def snapshot(self) -> tuple[float, float]:
        """Takes a snapshot to sample from; seconds until it is there, and until there is a sample of it."""
        began = time.perf_counter()
        self.sampler = self.client.save_weights_and_get_sampling_client().result()
        saved = time.perf_counter() - began
        self.sampler.sample(self.prompts[0], 1, self.first).result()
        return saved, time.perf_counter() - began

    def sample(self) -> int:
        """Samples of all prompts, which become data; the number of sampled tokens."""
        answers = [self.sampler.sample(each, self.arguments.samples, self.sampling) for each in self.prompts]
        sequences = [
            (prompt, each) for prompt, answer in zip(self.prompts, answers) for each in answer.result().sequences
        ]
        self.data = [datum(prompt, each, number) for number, (prompt, each) in enumerate(sequences)]
        return sum(len(each.tokens) for _, each in sequences)

    def train(self) -> int:
        """An update on the data; the number of their tokens."""
        passed = self.client.forward_backward(self.data, "importance_sampling")
        stepped = self.client.optim_step(self.adam)
        self.difference = log_prob_difference(self.data, passed.result().loss_fn_outputs)
        stepped.result()
        return sum(each.model_input.length for each in self.data)


def datum(prompt: Any, sequence: Any, number: int) -> Any:
    import numpy as np
    import tinker

    answer, before = list(sequence.tokens), prompt.length - 1
    advantages = np.full(len(answer), 1.0 if number % 2 else -1.0, np.float32)
    inputs = {
        "target_tokens": np.pad(np.array(answer, np.int64), (before, 0)),
        "logprobs": np.pad(np.array(sequence.logprobs, np.float32), (before, 0)),
        "advantages": np.pad(advantages, (before, 0)),
    }
    whole = prompt.append(tinker.EncodedTextChunk(tokens=answer[:-1])) if len(answer) > 1 else prompt
    return tinker.Datum(model_input=whole, loss_fn_inputs=inputs)


def log_prob_difference(data: Sequence[Any], outputs: Sequence[Mapping[str, Any]]) -> float:
    """The mean absolute difference between the trainer's and the sampler's log-probs of sampled tokens, in nats."""
    import numpy as np

    found = []
    for each, output in zip(data, outputs, strict=True):
        sampled, advantages = (each.loss_fn_inputs[name].to_numpy() for name in ("logprobs", "advantages"))
        found.append(np.abs(output["logprobs"].to_numpy() - sampled)[advantages != 0])
    return float(np.concatenate(found).mean())


def model_inputs(path: Path, count: int) -> list[Any]:
    """The prompts of the loop as the SDK sends them."""
    import tinker

    from rollout.prompts import PromptBuilder

    builder = PromptBuilder.from_pretrained(path, 1 << 20)
    rows = problems(count)
    tokens = int(builder(rows[:1])["mm_token_type_ids"].sum())  # of an image: all have the same size
    found = []
    for row in rows:
        file = io.BytesIO()
        row["images"][0].save(file, "png")
        text = row["prompt"][0]["content"].removeprefix("<image>")
        image = tinker.types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=tokens)
        before, after = "<|im_start|>user\n<|vision_start|>", f"<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
        chunks = [tinker.EncodedTextChunk(tokens=builder.encode_text(part)) for part in (before, after)]
        found.append(tinker.ModelInput(chunks=[chunks[0], image, chunks[1]]))
    return found


def measure_server(arguments: argparse.Namespace) -> None:
    """The same steps by tenants, their phases one after the other; then snapshots of one tenant alone."""
    path = checkpoint(arguments)
    say("server: the checkpoint is written")
    prompts = model_inputs(path, arguments.prompts)
    options: dict[str, Any] = {
        "model": f"{MODEL}={path}",
        "sampler": arguments.sampler,
        "token_budget": arguments.token_budget,
        "max_num_seqs": arguments.max_num_seqs,
        "max_context_length": arguments.max_prompt + arguments.max_tokens,
        "max_lora_rank": RANK,
    }
    if arguments.sampler == "vllm":
        options |= {"vllm_adapters": TENANTS, "vllm_memory_share": arguments.memory_share}
    with served(arguments.output / "server.log", **options) as server, ThreadPoolExecutor(TENANTS) as pool:
        say(f"server: at {server.url}; its log is {arguments.output / 'server.log'}")

        def tenant(number: int) -> Tenant:
            return Tenant(server.url, server.key, number, arguments, prompts[number::TENANTS])

        with told("server: the first step is to come", arguments.output / "server.log", say):
            first = tenant(0)  # which waits for the engines
            tenants = [first, *pool.map(tenant, range(1, TENANTS))]
            gc.collect()
            gc.freeze()  # the collector would stop the clients for 0.2 s to look through all that is imported
            keep(arguments, 0, server_step(pool, tenants))
        for number in range(1, arguments.warmup + arguments.steps):
            keep(arguments, number, server_step(pool, tenants))


def server_step(pool: ThreadPoolExecutor, tenants: Sequence[Tenant]) -> Step:
    sampling, sampled = timed_all(pool, Tenant.sample, tenants)
    say(f"server: sampled {sum(sampled)} tokens in {sampling:.2f} s")
    training, trained = timed_all(pool, Tenant.train, tenants)
    say(f"server: trained {sum(trained)} tokens in {training:.2f} s")
    together, snapshots = timed_all(pool, Tenant.snapshot, tenants)
    saved, alone = tenants[0].snapshot()
    return {
        "sampling": sampling + together,  # as in the loop, where the engine gets its weights before it samples
        "training": training,
        "step": sampling + training + together,
        "sampled": sum(sampled),
        "trained": sum(trained),
        "snapshots": max(first for _, first in snapshots),
        "snapshot": alone,
        "saved": saved,
        "difference": max(each.difference for each in tenants),
    }


def timed_all(
    pool: ThreadPoolExecutor, work: Callable[[Tenant], Any], tenants: Sequence[Tenant]
) -> tuple[float, list[Any]]:
    """Seconds until all tenants have done something, and what they return."""
    began = time.perf_counter()
    found = list(pool.map(work, tenants))
    return time.perf_counter() - began, found


# Both


def run_side(side: str, arguments: Sequence[str]) -> bool:
    """Measures a side in a process of its own; whether it came to its end."""
    done = subprocess.run([sys.executable, __file__, *arguments, "--side", side])
    if done.returncode:
        say(f"{side} ended with status {done.returncode}: see its messages above")
    return not done.returncode


def read_steps(output: Path) -> dict[str, list[Step]]:
    """The steps so far, by side."""
    file = output / STEPS
    steps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {side: [step for step in steps if step["side"] == side] for side in ("loop", "server")}


def report(steps: Mapping[str, Sequence[Step]]) -> str:
    """A table of medians; a side that is not measured yet has no figures."""

    def rate(side: str, tokens: str, seconds: str) -> float:
        return median([step[tokens] / step[seconds] for step in steps[side]] or [float("nan")])

    lines = ["|  | GRPO loop | server | ratio |", "| --- | --- | --- | --- |"]
    names = (("sampled tokens/s", "sampled", "sampling"), ("trained tokens/s", "trained", "training"))
    for name, tokens, seconds in (*names, ("trained tokens/s of whole steps", "trained", "step")):
        ours, theirs = rate("server", tokens, seconds), rate("loop", tokens, seconds)
        lines.append(f"| {name} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.2f} |")
    alone = "snapshot to first sample, one tenant, s"
    for name, key in (
        (alone, "snapshot"),
        ("of these until the snapshot is there, s", "saved"),
        (f"the slowest of {TENANTS} at once, s", "snapshots"),
        ("log-probs of sampler and trainer differ by, nats a token, the largest of all tenants", "difference"),
    ):
        found = median([step[key] for step in steps["server"]] or [float("nan")])
        lines.append(f"| {name} |  | {found:.4f} |  |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b", choices=["tiny", "3b", "7b"])
    parser.add_argument("--sampler", default="vllm", choices=["hf", "vllm"])
    parser.add_argument("--prompts", type=int, default=32, help="of a step, over all tenants")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of every response")
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="responses that are decoded at the same time")
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--memory-share", type=float, default=0.35, help="of the GPU, for vLLM")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="high, so that adapters differ")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "random-checkpoints")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "serve-tenants")
    parser.add_argument("--first", choices=["loop", "server"], default="loop", help="the side that is measured first")
    parser.add_argument(
        "--side", choices=["loop", "server"], help="measures this side alone, in this process, and adds its steps"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.prompts < TENANTS:
        sys.exit(f"--prompts {arguments.prompts}: at least one for each of {TENANTS} tenants")
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.side is not None:
        (measure_loop if arguments.side == "loop" else measure_server)(arguments)
        return
    (arguments.output / STEPS).unlink(missing_ok=True)
    sides = sorted(("loop", "server"), key=lambda side: side != arguments.first)
    ended = []
    for side in sides:
        ended.append(run_side(side, sys.argv[1:]))
        table = report(read_steps(arguments.output))
        (arguments.output / "table.md").write_text(table + "\n")
        print(f"\n{table}\n", flush=True)
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
