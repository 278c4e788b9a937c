"""All weights of a language model, trained in the place of an adapter by one model only."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from dataproto.errors import CheckpointError
from dataproto.vlm import VLMFamily, family_of
from rollout.adapters.adapter_files import check_digests, read_tensors, write_digests
from workers.adapters.trained_adapter import Later, TrainedMatrices, at_once, nothing
from workers.ranks.mesh import Ranks
from workers.weights.sharded_export import ShardedExport

WEIGHTS_FILE = "weights.safetensors"


class FullWeights:
    """The parameters of a model, those of its vision tower and mergers excepted, which stay frozen."""

    trained = True

    def __init__(self, model: nn.Module, family: VLMFamily) -> None:
        """Turns their gradients on."""
        frozen = tuple(f"{part}." for part in family.vision_parts)
        self.parameters = {
            name: parameter.requires_grad_()
            for name, parameter in model.named_parameters()
            if not name.startswith(frozen)
        }

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters under their names in the model, tied ones once."""
        yield from self.parameters.items()


class TrainedWeights(TrainedMatrices):
    """`FullWeights` with their gradients and AdamW state."""

    def __init__(self, weights: FullWeights, model: Any, processors: Any) -> None:
        """
        Args:
            model: of which they are the weights.
            processors: writes what a checkpoint has next to its weights; see `PromptBuilder.save_pretrained`.
        """
        super().__init__(weights)
        self.model, self.processors = model, processors

    def export(self, directory: Path, base_model: str) -> None:
        """Writes a whole checkpoint, as ``from_pretrained`` loads it."""
        export = ShardedExport(directory, self.model, family_of(self.model), Ranks(), dtype=None)
        export.collect(behind=False)
        export.finish()
        self.processors.save_pretrained(directory)

    def save(
        self,
        directory: Path,
        base_model: str,
        optimizer_file: str,
        later: Later = at_once,
        between: Callable[[], None] = nothing,
    ) -> None:
        """See `TrainedMatrices.save`."""
        for file, found in ((WEIGHTS_FILE, self.matrices), (optimizer_file, self.state())):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
            save_file(tensors, directory / file)
            write_digests(directory, file)

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """See `TrainedMatrices.read`."""
        check_digests(directory, WEIGHTS_FILE)
        found = read_tensors(directory / WEIGHTS_FILE)
        shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        if {name: tensor.shape for name, tensor in found.items()} != shapes:
            raise CheckpointError(f"{directory / WEIGHTS_FILE} is of another model")
        return found
