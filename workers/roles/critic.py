"""The critic, which values the rest of a response at each token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.errors import CheckpointError, InvalidConfig, raised_as, writing
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.model.patches import remove_submodule
from workers.ranks.dispatch_modes import dispatch, join_rows
from workers.roles.model_worker import ModelWorker, TrainedWorker
from workers.training.mini_batches import split_scoring
from workers.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class CriticConfig(ModelConfig):
    """A critic: the checkpoint it starts from, usually the policy's, and how it is updated."""

    model_path: str
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


HEAD_FILE = "value_head.safetensors"
"""The head of a reward model, next to the other weights of its checkpoint."""


@dataclass(frozen=True)
class Values:
    """The outputs of a critic's forward pass that its loss function gets."""

    values: Tensor  # (B, R) float32, 0 where response_mask is 0
    entropy_or_none: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        return self.values


class ValueHead(nn.Linear):
    """From states ``(n, H)`` to values ``(n,)``: their products with one vector, in float32 whatever the model computes in."""

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return states.float() @ self.weight[0]


class PackedCritic(PackedVLM):
    """The packed model with a value in place of logits: the product of a state and one vector.

    The vector starts at zero, and so does every value: the first advantages are the rewards to come.
    """

    outputs = Values
    makes_logits = False
    float32_parts = ("value_head",)

    def __init__(self, model: PreTrainedModel, family: VLMFamily) -> None:
        """Removes the language-model head from ``model``; tied embeddings stay."""
        super().__init__(model, family, temperature=1.0)
        head = family.lm_head(model)
        remove_submodule(model, family.head)
        self.value_head = ValueHead(head.weight.shape[1], 1, bias=False, device=head.weight.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def head(self, states: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, None]:
        """Values ``(n,)`` of the states ``(n, H)``; the next tokens do not matter."""
        if entropy:
            raise InvalidConfig("a critic has no entropy")
        return self.value_head(states), None


class ValueWorker(ModelWorker):
    """Values of responses.

    The value at response token t is that of the state before it is sampled: of the hidden state that predicts it. So it is at the
    same position as the token's log-prob, reward and advantage, as in verl.
    """

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedCritic:
        """The packed model around a loaded one."""
        critic = PackedCritic(model, family)
        critic.value_head.requires_grad_(self.trains)
        return critic

    @dispatch(split=split_scoring, join=join_rows)
    def values(self, data: DataProto, into: str = "values") -> DataProto:
        """Values of the responses as column ``into`` ``(B, R)`` float32, 0 where ``response_mask`` is 0.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
            RankFailure: another rank's rows were refused.
        """
        return self.model.score(data, into)


class CriticWorker(TrainedWorker, ValueWorker):
    """Values of responses, and the update by a loss function that the recipe hands in.

    `update` is that of `TrainedWorker`; its loss function sees `Values`.
    """

    role = "critic"

    @dispatch("all")
    def save(self, directory: Path | str, in_background: bool = False) -> None:
        """Writes the training state, with the value head; ``in_background`` as the actor's."""
        self.model.save(directory, in_background, export=False)


class RewardModelWorker(CriticWorker):
    """A critic that learns to score whole answers, in the actor's place. `load_head` reads the head of its checkpoints."""

    role = "actor"

    @dispatch("all")
    def save(self, directory: Path | str, in_background: bool = False) -> None:
        """As the actor's; the exported model has no language-model head, and the value head in a file of its own."""
        self.model.save(directory, in_background)
        weight: Any = head_of(self).weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # all ranks take part
        if self.model.ranks.is_first:
            folder = Path(directory) / "huggingface"
            folder.mkdir(parents=True, exist_ok=True)
            with writing(folder / HEAD_FILE):
                save_file({"weight": whole.detach().float().cpu().contiguous()}, folder / HEAD_FILE)


def head_of(worker: ValueWorker) -> ValueHead:
    """The value head of a critic."""
    head: Any = worker.module.value_head
    return head


def load_head(worker: ValueWorker, checkpoint: Path) -> None:
    """Reads the value head that `RewardModelWorker.save` wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or of another model.
    """
    what = f"{checkpoint / HEAD_FILE} is not the head of this reward model"
    with raised_as(CheckpointError, what, OSError, KeyError, RuntimeError, ValueError, SafetensorError):
        weight = load_file(checkpoint / HEAD_FILE)["weight"]
        with torch.no_grad():
            head_of(worker).weight.copy_(weight)
