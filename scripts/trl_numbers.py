"""Writes tests/algorithms/trl_numbers.json: what TRL 1.16 computes on the batch of verl_numbers.json, and its defaults.

    pip install --no-deps --target /tmp/trl trl==1.16.0
    PYTHONPATH=/tmp/trl:tests python scripts/trl_numbers.py

Losses are those of `GRPOTrainer._compute_loss` with given log-probs in the place of a model's. Advantages are those of a trainer
that makes one step with a tiny model and given rewards.
"""

import json
import tempfile
from collections import defaultdict
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from helpers.moving_page import TRL, option_names

FOLDER = Path(__file__).parents[1] / "tests" / "algorithms"
FILE = FOLDER / "trl_numbers.json"
GIVEN = {
    name: torch.tensor(values)
    for name, values in json.loads((FOLDER / "verl_numbers.json").read_text())["inputs"].items()
}
MASK = GIVEN["response_mask"]
ADVANTAGES = [0.7, -1.2, 0.4, -0.3, 1.1, -0.8, 0.9]


def config(**options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none", **options)


def loss_of(advantages: list[float], old: Tensor | None, **options: Any) -> dict[str, Any]:
    """Loss and gradient with respect to log-probs of one micro-batch that is the whole batch."""
    args = config(bf16=False, **options)
    new = GIVEN["log_probs"].clone().requires_grad_()
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=args.steps_per_generation,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        **{
            name: getattr(args, name)
            for name in ("top_entropy_quantile", "off_policy_mask_threshold", "importance_sampling_level", "beta")
        },
        **{name: getattr(args, name) for name in ("loss_type", "use_vllm", "vllm_importance_sampling_correction")},
        max_completion_length=MASK.shape[1],
    )
    rows = MASK.shape[0]
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(MASK),
        "completion_mask": MASK,
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": old,
        "ref_per_token_logps": GIVEN["ref_log_prob"],
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"options": options, "loss": loss.item(), "gradient": new.grad.tolist()}


def losses() -> dict[str, Any]:
    old = GIVEN["old_log_probs"]
    sequence = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    return {
        "dapo": loss_of(ADVANTAGES, old, loss_type="dapo"),
        "two_sided": loss_of(ADVANTAGES, old, loss_type="dapo", delta=1.5),
        "grpo": loss_of(ADVANTAGES, old, loss_type="grpo"),
        "dr_grpo": loss_of(ADVANTAGES, old, loss_type="dr_grpo"),
        "bnpo": loss_of(ADVANTAGES, old, loss_type="bnpo"),
        "cispo": loss_of(ADVANTAGES, old, loss_type="cispo", epsilon_high=5.0),
        "cispo_by_default": loss_of(ADVANTAGES, old, loss_type="cispo"),
        "sapo": loss_of(ADVANTAGES, old, loss_type="sapo"),
        "gspo": loss_of(ADVANTAGES, old, loss_type="grpo", **sequence),
        "luspo": loss_of(ADVANTAGES, old, loss_type="luspo", **sequence),
    }


def kl_terms() -> dict[str, Any]:
    """The KL term by itself, averaged over tokens, where the policy has sampled the batch and where an older one has."""
    nothing, olds = [0.0] * len(ADVANTAGES), {"on": None, "off": GIVEN["old_log_probs"]}
    return {
        f"{policy}_policy_{'corrected' if corrected else 'plain'}": loss_of(
            nothing, old, loss_type="dapo", beta=1.0, use_bias_correction_kl=corrected
        )
        for policy, old in olds.items()
        for corrected in (True, False)
    }


class Captured(Exception):
    """Ends a run once its advantages are known."""


def advantages_of(rewards: list[float], scale_rewards: str, generations: int) -> list[float]:
    """The advantages of a step whose completions get these rewards, ``generations`` for each prompt."""
    words = ["<pad>", "<eos>", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="c")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), num_key_value_heads=2, **sizes))
    rows = len(rewards)

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            found.extend(inputs["advantages"].tolist())
            raise Captured

    found: list[float] = []
    trainer = Trainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards[: len(completions)],
        args=config(
            per_device_train_batch_size=rows,
            num_generations=generations,
            max_completion_length=2,
            max_steps=1,
            shuffle_dataset=False,
            bf16=False,
            scale_rewards=scale_rewards,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a b"] * (rows // generations)}),
        processing_class=fast,
    )
    try:
        trainer.train()
    except Captured:
        return found
    raise RuntimeError("the trainer has computed no loss")


def main() -> None:
    rewards = [0.0, 0.001, 1.0, 0.0]
    defaults, names = config(), (*option_names(TRL), "vllm_importance_sampling_correction")
    arguments = [name for name in names if name in signature(GRPOTrainer.__init__).parameters]
    numbers = {
        "made_by": f"scripts/trl_numbers.py with trl {version('trl')}, torch {torch.__version__.split('+')[0]}",
        "advantages": ADVANTAGES,
        "losses": losses(),
        "kl": kl_terms(),
        "group_advantages": {
            scale: {"rewards": rewards, "n": 2, "advantages": advantages_of(rewards, scale, 2)}
            for scale in ("group", "batch", "none")
        },
        "arguments": arguments,
        "defaults": {
            name: getattr(value := getattr(defaults, name), "value", value)
            for name in names
            if hasattr(defaults, name) and name not in ("output_dir", "report_to", "bf16", *arguments)
        },
    }
    FILE.write_text(json.dumps(numbers, allow_nan=False, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{FILE}: {FILE.stat().st_size:,} characters")


if __name__ == "__main__":
    main()
