"""An update of one optimizer step whose rows come in parts.

A gradient is a sum over tokens, divided by the denominator of the whole batch. The sums of the parts add up as they come, and are
divided when the denominator is known: the step is that of the whole batch, up to the order of float addition.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import InvalidConfig
from dataproto.packing import MAX_TOKENS
from workers.ranks.autograd_collectives import local_part
from workers.training.aggregation import denominator, token_weights
from workers.training.forward_pass import LossFn
from workers.training.loss_sums import LossSums, joined_means
from workers.training.row_checks import check_rows, check_update
from workers.training.training_model import TrainingModel, names_of_rows


class AccumulatedUpdate:
    """The parts of an update so far; every rank makes every call."""

    def __init__(self, model: TrainingModel, aggregation: str, entropy: bool) -> None:
        """Raises `InvalidConfig` for an update that the model cannot make."""
        check_update(1, aggregation, entropy, model.module)
        self.model, self.aggregation, self.entropy = model, aggregation, entropy
        self._name = f"{model.role}/loss"
        self._denominator = 0
        self._longest: int | None = None
        self._rows = 0
        self._not_finite: list[str] = []  # this rank's rows whose loss or scores are not finite
        self._sums: list[tuple[float, Mapping[str, float]]] = []  # of each part and data-parallel rank

    def add(self, data: DataProto, loss_fn: LossFn) -> Tensor:
        """Adds the gradients of a part, and returns the scores ``(B, R)`` of its rows.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`.
            InvalidConfig: the parts have other ``max_tokens`` in their ``meta_info``, or none.
        """
        model, mask = self.model, data["response_mask"]
        with model.ranks.fail_together():
            check_rows(data, model.module)
            longest = data.meta_info.get(MAX_TOKENS)
            if longest is None or self._longest not in (None, longest):
                raise InvalidConfig(f"parts of an update need the same max_tokens: {self._longest}, then {longest}")
            self._longest = int(longest)
        weights = token_weights(mask, self.aggregation, 1.0, max_length=self._longest)
        sums = LossSums(self._name, weights, model.device, keep_scores=True)
        model.run(data, loss_fn, sums, self.entropy)
        self._denominator += sum(model.ranks.all_gather(int(denominator(mask, self.aggregation)), "dp"))
        self._sums += sums.gathered(model.ranks)
        self._not_finite += names_of_rows(data, ~sums.finite, self._rows)
        self._rows += len(data)
        assert sums.scores is not None
        return sums.scores.cpu()

    def finish(self) -> dict[str, float]:
        """Makes the step, and returns the metrics of all parts and ranks together.

        Raises:
            InvalidConfig: no part has a response token.
        """
        if not self._denominator:
            raise InvalidConfig("an update needs rows with a response token: none were added")
        model, total = self.model, float(self._denominator)
        gradients = [weight.grad for weight in model.optimizer.parameters if weight.grad is not None]
        torch._foreach_div_([local_part(gradient) for gradient in gradients], total)
        stepped = model.step()
        if not math.isfinite(stepped["grad_norm"]):
            model.report_skip(stepped["grad_norm"], self._not_finite)
        means = joined_means(self._sums, self._name, total)
        return means | {f"{model.role}/{name}": value for name, value in stepped.items()}
