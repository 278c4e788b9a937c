"""TRL's half of ``benchmarks/dpo_step.py``: losses of its trainers on prepared pairs, and timed steps of `DPOTrainer`.

Run by the interpreter of an environment that has TRL; imports nothing of this project.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_step import load_processor, load_rows, plain_settings, run_half, train_in_turns

BETA, SMOOTHING, LORA_RANK = 0.1, 0.1, 8
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "robust": {"label_smoothing": SMOOTHING},
    "hinge": {},
    "ipo": {},
    "sigmoid_norm": {},
    "aot": {"label_smoothing": SMOOTHING},  # of one pair at a time: sigmoid with label smoothing
}


def rows_of(rows: Sequence[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` of pairs with decoded pictures, so that TRL decodes none while it is timed."""
    from datasets import Dataset

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [rows[number] for number in batch["number"]]
        answers = {
            name: [[{"role": "assistant", "content": row[name]}] for row in chosen] for name in ("chosen", "rejected")
        }
        return answers | {
            "prompt": [[{"role": "user", "content": row["text"]}] for row in chosen],
            "images": [[row["image"]] for row in chosen],
        }

    return Dataset.from_dict({"number": list(range(len(rows)))}).with_transform(look_up)


def load_model(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)


def options(directory: Path, rows: int) -> dict[str, Any]:
    """The fastest settings, and the workload's order of rows."""
    order = {"train_sampling_strategy": "sequential", "remove_unused_columns": False}
    return plain_settings(directory, rows) | order | {"beta": BETA, "max_length": None, "seed": 0}


def dpo_trainer(
    workload: Path, rows: Sequence[dict[str, Any]], pairs: int, model: str, adapters: Any = None, **more: Any
) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=load_model(workload / model),
        ref_model=None if adapters else load_model(workload / "checkpoint"),
        peft_config=adapters,
        args=DPOConfig(**options(workload / "trl", pairs) | more),
        train_dataset=rows_of(rows),
        processing_class=load_processor(workload / "checkpoint"),
    )


def losses(workload: Path, pairs: int) -> dict[str, float]:
    """The loss of each kind on the first pairs, of a policy that is not the reference."""
    import torch

    rows = load_rows(workload)[:pairs]
    found: dict[str, float] = {}
    for name, more in LOSSES.items():
        trainer = dpo_trainer(workload, rows, 1 if name == "aot" else pairs, "policy", loss_type=[name], **more)
        with torch.no_grad():
            each = [float(trainer.compute_loss(trainer.model, batch)) for batch in trainer.get_train_dataloader()]
        found[name] = sum(each) / len(each)
    return found | {"kto": kto_loss(workload, rows), "reward": reward_loss(workload, rows)}


def reward_loss(workload: Path, rows: Sequence[dict[str, Any]]) -> float:
    """The loss of `RewardTrainer`, which reads text only, on the pairs without their pictures."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    def conversations(name: str) -> list[Any]:
        return [[{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row[name]}] for row in rows]

    settings = {name: value for name, value in options(workload / "trl", len(rows)).items() if name != "beta"}
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(workload / "classifier", dtype=torch.float32),
        args=RewardConfig(**settings | {"remove_unused_columns": True}),
        train_dataset=Dataset.from_dict({name: conversations(name) for name in ("chosen", "rejected")}),
        processing_class=AutoTokenizer.from_pretrained(workload / "checkpoint"),
    )
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))))


def kto_loss(workload: Path, rows: Sequence[dict[str, Any]]) -> float:
    """The loss of `KTOTrainer` on all answers, the chosen ones first, as TRL makes them of pairs.

    The policy is the one that gives these answers more than the reference does, so that the estimate of the KL is above 0.
    """
    import torch
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    answers = [(row, name) for name in ("chosen", "rejected") for row in rows]

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [answers[number] for number in batch["number"]]
        return {
            "prompt": [[{"role": "user", "content": row["text"]}] for row, _ in chosen],
            "completion": [[{"role": "assistant", "content": row[name]}] for row, name in chosen],
            "label": [name == "chosen" for _, name in chosen],
            "images": [[row["image"]] for row, _ in chosen],
        }

    trainer = KTOTrainer(
        model=load_model(workload / "checkpoint"),
        ref_model=load_model(workload / "policy"),
        args=KTOConfig(**options(workload / "trl", len(answers)), undesirable_weight=2.0),
        train_dataset=Dataset.from_dict({"number": list(range(len(answers)))}).with_transform(look_up),
        processing_class=load_processor(workload / "checkpoint"),
    )
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))))


def measure(workload: Path, settings: dict[str, Any]) -> None:
    """Says how long each step of `DPOTrainer` takes."""
    adapters = None
    if settings["lora"]:
        from peft import LoraConfig

        adapters = LoraConfig(r=LORA_RANK, target_modules=r".*language_model\..*_proj")
    trainer = dpo_trainer(
        workload,
        load_rows(workload),
        settings["pairs"],
        "checkpoint",
        adapters,
        gradient_checkpointing=settings["checkpointing"],
        max_steps=settings["warmup"] + settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    train_in_turns(trainer)


if __name__ == "__main__":
    run_half(measure, lambda workload, settings: {"losses": losses(workload, settings["compared"])})
