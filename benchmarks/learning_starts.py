"""Where the runs of ``benchmarks/learning.py`` start: checkpoints after supervised updates on true answers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipes import easy_vqa
from recipes.configs import easy_vqa_config
from recipes.configs.sft_config import SFTConfig, SFTDataConfig
from recipes.configs.shared.run_config import RunConfig
from recipes.data import Answered, EasyVQA, ProblemRows, open_easy_vqa
from recipes.data.mixture import Mixture
from recipes.run.supervised import run_supervised
from recipes.sft import conversation_task
from recipes.tiny import tiny_checkpoint
from recipes.tiny.warm_up import ANSWER
from workers.model.model_config import OptimizerConfig

EVAL_ROWS = 256
START = {"easy_vqa": 50, "level1": 0, "level2": 3000, "level3": 3000, "level4": 3000}
"""Supervised updates before the runs of a task. Those of easy-VQA teach the form of an answer and little more; without those of
levels 2 to 4 no algorithm learns anything there within a few hundred steps."""
OTHER_PROBLEMS = 1000  # seeds of the problems of a start, before those of the runs


def make_start(task: str, seed: int, work: Path) -> Path:
    """The checkpoint from which the runs of a task and a seed start."""
    return easy_vqa_start(seed, work)[0] if task == "easy_vqa" else drawn_start(task, seed, work)


def easy_vqa_start(seed: int, work: Path) -> tuple[Path, EasyVQA]:
    """The checkpoint after the supervised phase, which the runs of a seed share, and the rows with few test questions."""
    rows = open_easy_vqa()
    with start_directory("easy_vqa", seed, work) as directory:
        config = easy_vqa_config.parse(
            ["--seed", str(seed), "--sft.steps", str(START["easy_vqa"]), "--output-dir", str(directory)]
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

    A quarter of the supervised updates' problems are of level 1, whose numbers are the easiest to read. None is one of the runs'.
    """
    level, updates = int(task.removeprefix("level")), START[task]
    if not updates:
        return tiny_checkpoint(seed)
    with start_directory(task, 0, work) as directory:
        made = directory / "sft" / f"global_step_{updates}" / "actor" / "huggingface"
        if not (made / "config.json").is_file():
            config = start_config(str(tiny_checkpoint(0)), updates, directory / "sft")
            train = Mixture(
                [Answered(ProblemRows(each, OTHER_PROBLEMS), ANSWER) for each in (1, level)], weights=[1, 3]
            )
            held_out = Answered(ProblemRows(level, 0, "test")[:EVAL_ROWS], ANSWER)
            run_supervised(config, partial(conversation_task, config, rows=(train, held_out)))
    return made


def start_config(model: str, updates: int, directory: Path) -> SFTConfig:
    """The supervised phase of a drawn level, which goes on if it was interrupted. It says how many held-out answers are right."""
    every = max(updates // 6, 1)
    return SFTConfig(
        model_path=model,
        data=SFTDataConfig(
            batch_size=64,
            max_length=512,
            eval_rows=EVAL_ROWS,
            max_response_length=24,
            num_workers=4 if len(os.sched_getaffinity(0)) > 4 else 0,
        ),
        optimizer=OptimizerConfig(lr=1.5e-3, betas=(0.9, 0.95), schedule="cosine", warmup_steps=20),
        keep_rows=0,
        run=RunConfig(
            steps=updates,
            eval_every=every,
            save_every=every,
            resume=(directory / "config.json").is_file(),
            output_dir=directory,
        ),
    )
