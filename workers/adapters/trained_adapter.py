"""What is trained by itself, with its gradients and its AdamW state: an adapter, or all weights of a model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily
from rollout.adapters import Adapter, read_adapter, write_adapter
from rollout.adapters.adapter_files import check_digests, read_tensors, write_digests, write_packed_adapter
from rollout.adapters.packed_tensors import pack_by_kind, write_packed
from workers.adapters.step_check import StepCheck
from workers.model.model_config import AdamParams, OptimizerConfig
from workers.training.optimizer import Optimizer, new_moments

COUNTS = ("steps", "skipped_steps")
Later = Callable[[Callable[[], None]], None]
"""Carries out some work now or later, in any thread."""


def at_once(work: Callable[[], None]) -> None:
    """Carries out some work now."""
    work()


def nothing() -> None:
    """Does nothing."""


class Trainable(Protocol):
    """Matrices by their names, which may be trained."""

    @property
    def trained(self) -> bool: ...

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class TrainedMatrices(ABC):
    """Matrices that are trained by themselves: gradients add up until `step`, which has settings of its own each time."""

    def __init__(self, source: Trainable) -> None:
        """``source``'s matrices have gradients; they are changed in place."""
        self.source = source
        self.matrices = dict(source.named_parameters())
        # Its settings come with each step.
        self.optimizer = Optimizer(cast(Iterable[nn.Parameter], self.matrices.values()), OptimizerConfig())
        self._check = StepCheck(self.matrices)

    @abstractmethod
    def export(self, directory: Path, base_model: str) -> None:
        """Writes what a sampler loads to a directory, which exists."""

    @abstractmethod
    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The matrices that `save` wrote.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model or configuration.
        """

    def check_finite(self) -> None:
        """Raises `CheckpointError` if a matrix is not finite: a file of it could not be loaded. Waits for the device once."""
        if bool(get_total_norm(list(self.matrices.values()), math.inf).isfinite()):
            return
        for name, matrix in self.matrices.items():
            if not bool(matrix.isfinite().all()):
                raise CheckpointError(
                    f"{name} is not finite, so the weights are not saved: load an earlier checkpoint, and take smaller steps"
                )

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients, in the order of the matrices, and keeps them. Takes no memory, so that none fails after others."""
        for matrix, gradient in zip(self.matrices.values(), gradients, strict=True):
            if matrix.grad is None:
                matrix.grad = gradient
            elif gradient is not None:
                matrix.grad.add_(gradient)

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step; see `Optimizer.step`. Without gradients nothing changes.

        Raises:
            InvalidConfig: see `StepCheck`. Nothing has changed, and the gradients are kept.
        """
        self._check(params, self.optimizer.moments)
        return self.optimizer.step(params)

    @abstractmethod
    def save(
        self,
        directory: Path,
        base_model: str,
        optimizer_file: str,
        later: Later = at_once,
        between: Callable[[], None] = nothing,
    ) -> None:
        """Writes the matrices and the AdamW state, without gradients.

        Args:
            later: gets what writes the files of the weights as they are now. Adapters use it; all weights of a model are written
                before `save` returns.
            between: is called between the parts in which an adapter is copied. It may not change the matrices or the AdamW
                state.
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

    def load(self, directory: Path, optimizer_file: str | None) -> None:
        """Replaces the matrices by saved ones, and drops the gradients.

        Args:
            optimizer_file: in the directory; ``None`` begins with a new AdamW state.

        Raises:
            CheckpointError: see `read`; or the AdamW state is missing or damaged. Everything is then as before.
        """
        saved = self.read(directory)
        moments: Mapping[Tensor, dict[str, Tensor]] = {}
        counts = dict.fromkeys(COUNTS, 0)
        if optimizer_file is not None:
            check_digests(directory, optimizer_file)
            tensors = read_tensors(directory / optimizer_file)
            counts = {name: int(_taken(tensors, name, (), directory / optimizer_file)) for name in COUNTS}
            moments = self._moments(tensors, directory / optimizer_file)
        with torch.no_grad():
            for name, matrix in self.matrices.items():
                matrix.copy_(saved[name])
        self._check.forget()
        self.optimizer.restore(moments, **counts)

    def _moments(self, tensors: dict[str, Tensor], file: Path) -> Mapping[Tensor, dict[str, Tensor]]:
        moments = {}
        for name, matrix in self.matrices.items():
            if f"{name}.step" in tensors:
                parts = new_moments(cast(nn.Parameter, matrix))
                moments[matrix] = {
                    part: _taken(tensors, f"{name}.{part}", empty.shape, file).to(empty)
                    for part, empty in parts.items()
                }
        if tensors:
            raise CheckpointError(f"{file} has {next(iter(tensors))}, which nothing that is trained has a state for")
        return moments


class TrainedAdapter(TrainedMatrices):
    """An adapter with its gradients and AdamW state."""

    def __init__(self, adapter: Adapter, model: nn.Module, family: VLMFamily) -> None:
        """``model`` is the frozen one."""
        super().__init__(adapter)
        self.adapter, self.model, self.family = adapter, model, family

    def export(self, directory: Path, base_model: str) -> None:
        """See `write_adapter`."""
        write_adapter(self.adapter, directory, base_model)

    def save(
        self,
        directory: Path,
        base_model: str,
        optimizer_file: str,
        later: Later = at_once,
        between: Callable[[], None] = nothing,
    ) -> None:
        """See `TrainedMatrices.save`. The weights are copied now, and written later."""
        matrices = self.adapter.packed().for_writing()
        between()
        state = pack_by_kind(self.state(), between)

        def write() -> None:
            write_packed_adapter(self.adapter.config, matrices, directory, base_model)
            digest = write_packed(state, directory / optimizer_file)
            write_digests(directory, known={optimizer_file: digest})

        later(write)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """See `read_adapter`."""
        device = next(iter(self.matrices.values())).device
        saved = read_adapter(directory, self.model, self.family, device)
        if saved.config != self.adapter.config:
            raise CheckpointError(f"{directory} holds an adapter of {saved.config}, not of {self.adapter.config}")
        return dict(saved.named_parameters())


def _taken(tensors: dict[str, Tensor], name: str, shape: Sequence[int], file: Path) -> Tensor:
    found = tensors.pop(name, None)
    if found is None or tuple(found.shape) != tuple(shape):
        raise CheckpointError(f"{file} lacks {name} of shape {tuple(shape)}")
    return found
