"""A full GRPO step with the sizes of the published Geometry3K runs, on the GPUs of one machine: seconds by phase, tokens/s, MFU.

    python benchmarks/geo3k_step.py --gpus 4 --size 7b                  # 512 prompts x 5 samples, mini-batches of 128, KL
    python benchmarks/geo3k_step.py --gpus 2 --size tiny --engine hf --prompts 8 --minibatch 4 --max-tokens 32       # anywhere
    python benchmarks/geo3k_step.py --gpus 2 --size 7b --lora-rank 0 64                     # all weights, then adapters
    python benchmarks/geo3k_step.py --gpus 2 --size qwen3.5-9b --prompts 32 --minibatch 32 --max-tokens 512 --whole-responses \
        --compile --activation-checkpointing selective --token-budget 6144 --unsharded weights  # the step of verl#7203
    python benchmarks/geo3k_step.py --gpus 4 --size 7b --staleness 0 1 2 --steps 4 --compile --token-budget 10240 \
        --activation-checkpointing selective --unsharded gradients     # decoding ahead compared with the plain step

Prompts are about 350 tokens with one image; random weights never end a response, so its length is sampled: log-normal with mean
400, at most 2,048, and in proportion with other ``--max-tokens``; with ``--whole-responses`` each has ``--max-tokens``. Weights,
data and recipe are otherwise those of a real run: `recipes.grpo.grpo_step` over `launch(on="ray")`.

``--staleness`` times decoding ahead, ``--rollout.staleness N``, next to the plain step: first with engines that share the GPUs
of the models, then with engines on ``--apart`` GPUs of their own, by default half of them. With 0 and shared engines the step is
the plain one, and not timed again. Give ``--steps`` of 4 or more: it takes some steps until as many samples are carried
into a step as out of it. What this saves of decoding only, on one GPU, ``carried_decoding.py`` tells.
"""

import argparse
import json
import logging
import math
import os
import random
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]
# Ray's processes find the project, and after it this file.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])

from PIL import Image, ImageDraw  # noqa: E402

from dataproto import DataProto, object_array  # noqa: E402
from recipes.grpo import GRPOConfig, grpo_step, grpo_step_in_parts  # noqa: E402
from recipes.rewards import load_reward  # noqa: E402
from recipes.run.carrying import carry_samples  # noqa: E402
from recipes.run.look_ahead import LookAhead  # noqa: E402
from recipes.run.phases import StepState  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from workers import ActorConfig, launch  # noqa: E402
from workers.model.model_config import UNSHARDED  # noqa: E402
from workers.ranks.layout import Layout  # noqa: E402
from workers.roles.rollout_worker import RolloutConfig  # noqa: E402

MEAN_SHARE, LENGTH_SIGMA = 400 / 2048, 0.8  # mean length of a response, of the longest
SIDE = 15  # of an image, in tokens


def drawn_length(seed: int, limit: int) -> int:
    """The number of tokens of a response, log-normal, from its random stream."""
    mean = math.log(MEAN_SHARE * limit) - LENGTH_SIGMA**2 / 2
    return max(min(int(random.Random(seed).lognormvariate(mean, LENGTH_SIGMA)), limit), 1)


def rest_of(seed: int, drawn: int, rest: int) -> int:
    """The number of tokens that follow ``drawn`` ones of a response whose limit is ``rest`` further ones."""
    return max(drawn_length(seed, rest + drawn) - drawn, 1)


def vllm_of_drawn_lengths() -> type:
    """The vLLM engine, with responses of sampled lengths."""
    from rollout.vllm.engine import VLLMEngine
    from rollout.vllm.requests import RunningRequests

    class DrawnRequests(RunningRequests):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._shortened: WeakSet[Any] = WeakSet()  # a request that was interrupted comes again

        def add(self, name: str, row: Any, *args: Any) -> None:
            if row not in self._shortened:
                rest = rest_of(row.request.seed, row.request.drawn, row.sampling.max_tokens)
                row.sampling = replace(row.sampling, max_tokens=rest)
                self._shortened.add(row)
            super().add(name, row, *args)

    class DrawnLengths(VLLMEngine):
        requests_type = DrawnRequests

    return DrawnLengths


def hf_of_drawn_lengths() -> type:
    """The Hugging Face engine, with responses of sampled lengths."""
    from rollout.hf.engine import HFEngine

    class DrawnLengths(HFEngine):
        def _add(self, request: Any, sampling: Any, *args: Any, **options: Any) -> int:
            rest = rest_of(request.seed, request.drawn, sampling.max_tokens)
            return super()._add(request, replace(sampling, max_tokens=rest), *args, **options)

    return DrawnLengths


OF_DRAWN_LENGTHS = {"vllm": "geo3k_step:VLLMOfDrawnLengths", "hf": "geo3k_step:HFOfDrawnLengths"}
"""Engines whose responses have sampled lengths, by the name of the engine."""


def __getattr__(name: str) -> Any:
    makers = {"VLLMOfDrawnLengths": vllm_of_drawn_lengths, "HFOfDrawnLengths": hf_of_drawn_lengths}
    if name not in makers:
        raise AttributeError(name)
    return makers[name]()


def image_pixels(size: str) -> int:
    """The side of an image of 15 x 15 tokens."""
    return SIDE * (32 if "qwen3.5" in size else 28)


def rows(count: int, side: int = 28 * SIDE) -> list[dict[str, Any]]:
    """Rows for `PromptBuilder` with one image of ``side`` pixels and about 120 tokens of text each."""
    found = []
    for number in range(count):
        rng = random.Random(number)
        picture = Image.new("RGB", (side, side), "white")
        corners = [(rng.randrange(side), rng.randrange(side)) for _ in range(3)]
        ImageDraw.Draw(picture).polygon(corners, outline="black", width=3)
        text = "<image>In the figure, find the length of the side. " + " ".join(
            str(rng.randrange(100)) for _ in range(30)
        )
        found.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "images": [picture],
                "data_source": "drawn",
                "reward_model": {"style": "rule", "ground_truth": str(rng.randrange(100))},
            }
        )
    return found


class Steps:
    """A loader of the same prompts in each step, with uids of their own."""

    def __init__(self, prompts: DataProto) -> None:
        self.prompts, self.number = prompts, 0
        self.skipped: dict[int, str] = {}

    def __next__(self) -> DataProto:
        step = self.prompts[:]
        step["uid"] = object_array([f"{self.number}-{row}" for row in range(len(step))])
        self.number += 1
        return step

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="processes; without GPUs they share the CPU")
    parser.add_argument("--size", default="7b", choices=["tiny", "3b", "7b", "tiny-qwen3.5", "qwen3.5-9b"])
    parser.add_argument("--engine", default="vllm", choices=sorted(OF_DRAWN_LENGTHS))
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--minibatch", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--whole-responses", action="store_true", help="each response has --max-tokens tokens")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--activation-checkpointing", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--flash-attention", default="torch", choices=["torch", "fa4"])
    parser.add_argument("--scoring-token-budget", type=int, help="default: twice --token-budget")
    parser.add_argument("--unsharded", default="auto", choices=("auto", *UNSHARDED), help="between micro-batches")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one warm-up step")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[], help="--rollout.staleness to time next to the plain step"
    )
    parser.add_argument("--apart", type=int, help="GPUs of separate engines, for --staleness; default: half, 0: none")
    parser.add_argument("--rollout", default="{}", help="JSON: options of the engine")
    parser.add_argument("--rollout-apart", default="{}", help="JSON: those that separate engines have in addition")
    parser.add_argument(
        "--lora-rank",
        type=int,
        nargs="+",
        default=[0],
        help="ranks of adapters, a run each; 0: all weights are trained",
    )
    parser.add_argument(
        "--lora-rollout", default="{}", help="JSON: further options of the engine in runs with adapters"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/random-checkpoints"), help="folder for the checkpoints"
    )
    return parser.parse_args()


Figures = dict[str, float]


def timed_steps(
    arguments: argparse.Namespace, roles: Any, prompts: DataProto, staleness: int | None, apart: bool
) -> list[Figures]:
    """Seconds, tokens/s and phases of a warm-up step and the measured ones."""
    state, loader, steps = StepState(), LookAhead(Steps(prompts), background=True), 1 + arguments.steps
    loader.send = roles.send_ahead
    original = roles.rollout
    # One step more than are timed: the last step of a run carries no samples on, and waits for the longest of them.
    batches, measure = carry_samples(roles, loader, staleness, state, steps + (not apart), apart)
    make_step = grpo_step_in_parts if staleness == 0 else grpo_step
    correction = "token" if "quantization" in json.loads(arguments.rollout) else "none"
    config = GRPOConfig(n=arguments.samples, kl_coef=0.01, minibatch=arguments.minibatch, correction=correction)
    sampling, found = config.sampling(arguments.max_tokens, seed=0), list[Figures]()
    for number in range(steps):
        started = time.perf_counter()
        data, metrics = make_step(roles, next(batches), config, sampling, state)
        seconds = time.perf_counter() - started
        tokens = int(data["attention_mask"].sum())
        figures = {"seconds": seconds, "tokens/s/GPU": tokens / seconds / arguments.gpus}
        figures |= {name.removeprefix("timing_s/"): value for name, value in metrics.items() if "timing" in name}
        figures |= {name: value for name, value in metrics.items() if name.startswith("perf/")}
        measured = measure(data, metrics | {"timing_s/step": seconds}, roles.devices)
        figures |= {name: value for name, value in {**metrics, **measured}.items() if name.startswith("training/")}
        print(f"step {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)
        found.append(figures)
    loader.close()
    roles.rollout = original
    return found


def timed_forms(
    arguments: argparse.Namespace, path: str, prompts: DataProto, forms: list[int | None], rank: int, apart: int = 0
) -> dict[str, list[Figures]]:
    """The steps of each form, by its name, with adapters if their ``rank`` is not 0, and engines on ``apart`` GPUs of their own;
    0: on those of the models.
    """
    actor = ActorConfig(
        path,
        token_budget=arguments.token_budget,
        activation_checkpointing=arguments.activation_checkpointing,
        compile=arguments.compile,
        flash_attention=arguments.flash_attention,
        scoring_token_budget=arguments.scoring_token_budget,
        unsharded=arguments.unsharded,
        lora_rank=rank,
    )
    engine = arguments.engine if arguments.whole_responses else OF_DRAWN_LENGTHS[arguments.engine]
    options = json.loads(arguments.rollout) | (json.loads(arguments.lora_rollout) if rank else {})
    options |= json.loads(arguments.rollout_apart) if apart else {}
    found, started = {}, time.perf_counter()
    with launch(
        actor=actor,
        reference=actor.frozen(),
        reward=load_reward("geo3k"),
        rollout=RolloutConfig(path, engine, options),
        on="ray",
        layout=Layout(dp=arguments.gpus - apart, rollout=apart),
        timeout_s=500,
        show_logs=True,
    ) as roles:
        print(roles.start_seconds, flush=True)
        print(f"roles launched: {time.perf_counter() - started:.0f} s", flush=True)
        for staleness in forms:
            name = "plain" if staleness is None else f"staleness {staleness}"
            name += f", engines on {apart} of {arguments.gpus} GPUs" if apart else ""
            name += f", adapters of rank {rank}" if rank else ""
            print(f"\n{name}", flush=True)
            found[name] = timed_steps(arguments, roles, prompts, staleness, bool(apart))
    return found


def table(found: dict[str, list[Figures]]) -> str:
    """Medians of the steps after the first, in Markdown, and how often each form's step fits into the first one's.

    >>> steps = [{"seconds": 9.0}, {"seconds": 3.0}], [{"seconds": 9.0, "x": 1}, {"seconds": 2.0, "x": 4}]
    >>> print(table(dict(zip(("plain", "other"), steps))))
    | figure | plain | other |
    |---|---|---|
    | seconds | 3 | 2 |
    | x |  | 4 |
    | times as fast | 1 | 1.5 |
    """
    rows = {name: None for steps in found.values() for name in steps[-1]}
    lines = [f"| figure | {' | '.join(found)} |", "|---" * (1 + len(found)) + "|"]
    medians = {
        form: {name: median(step[name] for step in steps[1:] if name in step) for name in steps[-1]}
        for form, steps in found.items()
    }
    first = next(iter(medians.values()))["seconds"]
    for each in medians.values():
        each["times as fast"] = first / each["seconds"]
    for name in [*rows, "times as fast"]:
        cells = [f"{each[name]:.4g}" if name in each else "" for each in medians.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("workers").setLevel(logging.INFO)  # how long each role takes to come up
    path = str(
        runpy.run_path(str(HERE / "random_checkpoint.py"))["make"](arguments.model / arguments.size, arguments.size)
    )
    builder = PromptBuilder.from_pretrained(path, 1024)
    started = time.perf_counter()
    prompts = builder(rows(arguments.prompts, image_pixels(arguments.size)))
    print(
        f"prompts: {time.perf_counter() - started:.1f} s, {prompts['attention_mask'].sum(1).float().mean():.0f} tokens",
        flush=True,
    )
    found, apart = dict[str, list[Figures]](), arguments.gpus // 2 if arguments.apart is None else arguments.apart
    for rank in arguments.lora_rank:
        found |= timed_forms(arguments, path, prompts, [None, *(each for each in arguments.staleness if each)], rank)
        if arguments.staleness and apart:
            found |= timed_forms(arguments, path, prompts, list(arguments.staleness), rank, apart)
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
