"""Scores of a reward model that ``dataproto reward-model`` has trained: of whole conversations, with their images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dataproto import DataProto
from dataproto.columns import PAIR
from dataproto.errors import DataProtoError, RewardError
from rollout.answers import AnsweredPrompt, AnswersBuilder
from workers.roles.critic import CriticConfig, ValueWorker, load_head
from workers.roles.reward import RewardRow

LONGEST = 2**20
"""Tokens of a conversation; the prompts of a run have their own limit."""


class RankedAnswers:
    """The score of each answer: the product of the value head and the state at the answer's end, as in training."""

    def __init__(self, checkpoint: str, device: str | None = None) -> None:
        """Loads a checkpoint of ``dataproto reward-model``. Raises `RewardError`."""
        self.checkpoint = checkpoint
        try:
            self.builder = AnswersBuilder.from_pretrained(checkpoint, LONGEST).grouped("scored")
            self.worker = ValueWorker(CriticConfig(checkpoint), None if device is None else torch.device(device))
            load_head(self.worker, Path(checkpoint))
        except DataProtoError as error:
            raise RewardError(f"{checkpoint} is not a reward model: {error}") from error

    def __call__(self, rows: Sequence[RewardRow]) -> list[float]:
        """Raises `RewardError` for a row without a prompt, or one that the model cannot read; names it."""
        scores: list[float] = self.worker.values(self.batch(rows))["values"].sum(1).tolist()
        return scores

    def batch(self, rows: Sequence[RewardRow]) -> DataProto:
        """The rows as the model reads them. Rows of one prompt that are next to each other share it, so it is computed once."""
        data = self.builder.collate([self._prepare(number, row) for number, row in enumerate(rows)])
        data.pop([PAIR])  # which would hold the rows of a prompt in one micro-batch
        return data

    def _prepare(self, number: int, row: RewardRow) -> AnsweredPrompt:
        asked: Any = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        answer = {"role": "assistant", "content": row.solution_str or " "}
        try:
            if not asked:
                raise RewardError("it has no prompt")
            return self.builder.prepare({"prompt": asked, "answers": [[answer]]})
        except DataProtoError as error:
            raise RewardError(f"row {number}: {self.checkpoint} cannot score it: {error}") from error
