"""The policy that learns."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from workers.model.packed_model import PackedVLM
from workers.ranks.dispatch_modes import dispatch, split_rows
from workers.roles.model_worker import PolicyConfig, PolicyWorker, TrainedWorker
from workers.roles.step_by_step import (
    LOSS_SUM,
    PassOutput,
    every_target,
    every_token,
    join_passes,
    join_tensors,
    own_targets,
)
from workers.training.forward_pass import LossFn
from workers.training.loss_sums import LossSums
from workers.training.optimizer import AdamParams, OptimizerConfig
from workers.training.row_checks import check_rows


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """A policy and how it is updated."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


class ActorWorker(TrainedWorker, PolicyWorker):
    """The policy that learns, by whole updates or step by step.

    Step by step, the loss is the sum over tokens of what the loss function gives, where ``response_mask`` is not 0. Gradients add
    up over calls until `optim_step`; a `forward_backward` that raises in its loss function clears them. `Roles.sample` and
    `Roles.save_weights_for_sampler`, which need an engine as well, complete these methods.
    """

    role = "actor"

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedVLM:
        """The packed model around a loaded one. It uses the experts that an engine has recorded, if rows have them."""
        module = super().wrap(model, family)
        module.replays_routing = family.experts is not None
        return module

    @dispatch(split=split_rows, join=join_passes)
    def forward(self, data: DataProto, loss_fn: LossFn, per_token: bool = False) -> PassOutput:
        """The loss, without gradients.

        Args:
            per_token: also return the log-probs of all targets, whatever ``response_mask`` says; the loss function sees the
                same outputs and rows either way.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
        """
        return self._pass(data, loss_fn, per_token, backward=False)

    @dispatch(split=split_rows, join=join_passes)
    def forward_backward(self, data: DataProto, loss_fn: LossFn, per_token: bool = False) -> PassOutput:
        """The loss, whose gradients are added to those of earlier calls. Arguments and errors as `forward`.

        Raises:
            InvalidConfig: the parts of an update are open (`accumulate`); they stay as they are.
        """
        self._refuse_open_update("forward_backward")
        return self._pass(data, loss_fn, per_token, backward=True)

    @dispatch(split=split_rows, join=join_tensors)
    def compute_logprobs(self, data: DataProto) -> Tensor:
        """Log-probs of tokens given those before, ``(B, L)`` float32 beside ``input_ids``, of prompts or of any other rows.

        NaN where there is none: on padding, a row's first token, and tokens that the policy never gives (media and their
        delimiters).

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
        """
        with self.model.ranks.fail_together():
            require(data, "input_ids", "attention_mask", "position_ids")
            rows = every_token(data, self.module)
        found = self.model.score(rows, "log_probs")["log_probs"]
        return pad(found.where(rows["response_mask"].bool(), torch.nan), (1, 0), value=torch.nan)

    @dispatch("all")
    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """One step with the gradients so far, which are then cleared; ``grad_norm``, ``lr`` and ``skipped_steps``.

        Args:
            params: of this step; without them the configured ones and their schedule.

        Raises:
            InvalidConfig: the parts of an update are open (`accumulate`); they stay as they are.
        """
        self._refuse_open_update("optim_step")
        self.module.forget_features()
        return self.model.step(params)

    @dispatch("all")
    def save_state(self, directory: Path) -> None:
        """Writes weights and optimizer, as `save`; gradients are not part of it."""
        self.model.save(directory)

    @dispatch("all")
    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote, to the last bit, and clears the gradients."""
        self.load(directory)

    def _refuse_open_update(self, call: str) -> None:
        """All ranks raise it, since all have made the same calls of `accumulate`."""
        with self.model.ranks.fail_together():
            if self._open_update is not None:
                raise InvalidConfig(
                    f"{call} would mix its gradients with those of an update in parts, which is open: "
                    "finish_update makes its step, and drop_update drops its parts"
                )

    def _pass(self, data: DataProto, loss_fn: LossFn, per_token: bool, backward: bool) -> PassOutput:
        model = self.model
        with model.ranks.fail_together():
            check_rows(data, self.module)
            sums = LossSums(LOSS_SUM, data["response_mask"].float(), model.device, keep_scores=per_token)
            if per_token:
                data, loss_fn = every_target(data, self.module), own_targets(loss_fn)
        model.run(data, loss_fn, sums, backward=backward)
        if backward:
            model.note_pass()
        metrics = {LOSS_SUM: 0.0} | sums.sums(model.ranks)
        return PassOutput(metrics, None if sums.scores is None else sums.scores.cpu())
