"""Workers that hold a model: those that score rows, those that learn, and the policy's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataproto import DataProto
from dataproto.errors import InvalidConfig, ending, undoing
from dataproto.packing import MAX_TOKENS
from dataproto.vlm import VLMFamily
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.ranks.autograd_collectives import local_part
from workers.ranks.dispatch_modes import dispatch, join_rows
from workers.ranks.mesh import Ranks
from workers.training.forward_pass import LossFn
from workers.training.loss_sums import LossSums, Updated, denominator, joined_means, token_weights
from workers.training.mini_batches import ROW, split_scoring, split_update
from workers.training.row_checks import check_rows, check_update
from workers.training.training_model import TrainingModel, names_of_rows


class ModelWorker:
    """Holds one `TrainingModel`; every rank calls every method."""

    role = "model"  # the model's name in metrics
    trains = False

    def __init__(self, config: Any, device: torch.device | None = None, ranks: Ranks | None = None) -> None:
        """``ranks`` comes from `init_ranks`; without it the process is alone."""
        self.config = config
        optimizer = config.optimizer if self.trains else None
        self.model = TrainingModel(config, self.wrap, device, ranks, optimizer, self.role)

    @property
    def module(self) -> PackedVLM:
        """The packed model, or this rank's part of it."""
        return self.model.module

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedVLM:
        """The packed model around a loaded one."""
        raise NotImplementedError


def join_updates(results: Sequence[Updated]) -> Updated:
    """Scores in the order of the caller's rows; every rank has the same metrics."""
    scores = torch.cat([result.scores for result in results])
    order = np.concatenate([result.rows for result in results if result.rows is not None])
    return Updated(results[0].metrics, torch.empty_like(scores).index_copy_(0, torch.from_numpy(order), scores))


class AccumulatedUpdate:
    """An update of one optimizer step whose rows come in parts: those so far. Every rank makes every call.

    A gradient is a sum over tokens, divided by the denominator of the whole batch. The sums of the parts add up as they come, and
    are divided when the denominator is known: the step is that of the whole batch, up to the order of float addition.
    """

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
            check_rows(data, model.module, data.names())
            longest = data.meta_info.get(MAX_TOKENS)
            if longest is None or self._longest not in (None, longest):
                raise InvalidConfig(f"parts of an update need the same max_tokens: {self._longest}, then {longest}")
            self._longest = int(longest)
        weights = token_weights(mask, self.aggregation, 1.0, max_length=self._longest)
        sums = LossSums(self._name, weights, model.device)
        model.run(data, loss_fn, sums, self.entropy)
        self._denominator += sum(model.ranks.all_gather(int(denominator(mask, self.aggregation)), "dp"))
        self._sums += sums.gathered(model.ranks)
        self._not_finite += names_of_rows(data, ~sums.finite, self._rows)
        self._rows += len(data)
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
        stepped = model.reported_step(lambda: self._not_finite)
        return joined_means(self._sums, self._name, total) | stepped


PASSES = "forward_backward, which no step has used: optim_step makes their step, and drop_update drops them"
PARTS = "an update in parts, which is open: finish_update makes its step, and drop_update drops its parts"


class TrainedWorker(ModelWorker):
    """Updates a model by a loss function that the recipe hands in."""

    trains = True
    _open_update: AccumulatedUpdate | None = None  # whose parts `accumulate` adds

    @dispatch(split=split_update)
    def update(
        self,
        data: DataProto,
        loss_fn: LossFn,
        minibatch: int | None = None,
        epochs: int = 1,
        aggregation: str = "token-mean",
        entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step for each mini-batch of ``minibatch`` prompts (all rows if ``None``), ``epochs`` times.

        The loss does not depend on how rows are split into micro-batches or over ranks: its denominators are those of the
        whole mini-batch. With several data-parallel ranks ``data`` is this rank's share, whose column `MINIBATCH` says which
        rows belong together (see `workers.training.mini_batches.share_out`); without that column all rows are one mini-batch.

        Args:
            loss_fn: see `LossFn`; its metrics are averaged with the loss's own weights. Of metrics whose names end in ``_max``,
                which are not negative, the largest value counts.
            aggregation: how per-token losses become one number, see `workers.training.loss_sums`; the constant of
                ``seq-mean-token-sum-norm`` is the ``max_tokens`` in ``meta_info`` that the rows were generated with, else R.
            entropy: compute ``outputs.entropy`` for the loss function.

        Returns:
            The metrics of all ranks together, averaged over the optimizer steps.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch: see `check_rows`; also a mini-batch without any response token. Nothing
                has been learned then.
            InvalidConfig: impossible arguments, or gradients of ``forward_backward`` without a step.
            RankFailure: another rank's rows were refused.
        """
        return self.update_and_score(data, loss_fn, minibatch, epochs, aggregation, entropy).metrics

    @dispatch(split=split_update, join=join_updates)
    def update_and_score(
        self,
        data: DataProto,
        loss_fn: LossFn,
        minibatch: int | None = None,
        epochs: int = 1,
        aggregation: str = "token-mean",
        entropy: bool = False,
    ) -> Updated:
        """`update`, which also returns the scores of the rows before the model learned from them, without a further pass."""
        self._refuse_to_mix("update", self.model.has_passes, PASSES)
        self.drop_update()
        with (
            ending(self.module.forget_features),
            self.model.updating(data, minibatch, epochs, aggregation, entropy) as update,
        ):
            for rows, sums in update.minibatches():
                self.model.run(rows, loss_fn, sums, entropy)
        return update.result

    @dispatch(split=split_update, join=join_updates)
    def accumulate(
        self, data: DataProto, loss_fn: LossFn, *, aggregation: str = "token-mean", entropy: bool = False
    ) -> Updated:
        """Adds the gradients of a part of a batch; `finish_update` makes the step of all parts together.

        The step is that of `update` for the whole batch without ``minibatch``, up to the order of float addition. Arguments as
        there, the same for all parts. If the batch is given up between two parts, `drop_update` drops those so far; `update` and
        `load` do so too.

        Returns:
            The scores of the rows; metrics come with the step.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch, RankFailure: see `update`. The parts so far are dropped.
            InvalidConfig: impossible arguments, parts without a common ``max_tokens`` in ``meta_info``, or gradients of
                ``forward_backward`` without a step.
        """
        self._refuse_to_mix("accumulate", self.model.has_passes, PASSES)
        open_update, self._open_update = self._open_update, None
        update = open_update or AccumulatedUpdate(self.model, aggregation, entropy)
        with undoing(partial(self._drop, update)):
            scores = update.add(data, loss_fn)
        self._open_update = update
        return Updated({}, scores, np.asarray(data[ROW]) if ROW in data else None)

    @dispatch("all")
    def finish_update(self) -> dict[str, float]:
        """One optimizer step with the parts of `accumulate`. Returns the metrics of all of them and all ranks together.

        Raises:
            InvalidConfig: there are no parts with a response token.
        """
        self.module.forget_features()
        update, self._open_update = self._open_update, None
        if update is None:
            raise InvalidConfig("there is no update to finish: call accumulate first")
        with undoing(partial(self._drop, update)):
            return update.finish()

    @dispatch("all")
    def drop_update(self) -> None:
        """Drops the gradients of `accumulate` or ``forward_backward`` that no step has used. Does nothing if there are none."""
        update, self._open_update = self._open_update, None
        self._drop(update)

    def _drop(self, update: AccumulatedUpdate | None) -> None:
        if update is not None or self.model.has_passes:
            self.module.forget_features()
            self.model.drop_gradients()

    def _refuse_to_mix(self, call: str, are_open: bool, others: str) -> None:
        """All ranks raise it, since all have made the same calls."""
        with self.model.ranks.fail_together():
            if are_open:
                raise InvalidConfig(f"{call} would mix its gradients with those of {others}")

    @dispatch("all")
    def forget_features(self) -> None:
        """Forgets the features of a vision tower that is not trained, at the end of a step without an update of this model."""
        self.module.forget_features()

    @dispatch("all")
    def save(self, directory: Path | str, in_background: bool = False) -> None:
        """Writes the weights as a Hugging Face checkpoint, adapters merged, and the training state next to it.

        It may be called at any time and does not change the training; gradients are not written. With ``in_background`` it
        returns as soon as the state is copied, and `finish_save` waits for the rest.

        Raises:
            CheckpointError: a rank could not write.
        """
        self.model.save(directory, in_background)

    @dispatch("all")
    def finish_save(self) -> None:
        """Waits until everything that is saved in the background is on disk; raises the error of a save that failed."""
        self.model.saving.finish()

    @dispatch("all")
    def load(self, directory: Path | str) -> None:
        """Reads what `save` wrote, to the last bit, and clears the gradients.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another model.
        """
        self.drop_update()
        self.module.forget_features()
        self.model.load(directory)


@dataclass(frozen=True)
class PolicyConfig(ModelConfig):
    """A policy: the weights and how it is scored."""

    model_path: str
    temperature: float = 1.0  # of the policy; the same value samples and scores

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise InvalidConfig(f"temperature={self.temperature}: the policy needs a temperature above 0")

    def frozen(self) -> "PolicyConfig":
        """The same policy, as it was before any training, for a worker that never updates it."""
        kept = {field.name: getattr(self, field.name) for field in fields(PolicyConfig)}
        kept |= {"lora_rank": 0, "lora_vision": False, "load_in_4bit": False, "freeze_language": False, "mtp_coef": 0.0}
        return PolicyConfig(**kept | {"activation_checkpointing": "none"})


class PolicyWorker(ModelWorker):
    """Scores responses under a policy."""

    def wrap(self, model: PreTrainedModel, family: VLMFamily) -> PackedVLM:
        """The packed model around a loaded one."""
        return PackedVLM(model, family, self.config.temperature)

    @dispatch(split=split_scoring, join=join_rows)
    def log_probs(self, data: DataProto, into: str = "old_log_probs", entropy: bool = False) -> DataProto:
        """Log-probs of the responses as column ``into`` ``(B, R)`` float32, and ``entropys`` likewise if asked for.

        Raises:
            MissingColumn, InvalidColumn, MediaMismatch, NonFiniteLogits, RankFailure: see `TrainingModel.score`.
        """
        return self.model.score(data, into, entropy)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face parameter name, full tensor) pairs, adapters merged; see `TrainingModel.named_weights`."""
        return self.model.named_weights(dtype)

    def base_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The same without the adapters."""
        return self.model.named_weights(dtype, merged=False)

    def adapter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The matrices of the adapters; see `TrainingModel.adapter_weights`."""
        return self.model.adapter_weights(dtype)


class ReferenceWorker(PolicyWorker):
    """The frozen policy that a KL term is measured against."""

    role = "reference"

    @dispatch(split=split_scoring, join=join_rows)
    def log_probs(self, data: DataProto, into: str = "ref_log_prob", entropy: bool = False) -> DataProto:
        """As the actor's, into ``ref_log_prob``."""
        with self.acting():
            return super().log_probs(data, into, entropy)

    def acting(self) -> AbstractContextManager[None]:
        """A context in which ``model`` is the reference."""
        return nullcontext()
