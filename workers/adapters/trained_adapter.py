"""An adapter with its gradients and its AdamW state."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily
from rollout.adapters import Adapter, read_adapter, write_adapter
from rollout.adapters.adapter_files import check_digests, read_tensors, write_digests
from workers.model.model_config import AdamParams, OptimizerConfig
from workers.training.optimizer import Optimizer, new_moments

COUNTS = ("steps", "skipped_steps")


class TrainedAdapter:
    """An adapter that is trained by itself: gradients add up until `step`, which has settings of its own each time."""

    def __init__(self, adapter: Adapter) -> None:
        """``adapter``'s matrices have gradients; they are changed in place."""
        self.adapter = adapter
        self.matrices = dict(adapter.named_parameters())
        # Its settings come with each step.
        self.optimizer = Optimizer(cast(Iterable[nn.Parameter], self.matrices.values()), OptimizerConfig())

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients, in the order of `Adapter.named_parameters`."""
        for matrix, gradient in zip(self.matrices.values(), gradients, strict=True):
            if gradient is not None:
                matrix.grad = gradient if matrix.grad is None else matrix.grad + gradient

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step; see `Optimizer.step`. Without gradients nothing changes."""
        return self.optimizer.step(params)

    def export(self, directory: Path, base_model: str) -> None:
        """Writes the adapter alone; see `write_adapter`."""
        write_adapter(self.adapter, directory, base_model)

    def save(self, directory: Path, base_model: str, optimizer_file: str) -> None:
        """Writes the adapter and the AdamW state, without gradients."""
        self.export(directory, base_model)
        tensors = {
            f"{name}.{part}": value.detach().cpu()
            for name, matrix in self.matrices.items()
            for part, value in self.optimizer.moments.get(matrix, {}).items()
        }
        counts = {name: torch.tensor(getattr(self.optimizer, name)) for name in COUNTS}
        save_file({**tensors, **counts}, directory / optimizer_file)
        write_digests(directory, optimizer_file)

    def load(self, directory: Path, model: nn.Module, family: VLMFamily, optimizer_file: str | None) -> None:
        """Replaces the adapter by a saved one of the same configuration, and drops the gradients.

        Args:
            optimizer_file: in the directory; ``None`` begins with a new AdamW state.

        Raises:
            CheckpointError: a file is missing, damaged, or of another model or configuration. The adapter is then as before.
        """
        device = next(iter(self.matrices.values())).device
        saved = read_adapter(directory, model, family, device)
        if saved.config != self.adapter.config:
            raise CheckpointError(f"{directory} holds an adapter of {saved.config}, not of {self.adapter.config}")
        moments: Mapping[Tensor, dict[str, Tensor]] = {}
        counts = dict.fromkeys(COUNTS, 0)
        if optimizer_file is not None:
            check_digests(directory, optimizer_file)
            tensors = read_tensors(directory / optimizer_file)
            counts = {name: int(_taken(tensors, name, (), directory / optimizer_file)) for name in COUNTS}
            moments = self._moments(tensors, directory / optimizer_file)
        with torch.no_grad():
            for (_, matrix), (_, value) in zip(self.matrices.items(), saved.named_parameters(), strict=True):
                matrix.copy_(value)
        self.optimizer.restore(moments, **counts)

    def _moments(self, tensors: dict[str, Tensor], file: Path) -> Mapping[Tensor, dict[str, Tensor]]:
        moments = {}
        for name, matrix in self.matrices.items():
            if f"{name}.step" in tensors:
                parts = new_moments(matrix)  # type: ignore[arg-type]
                moments[matrix] = {
                    part: _taken(tensors, f"{name}.{part}", empty.shape, file).to(empty)
                    for part, empty in parts.items()
                }
        if tensors:
            raise CheckpointError(f"{file} has {next(iter(tensors))}, which the adapter has no state for")
        return moments


def _taken(tensors: dict[str, Tensor], name: str, shape: Sequence[int], file: Path) -> Tensor:
    found = tensors.pop(name, None)
    if found is None or tuple(found.shape) != tuple(shape):
        raise CheckpointError(f"{file} lacks {name} of shape {tuple(shape)}")
    return found
