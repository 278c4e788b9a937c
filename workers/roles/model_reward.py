"""A reward that a model gives: a critic whose value at the end of a response is its score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dataproto import DataProto
from workers.ranks.mesh import Ranks
from workers.roles.critic import CriticConfig, FrozenCriticWorker
from workers.roles.reward import RewardWorker


@dataclass(frozen=True)
class ModelReward:
    """A reward model: a critic, and the directory into which `CriticWorker.save` wrote its weights.

    Without a directory its value head is zero, and so is every score.
    """

    critic: CriticConfig
    directory: Path | None = None


class ModelRewardWorker(RewardWorker):
    """Scores each response with the value before its last token, which by then is the end token."""

    def __init__(
        self, config: ModelReward, model_path: str, device: torch.device | None = None, ranks: Ranks | None = None
    ) -> None:
        """``model_path`` is where the tokenizer of the responses lives."""
        super().__init__(lambda rows: [], model_path, ranks)
        self.critic = FrozenCriticWorker(config.critic, device, ranks)
        if config.directory is not None:
            self.critic.load(config.directory)

    def results(self, data: DataProto, texts: Sequence[str]) -> Sequence[Mapping[str, float]]:
        """The values; 0 for a row without a response."""
        values = self.critic.values(data)["values"]
        mask = data["response_mask"].bool()
        last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
        scores = values.gather(1, last.clamp(min=0)[:, None])[:, 0].where(last >= 0, 0.0)
        return [{"score": score} for score in scores.tolist()]
