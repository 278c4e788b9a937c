"""Image classification by a vision-language model: ``dataproto classify``.

With no arguments it draws pictures of 48 classes, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With
``--model-path`` and ``--data-path`` it takes a folder of class directories (as Caltech-101's) or a data set with an image and a
label column. Accuracy is that of greedy answers which are exactly right, measured before, during and after.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from dataproto.errors import InvalidConfig
from recipes.data.conversation_rows import Questions
from recipes.data.labelled_pictures import IMAGES, LabelledData, Templates, drawn_data, folder_data, table_data
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.report.confusion import Confusion, save_confusion
from recipes.run.command_line import announce_small_model, exit_status, parse_recipe
from recipes.run.evaluation import evaluate_answers
from recipes.run.loop import RunConfig
from recipes.run.supervised import RowsConfig, SupervisedConfig, SupervisedTask, held_out_loss, run_supervised
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import Roles
from workers.training.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig(RowsConfig):
    """Labelled pictures: where they come from and what is asked about them."""

    data_path: str | None = None  # folder of class directories, parquet or JSON file, data set name; drawn by default
    image_column: Annotated[str, tyro.conf.arg(aliases=("--image-key",))] = "image"  # of a data set
    label_column: Annotated[str, tyro.conf.arg(aliases=("--answer-key",))] = "label"  # of a data set
    exclude: tuple[str, ...] = ()  # class directories or labels to leave out, such as BACKGROUND_Google
    question: str = Templates.question  # {classes} stands for the list of all
    answer: str = Templates.answer  # {label} stands for the class
    drawn_rows: int = 2**20  # how many pictures are drawn before they repeat
    max_length: int = 2048  # tokens, image tokens included
    max_response_length: int = 32  # tokens of an answer to a held-out question

    def __post_init__(self) -> None:
        super().__post_init__()
        self.templates()
        if self.max_response_length < 1 or self.drawn_rows < 1:
            raise InvalidConfig(
                f"max_response_length={self.max_response_length} and drawn_rows={self.drawn_rows} must be at least 1"
            )

    def templates(self) -> Templates:
        return Templates(self.question, self.answer)


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: tyro.conf.OmitArgPrefixes[ClassifyDataConfig] = field(default_factory=ClassifyDataConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(
        default_factory=lambda: RunConfig(output_dir=Path("outputs/classify"))
    )


# What a model of under a million parameters learns from drawn classes within minutes on two cores.
TINY = ClassifyConfig(
    data=ClassifyDataConfig(batch_size=64, max_length=128, max_response_length=32),
    optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=20),
    run=RunConfig(steps=600, eval_every=100, save_every=200, output_dir=Path("outputs/classify")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with exit_status(arguments) as status:
        config = parse(arguments)
        announce_small_model(config.model_path, config.data.data_path)
        pictures = open_labelled(config.data, config.run.seed)
        print(f"report: {run_supervised(config, partial(classification_task, config, pictures))}")
    return status.code


def parse(arguments: Sequence[str]) -> ClassifyConfig:
    """The configuration of a command line. Defaults are the tiny model's, or with ``--model-path`` those for real ones.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    return parse_recipe(arguments, ClassifyConfig(), {"tiny": TINY}, __doc__, "dataproto classify")


def classification_task(config: ClassifyConfig, labelled: LabelledData, model_path: str) -> SupervisedTask:
    """Questions about labelled pictures, and the evaluation: the loss, greedy answers, and their confusion."""
    data = config.data
    limits = (data.max_length, data.min_pixels, data.max_pixels)
    builder = SupervisedBuilder.from_pretrained(model_path, *limits)
    questions = PromptBuilder.from_pretrained(model_path, *limits)
    loader = PromptLoader(
        labelled.train,
        builder,
        data.batch_size,
        config.run.seed,
        shuffle=data.data_path is not None,
        on_bad_row=data.on_bad_row,
        num_workers=data.num_workers,
    )
    answers = {data.templates().answer.replace("{label}", label).strip(): label for label in labelled.classes}

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        rows = EvaluationLoader(labelled.held_out, builder, data.batch_size, data.on_bad_row)
        metrics = held_out_loss(roles, rows)
        asked = EvaluationLoader(Questions(labelled.held_out), questions, 4 * data.batch_size, data.on_bad_row)
        found, batches = evaluate_answers(roles, asked, data.max_response_length, config.run.output_dir, step)
        pairs = [
            (answers[model["ground_truth"]], answers.get(text.strip(), ""))
            for batch in batches
            for model, text in zip(batch["reward_model"], batch["response_text"])
        ]
        confusion = Confusion.of(labelled.classes, pairs)
        save_confusion(config.run.output_dir, step, confusion)
        metrics |= found | {"val/other_answers": confusion.other_share}
        return metrics | {"data/skipped_eval_rows": len(rows.skipped)}

    return SupervisedTask(builder, loader, evaluate, data.max_length + data.max_response_length)


def open_labelled(data: ClassifyDataConfig, seed: int) -> LabelledData:
    """The pictures that the options name."""
    templates = data.templates()
    if data.data_path is None:
        return drawn_data(data.drawn_rows, data.eval_rows, seed, templates)
    path = Path(data.data_path)
    if path.is_dir() and _has_images(path):
        return folder_data(path, data.eval_rows, seed, templates, data.exclude)
    return table_data(
        data.data_path, data.eval_rows, seed, templates, data.image_column, data.label_column, data.exclude
    )


def _has_images(path: Path) -> bool:
    folders = [*path.glob("*/"), *path.glob("*/*/")]
    return any(file.suffix.lower() in IMAGES for folder in folders for file in folder.iterdir())


if __name__ == "__main__":
    sys.exit(main())
