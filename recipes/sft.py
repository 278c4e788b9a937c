"""Supervised training on conversations with images: ``dataproto sft``.

With no arguments it draws conversations, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop trains any checkpoint of a known family on data sets of chat messages (see
`recipes.data.conversations`).
"""

from collections.abc import Mapping
from typing import Any

from recipes.configs.sft_config import PRESETS, TINY, SFTConfig, SFTDataConfig, parse
from recipes.data.conversations import CONVERSATION_COLUMNS, conversation_rows, conversation_stream
from recipes.data.loader import check_row
from recipes.data.mixture import Mixture
from recipes.data.splits import open_sets, tell_columns_left_out, tell_data
from recipes.demo.rows import DrawnSums, DrawnTalks
from recipes.options import training_command
from recipes.run.policy_gradient import prompt_loader
from recipes.run.supervised import SupervisedTask, rows_builder, run_supervised, supervised_evaluation
from rollout.prompts import SupervisedBuilder

__all__ = ["PRESETS", "TINY", "SFTConfig", "SFTDataConfig", "conversation_task", "main", "open_data", "parse"]


def conversation_task(config: SFTConfig, model_path: str) -> SupervisedTask:
    """Training and held-out conversations, and the evaluation: the loss, and answers to the last questions."""
    data = config.data
    builder = rows_builder(SupervisedBuilder, data, model_path).learning(data.turns)
    train_rows, held_out = open_data(data, builder, config.run.seed)
    if not data.data_path and data.on_bad_row == "stop":  # drawn, and not counted one by one
        check_row(held_out[""], 0, builder)
    loader = prompt_loader(config, builder, train_rows, shuffle=bool(data.data_path))
    tell_data(loader, *held_out.values())
    evaluate = supervised_evaluation(config, data, model_path, held_out, builder)
    return SupervisedTask(builder, loader, evaluate, longest=data.max_length + data.max_response_length)


def open_data(data: SFTDataConfig, builder: SupervisedBuilder, seed: int) -> tuple[Any, Mapping[str, Any]]:
    """Training rows, and the held-out rows of each set by its name; a stream without such sets has none."""
    if not data.data_path:
        half = data.eval_rows // 2
        talks, sums = DrawnTalks(0, "test")[: data.eval_rows - half], DrawnSums(0, "test")[:half]
        return Mixture([DrawnTalks(seed), DrawnSums(seed)], weights=[3, 1]), {"": talks + sums}

    paths = () if data.streaming else data.data_path
    sources, held_out = open_sets(data, paths, conversation_rows, builder, CONVERSATION_COLUMNS)
    for path in data.data_path if data.streaming else ():
        stream = conversation_stream(path, buffer=data.shuffle_buffer, keys=data.keys, media_root=data.media_root)
        tell_columns_left_out(path, stream, CONVERSATION_COLUMNS, data.keys, "are not read")
        sources.append(stream)
    rows = sources[0]
    if len(sources) > 1:
        rows = Mixture(sources, data.weights or [float(len(each)) for each in sources])
    return rows, held_out


main = training_command(parse, run_supervised, lambda _: conversation_task)
