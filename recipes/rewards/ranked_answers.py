"""Scores of a reward model that ``dataproto reward-model`` has trained: of whole conversations, with their images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataproto.errors import DataProtoError, RewardError
from rollout.prompts import SupervisedBuilder
from rollout.prompts.conversations import TrainingRow, collate_rows
from workers.roles.critic import CriticConfig, ValueWorker, load_head
from workers.roles.reward import RewardRow

LONGEST = 2**20
"""Tokens of a conversation; the prompts of a run have their own limit."""


class RankedAnswers:
    """The score of each answer: the product of the value head and the state at the answer's end, as in training."""

    def __init__(self, checkpoint: str, batch_size: int = 16, device: str | None = None) -> None:
        """Loads a checkpoint of ``dataproto reward-model``. Raises `RewardError`."""
        self.checkpoint, self.batch_size = checkpoint, batch_size
        try:
            self.builder = SupervisedBuilder.from_pretrained(checkpoint, LONGEST).learning("last")
            self.worker = ValueWorker(CriticConfig(checkpoint), None if device is None else torch.device(device))
            load_head(self.worker, Path(checkpoint))
        except DataProtoError as error:
            raise RewardError(f"{checkpoint} is not a reward model: {error}") from error

    def __call__(self, rows: Sequence[RewardRow]) -> list[float]:
        """Raises `RewardError` for a row without a prompt, or one that the model cannot read; names it."""
        prepared = [self._prepare(number, row) for number, row in enumerate(rows)]
        scores: list[float] = []
        for start in range(0, len(prepared), self.batch_size):
            part = prepared[start : start + self.batch_size]
            data = collate_rows(self.builder, part, [row.loss_mask for row in part], {})
            scores += self.worker.values(data)["values"].sum(1).tolist()
        return scores

    def _prepare(self, number: int, row: RewardRow) -> TrainingRow:
        """The conversation, whose last token is there twice: the state at the first one predicts the second, which is scored."""
        asked: Any = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        answer = {"role": "assistant", "content": row.solution_str or " "}
        try:
            if not asked:
                raise RewardError("it has no prompt")
            whole = self.builder.prepare({"prompt": [*asked, answer]})
        except DataProtoError as error:
            raise RewardError(f"row {number}: {self.checkpoint} cannot score it: {error}") from error
        ids = np.append(whole.input_ids, whole.input_ids[-1])
        types, mask = np.append(whole.token_types, 0), np.zeros(len(ids), dtype=np.uint8)
        mask[-1] = 1
        return replace(whole, input_ids=ids, token_types=types.astype(np.int8), loss_mask=mask)
