"""Supervised training on conversations with images: ``dataproto sft``.

With no arguments it draws conversations, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset any``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on data sets of chat messages (see
`recipes.data.conversations`).
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import RunConfig
from recipes.configs.shared.supervised_config import RowsConfig, SupervisedConfig, tiny_schedule
from recipes.data.column_keys import ColumnOptions, refuse_without_data
from recipes.options import parse_recipe
from rollout.prompts.messages import Turns

OUTPUT_DIR = Path("outputs/sft")


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(RowsConfig, ColumnOptions):
    """Conversations: where they come from and what of them is learnt.

    Attributes:
        data_path: training data: parquet or JSON files, folders, or data set names; default: synthetic conversations
        weights: how often rows are taken from each of --data-path; default: as often as it has rows
        eval_data_path: held-out conversations: a set, or several, each as PATH or NAME=PATH; default: the "test" split of
            a folder or data set name, or a file's last rows
        turns: which of the assistant's turns are learnt
        streaming: read data sets as they come, without their length; needs --eval-data-path to evaluate
        shuffle_buffer: rows among which a stream is shuffled
    """

    data_path: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    turns: Turns = "all"
    streaming: bool = False
    shuffle_buffer: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.data_path):
            raise InvalidConfig(f"{len(self.weights)} weights for {len(self.data_path)} data sets")
        refuse_without_data(self, "conversations", "eval_data_path", "media_root", "streaming")
        if self.streaming and len(self.data_path) > 1 and not self.weights:
            raise InvalidConfig("streams have no length that could tell how often to draw from each: give --weights")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            (not self.streaming, "shuffle-buffer", "only streams have a buffer: add --streaming"),
            (len(self.data_path) == 1, "weights", "one data set has the whole weight: name several"),
            (not self.data_path, "on-bad-row", "all synthetic rows can be used: add --data-path"),
        ]


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run.keep_best == "accuracy" and not self.data.max_response_length:
            raise InvalidConfig("keep_best=accuracy needs answers: leave out --max-response-length 0, or give loss")
        if self.run.epochs is not None and not self.data.data_path:
            raise InvalidConfig("epochs without data_path: drawn conversations do not repeat; give --steps")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [
            *super().idle_options(),
            (
                self.data.max_response_length == 0,
                "engine engine-options layout.rollout ray.reward-processes ray.reward-timeout-s",
                "no question is asked: leave out --max-response-length 0",
            ),
            (
                self.data.streaming and not self.data.eval_data_path,
                "eval-every eval-rows eval-first max-response-length engine engine-options",
                "no rows of a stream are held out: add --eval-data-path",
            ),
        ]


TINY = SFTConfig(preset="tiny", data=SFTDataConfig(max_length=256, max_response_length=24), **tiny_schedule(OUTPUT_DIR))
PRESETS = {"tiny": TINY, "any": SFTConfig()}
"""The defaults of ``--preset``."""
parse = partial(parse_recipe, presets=PRESETS, description=__doc__, prog="dataproto sft")
