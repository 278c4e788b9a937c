"""Seconds of a full GRPO step (sample, score, log-probs, update) on a CPU, compared with TRL's `GRPOTrainer`.

    python benchmarks/grpo_step.py --trl-python /path/to/trl-venv/bin/python

Both sides load the same tiny Qwen2.5-VL checkpoint, see the same drawn problems in the same order, score with the same
function, and sample to the same token limit, which every row reaches, since nothing ends a response. Each side is a process
of its own on the same cores; they step in turns, one standing still while the other works; warm-up steps are not counted.
TRL decodes responses in its sampling phase, we in the reward phase. Neither needs a pass for old log-probs here.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, cast

from trl_grpo_step import await_turn, load_rows, say, score

if TYPE_CHECKING:
    from dataproto import DataProto

HERE = Path(__file__).resolve().parent
# The `dataproto.py` of this folder is not the library.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
OURS = "this project"
PHASES = {
    "step": "whole step",
    "gen": "prompts and sampling",
    "reward": "reward",
    "update": "log-probs, update and the rest",
}
WORK = {"rows": "rows", "prompt_tokens": "prompt tokens", "response_tokens": "response tokens"}

Step = dict[str, float]  # seconds by phase, and the counts of `WORK`


def prepare(workload: Path, settings: dict[str, Any]) -> None:
    """Writes the workload of both sides: ``checkpoint/``, ``problems.json`` with its pictures, ``settings.json``."""
    from transformers import AutoConfig, GenerationConfig

    from dataproto.vlm import family_of
    from recipes.demo.problems import make_problem
    from recipes.demo.tiny_model import make_tiny_model

    checkpoint = make_tiny_model(workload / "checkpoint")
    generation = GenerationConfig.from_pretrained(checkpoint)
    generation.eos_token_id = None  # TRL takes end tokens from here too
    generation.save_pretrained(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    settings = settings | {"banned_ids": family_of(config).banned_ids(config)}
    rows = []
    for number in range(settings["prompts"] * (settings["warmup"] + settings["steps"])):
        problem = make_problem(number)
        problem.image.save(workload / f"{number}.png")
        text = problem.text.removeprefix("<image>")
        rows.append({"text": text, "answer": problem.answer, "image": f"{number}.png"})
    (workload / "problems.json").write_text(json.dumps(rows))
    (workload / "settings.json").write_text(json.dumps(settings))


def measure(workload: Path) -> None:
    """Our side, in this process: runs a step in each of its turns."""
    import torch

    from recipes.grpo import GRPOConfig, grpo_step
    from recipes.run.metrics import rollout_metrics, timed
    from rollout.engine import SamplingParams
    from rollout.prompts import PromptBuilder
    from workers import ActorConfig, OptimizerConfig, RewardRow, launch

    def reward(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        return [{"score": score(row.solution_str, row.ground_truth)} for row in rows]

    settings = json.loads((workload / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    builder = PromptBuilder.from_pretrained(workload / "checkpoint", max_prompt_length=512)
    actor = ActorConfig(str(workload / "checkpoint"), optimizer=OptimizerConfig(lr=settings["learning_rate"]))
    config = GRPOConfig(n=settings["samples"])
    sampling = SamplingParams(max_tokens=settings["max_tokens"], ignore_eos=True)
    rows = prompt_rows(workload)
    with launch(actor, reward=reward) as roles:
        say("READY", {"name": OURS, "torch": torch.__version__})
        for start in range(0, len(rows), settings["prompts"]):
            await_turn()
            seconds: dict[str, float] = {}
            with timed(seconds, "step"):
                with timed(seconds, "data"):
                    prompts = builder(rows[start : start + settings["prompts"]])
                data, metrics = grpo_step(roles, prompts, config, sampling)
                rollout_metrics(data)
            say("STEP", phases(seconds | metrics) | work(data))


def prompt_rows(workload: Path) -> list[dict[str, Any]]:
    """The problems of the workload as rows for `PromptBuilder`."""
    return [
        {
            "prompt": [{"role": "user", "content": f"<image>{row['text']}"}],
            "images": [row["image"]],
            "uid": str(number),
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for number, row in enumerate(load_rows(workload))
    ]


def phases(metrics: Mapping[str, float]) -> Step:
    """Seconds by the names of `PHASES`."""
    step, reward = metrics["timing_s/step"], metrics["timing_s/reward"]
    gen = metrics["timing_s/data"] + metrics["timing_s/gen"]
    return {"step": step, "gen": gen, "reward": reward, "update": step - gen - reward}


def work(data: "DataProto") -> Step:
    """Counts by the names of `WORK`."""
    responses, tokens = int(data["response_mask"].sum()), int(data["attention_mask"].sum())
    return {"rows": len(data), "prompt_tokens": tokens - responses, "response_tokens": responses}


class Side:
    """A process that runs a step on request."""

    def __init__(self, command: Sequence[str], workload: Path, threads: int) -> None:
        self.command = command
        self.errors = workload / f"errors-{len(list(workload.glob('errors-*')))}.txt"
        self.process = subprocess.Popen(
            [*command, str(workload)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        self.orders, self.answers = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self.facts = self._hear("READY")

    def step(self) -> Step:
        with contextlib.suppress(BrokenPipeError):  # `_hear` tells why it is gone
            self.orders.write("\n")
            self.orders.flush()
        return self._hear("STEP")

    def _hear(self, word: str) -> dict[str, Any]:
        for line in self.answers:
            if line.startswith(f"{word} "):
                facts: dict[str, Any] = json.loads(line.removeprefix(word))
                return facts
        sys.exit(f"{' '.join(self.command)} ended early:\n{self.errors.read_text()[-4000:]}")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.orders.close()
        self.answers.read()
        self.process.wait()


def steps_in_turns(
    workload: Path, settings: Mapping[str, Any], commands: Sequence[Sequence[str]], work: str
) -> tuple[str, list[Side], dict[str, list[Step]]]:
    """Lets the sides step in turns: what was done where, the sides, which have ended, and the measured steps of each."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(Side(command, workload, settings["threads"])) for command in commands]
        steps: dict[str, list[Step]] = {side.facts["name"]: [] for side in sides}
        for number in range(settings["warmup"] + settings["steps"]):
            for side in sides:
                step = side.step()
                if number >= settings["warmup"]:
                    steps[side.facts["name"]].append(step)
    torches = ", ".join(sorted({side.facts["torch"] for side in sides}))
    head = (
        f"{settings['threads']} cores of {cpu_name()}, torch {torches}: {work}, "
        f"{settings['steps']} steps of each in turns, load average before {load:.1f}"
    )
    return head, sides, steps


def compare(workload: Path, settings: Mapping[str, Any], commands: Sequence[Sequence[str]]) -> str:
    """Lets the sides step in turns and returns the measured steps as text."""
    work = f"{settings['prompts']} prompts x {settings['samples']} samples x {settings['max_tokens']} tokens"
    head, _, steps = steps_in_turns(workload, settings, commands, work)
    check_same_work(steps, settings)
    each = [f"{name}: {' '.join(format(step['step'], '.3f') for step in found)}" for name, found in steps.items()]
    return "\n".join([head, "", table(steps), "", "whole steps, s:", *each])


def check_same_work(steps: Mapping[str, list[Step]], settings: Mapping[str, Any]) -> None:
    """Checks that both sides had the same prompts in each step, and that every response reached the limit."""
    rows = settings["prompts"] * settings["samples"]
    prompts = [step["prompt_tokens"] for step in next(iter(steps.values()))]
    expected = [[rows, tokens, rows * settings["max_tokens"]] for tokens in prompts]
    for side, each in steps.items():
        found = [[step[name] for name in WORK] for step in each]
        if found != expected:
            sys.exit(f"{side} did other work than asked for ({', '.join(WORK)} of each step): {found}, not {expected}")


def table(steps: Mapping[str, list[Step]]) -> str:
    """A Markdown table: medians by phase and their ratios, the fastest step, and the work of a step."""
    lines = [[""] + list(steps) + ["ratio"] * (len(steps) - 1)]
    lines.append(["---"] * len(lines[0]))

    def seconds(label: str, values: Sequence[float]) -> None:
        lines.append(
            [label, *(f"{value:.3f}" for value in values), *(f"{value / values[0]:.2f}" for value in values[1:])]
        )

    for phase, label in PHASES.items():
        seconds(f"{label}, median s", [median(step[phase] for step in each) for each in steps.values()])
    seconds("whole step, fastest s", [min(step["step"] for step in each) for each in steps.values()])
    if len(steps) > 1:
        ours, theirs = steps.values()
        ratio = median(their["step"] / our["step"] for our, their in zip(ours, theirs))
        lines.append(["whole step, median ratio of neighbouring steps", "", "", f"{ratio:.2f}"])
    for name, label in WORK.items():
        means = [sum(step[name] for step in each) / len(each) for each in steps.values()]
        lines.append([f"{label} a step", *(f"{mean:,.0f}" for mean in means), *[""] * (len(means) - 1)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def parser_of(doc: str | None, steps: int, warmup: int) -> argparse.ArgumentParser:
    """The options that a comparison with TRL has in any case."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL; without it, our side runs alone")
    parser.add_argument("--steps", type=int, default=steps, help=f"measured steps of each side (default: {steps})")
    parser.add_argument("--warmup", type=int, default=warmup, help=f"warm-up steps before them (default: {warmup})")
    parser.add_argument("--threads", type=int, default=2, help="cores that each side may use (default: 2)")
    return parser


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, 16, 3)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step (default: 16)")
    parser.add_argument("--samples", type=int, default=16, help="samples of each prompt (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of each response (default: 16)")
    arguments = parser.parse_args(argv)
    for name in ("steps", "warmup", "prompts", "max_tokens", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.samples < 2:
        parser.error("--samples must be at least 2")
    if arguments.trl_python and not shutil.which(arguments.trl_python):
        parser.error(f"--trl-python {arguments.trl_python}: no such interpreter")
    return arguments


def run_sides(
    file: str,
    arguments: argparse.Namespace,
    prepare: Callable[[Path, dict[str, Any]], None],
    compare: Callable[[Path, dict[str, Any], Sequence[Sequence[str]]], str],
) -> None:
    """Prepares the workload, and prints the comparison of ``file``, run as ``measure``, with ``trl_`` and its name next to it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    commands = [[sys.executable, file, "measure"]]
    if arguments.trl_python:
        commands.append([arguments.trl_python, str(HERE / f"trl_{Path(file).name}")])
    else:
        print("without --trl-python only this project's side runs\n")
    settings = vars(arguments) | {"learning_rate": 1e-4}
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory), settings)
        print(compare(Path(directory), settings, commands))


def main() -> None:
    if sys.argv[1:2] == ["measure"]:  # our side's own process
        measure(Path(sys.argv[2]))
    else:
        run_sides(__file__, arguments_of(), prepare, compare)


if __name__ == "__main__":
    main()
