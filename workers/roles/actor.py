"""The policy that learns, by whole updates or step by step: rows whose targets are all scored, and the results of passes."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS, require
from dataproto.errors import InvalidConfig
from dataproto.ragged import RaggedTensor
from dataproto.vlm import VLMFamily
from workers.model.packed_model import Outputs, PackedVLM
from workers.ranks.dispatch_modes import dispatch, split_rows
from workers.roles.model_worker import PolicyConfig, PolicyWorker, TrainedWorker
from workers.training.forward_pass import LossFn, token_types
from workers.training.loss_sums import LossSums
from workers.training.optimizer import AdamParams, OptimizerConfig
from workers.training.row_checks import check_rows

LOSS_SUM = "loss:sum"
OWN_MASK = "_own_response_mask"  # where a batch keeps its response_mask while all targets are scored


@dataclass(frozen=True)
class PassOutput:
    """The result of a pass over rows.

    ``metrics`` are sums over tokens of all rows, with the loss as ``loss:sum``. ``log_probs (B, R)`` float32, if asked for,
    are 0 for targets without one (see `scored_targets`).
    """

    metrics: Mapping[str, float]
    log_probs: Tensor | None = None


def join_passes(results: Sequence[PassOutput]) -> PassOutput:
    """The ranks' rows one after the other; every rank has the same metrics."""
    parts = [result.log_probs for result in results if result.log_probs is not None and len(result.log_probs)]
    return PassOutput(results[0].metrics, torch.cat(parts) if parts else results[0].log_probs)


def join_tensors(results: Sequence[Tensor]) -> Tensor:
    """The ranks' rows one after the other."""
    return torch.cat(list(results))


def scored_targets(data: DataProto, module: PackedVLM) -> Tensor:
    """``(B, R)`` int64: 1 on targets that have a log-prob under the policy.

    These follow another token, are in the vocabulary, and are neither placeholders of media nor their delimiters.
    """
    attended, width = data["attention_mask"].bool(), data["response_mask"].shape[1]
    behind = attended & (attended.cumsum(1) > 1)
    response = slice(attended.shape[1] - width, None)
    targets = data["targets"] if "targets" in data else data["input_ids"][:, response]
    vocabulary = module.model.config.get_text_config().vocab_size
    banned = torch.isin(targets, torch.tensor(module.banned_ids, dtype=targets.dtype))
    return (behind[:, response] & (targets >= 0) & (targets < vocabulary) & ~banned).to(torch.int64)


def every_target(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with `scored_targets` as ``response_mask``; their original mask is kept for `own_targets`."""
    rows = copy(data)
    rows[OWN_MASK] = data["response_mask"]
    rows["response_mask"] = scored_targets(data, module)
    return rows


def own_targets(loss_fn: LossFn) -> LossFn:
    """The loss function for rows of `every_target`, which gets the rows' original mask and only the log-probs under it."""

    def own(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        mask, rows = rows[OWN_MASK], copy(rows)
        rows.pop([OWN_MASK])
        rows["response_mask"] = mask
        return loss_fn(replace(outputs, log_probs=outputs.log_probs.where(mask != 0, 0.0)), rows)

    return own


def every_token(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with all tokens except the first as responses, R = L - 1; ``response_mask`` is 1 wherever there is a log-prob."""
    rows, ids = copy(data), data["input_ids"]
    if "targets" in rows:
        rows.pop(["targets"])
    if "response_mask" not in rows:
        rows["response_mask"] = ids[:, :0]
    if PROMPT_ROUTED_EXPERTS in rows and ROUTED_EXPERTS in rows:
        rows[PROMPT_ROUTED_EXPERTS], rows[ROUTED_EXPERTS] = _split_at_first(rows)
    rows["mm_token_type_ids"] = token_types(module, rows)
    rows["response_mask"] = torch.zeros_like(ids[:, 1:])
    rows["response_mask"] = scored_targets(rows, module)
    return rows


def _split_at_first(rows: DataProto) -> tuple[RaggedTensor, RaggedTensor]:
    """The recorded experts of what `every_token` makes the prompt, the first place of a row, and of all others."""
    firsts, others = [], []
    for row, first in enumerate(rows["attention_mask"][:, 0].bool().tolist()):
        experts = torch.cat([rows[PROMPT_ROUTED_EXPERTS][row], rows[ROUTED_EXPERTS][row]])
        firsts.append(experts[: int(first)])
        others.append(experts[int(first) :])
    return RaggedTensor.from_list(firsts), RaggedTensor.from_list(others)


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
        """Log-probs of tokens given those before, ``(B, L)`` float32 next to ``input_ids``, of prompts or of any other rows.

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
