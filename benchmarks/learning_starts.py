"""Where the runs of ``benchmarks/learning.py`` start: checkpoints after supervised updates on true answers.

    python benchmarks/learning_starts.py --level 2 --output outputs/start_level2 --workers 14

makes the start of a drawn level, on a GPU if there is one, and prints what it can do as that grows. First the vision tower learns
to read the texts of drawings (see ``label_reading.py``), then the whole model to answer: it names the texts that count, and gives
the answer in the form that the reward asks for. Training ends when ``--until`` of the held-out questions are answered right, or
after ``--seconds``; ``--output`` is then an ordinary checkpoint, for ``benchmarks/learning.py --start``. Worker processes draw
pictures and make batches of them, so that an update costs what the model costs.
"""

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import Dataset

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

from label_reading import (  # noqa: E402
    LabelledPictures,
    ReadingBatches,
    as_bytes,
    as_tensors,
    from_bytes,
    in_processes,
    learn_to_read,
    one_ahead,
)
from synthetic_levels import LevelProblem, LevelRows, make_problem  # noqa: E402

from dataproto import DataProto, object_array  # noqa: E402
from recipes import easy_vqa  # noqa: E402
from recipes.configs import easy_vqa_config  # noqa: E402
from recipes.data.easy_vqa_rows import EasyVQA, open_easy_vqa  # noqa: E402
from recipes.data.loader import EvaluationLoader  # noqa: E402
from recipes.demo.tiny_model import TinyConfig, make_tiny_model, tiny_checkpoint  # noqa: E402
from recipes.rewards import geo3k_reward  # noqa: E402
from recipes.run.evaluation import evaluate_samples, held_out_value  # noqa: E402
from recipes.run.supervised import next_token_loss  # noqa: E402
from rollout import SamplingParams  # noqa: E402
from rollout.prompts import PromptBuilder, SupervisedBuilder  # noqa: E402
from workers import Roles, launch  # noqa: E402
from workers.model.model_config import OptimizerConfig  # noqa: E402
from workers.roles.actor import ActorConfig  # noqa: E402
from workers.roles.rollout_worker import RolloutConfig  # noqa: E402

EVAL_ROWS = 256
EASY_VQA_UPDATES = 50
"""Supervised updates before the runs of easy-VQA: they teach the form of an answer and little more."""
TASKS = ("easy_vqa", "level1", "level2", "level3")
OTHER_PROBLEMS = 1000  # seed of the problems of a start; the runs have others
LENGTH, ANSWER_LENGTH = 512, 32  # tokens at most
WORKED = "<think>{shown}</think> \\boxed{{{answer}}}"
"""An answer computed from the texts that are named before it; a model learns that far sooner than the answer alone."""
MODELS = {
    2: TinyConfig(patch=7, vision_heads=4, vision_mlp=4),
    3: TinyConfig(hidden=192, heads=6, layers=3, vision_width=96, patch=7, vision_heads=4, vision_mlp=4),
}
"""The models of the levels that the smallest one does not learn: a digit of 7 pixels has a patch of its own."""


@dataclass(frozen=True)
class StartOptions:
    """How long the start of a drawn level learns, and on what."""

    level: int
    output: Path
    workers: int = 0  # processes that draw; 0: this process
    batch_size: int = 64
    lr: float = 1e-3
    until: float = 0.25  # held-out accuracy at which training ends
    seconds: float = 1500.0  # after which it ends in any case
    every: int = 250  # updates between evaluations
    read_until: float = 0.97  # share of held-out texts at which the tower has learned to read
    read_seconds: float | None = None  # after which reading ends in any case; default: half of the seconds
    read_lr: float = 2e-3
    seed: int = 0  # of the first weights


def worked_answer(problem: LevelProblem) -> str:
    """The true answer after the texts of the picture from which it follows.

    >>> worked_answer(make_problem(0, 2))
    '<think>45</think> \\\\boxed{45}'
    """
    shown = [each.text.strip("°") for each in problem.shown]
    return WORKED.format(shown=" ".join(shown), answer=problem.answer)


class AnsweredBatches(Dataset[Any]):
    """Problems of a level with worked answers in batches, each made where it is read, for `batch_of`."""

    def __init__(self, builder: SupervisedBuilder, level: int, size: int) -> None:
        self.builder, self.level, self.size = builder.without_cache(), level, size

    def row(self, place: int) -> dict[str, Any]:
        """A question and its worked answer as a conversation."""
        problem = make_problem(place, self.level, OTHER_PROBLEMS)
        turns = [("user", problem.text), ("assistant", worked_answer(problem))]
        return {"prompt": [{"role": role, "content": text} for role, text in turns], "images": [problem.image]}

    def __getitem__(self, number: int) -> tuple[dict[str, Any], Any, Any]:
        places = range(number * self.size, (number + 1) * self.size)
        rows = self.builder.collate([self.builder.prepare(self.row(place)) for place in places])
        inputs = rows["multi_modal_inputs"]
        pixels = as_bytes(torch.cat([row["pixel_values"] for row in inputs]))
        grids = torch.cat([row["image_grid_thw"] for row in inputs])
        return {name: column.numpy() for name, column in rows.batch.items()}, pixels.numpy(), grids.numpy()


def batch_of(made: tuple[dict[str, Any], Any, Any]) -> DataProto:
    """The batch that an `AnsweredBatches` made, as an actor reads it."""
    columns = {name: torch.from_numpy(column) for name, column in made[0].items()}
    pixels, grids = as_tensors(made[1:])
    parts = from_bytes(pixels).split(grids.prod(1).tolist())
    media = [{"pixel_values": part, "image_grid_thw": grid[None]} for part, grid in zip(parts, grids, strict=True)]
    return DataProto.from_dict(columns, {"multi_modal_inputs": object_array(media)})


def make_start_model(options: StartOptions, path: Path) -> tuple[Path, SupervisedBuilder]:
    """The untrained checkpoint of a start, whose tokenizer knows the words of the questions, and what makes its batches."""
    problems = [make_problem(place, options.level) for place in range(200)]
    texts = [text for problem in problems for text in (problem.text, worked_answer(problem))]
    make_tiny_model(path, options.seed, MODELS[options.level], texts)
    return path, SupervisedBuilder.from_pretrained(path, LENGTH)


def make_level_start(options: StartOptions) -> float:
    """Makes a checkpoint in ``options.output``, trains it on true answers, and returns its held-out accuracy.

    Prints what reinforcement learning has to begin with: the accuracy of eight samples of each held-out question.
    """
    if options.output.exists() and not (options.output / "config.json").is_file():
        raise SystemExit(f"--output {options.output} is no checkpoint of an earlier start: it is not replaced")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with TemporaryDirectory(dir=options.output.parent, prefix=".start_") as folder:
        draft = Path(folder)
        model, builder = make_start_model(options, draft / "model")
        answered = AnsweredBatches(builder, options.level, options.batch_size)
        made = in_processes(answered, options.workers)  # their processes begin before this one has threads or a GPU
        read(options, model, builder)
        seconds = options.seconds - (time.monotonic() - began)
        batches = one_ahead(made, batch_of)
        asked = PromptBuilder.from_pretrained(model, LENGTH)
        held_out = list(EvaluationLoader(LevelRows(options.level, 0, "test")[:EVAL_ROWS], asked, EVAL_ROWS))
        optimizer = OptimizerConfig(lr=options.lr, betas=(0.9, 0.95), warmup_steps=50)
        # In float32: products take little of an update of so small a model, whatever their precision.
        actor = ActorConfig(str(model), dtype="float32", token_budget=2**16, optimizer=optimizer)
        engine = RolloutConfig(str(model), options={"dtype": "float32"})
        with launch(actor, reward=geo3k_reward, rollout=engine) as roles:
            accuracy = update_until_right(roles, batches, held_out, replace(options, seconds=seconds), draft)
            several = SamplingParams(n=8, max_tokens=ANSWER_LENGTH)
            found = evaluate_samples(roles, held_out, several, draft, 0)[0]
            shares = [next(found[name] for name in found if name.endswith(end)) for end in ("acc/mean@8", "acc/pass@8")]
            print(f"sampled 8 times: {shares[0]:.3f} right, of the questions at least once {shares[1]:.3f}")
            roles.actor.save(draft)
        builder.save_pretrained(draft / "huggingface")
        if options.output.exists():
            shutil.rmtree(options.output)
        (draft / "huggingface").rename(options.output)
    return accuracy


def read(options: StartOptions, model: Path, builder: PromptBuilder) -> None:
    """Teaches the tower of a checkpoint to read the drawings of a level."""
    pictures = LabelledPictures(builder, options.level, OTHER_PROBLEMS)
    batches = in_processes(ReadingBatches(pictures, options.batch_size), options.workers)
    held_out = replace(pictures, seed=0).tensors([pictures.problem(place, "test") for place in range(EVAL_ROWS)])
    seconds = options.seconds / 2 if options.read_seconds is None else options.read_seconds
    learn_to_read(model, batches, held_out, options.read_lr, options.read_until, seconds, options.every)


def update_until_right(
    roles: Roles, batches: Iterator[DataProto], held_out: list[DataProto], options: StartOptions, folder: Path
) -> float:
    """Trains until so much is right as the options ask for, or until the time is over. Returns the last accuracy."""
    began, losses = time.monotonic(), list[float]()
    for update, rows in enumerate(batches, 1):
        losses.append(roles.actor.update(rows, next_token_loss)["actor/loss"])
        over = time.monotonic() - began > options.seconds
        if over or not update % options.every:
            roles.sync_weights()
            greedy = SamplingParams(temperature=0, max_tokens=ANSWER_LENGTH)
            accuracy = held_out_value(evaluate_samples(roles, held_out, greedy, folder, update)[0], "accuracy")
            spent = f"answering, {update} updates, {time.monotonic() - began:.0f} s"
            print(f"{spent}: loss {mean(losses):.4f}, held-out accuracy {accuracy:.3f}", flush=True)
            losses.clear()
            if over or accuracy >= options.until:
                break
    return accuracy


def answer_length(task: str) -> int:
    """Tokens of the longest answer in the runs of a drawn level."""
    return ANSWER_LENGTH if int(task.removeprefix("level")) in MODELS else 24


def make_start(task: str, seed: int, work: Path) -> Path:
    """The checkpoint from which the runs of a task and a seed start."""
    return easy_vqa_start(seed, work)[0] if task == "easy_vqa" else drawn_start(task, seed, work)


def easy_vqa_start(seed: int, work: Path) -> tuple[Path, EasyVQA]:
    """The checkpoint after the supervised phase, which the runs of a seed share, and the rows with few test questions."""
    rows = open_easy_vqa()
    with start_directory("easy_vqa", seed, work) as directory:
        config = easy_vqa_config.parse(
            ["--seed", str(seed), "--sft.steps", str(EASY_VQA_UPDATES), "--output-dir", str(directory)]
        )
        config = replace(config, run=replace(config.run, resume=True))
        start = easy_vqa.supervised_checkpoint(config, rows)
    return start, EasyVQA(rows.train, rows.test.in_random_order()[:EVAL_ROWS])


@contextmanager
def start_directory(task: str, seed: int, work: Path) -> Iterator[Path]:
    """The directory of a start, for one process at a time: others wait until it is made."""
    directory = work / task / "start" / f"seed_{seed}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def drawn_start(task: str, seed: int, work: Path) -> Path:
    """The checkpoint from which the runs of a level start: of level 1 one for each seed, of the others one for all.

    None of the problems that it has learned from is one of the runs'.
    """
    level = int(task.removeprefix("level"))
    if level not in MODELS:
        return tiny_checkpoint(seed)
    with start_directory(task, 0, work) as directory:
        made = directory / "checkpoint"
        if not (made / "config.json").is_file():
            cores = len(os.sched_getaffinity(0))
            make_level_start(StartOptions(level, made, workers=cores - 2 if cores > 4 else 0))
    return made


def parse() -> StartOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, required=True, choices=sorted(MODELS))
    parser.add_argument(
        "--output", type=Path, required=True, help="directory of the checkpoint; an old one is replaced"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that draw; 0: the one that trains")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--until", type=float, default=0.25, help="held-out accuracy at which training ends")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which it ends in any case")
    parser.add_argument("--every", type=int, default=250, help="updates between evaluations")
    parser.add_argument("--read-until", type=float, default=0.97, help="share of texts read at which answering begins")
    parser.add_argument(
        "--read-seconds", type=float, help="after which it begins in any case; default: half of --seconds"
    )
    parser.add_argument(
        "--read-lr", type=float, default=2e-3, help="learning rate of the tower while it learns to read"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    return StartOptions(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    accuracy = make_level_start(options)
    print(f"{options.output}: held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
