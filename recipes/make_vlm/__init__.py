"""A small vision-language model with real words: ``dataproto make-vlm``.

SmolLM2-135M-Instruct (through pip) is joined with a small SigLIP tower into an ordinary SmolVLM checkpoint. Supervised training
teaches the tower captions of drawn pictures and of icons (through npm), and then the whole model these, easy-VQA and its own
answers in text. Tower and connector begin with random weights.
"""

from pathlib import Path

import yaml

from dataproto.errors import InvalidConfig
from recipes.configs.make_vlm_config import MakeVLMConfig
from recipes.console import start_phase
from recipes.data.easy_vqa_rows import fetch_easy_vqa, open_easy_vqa
from recipes.data.packages import ICONS, SMOLLM2, fetch
from recipes.make_vlm.alignment import align, phases
from recipes.make_vlm.assembly import assemble
from recipes.make_vlm.icons import read_icons
from recipes.make_vlm.model_card import Learnt, write_card
from recipes.make_vlm.replay import Replay, text_loss
from recipes.make_vlm.text_model import load_text_model
from recipes.options import options_of, write_options
from recipes.report.page import OPTIONS_FILE

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
    check_tower(path, config)
    print(f"text model: {SMOLLM2.notice}")
    if not (path / "README.md").is_file():
        with start_phase("fetching and reading the text model"):
            text_model, tokenizer = load_text_model(config.cache)
        with start_phase("assembling the checkpoint"):
            assemble(path, text_model, tokenizer, config.tower, config.seed)
            write_card(path, config.tower)
    write_options(path, config)
    if config.steps:
        teach(path, config)
    return path


def check_tower(path: Path, config: MakeVLMConfig) -> None:
    """Raises `InvalidConfig` if the checkpoint in a directory was made with another tower."""
    if not (path / OPTIONS_FILE).is_file():
        return
    began = yaml.safe_load((path / OPTIONS_FILE).read_text(encoding="utf-8"))
    for option in options_of(config.tower):
        if began.get(option.name, option.default) != option.default:
            raise InvalidConfig(
                f"--resume with --{option.name} {option.default}, but the tower in {path} was made with "
                f"{began[option.name]}: leave it out, or choose another --output-dir"
            )


def teach(path: Path, config: MakeVLMConfig) -> None:
    """Aligns a checkpoint that `assemble` has written, and describes it in its card."""
    print(f"icons: {ICONS.notice}")
    with start_phase("fetching and reading the pictures"):
        icons = read_icons(fetch(ICONS, config.cache))
        easy_vqa = open_easy_vqa(fetch_easy_vqa(config.cache))
    with start_phase("asking the text model for text to replay"):
        replay = Replay.of(path, [icon.phrase for icon in icons], config.seed, config.run_dir / "replay.json")
    run = phases(config, icons, easy_vqa, replay)
    report = align(path, config, run)
    loss = text_loss(path, replay.held_out)
    write_card(path, config.tower, Learnt(config.phase_steps, config.batch_size, len(icons), replay.loss, loss))
    print(f"held-out text: {replay.loss:.3f} nats a token before, {loss:.3f} after")
    print(f"report: {report}")
