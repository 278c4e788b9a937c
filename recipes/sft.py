"""Supervised training on conversations with images: ``dataproto sft``.

With no arguments it draws conversations, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on data sets of chat messages (see
`recipes.data.conversations`).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from dataproto.errors import InvalidConfig
from recipes.configs.sft_config import PRESETS, TINY, SFTConfig, SFTDataConfig, parse
from recipes.configs.shared.run_config import announce_small_model
from recipes.data.conversations import CONVERSATION_COLUMNS, Questions, conversation_rows, conversation_stream
from recipes.data.loader import EvaluationLoader, PromptLoader, check_row, drop_overlong
from recipes.data.mixture import Mixture
from recipes.data.row_values import columns_left_out
from recipes.demo.rows import DrawnSums, DrawnTalks
from recipes.options import exit_status
from recipes.run.evaluation import evaluate_answers
from recipes.run.supervised import SupervisedTask, held_out_loss, run_supervised, supervised_builders
from rollout.prompts import SupervisedBuilder
from workers import Roles

__all__ = ["PRESETS", "TINY", "SFTConfig", "SFTDataConfig", "conversation_task", "main", "open_data", "parse"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        config = parse(status.arguments)
        announce_small_model(config.model_path, config.data.data_path)
        print(f"report: {run_supervised(config, partial(conversation_task, config))}")
    return status.code


def conversation_task(config: SFTConfig, model_path: str, rows: tuple[Any, Any] | None = None) -> SupervisedTask:
    """Training and held-out conversations, and the evaluation: the loss, and answers to the last questions.

    Args:
        rows: conversations to train on and held-out ones, by default those that the options name.
    """
    data = config.data
    builder, questions = supervised_builders(data, model_path)
    builder.learning(data.turns)
    train_rows, held_out = rows or open_data(data, builder, config.run.seed)
    if held_out and not data.data_path and data.on_bad_row == "stop":  # drawn, and not counted one by one
        check_row(held_out, 0, builder)
    loader = PromptLoader(
        train_rows,
        builder,
        data.batch_size,
        config.run.seed,
        shuffle=bool(data.data_path),
        on_bad_row=data.on_bad_row,
        num_workers=data.num_workers,
    )

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        if held_out is None:
            return {}
        rows = EvaluationLoader(held_out, builder, data.batch_size, data.on_bad_row)
        metrics = held_out_loss(roles, rows)
        if data.max_response_length:
            asked = EvaluationLoader(Questions(held_out), questions, 4 * data.batch_size, data.on_bad_row)
            metrics |= evaluate_answers(roles, asked, data.max_response_length, config.run.output_dir, step)[0]
        return metrics | {"data/skipped_eval_rows": len(rows.skipped)}

    longest, asked = data.max_length + data.max_response_length, 0 if held_out is None else len(held_out)
    return SupervisedTask(builder, loader, evaluate, longest, asked)


def open_data(data: SFTDataConfig, builder: SupervisedBuilder, seed: int) -> tuple[Any, Any]:
    """Training and held-out rows; held-out ones are `None` where there are none."""
    if not data.data_path:
        half = data.eval_rows // 2
        held_out = [*(DrawnTalks(0, "test")[i] for i in range(data.eval_rows - half))]
        held_out += [DrawnSums(0, "test")[i] for i in range(half)]
        return Mixture([DrawnTalks(seed), DrawnSums(seed)], weights=[3, 1]), held_out
    if data.streaming:
        streams = [
            conversation_stream(path, buffer=data.shuffle_buffer, keys=data.keys, media_root=data.media_root)
            for path in data.data_path
        ]
        for path, stream in zip(data.data_path, streams):
            _tell_columns_left_out(path, stream, data)
        rows = Mixture(streams, data.weights or [1.0]) if len(streams) > 1 else streams[0]
        return rows, _first_rows(data.eval_data_path, data, builder) if data.eval_data_path else None
    sources, held_out = [], []
    for path in data.data_path:
        rows, last = _split(path, data, builder)
        sources.append(rows)
        held_out.append(last)
    weights = data.weights or [float(len(rows)) for rows in sources]
    rows = Mixture(sources, weights) if len(sources) > 1 else sources[0]
    if data.eval_data_path:
        return rows, _first_rows(data.eval_data_path, data, builder)
    held_out = [part for part in held_out if len(part)]
    return rows, ConcatDataset(held_out) if held_out else None


def _split(path: str, data: SFTDataConfig, builder: SupervisedBuilder) -> tuple[Any, Any]:
    """Rows to train on and to hold out: of a folder or name its splits, of a file its last rows, at most a fifth."""
    rows = _fitting(path, "train", data, builder)
    if data.eval_data_path:
        return rows, []
    share = max(data.eval_rows // len(data.data_path), 1)
    if not Path(path).is_file():
        held_out = _fitting(path, "test", data, builder)
        return rows, Subset(held_out, range(min(share, len(held_out))))
    kept = len(rows) - min(share, len(rows) // 5)
    if kept == len(rows):
        raise InvalidConfig(f"{path} has {len(rows)} rows, too few to hold some out: give --eval-data-path")
    return Subset(rows, range(kept)), Subset(rows, range(kept, len(rows)))


def _first_rows(path: str, data: SFTDataConfig, builder: SupervisedBuilder) -> Any:
    held_out = _fitting(path, "test", data, builder)
    return Subset(held_out, range(min(data.eval_rows, len(held_out))))


def _fitting(path: str, split: str, data: SFTDataConfig, builder: SupervisedBuilder) -> Any:
    read = conversation_rows(path, split, data.keys, data.media_root)
    if split == "train":
        _tell_columns_left_out(path, read, data)
    rows, dropped = drop_overlong(read, builder, data.on_bad_row)
    if dropped:
        print(f"{path}: {len(dropped)} rows of {split} exceed {builder.max_prompt_length} tokens and are left out")
    return rows


def _tell_columns_left_out(path: str, rows: Any, data: SFTDataConfig) -> None:
    if left_out := columns_left_out(rows, CONVERSATION_COLUMNS, data.keys):
        print(f"{path}: columns that are not read: {', '.join(left_out)}")


if __name__ == "__main__":
    sys.exit(main())
