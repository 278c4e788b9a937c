"""Where the runs of ``benchmarks/learning.py`` start: checkpoints after supervised updates on true answers.

    python benchmarks/learning_starts.py --level 2 --output outputs/start_level2 --workers 14

makes the start of a drawn level, on a GPU if there is one, and prints the held-out accuracy as it grows. Training ends when
``--until`` of the held-out questions are answered right, or after ``--seconds``; ``--output`` is then an ordinary checkpoint, for
``benchmarks/learning.py --start``. Worker processes draw pictures and make batches of them, so that an update costs what the
model costs.
"""

import argparse
import fcntl
import math
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

from dataproto import DataProto, object_array  # noqa: E402
from recipes import easy_vqa  # noqa: E402
from recipes.configs import easy_vqa_config  # noqa: E402
from recipes.data import Answered, EasyVQA, ProblemRows, open_easy_vqa  # noqa: E402
from recipes.data.drawn_rows import DrawnRows  # noqa: E402
from recipes.data.loader import EvaluationLoader  # noqa: E402
from recipes.data.problem_rows import read_row  # noqa: E402
from recipes.rewards import geo3k_reward  # noqa: E402
from recipes.run.evaluation import evaluate_answers, held_out_value  # noqa: E402
from recipes.run.supervised import next_token_loss  # noqa: E402
from recipes.synthetic.figure import Circle, Label, Region, Shape, draw_figure, random_style  # noqa: E402
from recipes.synthetic.parts import outline, ray  # noqa: E402
from recipes.synthetic.problems import make_problem  # noqa: E402
from recipes.tiny import TinyConfig, make_tiny_model, tiny_checkpoint  # noqa: E402
from recipes.tiny.warm_up import ANSWER  # noqa: E402
from rollout.prompts import PromptBuilder, SupervisedBuilder  # noqa: E402
from workers import Roles, launch  # noqa: E402
from workers.model.model_config import OptimizerConfig  # noqa: E402
from workers.roles.actor import ActorConfig  # noqa: E402

EVAL_ROWS = 256
EASY_VQA_UPDATES = 50
"""Supervised updates before the runs of easy-VQA: they teach the form of an answer and little more."""
TASKS = ("easy_vqa", "level1", "level2", "level3", "level4")
OTHER_PROBLEMS = 1000  # seed of the problems of a start; the runs have others
LENGTH, ANSWER_LENGTH = 512, 24  # tokens at most
ALONE = "Give the answer alone."
MODELS = {
    2: TinyConfig(),
    3: TinyConfig(hidden=192, heads=6, layers=3, vision_width=96),
    4: TinyConfig(hidden=192, heads=6, layers=3, vision_width=96),
}
"""The models of the levels that the smallest one does not learn without a supervised start."""


@dataclass(frozen=True)
class StartOptions:
    """How long the start of a drawn level learns, and on what."""

    level: int
    output: Path
    workers: int = 0  # processes that draw; 0: this process
    batch_size: int = 64
    lr: float = 1e-3
    until: float = 0.2  # held-out accuracy at which training ends
    seconds: float = 1500.0  # after which it ends in any case
    every: int = 250  # updates between evaluations
    numbers: int = 3000  # updates at the beginning on pictures of a number alone
    seed: int = 0  # of the first weights


class Numbers(DrawnRows):
    """Pictures of 56 pixels that show a number, inside a rectangle or beside a circle: what reading a figure begins with."""

    def __init__(self, seed: int = 0, instruction: str = "", rows: int = 2**20) -> None:
        self.seed, self.instruction, self.rows = seed, instruction, rows

    def __getitem__(self, place: Any) -> Any:
        random = Random(f"numbers/{self.seed}/{place}")
        number, way = str(random.randint(1, 99)), ray(random.uniform(0, 360))
        if random.random() < 0.5:
            corner = complex(random.uniform(11, 18), random.uniform(8, 14))
            corners = tuple(way * each for each in (corner, -corner.conjugate(), -corner, corner.conjugate()))
            figure: list[Shape] = [Region(corners), *outline(*corners), Label(number, 0j)]
        else:
            radius = random.uniform(2, 10)
            figure = [Circle(0j, radius), Label(number, radius * way, way)]
        image = draw_figure(figure, 56, random_style(random, turn=0, pen=1.3, font=12), unit=1.0)
        raw = {"problem": "<image>Read the number.", "answer": number, "images": [image]}
        return read_row(raw, place, "train", "synthetic/numbers", self.instruction)


class AnsweredBatches(Dataset[bytes]):
    """Answered problems in batches, each made where it is read, as bytes that `batch_of` reads.

    The first ``numbers`` batches show numbers alone. In the others half of the pictures are of the level, the rest numbers and of
    the levels from 2 on below it. Half of the questions ask for the answer alone: behind the ten tokens of `ANSWER`'s form a
    model takes far longer to find out that the picture matters. The other half, as those of the runs, teach the form.

    A batch has the pixels of its pictures as bytes, and one of the two equal frames that the tower sees: an eighth of what the
    tower gets, since all of it, sent from process to process, would take longer than an update.
    """

    def __init__(self, builder: SupervisedBuilder, level: int, size: int, numbers: int) -> None:
        self.builder, self.size, self.numbers = builder.without_cache(), size, numbers
        pictures: list[Callable[[str], Sequence[Any]]] = [partial(Numbers, OTHER_PROBLEMS)]
        pictures += [partial(ProblemRows, each, OTHER_PROBLEMS, "train") for each in range(2, level + 1)]
        self.sources = [
            Answered(each(text), form) for each in pictures for text, form in ((ALONE, "{answer}"), ("", ANSWER))
        ]
        self.first = [1, 1] + [0, 0] * (level - 1)
        self.later = [1, 1] * (level - 1) + [level - 1] * 2

    def __getitem__(self, number: int) -> bytes:
        weights = self.first if number < self.numbers else self.later
        chosen = Random(f"batch/{number}").choices(self.sources, weights, k=self.size)
        places = range(number * self.size, (number + 1) * self.size)
        rows = self.builder.collate([self.builder.prepare(each[place]) for each, place in zip(chosen, places)])
        inputs = rows["multi_modal_inputs"]
        frames = torch.cat([row["pixel_values"] for row in inputs]).unflatten(1, (3, 2, -1))[:, :, 0]
        pixels = (frames / 2 + 1).mul(255).round().to(torch.uint8)  # of a processor whose mean is 1 and deviation 0.5
        grids = [row["image_grid_thw"].tolist() for row in inputs]
        columns = {name: column.numpy() for name, column in rows.batch.items()}
        return pickle.dumps((columns, pixels.numpy(), grids), 5)


def batch_of(made: bytes) -> DataProto:
    """The batch that an `AnsweredBatches` made, as an actor reads it."""
    columns, pixels, grids = pickle.loads(made)
    frames = (torch.from_numpy(pixels).float() / 255 - 1) * 2
    patches = frames[:, :, None].expand(-1, -1, 2, -1).flatten(1)
    media = [
        {"pixel_values": part, "image_grid_thw": torch.tensor(grid)}
        for part, grid in zip(patches.split([math.prod(grid[0]) for grid in grids]), grids, strict=True)
    ]
    return DataProto.from_dict(
        {name: torch.from_numpy(column) for name, column in columns.items()},
        {"multi_modal_inputs": object_array(media)},
    )


def endless_batches(builder: SupervisedBuilder, options: StartOptions) -> Iterator[DataProto]:
    """The batches of a start; its processes begin at once to make them ahead."""
    batches = AnsweredBatches(builder, options.level, options.batch_size, options.numbers)
    ahead = {"num_workers": options.workers, "prefetch_factor": 4} if options.workers else {}
    return map(batch_of, DataLoader(batches, batch_size=None, sampler=count(), collate_fn=bytes, **ahead))  # type: ignore[arg-type]


def make_start_model(options: StartOptions, path: Path) -> tuple[Path, SupervisedBuilder]:
    """The untrained checkpoint of a start, whose tokenizer knows the words of the questions, and what makes its batches."""
    texts = [make_problem(place, each).text for each in range(1, options.level + 1) for place in range(100)]
    texts += 100 * [f"Read the number. {ALONE}"]
    make_tiny_model(path, options.seed, MODELS[options.level], texts)
    return path, SupervisedBuilder.from_pretrained(path, LENGTH)


def learn_to_read(options: StartOptions) -> float:
    """Makes a checkpoint in ``options.output``, trains it on true answers, and returns its held-out accuracy."""
    if options.output.exists() and not (options.output / "config.json").is_file():
        raise SystemExit(f"--output {options.output} is no checkpoint of an earlier start: it is not replaced")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    optimizer = OptimizerConfig(lr=options.lr, betas=(0.9, 0.95), warmup_steps=50)
    with TemporaryDirectory(dir=options.output.parent, prefix=".start_") as folder:
        draft = Path(folder)
        model, builder = make_start_model(options, draft / "model")
        batches = endless_batches(builder, options)
        asked = PromptBuilder.from_pretrained(model, LENGTH)
        held_out = list(EvaluationLoader(ProblemRows(options.level, 0, "test")[:EVAL_ROWS], asked, EVAL_ROWS))
        with launch(ActorConfig(str(model), optimizer=optimizer), reward=geo3k_reward) as roles:
            accuracy = update_until_right(roles, batches, held_out, options, draft)
            roles.actor.save(draft)
        builder.save_pretrained(draft / "huggingface")
        if options.output.exists():
            shutil.rmtree(options.output)
        (draft / "huggingface").rename(options.output)
    return accuracy


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
            accuracy = held_out_value(evaluate_answers(roles, held_out, ANSWER_LENGTH, folder, update)[0], "accuracy")
            spent = f"{update} updates, {time.monotonic() - began:.0f} s"
            print(f"{spent}: loss {mean(losses):.4f}, held-out accuracy {accuracy:.3f}", flush=True)
            losses.clear()
            if over or accuracy >= options.until:
                break
    return accuracy


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
            learn_to_read(StartOptions(level, made, workers=cores - 2 if cores > 4 else 0))
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
    parser.add_argument("--until", type=float, default=0.2, help="held-out accuracy at which training ends")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which it ends in any case")
    parser.add_argument("--every", type=int, default=250, help="updates between evaluations")
    parser.add_argument("--numbers", type=int, default=3000, help="first updates, on pictures of a number alone")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    return StartOptions(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    accuracy = learn_to_read(options)
    print(f"{options.output}: held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
