"""TRL's half of ``benchmarks/walk_beside_trl.py``: `GRPOTrainer` with an ``environment_factory`` on the drawn grid.

TRL's environments are tools of a chat template, whose calls are parsed from the text. Here the words of the walk are the calls:
the template writes the call ``up()`` as ``up``, and the picture that it returns as a message of the user. So prompts and turns
have the tokens of our half, and the small model is warmed up for both. TRL ends an episode when the policy calls no tool or after
as many turns as are allowed: an environment cannot end it. Moves after the goal is reached change nothing here.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trl_grpo_step import grpo_config, load_processor

from recipes.data.loader import draws
from recipes.demo.grid_walk import MOVES, GridWalk
from workers.training.optimizer import OptimizerConfig

TURN_TOKENS, EPISODE_TOKENS = 3, 256
CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- call.function.name }}
{%- if call.function.arguments %}
{{- call.function.arguments | tojson }}
{%- endif %}
{%- endfor %}
"""


class WalkTools:
    """The walk as TRL has environments: public methods are tools, ``get_reward`` is the reward."""

    def reset(self, **row: Any) -> list[dict[str, Any]]:
        self._walk, self._reward, self._done = GridWalk(), 0.0, False
        return self._seen(self._walk.reset(row, 0).content)

    def up(self) -> list[dict[str, Any]]:
        """Moves up."""
        return self._moved("up")

    def down(self) -> list[dict[str, Any]]:
        """Moves down."""
        return self._moved("down")

    def left(self) -> list[dict[str, Any]]:
        """Moves to the left."""
        return self._moved("left")

    def right(self) -> list[dict[str, Any]]:
        """Moves to the right."""
        return self._moved("right")

    def get_reward(self) -> float:
        return self._reward

    def _moved(self, word: str) -> list[dict[str, Any]]:
        shown = self._walk.step("" if self._done else word)
        self._reward, self._done = self._reward + shown.reward, self._done or shown.done
        return self._seen(shown.content)

    def _seen(self, content: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"type": "image", "image": image} for image in content]


def walking_processor(checkpoint: Path) -> Any:
    """The small model's processor, with a template that writes calls and pictures as our half does."""
    processor = load_processor(checkpoint)
    template = processor.chat_template
    role = "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    end = "{{- '<|im_end|>\\n' }}\n{%- endfor %}"
    if template.count(role) != 1 or template.count(end) != 1:
        raise ValueError("the small model's chat template has changed: rewrite what this benchmark adds to it")
    as_user = role.replace("message['role']", "('user' if message['role'] == 'tool' else message['role'])")
    template = template.replace(role, as_user).replace(end, CALLS + end)
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.tokenizer.response_schema = {}  # TRL then leaves the parser as it is
    processor.tokenizer.parse_response = parser(processor.tokenizer)
    return processor


def parser(tokenizer: Any) -> Callable[[Sequence[int]], dict[str, Any]]:
    """The first word of a response as a call; no call for other words."""

    def parse(ids: Sequence[int]) -> dict[str, Any]:
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        word = (text.split() or [""])[0].lower()
        if word not in MOVES:
            return {"role": "assistant", "content": text}
        call = {"type": "function", "function": {"name": word, "arguments": {}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    return parse


def as_dataset(rows: Sequence[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` of the walk's rows; the environment adds the first picture to the user's empty message."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": [*row["prompt"], {"role": "user", "content": ""}], "extra_info": row["extra_info"]} for row in rows]
    )


def make_trainer(
    checkpoint: Path,
    rows: Any,
    directory: Path,
    seed: int,
    steps: int,
    prompts: int,
    samples: int,
    turns: int,
    optimizer: OptimizerConfig,
    entropy_coef: float,
    banned: Sequence[int],
) -> Any:
    """TRL's trainer on the rows that our half draws, in their order, with its optimizer."""
    import torch
    from transformers import AutoModelForImageTextToText
    from trl import GRPOTrainer

    order = [place for _, place, _ in islice(draws(rows, seed, False), steps * prompts)]
    torch.manual_seed(seed)
    args = grpo_config(
        directory,
        prompts * samples,
        samples,
        max_completion_length=EPISODE_TOKENS,
        max_tool_calling_iterations=turns,
        generation_kwargs={"suppress_tokens": list(banned), "max_new_tokens": TURN_TOKENS},
        max_steps=steps,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        entropy_coef=entropy_coef,
        seed=seed,
    )
    return GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32),
        train_dataset=as_dataset([rows[place] for place in order]),
        processing_class=walking_processor(checkpoint),
        args=args,
        reward_funcs=[],
        environment_factory=WalkTools,
    )


def train_and_measure(
    trainer: Any,
    accuracy: Callable[[Any], float],
    eval_every: int,
    target: float,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Trains, and reports seconds and processor seconds of the steps so far, with the accuracy where it is due.

    It ends once the accuracy reaches the target.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        seconds = processor = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            report({"step": 0, "seconds": 0.0, "processor": 0.0, "accuracy": accuracy(trainer.model)})
            self.start()

        def start(self) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds += time.perf_counter() - self.began[0]
            self.processor += time.process_time() - self.began[1]
            row = {"step": int(state.global_step), "seconds": self.seconds, "processor": self.processor}
            if state.global_step % eval_every == 0 or state.global_step == state.max_steps:
                row["accuracy"] = accuracy(trainer.model)
                control.should_training_stop = row["accuracy"] >= target
            report(row)
            self.start()

    trainer.add_callback(Clock())
    trainer.train()
