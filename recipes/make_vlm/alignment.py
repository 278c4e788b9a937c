"""Alignment: supervised training on pictures and words in two phases, by the recipe ``sft``."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dataproto.errors import CheckpointError, writing
from recipes.configs.make_vlm_config import MakeVLMConfig
from recipes.data.easy_vqa_rows import Answered, EasyVQA
from recipes.data.mixture import Mixture
from recipes.make_vlm.captions import DrawnCaptions, IconCaptions
from recipes.make_vlm.icons import Icon
from recipes.make_vlm.replay import Replay
from recipes.report.page import REPORT_FILE
from recipes.run.loop import RunConfig
from recipes.run.supervised import run_supervised
from recipes.sft import SFTConfig, SFTDataConfig, conversation_task
from workers.model.model_config import ModelConfig
from workers.training.checkpoint import latest_checkpoint
from workers.training.optimizer import OptimizerConfig

EVAL_ROWS = 128
TOWER, WHOLE = "tower", "whole"
"""The phases, and the folders of their runs."""
QUESTION_SHARE, TEXT_SHARE = 0.4, 0.1
"""Rows of the second phase that are questions of easy-VQA, and replayed text; the others are captions. An answer in text is some
twenty times as long as one about a picture, so most of the tokens are text.
"""
WHOLE_RATE = 0.1
"""The learning rate of the second phase as a share of that of the first."""


@dataclass(frozen=True)
class Phase:
    """A run of supervised training."""

    name: str
    steps: int
    lr: float
    rows: Any
    held_out: Sequence[dict[str, Any]]
    freeze_language: bool = False


def phases(config: MakeVLMConfig, icons: Sequence[Icon], easy_vqa: EasyVQA, replay: Replay) -> tuple[Phase, Phase]:
    """Tower and connector alone learn captions; then all weights learn captions, questions and replayed text."""
    seed, (first, second) = config.seed, config.phase_steps
    drawn, pictured = DrawnCaptions(seed), IconCaptions(icons, seed)
    held_out = [*DrawnCaptions(0, "test", EVAL_ROWS // 4), *IconCaptions(icons, 0, "test", EVAL_ROWS // 4)]
    asked = [Answered(easy_vqa.train.open_questions(each)) for each in (True, False)]
    captions = (1 - QUESTION_SHARE - TEXT_SHARE) / 2
    shares = [captions, captions, QUESTION_SHARE * 2 / 3, QUESTION_SHARE / 3, TEXT_SHARE]
    questions = Answered(easy_vqa.test.in_random_order()[: EVAL_ROWS // 2])
    return (
        Phase(TOWER, first, config.lr, Mixture([drawn, pictured], [1, 1]), held_out, freeze_language=True),
        Phase(
            WHOLE,
            second,
            config.lr * WHOLE_RATE,
            Mixture([drawn, pictured, *asked, replay.rows], shares),
            [*held_out, *questions],
        ),
    )


def align(checkpoint: Path, config: MakeVLMConfig, run: Sequence[Phase]) -> Path:
    """Trains the checkpoint by each phase, and puts the trained weights into its place.

    Returns:
        The report of the last phase, whose run is in a folder of ``config.run_dir``.
    """
    for phase in run:
        folder = config.run_dir / phase.name
        supervised = supervised_config(checkpoint, config, phase, folder)
        if finished(folder, phase.steps) is None:
            run_supervised(supervised, partial(conversation_task, supervised, rows=(phase.rows, phase.held_out)))
        trained = finished(folder, phase.steps)
        if trained is None:
            raise CheckpointError(
                f"{folder} has no checkpoint of step {phase.steps}: run the same command with --resume"
            )
        replace_weights(checkpoint, trained / "actor" / "huggingface")
    return folder / REPORT_FILE


def supervised_config(checkpoint: Path, config: MakeVLMConfig, phase: Phase, folder: Path) -> SFTConfig:
    """The run of a phase, in ``folder``."""
    return SFTConfig(
        model_path=str(checkpoint),
        data=SFTDataConfig(
            batch_size=config.batch_size,
            eval_rows=EVAL_ROWS,
            max_length=512,
            max_response_length=16,
            num_workers=config.num_workers,
        ),
        optimizer=OptimizerConfig(lr=phase.lr, schedule="cosine", warmup_steps=min(50, phase.steps // 10)),
        compute=ModelConfig(freeze_language=phase.freeze_language),
        run=RunConfig(
            steps=phase.steps,
            eval_every=max(phase.steps // 4, 1),
            save_every=max(phase.steps // 4, 1),
            output_dir=folder,
            seed=config.seed,
            resume=config.resume and folder.exists(),
        ),
    )


def finished(folder: Path, steps: int) -> Path | None:
    """The last checkpoint of a run that has come to its end."""
    found = latest_checkpoint(folder) if folder.exists() else None
    return None if found is None or found[0] < steps else found[1]


def replace_weights(checkpoint: Path, trained: Path) -> None:
    """Puts the safetensors files of ``trained`` into the place of those of ``checkpoint``."""
    old = {file.name for file in checkpoint.glob("model*.safetensors*")}
    new = list(trained.glob("model*.safetensors*"))
    for file in new:
        draft = checkpoint / f".{file.name}.partial"
        with writing(checkpoint / file.name, draft):
            shutil.copy2(file, draft)
            os.replace(draft, checkpoint / file.name)
    for name in old - {file.name for file in new}:
        (checkpoint / name).unlink()
