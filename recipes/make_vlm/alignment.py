"""Alignment: supervised training on captions of and questions about drawn pictures, by the recipe ``sft``."""

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dataproto.errors import CheckpointError
from recipes.data.drawn_rows import EPOCH_ROWS
from recipes.run.loop import RunConfig
from recipes.run.supervised import run_supervised
from recipes.sft import SFTConfig, SFTDataConfig, conversation_task
from recipes.synthetic.classes import COLOURS, SHAPES, draw_class
from recipes.synthetic.problems import Split
from workers.training.checkpoint import latest_checkpoint
from workers.training.optimizer import OptimizerConfig

EVAL_ROWS = 128


class DrawnCaptions(Sequence[dict[str, Any]]):
    """Conversations of one turn about the picture of a class: its caption, its shape, its colour, or yes or no.

    >>> [turn["content"] for turn in DrawnCaptions()[5]["prompt"]]
    ['<image>What shape is in the picture?', 'circle']
    """

    def __init__(self, seed: int = 0, split: Split = "train", rows: int = EPOCH_ROWS) -> None:
        self.seed, self.split, self.rows = seed, split, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, place: Any) -> Any:
        place = range(self.rows)[place]
        picture = draw_class(place, self.seed, self.split)
        random = Random(f"captions/{self.split}/{self.seed}/{place}")
        shape, colour = (
            random.choice([own, random.choice(others)])
            for own, others in ((picture.shape, SHAPES), (picture.colour, tuple(COLOURS)))
        )
        article = "An" if picture.fill[0] in "aeiou" else "A"
        question, answer = random.choice(
            [
                ("Describe the picture.", f"{article} {picture.label} on white paper."),
                ("What shape is in the picture?", picture.shape),
                ("What colour is the shape?", picture.colour),
                (f"Is there a {shape}?", "yes" if shape == picture.shape else "no"),
                (f"Is the shape {colour}?", "yes" if colour == picture.colour else "no"),
            ]
        )
        messages = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
        return {
            "prompt": messages,
            "images": [picture.image],
            "videos": [],
            "data_source": "synthetic/captions",
            "index": place,
        }


def align(checkpoint: Path, run_dir: Path, steps: int, batch_size: int, lr: float, seed: int, resume: bool) -> Path:
    """Trains all weights of the checkpoint for this number of steps, and puts the trained weights into its place.

    Returns:
        The report of the run, whose directory is ``run_dir``.
    """
    config = SFTConfig(
        model_path=str(checkpoint),
        data=SFTDataConfig(batch_size=batch_size, eval_rows=EVAL_ROWS, max_length=512, max_response_length=16),
        optimizer=OptimizerConfig(lr=lr, schedule="cosine", warmup_steps=min(50, steps // 10)),
        run=RunConfig(
            steps=steps,
            eval_every=max(steps // 4, 1),
            save_every=max(steps // 4, 1),
            output_dir=run_dir,
            seed=seed,
            resume=resume,
        ),
    )
    test = DrawnCaptions(0, "test")
    rows = DrawnCaptions(seed), [test[place] for place in range(EVAL_ROWS)]
    report = run_supervised(config, partial(conversation_task, config, rows=rows))
    found = latest_checkpoint(run_dir)
    if found is None or found[0] < steps:
        raise CheckpointError(f"{run_dir} has no checkpoint of step {steps}: run the same command with --resume")
    replace_weights(checkpoint, found[1] / "actor" / "huggingface")
    return report


def replace_weights(checkpoint: Path, trained: Path) -> None:
    """Puts the safetensors files of ``trained`` into the place of those of ``checkpoint``."""
    old = {file.name for file in checkpoint.glob("model*.safetensors*")}
    new = list(trained.glob("model*.safetensors*"))
    for file in new:
        draft = checkpoint / f".{file.name}.partial"
        shutil.copy2(file, draft)
        os.replace(draft, checkpoint / file.name)
    for name in old - {file.name for file in new}:
        (checkpoint / name).unlink()
