"""What recipes of preferred answers share: their data, the reference's log-probs on disk, and the evaluation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import writing
from recipes.configs.shared.supervised_config import PreferenceDataConfig, SupervisedConfig
from recipes.data.loader import EvaluationLoader, check_row
from recipes.data.preferences import PREFERENCE_COLUMNS, preference_rows
from recipes.data.splits import open_sets, tell_data
from recipes.demo.rows import DrawnPairs
from recipes.run.evaluation import Evaluate
from recipes.run.loop import StepFunction
from recipes.run.policy_gradient import prompt_loader
from recipes.run.supervised import Learns, SupervisedTask, rows_builder, sent
from rollout.answers import ANSWER_KEY, AnswersBuilder, Grouping
from workers import Roles

REFERENCE = "ref_answer_log_prob"
"""The column with the reference's log-prob of each answer ``(B,)``."""
RECORD = np.dtype([("key", "V16"), ("log_prob", "<f8")])

Held = Mapping[str, Any]
"""Held-out rows of each set by its name, "" for one without."""
Judge = Callable[[Roles, DataProto], tuple[Tensor, dict[str, Tensor]]]
"""Roles and a held-out batch -> what the loss function of the step gives for it."""


def open_preferences(data: PreferenceDataConfig, builder: AnswersBuilder, seed: int) -> tuple[Any, Held]:
    """Training rows, and the held-out rows of each set by its name, that fit."""
    if not data.data_path:
        return DrawnPairs(seed), {"": DrawnPairs(0, "test")[: data.eval_rows]}

    (rows,), held_out = open_sets(data, [data.data_path], preference_rows, builder, PREFERENCE_COLUMNS)
    return rows, held_out


class ReferenceLogProbs:
    """The reference's log-prob of each answer, computed when the answer first comes and kept in a file.

    A later epoch, evaluation or resumed run reads it from there. The file has 24 bytes for each answer, the digest of its prompt,
    media and tokens and the log-prob; a record that was cut is computed again.
    """

    def __init__(self, file: Path) -> None:
        """Opens no file yet: the run may still delete that of an earlier one."""
        self.file = file
        self._known: dict[bytes, float] | None = None

    def add(self, roles: Roles, rows: DataProto) -> None:
        """Adds the column `REFERENCE`; asks the reference only for answers that are not in the file."""
        known = self._read() if self._known is None else self._known
        keys = [bytes.fromhex(key) for key in rows[ANSWER_KEY]]
        if new := [place for place, key in enumerate(keys) if key not in known]:
            found = roles.reference.log_probs(sent(rows[new]))["ref_log_prob"].double().sum(1).tolist()
            records = np.array([(keys[place], value) for place, value in zip(new, found, strict=True)], RECORD)
            with writing(self.file), self.file.open("ab") as file:
                file.write(records.tobytes())
            known |= {keys[place]: value for place, value in zip(new, found, strict=True)}
        rows[REFERENCE] = torch.tensor([known[key] for key in keys], dtype=torch.float32)

    def _read(self) -> dict[bytes, float]:
        content = self.file.read_bytes() if self.file.exists() else b""
        if cut := len(content) % RECORD.itemsize:
            content = content[:-cut]
            self.file.write_bytes(content)
        records = np.frombuffer(content, RECORD)
        self._known = dict(zip((key.tobytes() for key in records["key"]), records["log_prob"].tolist(), strict=True))
        return self._known


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Of the rewards of the answers of each pair."""
    metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    return metrics | {"rewards/accuracies": (chosen > rejected).float()}


def on_tokens(losses: Tensor, metrics: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and metrics, each of an answer or of a pair of them, at every token of its rows."""
    rows = len(mask) // len(losses)  # of a loss

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(rows)[:, None].expand(mask.shape)

    return spread(losses), {name: spread(values.detach()) for name, values in metrics.items()}


def preference_task(
    config: SupervisedConfig, model_path: str, grouping: Grouping, judge: Judge, step: StepFunction, learns: Learns
) -> SupervisedTask:
    """Preferred answers by the options ``config.data``, a step, and the evaluation by ``judge``; see `SupervisedTask`."""
    data: PreferenceDataConfig = config.data  # type: ignore[attr-defined]
    builder = rows_builder(AnswersBuilder, data, model_path).grouped(grouping)
    train_rows, held_out = open_preferences(data, builder, config.run.seed)
    if data.on_bad_row == "stop":
        check_row(train_rows, 0, builder)
    loader = prompt_loader(config, builder, train_rows, shuffle=bool(data.data_path))
    tell_data(loader, *held_out.values())
    evaluate = held_out_preferences(held_out, builder, data, judge)
    return SupervisedTask(builder, loader, evaluate, data.max_length, step, learns)


def held_out_preferences(held_out: Held, builder: AnswersBuilder, data: PreferenceDataConfig, judge: Judge) -> Evaluate:
    """``val/loss``, ``val/accuracy`` and the other numbers of ``judge``, means over each held-out set and over the sets."""

    def numbers(roles: Roles, rows: DataProto) -> dict[str, list[float]]:
        losses, metrics = judge(roles, rows)
        named = {name.removeprefix("rewards/"): values for name, values in metrics.items()}
        named["accuracy"] = named.pop("accuracies")
        return {name: values[:, 0].tolist() for name, values in ({"loss": losses} | named).items()}

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        means: dict[str, dict[str, float]] = {}
        skipped = 0
        for name, rows in held_out.items():
            loader = EvaluationLoader(rows, builder, data.batch_size, data.on_bad_row)
            found = [numbers(roles, batch) for batch in loader]
            skipped += len(loader.skipped)
            means[name] = {each: fmean(value for part in found for value in part[each]) for each in found[0]}
        metrics = {f"val/{each}/{name}": value for name, part in means.items() if name for each, value in part.items()}
        for name, part in means.items():
            metrics[f"val-core/{name or 'preferences'}/acc/mean@1"] = part["accuracy"]
        for each in next(iter(means.values()), {}):
            metrics[f"val/{each}"] = fmean(part[each] for part in means.values())
        return metrics | {"data/skipped_eval_rows": skipped}

    return evaluate
