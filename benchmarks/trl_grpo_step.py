"""TRL's half of ``benchmarks/grpo_step.py``: times `GRPOTrainer` steps on a workload that the other half prepared.

Run by the interpreter of an environment that has TRL; imports nothing of this project.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def score(response: str, answer: str) -> float:
    """The reward of both halves: the answer somewhere in the response, and a little for digits.

    It differs between samples of an untrained model, so that there is a gradient to compute.

    >>> score("it is 40", "40"), score("nothing", "40")
    (0.925, 0.0)
    """
    digits = sum(character.isdigit() for character in response)
    return 0.9 * (answer in response) + 0.1 * digits / max(len(response), 1)


def load_rows(workload: Path) -> list[dict[str, Any]]:
    """The problems of the workload with decoded pictures: ``text``, ``answer`` and ``image`` (PIL)."""
    from PIL import Image

    rows = json.loads((workload / "problems.json").read_text())
    return [row | {"image": Image.open(workload / row["image"]).convert("RGB")} for row in rows]


def in_memory_dataset(rows: Sequence[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` with decoded pictures, so that TRL decodes none while it is timed."""
    from datasets import Dataset

    def look_up(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = [rows[number] for number in batch["number"]]
        return {
            "prompt": [[{"role": "user", "content": row["text"]}] for row in chosen],
            "images": [[row["image"]] for row in chosen],
            "answer": [row["answer"] for row in chosen],
        }

    return Dataset.from_dict({"number": list(range(len(rows)))}).with_transform(look_up)


def load_processor(checkpoint: Path) -> Any:
    """The processor of Qwen2.5-VL; without torchvision, which its video part needs, a processor without that part.

    The workload has no videos, so both take the same time.
    """
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor

    class ImageTextProcessor(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)  # takes None for the video processor

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    image_processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    return ImageTextProcessor(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)


def timed_trainer() -> type:
    """A `GRPOTrainer` class whose `step` holds the seconds of the current step's phases and its numbers of rows and tokens."""
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.step: dict[str, float] = {}
            super().__init__(*args, **kwargs)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            self.step["gen"] = time.perf_counter() - start
            prompts, completions = result[:2]
            self.step["rows"] = len(prompts)
            self.step["prompt_tokens"] = sum(map(len, prompts))
            self.step["response_tokens"] = sum(map(len, completions))
            return result

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._calculate_rewards(*args, **kwargs)
            self.step["reward"] = time.perf_counter() - start
            return result

    return TimedTrainer


def plain_settings(directory: Path, rows: int) -> dict[str, Any]:
    """The fastest settings of a trainer on a CPU: one forward pass and one optimizer step for all rows, and no reports."""
    off = ("bf16", "gradient_checkpointing", "dataloader_pin_memory")
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **dict.fromkeys(off, False),
    }


def grpo_config(directory: Path, rows: int, samples: int, **options: Any) -> Any:
    """`plain_settings` of `GRPOTrainer` with this project's loss."""
    from trl import GRPOConfig

    return GRPOConfig(
        **plain_settings(directory, rows),
        num_generations=samples,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",  # the mean over tokens, as ours
        temperature=1.0,
        shuffle_dataset=False,
        **options,
    )


def make_trainer(workload: Path, settings: dict[str, Any]) -> Any:
    """The trainer of `timed_trainer` on the workload, with the settings of `grpo_config`."""
    import torch
    from transformers import AutoModelForImageTextToText

    def reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        return [score(completion[0]["content"], truth) for completion, truth in zip(completions, answer)]

    checkpoint = workload / "checkpoint"
    processor = load_processor(checkpoint)
    args = grpo_config(
        workload / "trl",
        settings["prompts"] * settings["samples"],
        settings["samples"],
        max_completion_length=settings["max_tokens"],
        # Never an end token, so that all rows reach the limit, as in our half.
        generation_kwargs={"suppress_tokens": [*settings["banned_ids"], processor.tokenizer.eos_token_id]},
        max_steps=settings["warmup"] + settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        seed=0,
    )
    return timed_trainer()(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=in_memory_dataset(load_rows(workload)),
        processing_class=processor,
    )


def say(word: str, facts: dict[str, Any]) -> None:
    """Reports to the comparing process: one line with a word and JSON, among other output."""
    print(f"\n{word} {json.dumps(facts)}", flush=True)


def await_turn() -> None:
    """Waits for the comparing process. The other half is idle while this one runs a step."""
    if not sys.stdin.readline():
        sys.exit("nobody waits for the next step")


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and of this process's processors."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    """Both since ``start``."""
    now = clocks()
    return {"step": now[0] - start[0], "processor": now[1] - start[1]}


def train_in_turns(trainer: Any, facts: Callable[[dict[str, float]], dict[str, float]] = dict) -> None:
    """Runs a step in each turn of this half, which ends when the trainer is ready to load the rows of the next step.

    ``facts`` makes what is said of a step from its seconds.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            await_turn()
            self.start = clocks()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say("STEP", facts(since(self.start)))
            if state.global_step < state.max_steps:
                await_turn()
            self.start = clocks()

    trainer.add_callback(Clock())
    trainer.train()


def measure(workload: Path, settings: dict[str, Any]) -> None:
    """Says how long the phases of each step take."""
    trainer = make_trainer(workload, settings)

    def phases(seconds: dict[str, float]) -> dict[str, float]:
        update = seconds["step"] - trainer.step["gen"] - trainer.step["reward"]
        return trainer.step | {"step": seconds["step"], "update": update}

    train_in_turns(trainer, phases)


def run_half(
    measure: Callable[[Path, dict[str, Any]], None],
    facts: Callable[[Path, dict[str, Any]], dict[str, Any]] = lambda *_: {},
) -> None:
    """What TRL's half of a benchmark does: it says its ``facts`` of the workload, then measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path, help="directory that the other half prepared")
    workload = parser.parse_args().workload
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    import trl

    settings = json.loads((workload / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    say("READY", {"name": f"TRL {trl.__version__}", "torch": torch.__version__} | facts(workload, settings))
    measure(workload, settings)


if __name__ == "__main__":
    run_half(measure)
