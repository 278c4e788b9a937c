"""Training step by step: passes and optimizer steps, each usable alone."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto import DataProto
from dataproto.columns import require
from workers.model.packed_model import Outputs, PackedVLM
from workers.ranks.dispatch_modes import dispatch, split_rows
from workers.training.forward_pass import LARGEST, LossFn, check_rows, token_types
from workers.training.optimizer import AdamParams

if TYPE_CHECKING:
    from workers.roles.actor import TrainedWorker
else:
    TrainedWorker = object

LOSS_SUM = "loss:sum"
OWN_MASK = "_own_response_mask"  # where a batch keeps its response_mask while all targets are scored


@dataclass(frozen=True)
class PassOutput:
    """What a pass over rows gives.

    ``metrics`` are sums over tokens of all rows, ``loss:sum`` among them; ``log_probs (B, R)`` float32, 0 for targets without
    one (see `scored_targets`), are there if asked for.
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


class StepByStep(TrainedWorker):
    """What `TrainedWorker.update` is made of, as calls of their own.

    The loss is the sum over tokens of what the loss function gives, where ``response_mask`` is not 0. Gradients add up over
    calls until `optim_step`; a `forward_backward` that raises in its loss function clears them. `Roles.sample` and
    `Roles.save_weights_for_sampler`, which take an engine as well, complete them.
    """

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
        """The loss, and its gradients added to those that stand. Arguments and errors as `forward`'s."""
        return self._pass(data, loss_fn, per_token, backward=True)

    @dispatch(split=split_rows, join=join_tensors)
    def compute_logprobs(self, data: DataProto) -> Tensor:
        """Log-probs of tokens given those before, ``(B, L)`` float32 beside ``input_ids``, of prompts or of any other rows.

        NaN stands where there is none: on padding, a row's first token, and tokens that the policy never gives (media and
        what encloses them).

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
        """
        with self.ranks.fail_together():
            require(data, "input_ids", "attention_mask", "position_ids")
            rows = every_token(data, self.module)
        found = self.scores(rows, "log_probs")["log_probs"]
        return pad(found.where(rows["response_mask"].bool(), torch.nan), (1, 0), value=torch.nan)

    @dispatch("all")
    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """One step on the gradients that stand, which are cleared; ``grad_norm``, ``lr`` and ``skipped_steps``.

        Args:
            params: of this step; without them the configured ones and their schedule.
        """
        return self.step_optimizer(params)

    @dispatch("all")
    def save_state(self, directory: Path) -> None:
        """Writes weights and optimizer, as `save`; gradients that stand are not part of it."""
        self.save(directory)

    @dispatch("all")
    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote, to the last bit; gradients that stand are cleared."""
        self.load(directory)

    def _pass(self, data: DataProto, loss_fn: LossFn, per_token: bool, backward: bool) -> PassOutput:
        with self.ranks.fail_together():
            check_rows(data, self.module)
            weights, scores = data["response_mask"].float(), None
            if per_token:
                data, loss_fn, scores = (
                    every_target(data, self.module),
                    own_targets(loss_fn),
                    torch.zeros(weights.shape, device=self.device),
                )
        self.module.train(backward)
        with torch.set_grad_enabled(backward):
            totals, _ = self.accumulate(data, loss_fn, weights, backward=backward, scores=scores)
        if not backward and self.sharded:
            import_module("workers.parallel.fsdp").reshard(self.module)
        return PassOutput(self._sums(totals), None if scores is None else scores.cpu())

    def _sums(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Sums over the rows of all ranks; of what counts by its largest, the largest."""
        own = {name: float(value) for name, value in totals.items()}
        loss = own.pop(f"{self.role}/loss", 0.0)
        sums = {LOSS_SUM: 0.0}
        for part in self.ranks.all_gather({LOSS_SUM: loss, **own}, "dp"):
            for name, value in part.items():
                if name.endswith(LARGEST):
                    sums[name] = max(sums.get(name, value), value)
                else:
                    sums[name] = sums.get(name, 0.0) + value
        return sums


def scored_targets(data: DataProto, module: PackedVLM) -> Tensor:
    """``(B, R)`` int64: 1 on targets that have a log-prob under the policy.

    They stand behind another token, are in the vocabulary, and are neither placeholders of media nor enclose them.
    """
    attended, width = data["attention_mask"].bool(), data["response_mask"].shape[1]
    behind = attended & (attended.cumsum(1) > 1)
    response = slice(attended.shape[1] - width, None)
    targets = data["targets"] if "targets" in data else data["input_ids"][:, response]
    vocabulary = module.model.config.get_text_config().vocab_size
    banned = torch.isin(targets, torch.tensor(module.banned_ids, dtype=targets.dtype))
    return (behind[:, response] & (targets >= 0) & (targets < vocabulary) & ~banned).to(torch.int64)


def every_target(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with all of `scored_targets` in ``response_mask``, whose own is kept for `own_targets`."""
    rows = copy(data)
    rows[OWN_MASK] = data["response_mask"]
    rows["response_mask"] = scored_targets(data, module)
    return rows


def own_targets(loss_fn: LossFn) -> LossFn:
    """The loss function over rows of `every_target`: it sees what it would see without that, and none of the other log-probs."""

    def own(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        mask, rows = rows[OWN_MASK], copy(rows)
        rows.pop([OWN_MASK])
        rows["response_mask"] = mask
        return loss_fn(replace(outputs, log_probs=outputs.log_probs.where(mask != 0, 0.0)), rows)

    return own


def every_token(data: DataProto, module: PackedVLM) -> DataProto:
    """The rows with all tokens but the first as responses, R = L - 1, and 1 in ``response_mask`` wherever there is a log-prob."""
    rows, ids = copy(data), data["input_ids"]
    if "targets" in rows:
        rows.pop(["targets"])
    if "response_mask" not in rows:
        rows["response_mask"] = ids[:, :0]
    rows["mm_token_type_ids"] = token_types(module, rows)
    rows["response_mask"] = torch.zeros_like(ids[:, 1:])
    rows["response_mask"] = scored_targets(rows, module)
    return rows
