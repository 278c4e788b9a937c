"""A small vision-language model with real words: ``dataproto make-vlm``.

SmolLM2-135M-Instruct (through pip) is joined with a small SigLIP tower into an ordinary SmolVLM checkpoint. Supervised training
teaches the tower captions of drawn pictures and of icons (through npm), and then the whole model these, easy-VQA and its own
answers in text. Tower and connector begin with random weights.
"""

from pathlib import Path

import yaml

from dataproto.errors import CheckpointError, InvalidConfig
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
from recipes.run.directory_lock import locked

__all__ = ["MakeVLMConfig", "make_vlm"]

LEARNING_OPTIONS = ("steps", "batch-size", "lr")
"""Options that a training keeps from its start to its end."""


def make_vlm(config: MakeVLMConfig) -> Path:
    """Writes the checkpoint and returns its directory. Says on the console what is fetched, under which licence.

    Raises:
        InvalidConfig: the directory exists already, another process makes it, or the text model cannot be downloaded.
        MissingPackage: a package of the extra ``make-vlm`` is not installed.
    """
    path = config.output_dir
    with locked(path, inside=False):
        return _make_vlm(path, config)


def _make_vlm(path: Path, config: MakeVLMConfig) -> Path:
    if path.exists() and not config.resume:
        raise InvalidConfig(
            f"{path} exists already: choose another --output-dir, or continue its training with --resume"
        )
    check_began(path, config)
    print(f"text model: {SMOLLM2.notice}")
    if config.steps:  # before the minute that the text model takes
        print(f"icons: {ICONS.notice}")
        with start_phase("fetching the pictures"):
            pictures = fetch(ICONS, config.cache), fetch_easy_vqa(config.cache)
    if not (path / "README.md").is_file():
        with start_phase("fetching and reading the text model"):
            text_model, tokenizer = load_text_model(config.cache)
        with start_phase("assembling the checkpoint"):
            assemble(path, text_model, tokenizer, config.tower, config.seed)
            write_card(path, config.tower)
    write_options(path, config)
    if config.steps:
        teach(path, config, *pictures)
    return path


def check_began(path: Path, config: MakeVLMConfig) -> None:
    """Checks that what is there was begun with the same options.

    Raises:
        InvalidConfig: the checkpoint has another tower or seed, its training began with other options, or there is a training
            of a checkpoint that has been deleted.
        CheckpointError: the file of its options is damaged.
    """
    trains, file = config.run_dir.exists(), path / OPTIONS_FILE
    if trains and not (path / "README.md").is_file():
        raise InvalidConfig(
            f"{config.run_dir} holds the training of an earlier model, and {path} is no such model: delete {config.run_dir}, or "
            "choose another --output-dir"
        )
    if not file.is_file():
        return
    try:
        began = dict(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged, so {path} cannot be resumed: choose another --output-dir") from error
    fixed = [*options_of(config.tower), *(option for option in options_of(config) if option.name == "seed")]
    if trains:
        fixed += [option for option in options_of(config) if option.name in LEARNING_OPTIONS]
    for option in fixed:
        if str(began.get(option.name, option.default)) != str(option.default):
            raise InvalidConfig(
                f"--resume with --{option.name} {option.default}, but {path} was made with {began[option.name]}: give that, or "
                "choose another --output-dir"
            )


def teach(path: Path, config: MakeVLMConfig, icons_file: Path, easy_vqa_file: Path) -> None:
    """Aligns a checkpoint that `assemble` has written, and describes it in its card."""
    with start_phase("reading the pictures"):
        icons = read_icons(icons_file)
        easy_vqa = open_easy_vqa(easy_vqa_file)
    with start_phase("asking the text model for text to replay"):
        replay = Replay.of(path, [icon.phrase for icon in icons], config.seed, config.run_dir / "replay.json")
    run = phases(config, icons, easy_vqa, replay)
    report = align(path, config, run)
    loss = text_loss(path, replay.held_out)
    write_card(path, config.tower, Learnt(config.phase_steps, config.batch_size, len(icons), replay.loss, loss))
    print(f"held-out text: {replay.loss:.3f} nats a token before, {loss:.3f} after")
    print(f"report: {report}")
