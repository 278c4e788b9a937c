"""Seconds of a step on preferred answers with pictures on a CPU, compared with TRL's `DPOTrainer`, and the same losses.

    python benchmarks/dpo_step.py --trl-python /path/to/trl-venv/bin/python
    python benchmarks/dpo_step.py --trl-python /path/to/trl-venv/bin/python --size small --sides 140 420 --epoch later

Both sides load the same small Qwen2.5-VL and take the same pairs in the same order, tokens, pictures and reference included. Each
side is a process of its own on the same cores; they step in turns, one standing still while the other works; warm-up steps are
not counted. Before that, both compute each loss on the same rows with a policy that is not the reference; the program fails if
two differ by more than 1e-5. ``--golden FILE`` writes TRL's, for the tests.

The vision tower takes about as many operations for a token of a picture as the language model does, as in Qwen2.5-VL-3B. Both
sides have their fastest settings. After the first epoch ours reads the reference's log-probs from disk; TRL computes them in each
step, since it refuses to keep those of rows with pictures. Ratios of processor seconds count where other work has the same cores.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from synthetic_levels import make_problem
from trl_dpo_step import BETA, LORA_RANK, LOSSES, SMOOTHING
from trl_grpo_step import await_turn, clocks, load_rows, say, since

from grpo_step import OURS, parser_of, run_sides, steps_in_turns  # isort: skip  # which takes this folder from the path

TOLERANCE = 1e-5
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},  # 0.7 million parameters
    "small": {"hidden": 256, "heads": 8, "layers": 4, "vision_width": 128, "vision_depth": 4, "vision_heads": 4},
    "medium": {"hidden": 512, "heads": 16, "layers": 6, "vision_width": 256, "vision_depth": 6, "vision_heads": 8},
}
"""The models, as settings of `recipes.demo.tiny_model.TinyConfig`."""


def prepare(workload: Path, settings: dict[str, Any]) -> None:
    """Writes the workload of both sides: ``checkpoint/``, ``policy/``, ``problems.json`` with its pictures, ``settings.json``."""
    make_models(workload, SIZES[settings["size"]])
    rows, random = [], Random(0)
    for number in range(settings["pairs"] * (settings["warmup"] + settings["steps"])):
        problem, side = make_problem(number, level=3), random.randint(*settings["sides"])
        problem.image.resize((side, side)).save(workload / f"{number}.png")
        thought = "The figure shows what is asked for. " * settings["sentences"]
        answers = {
            "chosen": f"{thought}It is {problem.answer}.",
            "rejected": f"{thought}It is not {number % 10}, as I see.",
        }
        text = problem.text.removeprefix("<image>")
        rows.append({"text": text, "image": f"{number}.png", "answer": problem.answer} | answers)
    (workload / "problems.json").write_text(json.dumps(rows))
    (workload / "settings.json").write_text(json.dumps(settings))


def make_models(workload: Path, size: dict[str, int]) -> None:
    """The reference and a policy near it.

    Their template writes nothing after the end of an answer, which TRL would learn too. As models that were trained, they give
    placeholders of media no probability: here these are never sampled and have none in a log-prob, in TRL they have.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    from dataproto.vlm import family_of
    from recipes.demo.tiny_model import TinyConfig, make_tiny_model

    checkpoint = make_tiny_model(workload / "checkpoint", config=TinyConfig(**size, max_pixels=2**20))
    template = checkpoint / "chat_template.jinja"
    newline = (
        "<|im_end|>' + ('' if loop.last and message['role'] == 'assistant' else '\\n') }}\n{%- endfor %}\n{%- if add"
    )
    text = template.read_text()
    changed = text.replace("<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add", newline)
    if changed == text:
        sys.exit("the small model has another chat template")
    template.write_text(changed)
    shutil.copytree(checkpoint, workload / "policy")
    config = AutoConfig.from_pretrained(checkpoint)
    banned, generator = list(family_of(config).banned_ids(config)), torch.Generator().manual_seed(0)
    weights = load_file(checkpoint / "model.safetensors")
    for directory, noise in ((checkpoint, 0.0), (workload / "policy", 0.1)):
        for name, weight in weights.items():
            if weight.ndim > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
            if "embed_tokens" in name:
                weight[:, 0] = 1.0 if size else 0.1  # a number that all states of text have, large next to the others
            if "lm_head" in name:
                weight[banned], weight[:, 0] = 0.0, 0.0
                weight[banned, 0] = -30.0
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    make_classifier(workload)


def make_classifier(workload: Path) -> None:
    """A small text classifier of one label, ``classifier/``, and the same weights as a model and a value head, ``scored/``."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    from workers.roles.critic import HEAD_FILE

    tokenizer = AutoTokenizer.from_pretrained(workload / "checkpoint")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    classifier = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ends))
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(workload / "classifier")
    model = Qwen2ForCausalLM(classifier.config)
    model.model = classifier.model
    model.save_pretrained(workload / "scored")
    tokenizer.save_pretrained(workload / "scored")
    save_file({"weight": classifier.score.weight.detach().contiguous()}, workload / "scored" / HEAD_FILE)


def reward_loss(workload: Path, rows: Sequence[dict[str, Any]]) -> float:
    """The loss of the recipe ``reward-model`` on the pairs without their pictures, which TRL's trainer does not read."""
    from types import SimpleNamespace

    from recipes.reward_model import ranking_loss
    from recipes.run.preferences import sent
    from rollout.answers import AnswersBuilder
    from workers import CriticConfig, launch
    from workers.roles.critic import load_head

    builder = AnswersBuilder.from_pretrained(workload / "scored", max_prompt_length=4096).grouped("scored")
    texts = [row["prompt"][0]["content"].removeprefix("<image>") for row in rows]
    asked = [[{"role": "user", "content": text}] for text in texts]
    batch = builder([row | {"images": [], "prompt": prompt} for row, prompt in zip(rows, asked, strict=True)])
    with launch(CriticConfig(str(workload / "scored")), rollout=None) as roles:
        load_head(roles.actor.worker, workload / "scored")
        values = roles.actor.values(sent(batch))["values"]
    return float(ranking_loss(SimpleNamespace(values=values), batch)[0][:, 0].mean())


def pair_rows(workload: Path) -> list[dict[str, Any]]:
    """The pairs of the workload as rows of `rollout.answers.AnswersBuilder`."""
    from recipes.data.preferences import read_preference_row

    return [
        read_preference_row(
            {"prompt": f"<image>{row['text']}", "images": [row["image"]]}
            | {name: row[name] for name in ("chosen", "rejected")},
            number,
        )
        | {"uid": str(number)}
        for number, row in enumerate(load_rows(workload))
    ]


def losses(workload: Path, pairs: int) -> dict[str, float]:
    """The losses that TRL's half computes, through the builder, the packed model and the loss functions of the recipe."""
    from recipes.dpo import PreferenceConfig, compared, preference_loss
    from recipes.run.preferences import ReferenceLogProbs, sent
    from rollout.answers import AnswersBuilder
    from workers import ActorConfig, launch

    configs = {name: PreferenceConfig(loss=name, beta=BETA, **more) for name, more in LOSSES.items() if name != "aot"}
    configs["aot"] = PreferenceConfig(loss="sigmoid", beta=BETA, label_smoothing=SMOOTHING)
    kto = {"kto": PreferenceConfig(loss="kto", beta=BETA, undesirable_weight=2.0)}
    builder = AnswersBuilder.from_pretrained(workload / "checkpoint", max_prompt_length=4096)
    rows, found = pair_rows(workload)[:pairs], {}
    for policy, other, named in (("policy", "checkpoint", configs), ("checkpoint", "policy", kto)):
        actor = ActorConfig(str(workload / policy))
        reference = replace(actor, model_path=str(workload / other)).frozen()
        with tempfile.TemporaryDirectory() as folder, launch(actor, reference, rollout=None) as roles:
            for name, config in named.items():
                batch = builder.grouped("answers" if config.unpaired else "pairs")(rows)
                batch, kl = compared(roles, batch, ReferenceLogProbs(Path(folder, "reference")), {})
                loss = partial(preference_loss, config=config, kl=kl)
                passed = roles.actor.forward(sent(batch), loss, aggregation="seq-mean-token-mean")
                found[name] = passed.metrics["actor/loss"]
    return found | {"reward": reward_loss(workload, rows)}


def lengths_of(batch: Any) -> dict[str, str]:
    """The least, mean and largest numbers of tokens of prompts and answers."""
    answers = batch["response_mask"].sum(1)
    found = {"prompt": batch["attention_mask"].sum(1) - answers, "answers": answers}
    return {name: f"{int(n.min())}, {float(n.float().mean()):.0f}, {int(n.max())}" for name, n in found.items()}


def measure(workload: Path) -> None:
    """Our side, in this process: runs a step in each of its turns."""
    import torch

    from recipes.dpo import PreferenceConfig, dpo_step
    from recipes.run.preferences import ReferenceLogProbs
    from recipes.run.supervised import measure_rows
    from rollout.answers import AnswersBuilder
    from workers import ActorConfig, OptimizerConfig, launch

    settings = json.loads((workload / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    found = losses(workload, settings["compared"])
    checkpoint = str(workload / "checkpoint")
    builder = AnswersBuilder.from_pretrained(checkpoint, max_prompt_length=4096)
    optimizer = OptimizerConfig(lr=settings["learning_rate"])
    actor = ActorConfig(checkpoint, optimizer=optimizer, lora_rank=LORA_RANK if settings["lora"] else 0)
    config, reference = PreferenceConfig(beta=BETA), ReferenceLogProbs(workload / "reference_log_probs.bin")
    rows, pairs = pair_rows(workload), settings["pairs"]
    with launch(actor, actor.frozen(), rollout=None) as roles:
        for start in range(0, len(rows) if settings["epoch"] == "later" else 0, pairs):
            reference.add(roles, builder(rows[start : start + pairs]))
        lengths = lengths_of(builder(rows))
        say("READY", {"name": OURS, "torch": torch.__version__, "losses": found} | lengths)
        for start in range(0, len(rows), pairs):
            await_turn()
            began = clocks()
            data, metrics = dpo_step(roles, builder(rows[start : start + pairs]), config, reference)
            measure_rows(data, metrics | {"timing_s/step": 1.0}, 1)
            say("STEP", since(began))


def compare(workload: Path, settings: dict[str, Any], commands: Sequence[Sequence[str]]) -> str:
    """Compares the losses, lets the sides step in turns, and returns the measured steps as text."""
    work = (
        f"{settings['pairs']} pairs, size {settings['size']}, pictures of {' to '.join(map(str, settings['sides']))} pixels, "
        f"{settings['sentences']} sentences before an answer, {settings['epoch']} epoch"
        f"{', adapters' if settings['lora'] else ''}{', TRL checkpoints' if settings['checkpointing'] else ''}"
    )
    head, sides, steps = steps_in_turns(workload, settings, commands, work)
    lines = [head, f"tokens of the prompts {sides[0].facts['prompt']}, of the answers {sides[0].facts['answers']}"]
    medians = {
        name: {clock: median(step[clock] for step in each) for clock in ("step", "processor")}
        for name, each in steps.items()
    }
    for name, each in steps.items():
        found = " ".join(f"{step['step']:.3f}" for step in each)
        wall, processor = medians[name].values()
        lines.append(f"{name}: median {wall:.3f} s, {processor:.3f} s of processors ({found})")
    ours, theirs = sides[0].facts["losses"], sides[-1].facts["losses"]
    if len(sides) > 1:
        mine, other = medians.values()
        for clock, what in (("step", "seconds"), ("processor", "seconds of processors")):
            ratio = mine[clock] / other[clock]
            lines.append(f"ratio of medians, {what}: {ratio:.3f} ({1 / ratio:.2f} times as fast as TRL)")
    lines += [f"loss {name}: {ours[name]:.7f} and {theirs[name]:.7f}" for name in theirs]
    if wrong := [
        name for name in theirs if not abs(ours[name] - theirs[name]) <= TOLERANCE * max(1, abs(theirs[name]))
    ]:
        sys.exit("\n".join([*lines, f"more than {TOLERANCE} apart: {', '.join(wrong)}"]))
    if settings["golden"] and len(sides) > 1:
        facts = {name: sides[1].facts[name] for name in ("name", "torch", "losses")}
        Path(settings["golden"]).write_text(json.dumps(facts | {"settings": settings}, indent=2) + "\n")
    return "\n".join(lines)


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, 12, 2)
    parser.add_argument("--pairs", type=int, default=16, help="pairs a step (default: 16)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="size of the model (default: tiny)")
    parser.add_argument(
        "--sides", type=int, nargs=2, default=(168, 168), help="least and largest side of a picture (default: 168 168)"
    )
    parser.add_argument("--sentences", type=int, default=1, help="sentences before each answer (default: 1)")
    parser.add_argument("--compared", type=int, default=6, help="pairs whose losses are compared (default: 6)")
    parser.add_argument(
        "--epoch",
        choices=("first", "later"),
        default="first",
        help="in a later one our reference is on disk (default: first)",
    )
    parser.add_argument(
        "--lora", action="store_true", help="train adapters of the language model, whose base is the reference"
    )
    parser.add_argument("--checkpointing", action="store_true", help="TRL recomputes activations, as by its default")
    parser.add_argument("--golden", help="file for TRL's losses")
    return parser.parse_args(argv)


def main() -> None:
    if sys.argv[1:2] == ["measure"]:  # our side's own process
        measure(Path(sys.argv[2]))
    else:
        run_sides(__file__, arguments_of(), prepare, compare)


if __name__ == "__main__":
    main()
