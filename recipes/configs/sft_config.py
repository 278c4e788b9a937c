"""Supervised training on conversations with images: ``dataproto sft``.

With no arguments it draws conversations, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset any``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on data sets of chat messages (see
`recipes.data.conversation_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import RunConfig
from recipes.configs.shared.supervised_config import RowsConfig, SupervisedConfig, tiny_schedule
from recipes.data.column_keys import ColumnKeys
from recipes.options import parse_recipe
from rollout.prompts.messages import Turns

OUTPUT_DIR = Path("outputs/sft")


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(RowsConfig):
    """Conversations: where they come from and what of them is learnt."""

    data_path: tuple[str, ...] = ()  # parquet or JSON files, folders, or data set names; drawn conversations by default
    weights: tuple[float, ...] = ()  # how often each of --data-path is drawn from; default: as often as it has rows
    # held-out conversations; default: the "test" split of a folder or data set name, or a file's last rows
    eval_data_path: str | None = None
    media_root: str | None = (
        None  # folder at which relative paths of images and videos start; default: that of the file
    )
    keys: tyro.conf.OmitArgPrefixes[ColumnKeys] = field(default_factory=ColumnKeys)
    turns: Turns = "all"  # which of the assistant's turns are learnt
    streaming: bool = False  # read data sets as they come, without their length; needs --eval-data-path to evaluate
    shuffle_buffer: int = 1024  # rows among which a stream is shuffled

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.data_path):
            raise InvalidConfig(f"{len(self.weights)} weights for {len(self.data_path)} data sets")
        if self.keys.given() and not self.data_path:
            raise InvalidConfig(
                f"{next(iter(self.keys.given()))} without data_path: drawn conversations have their own columns"
            )
        if not self.data_path and (self.eval_data_path or self.streaming or self.media_root):
            raise InvalidConfig(
                "eval_data_path, streaming or media_root without data_path: drawn conversations have their own"
            )
        if self.streaming and len(self.data_path) > 1 and not self.weights:
            raise InvalidConfig("streams have no length that could tell how often to draw from each: give --weights")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Everything the run depends on."""

    data: tyro.conf.OmitArgPrefixes[SFTDataConfig] = field(default_factory=SFTDataConfig)
    run: tyro.conf.OmitArgPrefixes[RunConfig] = field(default_factory=lambda: RunConfig(output_dir=OUTPUT_DIR))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run.keep_best == "accuracy" and not self.data.max_response_length:
            raise InvalidConfig("keep_best=accuracy needs answers: leave out --max-response-length 0, or give loss")
        if self.run.epochs is not None and not self.data.data_path:
            raise InvalidConfig("epochs without data_path: drawn conversations do not repeat; give --steps")


TINY = SFTConfig(
    preset="tiny",
    data=SFTDataConfig(batch_size=64, max_length=256, max_response_length=24),
    **tiny_schedule(OUTPUT_DIR),
)
PRESETS = {"tiny": TINY, "any": SFTConfig()}
"""The defaults of ``--preset``."""


def parse(arguments: Sequence[str]) -> SFTConfig:
    """The configuration of a command line, over the defaults of ``--preset``, by default ``tiny``.

    Raises:
        InvalidConfig: an unknown or ill-typed option, or an impossible combination, in one line.
    """
    return parse_recipe(arguments, PRESETS, __doc__, "dataproto sft")
