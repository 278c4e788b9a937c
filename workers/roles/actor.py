"""The policy that learns, by whole updates or step by step, and the results of passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.vlm import VLMFamily
from workers.model.packed_model import PackedVLM
from workers.ranks.dispatch_modes import dispatch, split_rows
from workers.roles.model_worker import PARTS, PolicyConfig, PolicyWorker, TrainedWorker
from workers.training.forward_pass import LossFn
from workers.training.loss_sums import MODES, LossSums, check_mode
from workers.training.optimizer import AdamParams, OptimizerConfig
from workers.training.row_checks import check_rows

LOSS_SUM, MEAN_LOSS = "loss:sum", "actor/loss"


@dataclass(frozen=True)
class PassOutput:
    """The result of a pass over rows.

    ``metrics`` are sums over tokens of all rows, with the loss as ``loss:sum``; with an ``aggregation`` they are means, with the
    loss as ``actor/loss``, as those of an update. ``log_probs (B, R)`` float32 are those that the loss function got, 0 where
    ``response_mask`` is 0.
    """

    metrics: Mapping[str, float]
    log_probs: Tensor


def join_passes(results: Sequence[PassOutput]) -> PassOutput:
    """The ranks' rows one after the other; every rank has the same metrics."""
    return PassOutput(results[0].metrics, torch.cat([result.log_probs for result in results]))


@dataclass(frozen=True)
class ActorConfig(PolicyConfig):
    """A policy and how it is updated."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


class ActorWorker(TrainedWorker, PolicyWorker):
    """The policy that learns, by whole updates or step by step.

    Step by step, the loss is the sum over tokens of what the loss function gives, where ``response_mask`` is not 0, or their mean
    by an ``aggregation``: such a `forward_backward` and an `optim_step` are the step of `update` for a mini-batch. Gradients add
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
    def forward(
        self, data: DataProto, loss_fn: LossFn, aggregation: str | None = None, entropy: bool = False
    ) -> PassOutput:
        """The loss, without gradients.

        Args:
            aggregation, entropy: as of `update`; without an ``aggregation`` the loss is a sum over tokens.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
            InvalidConfig: an unknown ``aggregation``.
        """
        return self._pass(data, loss_fn, aggregation, entropy, backward=False)

    @dispatch(split=split_rows, join=join_passes)
    def forward_backward(
        self, data: DataProto, loss_fn: LossFn, aggregation: str | None = None, entropy: bool = False
    ) -> PassOutput:
        """The loss, whose gradients are added to those of earlier calls. Arguments and errors as `forward`.

        Raises:
            InvalidConfig: the parts of an update are open (`accumulate`); they stay as they are.
        """
        self._refuse_to_mix("forward_backward", self._open_update is not None, PARTS)
        return self._pass(data, loss_fn, aggregation, entropy, backward=True)

    @dispatch("all")
    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """One step with the gradients so far, which are then cleared; ``actor/grad_norm``, ``actor/lr`` and
        ``actor/skipped_steps``, as of `update`.

        Args:
            params: of this step; without them the configured ones and their schedule.

        Raises:
            InvalidConfig: the parts of an update are open (`accumulate`); they stay as they are.
        """
        self._refuse_to_mix("optim_step", self._open_update is not None, PARTS)
        self.module.forget_features()
        return self.model.reported_step(list, params)

    def _pass(
        self, data: DataProto, loss_fn: LossFn, aggregation: str | None, entropy: bool, backward: bool
    ) -> PassOutput:
        model = self.model
        with model.ranks.fail_together():
            check_mode(aggregation or MODES[0])
            check_rows(data, self.module, data.names())
        weights = model.token_weights(data, aggregation) if aggregation else data["response_mask"].float()
        sums = LossSums(MEAN_LOSS if aggregation else LOSS_SUM, weights, model.device)
        model.run(data, loss_fn, sums, entropy, backward)
        if backward:
            model.note_pass()
        metrics = sums.means(model.ranks) if aggregation else {LOSS_SUM: 0.0} | sums.sums(model.ranks)
        return PassOutput(metrics, sums.scores.cpu())
