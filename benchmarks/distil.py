r"""On-policy distillation beside supervised training on the teacher's answers: ``python benchmarks/distil.py``.

A student of 0.36 million parameters learns the drawn problems from a trained tiny model of 0.64 million (``--teacher
CHECKPOINT``, or one that GRPO trains first). It begins with ``--start`` steps of supervised training on the teacher's answers.
Then ``distilled``: the student samples and the teacher scores. ``taught``: the teacher samples as many answers to the same
prompts, and the student learns them by cross-entropy. Both have the same optimizer and batches, and are compared after as many
samples and after as many seconds. With ``--start 0`` the student knows only the form of an answer.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataproto import DataProto
from recipes import distil, grpo
from recipes.configs.distil_config import DistilConfig, DistilRunConfig
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import TinyConfig, make_tiny_model, next_token_loss, warm_up
from recipes.rewards import geo3k_reward
from recipes.run import evaluate_samples, run
from recipes.run.evaluation import held_out_value
from rollout import SamplingParams
from rollout.prompts import PromptBuilder
from workers import ActorConfig, OptimizerConfig, Roles, launch

STUDENT = TinyConfig(hidden=64, heads=2)
FIRST_PROBLEMS = 1000  # seeds of the problems before those of the comparison
Step = Callable[[DataProto], object]


@dataclass(frozen=True)
class Settings:
    """What both ways share."""

    teacher: str
    steps: int
    prompts: int
    samples: int
    rows: int  # held-out problems
    lr: float
    level: int = 1

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(n=self.samples, max_tokens=24)

    def actor(self, path: str) -> ActorConfig:
        return ActorConfig(path, optimizer=OptimizerConfig(lr=self.lr, warmup_steps=10))

    def loader(self, path: str, seed: int) -> PromptLoader:
        builder = PromptBuilder.from_pretrained(path, 256)
        return PromptLoader(ProblemRows(self.level, seed), builder, self.prompts, seed, shuffle=False)


@dataclass(frozen=True)
class Point:
    """The student after some training."""

    samples: int
    seconds: float
    accuracy: float


def accuracy(roles: Roles, path: str, settings: Settings) -> float:
    """The share of held-out problems that the student answers right, greedily."""
    rows = ProblemRows(settings.level, 0, "test")[: settings.rows]
    held_out = EvaluationLoader(rows, PromptBuilder.from_pretrained(path, 256), 256)
    with tempfile.TemporaryDirectory() as folder:
        found, _ = evaluate_samples(roles, held_out, SamplingParams(temperature=0, max_tokens=24), Path(folder), 0)
    return held_out_value(found, "accuracy")


def learn(
    step: Step, loader: PromptLoader, measure: Callable[[], float], settings: Settings, seconds: float = 0.0
) -> list[Point]:
    """The student before, after ``settings.steps`` steps, and after ``seconds`` of training if they are given."""
    points, spent, done = [Point(0, 0.0, measure())], 0.0, 0
    while done < settings.steps or spent < seconds:
        prompts = next(loader)
        start = time.monotonic()
        step(prompts)
        before, spent, done = spent, spent + time.monotonic() - start, done + 1
        if done == settings.steps or before < seconds <= spent:
            points.append(Point(done * settings.prompts * settings.samples, spent, measure()))
    return points


def distilled(path: str, seed: int, settings: Settings) -> list[Point]:
    """The student samples, the teacher scores."""
    config = DistilConfig(n=settings.samples)
    actor, sampling = settings.actor(path), replace(settings.sampling, seed=seed)
    teacher = DistilRunConfig(teacher=settings.teacher, algorithm=config).reference(actor)
    with launch(actor, teacher, geo3k_reward) as roles:

        def step(prompts: DataProto) -> None:
            distil.distil_step(roles, prompts, config, sampling)

        return learn(step, settings.loader(path, seed), partial(accuracy, roles, path, settings), settings)


def taught(path: str, seed: int, settings: Settings, seconds: float) -> list[Point]:
    """The teacher samples, the student learns its answers."""
    sampling = replace(settings.sampling, seed=seed)
    with (
        launch(settings.actor(path), reward=geo3k_reward) as roles,
        launch(settings.actor(settings.teacher)) as teacher,
    ):

        def step(prompts: DataProto) -> None:
            roles.actor.update(teacher.rollout.generate(prompts, sampling), next_token_loss)
            roles.sync_weights()

        return learn(step, settings.loader(path, seed), partial(accuracy, roles, path, settings), settings, seconds)


def started(path: str, seed: int, settings: Settings, folder: Path) -> str:
    """The checkpoint of a student that has learned some of the teacher's answers."""
    if not settings.steps:
        return path
    builder, loader = PromptBuilder.from_pretrained(path, 256), settings.loader(path, FIRST_PROBLEMS + seed)
    with launch(settings.actor(path)) as roles, launch(settings.actor(settings.teacher)) as teacher:
        for _ in range(settings.steps):
            roles.actor.update(teacher.rollout.generate(next(loader), settings.sampling), next_token_loss)
        roles.actor.save(folder)
    for processor in builder.processors:
        processor.save_pretrained(folder / "huggingface")
    return str(folder / "huggingface")


def train_teacher(folder: Path, steps: int) -> str:
    """The tiny model, trained by ``dataproto grpo``."""
    options = ["--steps", str(steps), "--save-every", "0", "--keep-rollouts", "0", "--output-dir", str(folder)]
    run(grpo.parse(options), grpo.grpo_step)
    return str(folder / f"global_step_{steps}" / "actor" / "huggingface")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="checkpoint of a trained tiny model")
    parser.add_argument("--teacher-steps", type=int, default=500, help="of GRPO, without --teacher")
    parser.add_argument("--start", type=int, default=60, help="steps of supervised training before, at a rate of 1e-3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="of a prompt")
    parser.add_argument("--rows", type=int, default=256, help="held-out problems")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        teacher = a.teacher or train_teacher(Path(folder) / "teacher", a.teacher_steps)
        settings = Settings(teacher, a.steps, a.prompts, a.samples, a.rows, a.lr)
        with launch(settings.actor(teacher), reward=geo3k_reward) as roles:
            print(f"teacher: {accuracy(roles, teacher, settings):.3f} of {a.rows} held-out problems", flush=True)
        rows: dict[str, list[Point]] = {}
        for seed in a.seeds:
            path = str(make_tiny_model(Path(folder) / f"student-{seed}", seed, STUDENT))
            warm_up(Path(path), seed)
            path = started(path, seed, replace(settings, steps=a.start, lr=1e-3), Path(folder) / f"started-{seed}")
            before, after = distilled(path, seed, settings)
            points = {"before": before, "distilled": after}
            _, *later = taught(path, seed, settings, after.seconds)
            same_samples = next(point for point in later if point.samples == after.samples)
            same_seconds = next(point for point in later if point.seconds >= after.seconds)
            points |= {"taught, as many samples": same_samples, "taught, as many seconds": same_seconds}
            for name, point in points.items():
                rows.setdefault(name, []).append(point)
                print(f"seed {seed} {name:24}{point}", flush=True)
    print(f"\n| student | samples | seconds | accuracy, seeds {a.seeds} | mean |\n|---|---|---|---|---|")
    for name, found in rows.items():
        each = ", ".join(f"{point.accuracy:.3f}" for point in found)
        samples, seconds = mean(point.samples for point in found), mean(point.seconds for point in found)
        print(f"| {name} | {samples:,.0f} | {seconds:.0f} | {each} | {mean(point.accuracy for point in found):.3f} |")


if __name__ == "__main__":
    main()
