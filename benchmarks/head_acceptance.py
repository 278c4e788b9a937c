"""How many drafts by a model's own head (MTP) are kept over a run of GRPO: the head trained along, and left as it was.

    python benchmarks/head_acceptance.py --work outputs/head_acceptance
    python benchmarks/head_acceptance.py --work outputs/head_acceptance --seeds 0 --steps 40

The model is a small Qwen3.5 that gives random answers in the right format, and its head was fitted to samples of that policy.
Then GRPO runs on synthetic problems in the ``hf`` engine, with ``--mtp-coef`` and without, from one start for each seed. The
engine drafts by the head only: drafts from tokens that came before are switched off here. A run that is complete in WORK is read
and not run again. Prints a table by step, medians and ranges over the seeds, and draws it into ``WORK/acceptance.png``.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean, median
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.random_checkpoint import write  # noqa: E402
from dataproto.vlm import family_of  # noqa: E402
from dataproto.vlm.prediction_head import PredictionHead  # noqa: E402
from recipes import grpo  # noqa: E402
from recipes.demo.rows import ProblemRows  # noqa: E402
from recipes.demo.tiny_model import warm_up  # noqa: E402
from recipes.watch.metrics_file import read_metrics  # noqa: E402
from rollout.drafts import Drafts  # noqa: E402
from rollout.engine import SamplingParams  # noqa: E402
from rollout.hf import HFEngine  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from rollout.responses import attach_responses, build_requests  # noqa: E402
from workers.roles.actor import ActorConfig, ActorWorker  # noqa: E402
from workers.training.optimizer import OptimizerConfig  # noqa: E402

DRAFTED = 3
KINDS = {"with": ["--mtp-coef", "1"], "without": []}
FOUND = {"share": "speculation/accepted_ratio", "tokens a pass": "speculation/accepted_per_pass"}


def start_of(work: Path, seed: int, options: argparse.Namespace) -> Path:
    """The checkpoint from which both runs of a seed start."""
    path = work / f"start_{seed}"
    if not (path / "fitted").exists():
        write(path, "tiny-qwen3.5")
        print(f"warm-up: {warm_up(path, seed, steps=options.warmed):.3f} nats per token", flush=True)
        print(f"head: {fit_head(path, seed, options.fitted):.3f} nats per token", flush=True)
        (path / "fitted").touch()
    return path


def fit_head(path: Path, seed: int, steps: int) -> float:
    """Adds to the checkpoint a head that predicts samples of its policy; its loss in the last step."""
    model = family_of("qwen3_5").model_class().from_pretrained(path)
    torch.manual_seed(seed)
    add_head(path, PredictionHead(family_of(model), model).state_dict())
    builder, sampling = PromptBuilder.from_pretrained(path, max_prompt_length=512), SamplingParams(n=8, max_tokens=16)
    prompts, engine = builder(ProblemRows(1, seed, "train")[:32]), HFEngine(str(path))
    done = engine.generate(build_requests(prompts, sampling), sampling)
    rows = attach_responses(prompts, done, sampling, builder.family, pad_token_id=builder.tokenizer.pad_token_id)
    schedule = OptimizerConfig(lr=2e-3, schedule="linear", total_steps=steps)
    actor = ActorWorker(ActorConfig(str(path), mtp_coef=1.0, optimizer=schedule))
    losses = [
        actor.update(rows, lambda outputs, _: (0 * outputs.log_probs, {}))["actor/mtp_loss"] for _ in range(steps)
    ]
    add_head(path, actor.module.model.mtp.state_dict())
    return float(losses[-1])


def add_head(path: Path, weights: dict[str, Tensor]) -> None:
    """Writes the weights of a head into the checkpoint."""
    file = path / "model.safetensors"
    named = {f"mtp.{name}": weight.detach().clone() for name, weight in weights.items()}
    save_file(load_file(file) | named, file, {"format": "pt"})


def curve(work: Path, kind: str, seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """What was kept in each step of a run."""
    folder = work / f"{kind}_{options.steps}_steps" / f"seed_{seed}"
    if not (folder / "report.html").exists():
        start = start_of(work, seed, options)
        run = f"--preset tiny --model-path {start} --seed {seed} --steps {options.steps} --keep-rollouts 0"
        sizes = "--batch-size 16 --algorithm.n 8 --max-response-length 16 --max-prompt-length 512 --algorithm.kl-coef 0"
        rest = f"--engine hf --engine-options speculate {DRAFTED} --overwrite --output-dir {folder} --eval-every 0"
        with mock.patch.object(Drafts, "next_tokens", return_value=[]):
            if grpo.main([*run.split(), *sizes.split(), *rest.split(), *KINDS[kind]]):
                sys.exit(f"{kind} --mtp-coef, seed {seed} failed")
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if FOUND["share"] in row]
    return [
        {name: float(row[key]) for name, key in FOUND.items()} | {"reward": row["critic/score/mean"]} for row in rows
    ]


def table(curves: dict[str, list[list[dict[str, float]]]], parts: int) -> str:
    """Means over a part of the run each; medians, and ranges over the seeds."""
    steps = len(next(iter(curves.values()))[0])
    lines = ["| steps | head | share of drafts kept | tokens a pass in addition | reward |", "|---|---|---|---|---|"]
    for first in range(0, steps, -(-steps // parts)):
        last = min(first + -(-steps // parts), steps)
        for kind, seeds in curves.items():
            cells = []
            for name in (*FOUND, "reward"):
                means = [fmean(row[name] for row in found[first:last]) for found in seeds]
                cells.append(f"{median(means):.3f} ({min(means):.3f} to {max(means):.3f})")
            lines.append(f"| {first + 1} to {last} | {kind} `--mtp-coef` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: dict[str, list[list[dict[str, float]]]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for color, (kind, seeds) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        values = [sorted(row["share"] for row in step) for step in zip(*seeds, strict=True)]
        steps = range(1, len(values) + 1)
        axes.plot(steps, [median(each) for each in values], color=color, label=f"{kind} --mtp-coef")
        axes.fill_between(steps, [each[0] for each in values], [each[-1] for each in values], color=color, alpha=0.2)
    axes.set(xlabel="step of GRPO", ylabel=f"share of {DRAFTED} drafts kept", ylim=(0, 1))
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the starts and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default: 60)")
    parser.add_argument("--warmed", type=int, default=80, help="steps of the model's warm-up (default: 80)")
    parser.add_argument("--fitted", type=int, default=60, help="steps in which the head is fitted (default: 60)")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    curves = {kind: [curve(options.work, kind, seed, options) for seed in options.seeds] for kind in KINDS}
    print(table(curves, parts=6))
    draw(curves, options.work / "acceptance.png")


if __name__ == "__main__":
    main()
