"""Eight tenants of `dataproto serve` with images, beside a GRPO loop of one program on the same shapes: tokens/s of both.

    python benchmarks/serve_tenants.py --size 3b --sampler vllm                  # on one GPU
    python benchmarks/serve_tenants.py --size tiny --sampler hf --prompts 8 --samples 2 --max-tokens 8      # anywhere

Both sides have the same checkpoint (random weights), prompts (one image and about 350 tokens), samples and lengths: nothing ends
a response. Both train adapters of the same rank: the loop one (it needs the extra ``lora``), the server one of each tenant. The
tenants are clients of the real Tinker SDK over HTTP. They sample together, train together and take snapshots together, so that
the phases compare with those of the loop. Warm-up steps, in which engines start, are not counted. Each side is a process of its
own, one after the other. The last rows are the seconds from the request of a snapshot to the first sample of it.
"""

import argparse
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

TENANTS, RANK = 8, 16
MODEL = "random"
Step = dict[str, float]  # seconds of "sampling", "training" and the whole "step"; "sampled" and "trained" tokens


def say(figures: Step) -> None:
    print(f"STEP {json.dumps(figures)}", flush=True)


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
    rollout = RolloutConfig(path, arguments.sampler, options)
    with launch(
        actor, reward=lambda rows: [{"score": float(number % 2)} for number in range(len(rows))], rollout=rollout
    ) as roles:
        for number in range(arguments.warmup + arguments.steps):
            seconds: dict[str, float] = {}
            with timed(seconds, "step"):
                data, metrics = grpo_step(roles, prompts, config, config.sampling(arguments.max_tokens, seed=number))
            step, sampling = seconds["timing_s/step"], metrics["timing_s/gen"]
            tokens = {"sampled": int(data["response_mask"].sum()), "trained": int(data["attention_mask"].sum())}
            say({"step": step, "sampling": sampling, "training": step - sampling} | tokens)


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
        self.client = service.create_lora_training_client(MODEL, rank=RANK, seed=number).result()
        self.data: list[Any] = []
        self.snapshot()

    def snapshot(self) -> float:
        """Takes a snapshot to sample from; seconds until there is a sample of it."""
        began = time.perf_counter()
        self.sampler = self.client.save_weights_and_get_sampling_client().result()
        self.sampler.sample(self.prompts[0], 1, self.first).result()
        return time.perf_counter() - began

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
        passed.result()
        stepped.result()
        return sum(each.model_input.length for each in self.data)


def datum(prompt: Any, sequence: Any, number: int) -> Any:
    import tinker

    answer, before = list(sequence.tokens), prompt.length - 1
    inputs = {
        "target_tokens": [0] * before + answer,
        "logprobs": [0.0] * before + list(sequence.logprobs),
        "advantages": [0.0] * before + [1.0 if number % 2 else -1.0] * len(answer),
    }
    whole = prompt.append(tinker.EncodedTextChunk(tokens=answer[:-1])) if len(answer) > 1 else prompt
    return tinker.Datum(model_input=whole, loss_fn_inputs=inputs)


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


@contextmanager
def served(arguments: argparse.Namespace, path: Path) -> Iterator[tuple[str, str]]:
    """The address of a server and the key."""
    with tempfile.TemporaryDirectory() as state, (Path(state) / "log").open("w+") as log:
        options = {
            "--model": f"{MODEL}={path}",
            "--state": state,
            "--port": "0",
            "--sampler": arguments.sampler,
            "--token-budget": str(arguments.token_budget),
            "--max-num-seqs": str(arguments.max_num_seqs),
            "--max-context-length": str(arguments.max_prompt + arguments.max_tokens),
            "--max-lora-rank": str(RANK),
            "--vllm-adapters": str(TENANTS),
            "--vllm-memory-share": str(arguments.memory_share),
        }
        command = [*(sys.executable, "-c", "from recipes.commands import main; main()", "serve")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            [*command, *(part for pair in options.items() for part in pair)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            mark = "export TINKER_BASE_URL="
            url = next(line for line in process.stdout if line.startswith(mark))
            yield url.removeprefix(mark).strip(), (Path(state) / "api-key").read_text().strip()
        except Exception:
            print(Path(log.name).read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def measure_server(arguments: argparse.Namespace) -> None:
    """The same steps by tenants, their phases one after the other; then snapshots of one tenant alone."""
    path = checkpoint(arguments)
    prompts = model_inputs(path, arguments.prompts)
    with served(arguments, path) as (url, key), ThreadPoolExecutor(TENANTS) as pool:
        tenants = list(
            pool.map(lambda number: Tenant(url, key, number, arguments, prompts[number::TENANTS]), range(TENANTS))
        )
        for _ in range(arguments.warmup + arguments.steps):
            sampling, sampled = timed_all(pool, Tenant.sample, tenants)
            training, trained = timed_all(pool, Tenant.train, tenants)
            together, seconds = timed_all(pool, Tenant.snapshot, tenants)
            alone = tenants[0].snapshot()
            say(
                {
                    "sampling": sampling
                    + together,  # as in the loop, where the engine gets its weights before it samples
                    "training": training,
                    "step": sampling + training + together,
                    "sampled": sum(sampled),
                    "trained": sum(trained),
                    "snapshots": max(seconds),
                    "snapshot": alone,
                }
            )


def timed_all(
    pool: ThreadPoolExecutor, work: Callable[[Tenant], Any], tenants: Sequence[Tenant]
) -> tuple[float, list[Any]]:
    """Seconds until all tenants have done something, and what they return."""
    began = time.perf_counter()
    found = list(pool.map(work, tenants))
    return time.perf_counter() - began, found


# Both


def steps_of(side: str, arguments: Sequence[str], warmup: int) -> list[Step]:
    """The steps of a side behind the warm-up."""
    found = []
    command = [sys.executable, __file__, *arguments, "--side", side]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("STEP "):
                found.append(json.loads(line.removeprefix("STEP ")))
                print(f"{side}: {line.strip()}", flush=True)
    if process.returncode:
        sys.exit(f"{side} ended with status {process.returncode}: see its messages above")
    return found[warmup:]


def report(loop: Sequence[Step], server: Sequence[Step]) -> str:
    """A table of medians."""

    def rate(steps: Sequence[Step], tokens: str, seconds: str) -> float:
        return median(step[tokens] / step[seconds] for step in steps)

    lines = ["|  | GRPO loop | server | ratio |", "| --- | --- | --- | --- |"]
    names = (("sampled tokens/s", "sampled", "sampling"), ("trained tokens/s", "trained", "training"))
    for name, tokens, seconds in (*names, ("trained tokens/s of whole steps", "trained", "step")):
        ours, theirs = rate(server, tokens, seconds), rate(loop, tokens, seconds)
        lines.append(f"| {name} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.2f} |")
    for name, key in (("one tenant", "snapshot"), (f"the slowest of {TENANTS} at once", "snapshots")):
        lines.append(f"| snapshot to first sample, {name}, s |  | {median(step[key] for step in server):.3f} |  |")
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
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "random-checkpoints")
    parser.add_argument("--side", choices=["loop", "server"], help="measures this side alone, in this process")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.prompts < TENANTS:
        sys.exit(f"--prompts {arguments.prompts}: at least one for each of {TENANTS} tenants")
    if arguments.side is not None:
        (measure_loop if arguments.side == "loop" else measure_server)(arguments)
        return
    loop, server = (steps_of(side, sys.argv[1:], arguments.warmup) for side in ("loop", "server"))
    print(f"\n{report(loop, server)}")


if __name__ == "__main__":
    main()
