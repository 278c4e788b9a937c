"""What slow environments cost: episodes whose environment takes 100 ms a step beside episodes whose environment takes none.

    OMP_NUM_THREADS=1 python benchmarks/environment_latency.py                    # 256 episodes, Hugging Face engine, CPU
    python benchmarks/environment_latency.py --engine vllm --model /tmp/3b        # of random_checkpoint.py, on a GPU

Both kinds of episodes run in turns, so that other work on the machine meets both, and each kind's median counts. No further round
begins after ``--seconds``: 256 episodes with turns of 48 tokens take about 400 decoding steps, with turns of 200 tokens 1,700.
Each play is printed when it ends. While some environments work, the engine decodes the episodes of others. Where all do so at
once, the engine waits; the table says how long. All turns end at a random token, so that they differ in length as those of a
policy do: the model needs random weights, as the small one has that is the default.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
# The folder of this file comes last: its dataproto.py is not the library.
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE), str(HERE)]

from PIL import Image  # noqa: E402

from recipes.demo.grid_walk import draw_grid  # noqa: E402
from recipes.demo.tiny_model import TinyConfig, make_tiny_model  # noqa: E402
from rollout.engine import SamplingParams, create_engine  # noqa: E402
from rollout.environments import (  # noqa: E402
    EpisodeLimits,
    EpisodePlan,
    EpisodeStart,
    Observation,
    TurnRenderer,
    environment_host,
)
from rollout.prompts import PromptBuilder  # noqa: E402

LIMIT = 1.15
"""The largest ratio of the medians that is not too much."""


class Clock:
    """An environment that shows a picture each turn, after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, row: Any, seed: int) -> Observation:
        self.turn = seed
        return Observation([self.picture()])

    def step(self, action: str) -> Observation:
        if self.seconds:
            time.sleep(self.seconds)
        self.turn += 1
        return Observation([self.picture()], reward=float(len(action)))

    def picture(self) -> Image.Image:
        return draw_grid(divmod(self.turn % 16, 4), divmod(self.turn % 7, 4))


@dataclass
class Played:
    """What playing took, and of that the time in which nothing was decoded because the loop waited for environments."""

    seconds: float = 0.0
    processor: float = 0.0
    idle: float = 0.0
    polls: int = 0  # decoding steps
    tokens: int = field(default=0)  # sampled


def play(engine: Any, renderer: TurnRenderer, options: argparse.Namespace, seconds: float) -> Played:
    """Plays all episodes with environments that take ``seconds`` a step."""
    row = {"raw_prompt": [{"role": "user", "content": "Which way?"}]}
    starts = [EpisodeStart(row, 2 * number + 1, number, f"u{number}") for number in range(options.episodes)]
    words = renderer.builder.config.get_text_config().vocab_size  # the tokenizer may have fewer
    stops = tuple(range(0, words, options.turn_tokens))  # a turn ends at a token in so many
    sampling = SamplingParams(max_tokens=4 * options.turn_tokens, stop_token_ids=stops, ignore_eos=True)
    found = Played()
    with counted(engine, found):
        start, began = time.perf_counter(), time.process_time()
        limits = EpisodeLimits(options.turns, seconds=600.0)
        episodes = EpisodePlan(partial(Clock, seconds), limits).play(engine, renderer, starts, sampling)
        found.seconds, found.processor = time.perf_counter() - start, time.process_time() - began
    found.tokens = sum(len(turn.token_ids) for episode in episodes for turn in episode.turns)
    turns = sum(len(episode.turns) for episode in episodes)
    print(
        f"{1000 * seconds:.0f} ms a step: {len(starts)} episodes, {turns} turns, {found.tokens} tokens and {found.polls} "
        f"decoding steps in {found.seconds:.1f} s",
        flush=True,
    )
    return found


@contextmanager
def counted(engine: Any, found: Played) -> Iterator[None]:
    """Counts decoding steps, and the time in which the loop waits for environments."""
    poll_engine, poll_host = engine.poll, environment_host.EnvironmentHost.poll

    def poll() -> Any:
        found.polls += 1
        return poll_engine()

    def wait(host: Any, *limits: float | None) -> Any:
        began = time.perf_counter()
        answers = poll_host(host, *limits)
        found.idle += time.perf_counter() - began
        return answers

    engine.poll, environment_host.EnvironmentHost.poll = poll, wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.poll
        environment_host.EnvironmentHost.poll = poll_host  # type: ignore[method-assign]


def table(rounds: dict[float, list[Played]]) -> str:
    """Medians of the rounds in Markdown, and the ratio of the times."""
    lines = [
        "| environment, ms a step | s | processor s | waiting for environments, s | decoding steps | tokens sampled |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for seconds, played in rounds.items():
        values = [median(getattr(each, name) for each in played) for name in ("seconds", "processor", "idle")]
        cells = [f"{1000 * seconds:.0f}", *(f"{value:.2f}" for value in values)]
        cells += [f"{median(each.polls for each in played):.0f}", str(played[0].tokens)]
        lines.append(f"| {' | '.join(cells)} |")
    none, slow = (median(each.seconds for each in played) for played in rounds.values())
    verdict = "less" if slow / none < LIMIT else "NOT less"
    return "\n".join([*lines, "", f"{slow / none:.3f} times as long: {verdict} than {LIMIT - 1:.0%} more"])


def measured(engine: Any, renderer: TurnRenderer, options: argparse.Namespace) -> dict[float, list[Played]]:
    """What each play took, by the seconds of a step of its environments, after a short one until the engine is warm."""
    rounds: dict[float, list[Played]] = {0.0: [], options.latency: []}
    play(engine, renderer, argparse.Namespace(**vars(options) | {"turns": 1}), 0.0)
    began = time.perf_counter()
    for number in range(options.rounds):
        if number and time.perf_counter() - began > options.seconds:
            break
        for seconds, played in rounds.items():
            played.append(play(engine, renderer, options, seconds))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4, help="of an episode (default: 4)")
    parser.add_argument("--turn-tokens", type=int, default=48, help="mean length of a turn, about (default: 48)")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of a step of the slow environment")
    parser.add_argument("--rounds", type=int, default=5, help="at most (default: 5)")
    parser.add_argument("--seconds", type=float, default=45.0, help="after which no round begins (default: 45)")
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--model", help="checkpoint; default: a small Qwen2.5-VL with random weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or str(make_tiny_model(Path(folder) / "model", 0, TinyConfig(min_pixels=56 * 56)))
        began = time.perf_counter()
        engine = create_engine(options.engine, path)
        print(f"the engine is up after {time.perf_counter() - began:.0f} s", flush=True)
        builder = PromptBuilder.from_pretrained(path, 4096)
        renderer = TurnRenderer(builder)
        rounds = measured(engine, renderer, options)
    print(f"\n{options.episodes} episodes of {options.turns} turns, {options.engine}, load {os.getloadavg()[0]:.1f}\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
