"""TRL's half of ``benchmarks/dpo_step.py``: losses of its trainers on prepared pairs, and timed steps of `DPOTrainer`.

Run by the interpreter of an environment that has TRL; imports nothing of this project.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_step import await_turn, load_processor, load_rows, say

BETA, SMOOTHING = 0.1, 0.1
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "robust": {"label_smoothing": SMOOTHING},
    "hinge": {},
    "ipo": {},
    "sigmoid_norm": {},
    "aot": {"label_smoothing": SMOOTHING},  # of one pair at a time: sigmoid with label smoothing
}


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and of this process's processors."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    """Both since ``start``."""
    now = clocks()
    return {"step": now[0] - start[0], "processor": now[1] - start[1]}


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


def options(directory: Path, pairs: int) -> dict[str, Any]:
    """The fastest settings on a CPU: one forward pass and one optimizer step for all pairs of a step."""
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": pairs,
        "gradient_accumulation_steps": 1,
        "beta": BETA,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "seed": 0,
    }


def dpo_trainer(workload: Path, rows: Sequence[dict[str, Any]], pairs: int, model: str, **more: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=load_model(workload / model),
        ref_model=load_model(workload / "checkpoint"),
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
    """The loss of `KTOTrainer` on all answers, the chosen and the rejected one of each pair in turn."""
    import torch
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    answers = [(row, name) for row in rows for name in ("chosen", "rejected")]

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [answers[number] for number in batch["number"]]
        return {
            "prompt": [[{"role": "user", "content": row["text"]}] for row, _ in chosen],
            "completion": [[{"role": "assistant", "content": row[name]}] for row, name in chosen],
            "label": [name == "chosen" for _, name in chosen],
            "images": [[row["image"]] for row, _ in chosen],
        }

    trainer = KTOTrainer(
        model=load_model(workload / "policy"),
        ref_model=load_model(workload / "checkpoint"),
        args=KTOConfig(**options(workload / "trl", len(answers)), undesirable_weight=2.0),
        train_dataset=Dataset.from_dict({"number": list(range(len(answers)))}).with_transform(look_up),
        processing_class=load_processor(workload / "checkpoint"),
    )
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))))


def measure(workload: Path, settings: dict[str, Any]) -> None:
    """Runs a step in each turn of this half; it ends when the trainer is ready to load the rows of the next step."""
    from transformers import TrainerCallback

    more = {"precompute_ref_log_probs": True} if settings["kept_reference"] else {}
    trainer = dpo_trainer(
        workload,
        load_rows(workload),
        settings["pairs"],
        "checkpoint",
        max_steps=settings["warmup"] + settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        **more,
    )

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            await_turn()
            self.start = clocks()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say("STEP", since(self.start))
            if state.global_step < state.max_steps:
                await_turn()
            self.start = clocks()

    trainer.add_callback(Clock())
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path, help="directory that the other half prepared")
    workload = parser.parse_args().workload
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    import trl

    settings = json.loads((workload / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    found = losses(workload, settings["compared"])
    say("READY", {"name": f"TRL {trl.__version__}", "torch": torch.__version__, "losses": found})
    measure(workload, settings)


if __name__ == "__main__":
    main()
