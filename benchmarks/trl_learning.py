"""TRL's half of ``benchmarks/learning.py``: trains with `GRPOTrainer` on rows of this project and writes ``metrics.jsonl``."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.data.loader import draws
from recipes.rewards import RewardFunction, RewardRow
from rollout.prompts import PromptBuilder
from workers.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class TRLTask:
    """What both halves share: the start, the rows, the reward, the longest response and the optimizer."""

    checkpoint: Path
    train: Any
    held_out: Sequence[dict[str, Any]]
    reward: RewardFunction
    max_tokens: int
    optimizer: OptimizerConfig
    shuffle: bool


def as_dataset(rows: Sequence[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` of rows, with pictures that are decoded already."""
    from datasets import Dataset

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [rows[number] for number in batch["number"]]
        return {
            "prompt": [[{"role": "user", "content": question(row)}] for row in chosen],
            "images": [row["images"] for row in chosen],
            "answer": [row["reward_model"]["ground_truth"] for row in chosen],
        }

    return Dataset.from_dict({"number": list(range(len(rows)))}).with_transform(look_up)


def question(row: dict[str, Any]) -> str:
    """The words of a row; TRL puts the picture before them, where the marker is."""
    text: str = row["prompt"][0]["content"]
    return text.removeprefix("<image>")


def greedy_accuracy(model: Any, processor: Any, task: TRLTask, banned: Sequence[int]) -> float:
    """Share of held-out questions that are answered rightly, greedily."""
    import torch

    right = 0.0
    for first in range(0, len(task.held_out), 256):
        rows = [task.held_out[place] for place in range(first, min(first + 256, len(task.held_out)))]
        asked = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question(row)}]}] for row in rows
        ]
        texts = [
            processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for messages in asked
        ]
        inputs = processor(text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(
                **inputs, do_sample=False, max_new_tokens=task.max_tokens, suppress_tokens=list(banned), top_k=None
            )
        answers = processor.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scored = [RewardRow(text, row["reward_model"]["ground_truth"]) for text, row in zip(answers, rows, strict=True)]
        right += sum(result["acc"] for result in task.reward(scored))
    return right / len(task.held_out)


def train_and_measure(
    task: TRLTask,
    directory: Path,
    seed: int,
    steps: int,
    eval_every: int,
    prompts: int,
    samples: int,
    seconds: float = math.inf,
) -> None:
    """Trains for ``steps`` of ``prompts`` x ``samples``, or until the steps have taken ``seconds`` of the CPU.

    Writes accuracy and CPU seconds to ``metrics.jsonl`` in ``directory``; its last row has ``"complete": 1``.
    """
    from trl_grpo_step import load_processor

    processor = load_processor(task.checkpoint)
    builder = PromptBuilder.from_pretrained(task.checkpoint, 1024)
    banned = sorted(builder.family.banned_ids(builder.config))
    trainer = make_trainer(task, processor, banned, directory / "trainer", seed, steps, prompts, samples)

    def accuracy() -> dict[str, float]:
        trainer.model.eval()
        found = greedy_accuracy(trainer.model, processor, task, banned)
        trainer.model.train()
        return {"val-core/trl/acc/mean@1": found}

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").unlink(missing_ok=True)
    trainer.add_callback(measuring_callback(directory / "metrics.jsonl", accuracy, steps, eval_every, seconds))
    trainer.train()


def make_trainer(
    task: TRLTask,
    processor: Any,
    banned: Sequence[int],
    directory: Path,
    seed: int,
    steps: int,
    prompts: int,
    samples: int,
) -> Any:
    """TRL's trainer on the rows that our half draws, in their order, with the optimizer of the task."""
    import torch
    from transformers import AutoModelForImageTextToText
    from trl import GRPOTrainer
    from trl_grpo_step import grpo_config

    def score(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        rows = [RewardRow(each[0]["content"], truth) for each, truth in zip(completions, answer, strict=True)]
        return [result["score"] for result in task.reward(rows)]

    order = [place for _, place, _ in islice(draws(task.train, seed, task.shuffle), steps * prompts)]
    torch.manual_seed(seed)
    options = task.optimizer
    args = grpo_config(
        directory,
        prompts * samples,
        samples,
        max_completion_length=task.max_tokens,
        generation_kwargs={"suppress_tokens": banned},
        max_steps=steps,
        learning_rate=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        lr_scheduler_type=options.schedule,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        seed=seed,
    )
    return GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(task.checkpoint, dtype=torch.float32),
        reward_funcs=score,
        train_dataset=as_dataset([task.train[place] for place in order]),
        processing_class=processor,
        args=args,
    )


def measuring_callback(
    path: Path, accuracy: Callable[[], dict[str, float]], steps: int, eval_every: int, seconds: float
) -> Any:
    """A callback of TRL's trainer that writes a line for each step: its CPU seconds, and the accuracy where it is due.

    It ends the training after the step with which all steps have taken ``seconds``.
    """
    from transformers import TrainerCallback

    def write(row: dict[str, float]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    class Clock(TrainerCallback):
        used = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            write({"step": 0, **accuracy()})
            self.start = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = int(state.global_step)
            row = {"step": step, "timing_cpu_s/step": time.process_time() - self.start}
            self.used += row["timing_cpu_s/step"]
            control.should_training_stop = last = step == steps or self.used >= seconds
            if last or step % eval_every == 0:
                row |= accuracy()
            write(row | {"complete": 1} if last else row)
            self.start = time.process_time()

    return Clock()
