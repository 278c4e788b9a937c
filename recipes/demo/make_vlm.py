"""A small vision-language model with real words: ``dataproto make-vlm``.

SmolLM2-135M-Instruct (through pip) is joined with a small SigLIP tower into an ordinary SmolVLM checkpoint. Supervised training
teaches the tower captions of drawn pictures and of icons (through npm), and then the whole model these, easy-VQA and its own
answers in text. Tower and connector begin with random weights.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

from dataproto.errors import CheckpointError, InvalidConfig, writing
from recipes.configs.make_vlm_config import MakeVLMConfig, parse
from recipes.configs.shared.run_config import RunConfig
from recipes.data.easy_vqa_rows import Answered, EasyVQA, fetch_easy_vqa, open_easy_vqa
from recipes.data.mixture import Mixture
from recipes.data.packages import ICONS, SMOLLM2, fetch
from recipes.data.row_values import conversation
from recipes.demo.captions import DrawnCaptions, Icon, IconCaptions, read_icons
from recipes.demo.smolvlm import Learnt, assemble, load_text_model, write_card
from recipes.directory_lock import locked
from recipes.options import exit_status, write_options
from recipes.options.config_file import OPTIONS_FILE, config_as_yaml
from recipes.run.supervised import run_supervised
from recipes.sft import SFTConfig, SFTDataConfig, conversation_task
from recipes.watch.console import start_phase
from recipes.watch.report import REPORT_FILE
from recipes.watch.rollout_files import replace_file
from rollout.engine import SamplingParams, create_engine
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.responses import build_requests
from workers.model.model_config import ModelConfig
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training.checkpoint import latest_checkpoint
from workers.training.optimizer import OptimizerConfig


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
        raise InvalidConfig(f"{path} exists already: choose another --output-dir, or continue with --resume")
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
    """Raises `InvalidConfig` if what is there was begun with other options, or is the training of a deleted checkpoint."""
    if config.run_dir.exists() and not path.exists():
        raise InvalidConfig(
            f"{config.run_dir} holds the training of an earlier model: delete it, or change --output-dir"
        )
    file = path / OPTIONS_FILE
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") != config_as_yaml(config):
        raise InvalidConfig(
            f"--resume with other options than those with which {path} was begun: give --config {file} --resume, or choose "
            "another --output-dir"
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


ASKED = 400  # questions
EVERY = 10  # of the answers, one is held out
LONGEST = 96  # tokens of an answer; one that has not ended by then is left out
LENGTH = 256  # tokens of question and answer
QUESTIONS = (
    "In one sentence, what is {}?",
    "Write one sentence about {}.",
    "Explain {} to a child in two sentences.",
    "Where do you find {}?",
    "Write a short poem of two lines about {}.",
    "Name three things that go with {}.",
    "How would you describe {} to someone who has never seen it?",
    "Tell me one surprising fact about {}.",
)


@dataclass(frozen=True)
class Replay:
    """Questions with the answers that the text model gave before any training.

    Attributes:
        answers: pairs of question and answer; one of `EVERY` is not learnt.
        loss: of the held-out answers before any training, in nats for each token.
    """

    answers: tuple[tuple[str, str], ...]
    loss: float

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers to learn, as conversations without a picture."""
        return conversations([answer for place, answer in enumerate(self.answers) if place % EVERY])

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """The other answers."""
        return conversations(self.answers[::EVERY])

    @classmethod
    def of(cls, checkpoint: Path, things: Sequence[str], seed: int, file: Path) -> Self:
        """What ``file`` holds, or else what the checkpoint says about the things, which is written there."""
        if file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            return cls(tuple((question, answer) for question, answer in kept["answers"]), kept["loss"])
        answers = own_answers(checkpoint, questions_about(things, seed, ASKED), seed)
        replay = cls(answers, text_loss(checkpoint, conversations(answers[::EVERY])))
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(asdict(replay), indent=1).encode())
        return replay


def questions_about(things: Sequence[str], seed: int, count: int) -> list[str]:
    """Random questions.

    >>> questions_about(["a hat"], seed=0, count=1)
    ['How would you describe a hat to someone who has never seen it?']
    """
    random = Random(f"replay/{seed}")
    return [random.choice(QUESTIONS).format(random.choice(things)) for _ in range(count)]


def own_answers(checkpoint: Path, questions: Sequence[str], seed: int) -> tuple[tuple[str, str], ...]:
    """The questions with an answer sampled at temperature 1, without those whose answer does not end.

    Answers of the policy itself have, in the mean, no gradient at the start: they hold the model where it is.
    """
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=LENGTH - LONGEST)
    prompts = builder([{"prompt": question} for question in questions])
    sampling = SamplingParams(max_tokens=LONGEST, seed=seed)
    requests = build_requests(prompts, sampling)
    done = {
        one.request: one.token_ids
        for one in create_engine("hf", str(checkpoint)).generate(requests, sampling)
        if one.finish_reason == "stop" and len(one.token_ids) > 1
    }
    decode = partial(builder.tokenizer.decode, skip_special_tokens=True)  # which a conversation may not contain as text
    texts = {place: decode(ids[:-1]).strip() for place, ids in done.items()}
    return tuple((questions[place], texts[place]) for place in sorted(texts) if texts[place])


def conversations(answers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows for `rollout.prompts.SupervisedBuilder`."""
    return [conversation(each, "replayed text", place) for place, each in enumerate(answers)]


def text_loss(checkpoint: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean loss of the answers' tokens in nats."""
    data = SupervisedBuilder.from_pretrained(checkpoint, LENGTH)(rows)
    data.pop(non_tensor_batch_keys=["multi_modal_data"])
    log_probs = ReferenceWorker(PolicyConfig(str(checkpoint))).log_probs(data)["ref_log_prob"]
    return -float(log_probs[data["response_mask"].bool()].double().mean())


EVAL_ROWS = 128
TOWER, WHOLE = "tower", "whole"
"""The phases, and the folders of their runs."""
QUESTION_SHARE, TEXT_SHARE = 0.4, 0.1
"""Rows of the second phase that are questions of easy-VQA, and replayed text; the others are captions. An answer in text is some
twenty times as long as one about a picture, so most of the tokens are text.
"""
WHOLE_RATE = 0.1
"""The learning rate of the second phase as a share of that of the first."""


@dataclass(frozen=True)
class Phase:
    """A run of supervised training."""

    name: str
    steps: int
    lr: float
    rows: Any
    held_out: Sequence[dict[str, Any]]
    freeze_language: bool = False


def phases(config: MakeVLMConfig, icons: Sequence[Icon], easy_vqa: EasyVQA, replay: Replay) -> tuple[Phase, Phase]:
    """Tower and connector alone learn captions; then all weights learn captions, questions and replayed text."""
    seed, (first, second) = config.seed, config.phase_steps
    drawn, pictured = DrawnCaptions(seed), IconCaptions(icons, seed)
    held_out = [*DrawnCaptions(0, "test", EVAL_ROWS // 4), *IconCaptions(icons, 0, "test", EVAL_ROWS // 4)]
    asked = [Answered(easy_vqa.train.open_questions(each)) for each in (True, False)]
    captions = (1 - QUESTION_SHARE - TEXT_SHARE) / 2
    shares = [captions, captions, QUESTION_SHARE * 2 / 3, QUESTION_SHARE / 3, TEXT_SHARE]
    questions = Answered(easy_vqa.test.in_random_order()[: EVAL_ROWS // 2])
    return (
        Phase(TOWER, first, config.lr, Mixture([drawn, pictured], [1, 1]), held_out, freeze_language=True),
        Phase(
            WHOLE,
            second,
            config.lr * WHOLE_RATE,
            Mixture([drawn, pictured, *asked, replay.rows], shares),
            [*held_out, *questions],
        ),
    )


def align(checkpoint: Path, config: MakeVLMConfig, run: Sequence[Phase]) -> Path:
    """Trains the checkpoint by each phase, and puts the trained weights into its place.

    Returns:
        The report of the last phase, whose run is in a folder of ``config.run_dir``.
    """
    for phase in run:
        folder = config.run_dir / phase.name
        supervised = supervised_config(checkpoint, config, phase, folder)
        if finished(folder, phase.steps) is None:
            run_supervised(supervised, partial(conversation_task, supervised, rows=(phase.rows, {"": phase.held_out})))
        trained = finished(folder, phase.steps)
        if trained is None:
            raise CheckpointError(f"{folder} has no checkpoint of step {phase.steps}: run the command with --resume")
        replace_weights(checkpoint, trained / "actor" / "huggingface")
    return folder / REPORT_FILE


def supervised_config(checkpoint: Path, config: MakeVLMConfig, phase: Phase, folder: Path) -> SFTConfig:
    """The run of a phase, in ``folder``."""
    return SFTConfig(
        model_path=str(checkpoint),
        data=SFTDataConfig(
            batch_size=config.batch_size,
            eval_rows=EVAL_ROWS,
            max_length=512,
            max_response_length=16,
            num_workers=config.num_workers,
        ),
        optimizer=OptimizerConfig(lr=phase.lr, schedule="cosine", warmup_steps=min(50, phase.steps // 10)),
        compute=ModelConfig(freeze_language=phase.freeze_language),
        run=RunConfig(
            steps=phase.steps,
            eval_every=max(phase.steps // 4, 1),
            save_every=max(phase.steps // 4, 1),
            output_dir=folder,
            seed=config.seed,
            resume=config.resume and folder.exists(),
        ),
    )


def finished(folder: Path, steps: int) -> Path | None:
    """The last checkpoint of a run that has come to its end."""
    found = latest_checkpoint(folder) if folder.exists() else None
    return None if found is None or found[0] < steps else found[1]


def replace_weights(checkpoint: Path, trained: Path) -> None:
    """Puts the safetensors files of ``trained`` into the place of those of ``checkpoint``."""
    old = {file.name for file in checkpoint.glob("model*.safetensors*")}
    new = list(trained.glob("model*.safetensors*"))
    for file in new:
        draft = checkpoint / f".{file.name}.partial"
        with writing(checkpoint / file.name, draft):
            shutil.copy2(file, draft)
            os.replace(draft, checkpoint / file.name)
    for name in old - {file.name for file in new}:
        (checkpoint / name).unlink()


def main(arguments: Sequence[str] | None = None, config: MakeVLMConfig | None = None) -> int:
    """Parses the command line, makes the model, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        print(f"model: {make_vlm(config or parse(status.arguments))}")
    return status.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
