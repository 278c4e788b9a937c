"""Image classification by a vision-language model: ``dataproto classify``.

With no arguments it draws pictures of 48 classes, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With
``--preset any``, ``--model-path`` and ``--data-path`` it takes a folder of class directories (as Caltech-101's) or a data set
with an image and a label column. Accuracy is that of greedy answers which are exactly right, measured before, during and after.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import check_at_least
from recipes.configs.shared.run_config import RunConfig
from recipes.configs.shared.supervised_config import RowsConfig, SupervisedConfig, tiny_schedule
from recipes.data.labelled_pictures import Templates
from recipes.options import parse_recipe

OUTPUT_DIR = Path("outputs/classify")


@dataclass(frozen=True, kw_only=True)
class ClassifyDataConfig(RowsConfig):
    """Labelled pictures: where they come from and what is asked about them.

    Attributes:
        data_path: training data: folder of class directories, parquet or JSON file, data set name; default: synthetic
            pictures
        eval_data_path: held-out pictures: a set, or several, each as PATH or NAME=PATH; default: the test pictures of
            --data-path, or an eighth of each class
        image_column: column of the images of a data set
        label_column: column of the labels of a data set
        exclude: class directories or labels to leave out, such as BACKGROUND_Google
        question: question about each picture; {classes} becomes the list of all classes
        answer: answer to learn; {label} becomes the name of the class
        max_length: tokens of a row, image tokens included; a longer row is unusable, see --on-bad-row
        max_response_length: tokens of an answer to a held-out question
    """

    data_path: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    exclude: tuple[str, ...] = ()
    question: str = Templates.question
    answer: str = Templates.answer
    max_length: int = 2048
    max_response_length: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.templates()
        check_at_least(1, self, "max_response_length")

    def templates(self) -> Templates:
        return Templates(self.question, self.answer)

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (
                not self.data_path,
                "eval-data-path image-column label-column exclude",
                "synthetic ones have none: add --data-path",
            ),
            (not self.data_path, "on-bad-row", "all synthetic rows can be used: add --data-path"),
        ]


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: ClassifyDataConfig = field(default_factory=ClassifyDataConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))


TINY = ClassifyConfig(preset="tiny", data=ClassifyDataConfig(max_length=128), **tiny_schedule(OUTPUT_DIR))
PRESETS = {"tiny": TINY, "any": ClassifyConfig()}
"""The defaults of ``--preset``."""
parse = partial(parse_recipe, presets=PRESETS, description=__doc__, prog="dataproto classify")
