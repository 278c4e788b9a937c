"""What is trained by itself, with its gradients and its AdamW state: an adapter, or all weights of a model.

An AdamW step that could leave numbers that float32 does not hold is refused before it changes anything.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from dataproto.errors import CheckpointError, InvalidConfig
from dataproto_server.backend import OPTIMIZER_FILE, Later, at_once
from dataproto_server.engine.base_model import BaseModel
from rollout.adapters import Adapter, host_copies, read_tensors, write_adapter
from workers.model.model_config import LARGEST_FLOAT32, AdamParams, OptimizerConfig
from workers.ranks.mesh import Ranks
from workers.training.optimizer import Optimizer, new_moments
from workers.weights.sharded_export import ShardedExport

LARGEST_GRADIENT = math.sqrt(LARGEST_FLOAT32)
"""The largest number in gradients whose norm float32 holds, and so in their means."""
LARGEST_CHANGE = LARGEST_FLOAT32 / 2  # the other half is for weights and rounding


def check_settings(params: AdamParams) -> None:
    """Raises `InvalidConfig` for settings with which AdamW could leave numbers that float32 does not hold.

    The means of gradients are at most `LARGEST_GRADIENT`; what divides them is at least eps, and the correction of the first mean
    at least 1 - beta1.
    """
    change = max(1.0, params.learning_rate / (1 - params.beta1)) * LARGEST_GRADIENT / min(params.eps, 1.0)
    if not change <= LARGEST_CHANGE or params.learning_rate * params.weight_decay > 1:
        raise InvalidConfig(
            f"learning_rate={params.learning_rate:g}, eps={params.eps:g} and weight_decay={params.weight_decay:g} can leave "
            "numbers that float32 does not hold: no update was made, and the gradients are kept for another step with a smaller "
            "rate, a larger eps, or a product of rate and decay of at most 1"
        )


COUNTS = ("steps", "skipped_steps")


class TrainedMatrices(ABC):
    """Matrices that are trained by themselves: gradients add up until `step`, which has settings of its own each time."""

    adapter: Adapter | None = None
    """``None`` if all weights of a model are trained."""

    def __init__(self, matrices: Mapping[str, Tensor], base_model: str, base: BaseModel) -> None:
        """
        Args:
            matrices: by their names; they have gradients, and are changed in place.
            base_model: by which clients call ``base``.
        """
        self.matrices, self.base_model, self.base = matrices, base_model, base
        # Its settings come with each step.
        self.optimizer = Optimizer(cast(Iterable[nn.Parameter], matrices.values()), OptimizerConfig())

    @abstractmethod
    def export(self, directory: Path, dtype: torch.dtype, later: Later) -> None:
        """Writes what a sampler loads to a directory, which exists; an adapter in a dtype. For ``later`` see `save`."""

    @abstractmethod
    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The matrices that `save` wrote.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model or configuration.
        """

    def check_finite(self, model: str) -> None:
        """Raises `CheckpointError` if a matrix is not finite: a file of it could not be loaded. Waits for the device once.

        Args:
            model: the name of what is trained.
        """
        if bool(get_total_norm(list(self.matrices.values()), math.inf).isfinite()):
            return
        for name, matrix in self.matrices.items():
            if not bool(matrix.isfinite().all()):
                raise CheckpointError(
                    f"model {model!r}: {name} is not finite, so the weights are not saved: load an earlier checkpoint, and take "
                    "smaller steps"
                )

    def add_gradients(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Adds those of the matrices, and keeps them. Takes no memory, so that none fails after others."""
        for matrix in self.matrices.values():
            gradient = gradients.get(matrix)
            if matrix.grad is None:
                matrix.grad = gradient
            elif gradient is not None:
                matrix.grad.add_(gradient)

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step; see `Optimizer.step`. Without gradients nothing changes.

        Raises:
            InvalidConfig: see `check_settings`. Nothing has changed, and the gradients are kept.
        """
        check_settings(params)
        return {name: float(value) for name, value in self.optimizer.step(params).items()}

    @abstractmethod
    def save(self, directory: Path, later: Later = at_once) -> None:
        """Writes the matrices and the AdamW state, without gradients.

        Args:
            later: gets what writes the files of the weights as they are now. Adapters use it; all weights of a model are written
                before `save` returns.
        """

    def state(self) -> dict[str, Tensor]:
        """The AdamW state by the names of its file."""
        counts = {name: torch.tensor(getattr(self.optimizer, name)) for name in COUNTS}
        moments = {
            f"{name}.{part}": value
            for name, matrix in self.matrices.items()
            for part, value in self.optimizer.moments.get(matrix, {}).items()
        }
        return moments | counts

    def load(self, directory: Path, *, optimizer: bool) -> None:
        """Replaces the matrices by saved ones, and drops the gradients.

        Args:
            optimizer: whether to read the AdamW state; without it a new one begins.

        Raises:
            CheckpointError: see `read`; or the AdamW state is missing or damaged. Everything is then as before.
        """
        saved = self.read(directory)
        moments: Mapping[Tensor, dict[str, Tensor]] = {}
        counts = dict.fromkeys(COUNTS, 0)
        if optimizer:
            tensors, file = read_tensors(directory / OPTIMIZER_FILE), directory / OPTIMIZER_FILE
            counts = {name: int(_taken(tensors, name, (), file)) for name in COUNTS}
            moments = self._moments(tensors, file)
        with torch.no_grad():
            for name, matrix in self.matrices.items():
                matrix.copy_(saved[name])
        self.optimizer.restore(moments, **counts)

    def _moments(self, tensors: dict[str, Tensor], file: Path) -> Mapping[Tensor, dict[str, Tensor]]:
        moments = {}
        for name, matrix in self.matrices.items():
            if f"{name}.step" in tensors:
                moments[matrix] = {
                    part: _taken(tensors, f"{name}.{part}", empty.shape, file).to(empty)
                    for part, empty in new_moments(cast(nn.Parameter, matrix)).items()
                }
        if tensors:
            raise CheckpointError(f"{file} has {next(iter(tensors))}, which nothing that is trained has a state for")
        return moments


class TrainedAdapter(TrainedMatrices):
    """An adapter with its gradients and AdamW state."""

    def __init__(self, adapter: Adapter, base_model: str, base: BaseModel) -> None:
        super().__init__(dict(adapter.named_parameters()), base_model, base)
        self.adapter: Adapter = adapter

    def export(self, directory: Path, dtype: torch.dtype, later: Later) -> None:
        """See `write_adapter`."""
        later(partial(write_adapter, self.adapter.snapshot(dtype), directory, self.base_model, dtype))

    def save(self, directory: Path, later: Later = at_once) -> None:
        """See `TrainedMatrices.save`. The weights are copied now, and written later."""
        snapshot, state = self.adapter.snapshot(), host_copies(self.state())

        def write() -> None:
            write_adapter(snapshot, directory, self.base_model)
            _save(state, directory, OPTIMIZER_FILE)

        later(write)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """See `read_adapter`."""
        saved = self.base.read_adapter(directory)
        if saved.config != self.adapter.config:
            raise CheckpointError(f"{directory} holds an adapter of {saved.config}, not of {self.adapter.config}")
        return dict(saved.named_parameters())


def _taken(tensors: dict[str, Tensor], name: str, shape: Sequence[int], file: Path) -> Tensor:
    found = tensors.pop(name, None)
    if found is None or tuple(found.shape) != tuple(shape):
        raise CheckpointError(f"{file} lacks {name} of shape {tuple(shape)}")
    return found


def _save(tensors: Mapping[str, Tensor], directory: Path, file: str) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / file)


WEIGHTS_FILE = "weights.safetensors"


class TrainedWeights(TrainedMatrices):
    """All weights of a model with their gradients and AdamW state."""

    def __init__(self, base_model: str, base: BaseModel) -> None:
        """``base`` is a copy of the model for them; see `AdapterTrainer`."""
        super().__init__(base.trainer.weights, base_model, base)

    def export(self, directory: Path, dtype: torch.dtype, later: Later) -> None:
        """Writes a whole checkpoint, as ``from_pretrained`` loads it."""
        export = ShardedExport(directory, self.base.trainer.model, self.base.trainer.family, Ranks(), dtype=None)
        export.collect(in_background=False)
        export.finish()
        self.base.renderer.builder.save_pretrained(directory)

    def save(self, directory: Path, later: Later = at_once) -> None:
        """See `TrainedMatrices.save`."""
        _save(self.matrices, directory, WEIGHTS_FILE)
        _save(self.state(), directory, OPTIMIZER_FILE)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """See `TrainedMatrices.read`."""
        found = read_tensors(directory / WEIGHTS_FILE)
        shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        if {name: tensor.shape for name, tensor in found.items()} != shapes:
            raise CheckpointError(f"{directory / WEIGHTS_FILE} is of another model")
        return found
