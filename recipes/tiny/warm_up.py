"""A short supervised warm-up on random answers, which teaches the format of an answer but nothing about the pictures."""

import contextlib
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from dataproto import DataProto
from dataproto.errors import FileNotWritten
from recipes.synthetic.problems import Problem, make_problem
from recipes.tiny.tiny_model import TinyConfig, is_whole, make_tiny_model
from rollout.engine import Completion, SamplingParams
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses
from workers.model.packed_model import Outputs
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

ANSWER = "<think>look</think> \\boxed{{{answer}}}"
FIRST_PROBLEM = 2**32
"""Index of the first problem of the warm-up; those of a run begin at 0."""


@dataclass(frozen=True)
class WarmUpConfig:
    """Steps, rows and learning rate of the warm-up."""

    steps: int = 80
    batch_size: int = 32
    lr: float = 2e-3
    problems: int = 256
    level: int = 1


def tiny_checkpoint(
    seed: int = 0,
    cache: Path | None = None,
    phase: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Path:
    """The path of a tiny Qwen2.5-VL that gives random answers in the right format; created once for each seed.

    Args:
        seed: seed of the initial weights and of the warm-up.
        cache: directory of these checkpoints; by default ``dataproto`` in the user's cache directory.
        phase: is called with the name of each phase, and gives a context manager for its time.

    Raises:
        FileNotWritten: the disk is full, say.
    """
    model, settings = TinyConfig(), WarmUpConfig()
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto"
    path = root / f"tiny-{fingerprint(model, settings)}-seed{seed}"
    if is_whole(path):
        print(f"tiny model: found in {path}")
        return path
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with phase("making the tiny model"):
            make_tiny_model(draft, seed, model)
        print(f"tiny model: warming up for {settings.steps} steps on random answers (their format, not the pictures)")
        with phase("warming up the tiny model"):
            loss = warm_up(draft, seed, settings)
        print(f"tiny model: cross-entropy {loss:.3f} nats per token; saved in {path}")
        if path.exists() and not is_whole(path):
            shutil.rmtree(path)
        with contextlib.suppress(OSError):  # another process was faster; its checkpoint is equal
            draft.rename(path)
    except (OSError, SafetensorError) as error:
        raise FileNotWritten(
            f"the tiny model could not be written into {root}: {error}; make room or lift the limit there, set XDG_CACHE_HOME "
            "to another directory, or give a checkpoint as --model-path"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def warm_up(path: Path, seed: int = 0, config: WarmUpConfig | None = None) -> float:
    """Trains the checkpoint at ``path`` in place on random answers in the right format.

    Returns:
        The loss of the last step.
    """
    config = config or WarmUpConfig()
    random = Random(f"warm-up/{seed}")
    problems = [make_problem(FIRST_PROBLEM + place, config.level, seed) for place in range(config.problems)]
    answers = defaultdict(list)
    for problem in problems:
        answers[problem.kind].append(problem.answer)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=1024)
    prompts = builder([{"prompt": problem.text, "images": [problem.image]} for problem in problems])
    schedule = OptimizerConfig(lr=config.lr, schedule="linear", warmup_steps=5, total_steps=config.steps)
    actor = ActorWorker(ActorConfig(str(path), optimizer=schedule))
    loss = float("nan")
    for _ in range(config.steps):
        chosen = [random.randrange(len(problems)) for _ in range(config.batch_size)]
        texts = [ANSWER.format(answer=random.choice(answers[problems[place].kind])) for place in chosen]
        loss = actor.update(answered_rows(builder, prompts[chosen], texts), negative_log_probs)["actor/loss"]
    actor.module.model.save_pretrained(path)
    return loss


def answered_rows(builder: PromptBuilder, prompts: DataProto, texts: list[str]) -> DataProto:
    """Prompts with the given texts as their responses, each followed by the end-of-turn token."""
    tokenizer = builder.tokenizer
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    completions = [Completion(row, tokens, [0.0] * len(tokens), "stop") for row, tokens in enumerate(ids)]
    width = SamplingParams(max_tokens=max(map(len, ids)))
    return attach_responses(prompts, completions, width, builder.family, tokenizer.pad_token_id)


def negative_log_probs(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-probs of the responses as a loss function."""
    return -outputs.log_probs, {}


def fingerprint(model: TinyConfig, settings: WarmUpConfig) -> str:
    """A digest of everything that determines a checkpoint: sizes, settings, problems and versions."""
    examples = [make_problem(FIRST_PROBLEM + place, settings.level) for place in range(8)]
    parts = (astuple(model), astuple(settings), ANSWER, torch.__version__, transformers.__version__)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6)
    for problem in examples:
        digest.update(_content(problem))
    return digest.hexdigest()


def _content(problem: Problem) -> bytes:
    return problem.text.encode() + problem.answer.encode() + problem.image.tobytes()
