"""Agents through their own clients next to native environments, which show the same.

    OMP_NUM_THREADS=1 python benchmarks/agents.py learning --work outputs/agents     # seconds to an accuracy
    OMP_NUM_THREADS=1 python benchmarks/agents.py overhead                          # processor time of a request
    python benchmarks/agents.py rate --engine vllm --model CHECKPOINT               # tokens a second, on a GPU

``learning`` trains the small models of ``dataproto walk`` and ``dataproto zoom`` from the same warm-up with the same seeds, in
their environments and by the agents of ``docs/picture_agents.py``, and prints when each run reaches the accuracy that is asked
for: seconds of its steps, without evaluations, and the processor time of the whole run for each step. A run that is complete in
WORK is read and not run again.

``overhead`` plays conversations of four turns, each turn with a picture, on an engine that answers at once: by
`EpisodePlan`, and by `AgentPlan` with an agent that uses httpx and sockets, and with one that uses OpenAI's client without
sockets. It prints the processor time of the loop and of the endpoint for each request, and that of the agents' own thread, which
is the client's; without sockets the endpoint is in that thread. The last line is the floor: OpenAI's client alone, with a
transport that answers at once.

``rate`` plays such conversations, with larger pictures and replies of about ``--turn-tokens``, on a real engine in the same three
ways, and with the agents in a process of their own. It prints the medians of tokens a second and their share of those of
`EpisodePlan`. CHECKPOINT is one of ``random_checkpoint.py``; by default a small model. An episode ends early after a reply
without an end. Give more conversations than the engine decodes at a time (``--options '{"max_num_seqs": 128}'``): else the
longest episode decides.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import httpx  # noqa: E402
import httpx2  # noqa: E402
import openai  # noqa: E402
from PIL import Image  # noqa: E402

from recipes.demo.tiny_model import make_tiny_model  # noqa: E402
from recipes.walk import WALK  # noqa: E402
from recipes.watch.metrics_file import METRICS_FILE, read_metrics  # noqa: E402
from rollout.agents import agent_host, agent_loop, in_process  # noqa: E402
from rollout.agents.agent import task_messages  # noqa: E402
from rollout.agents.messages import Ask, Reply  # noqa: E402
from rollout.agents.wire_replies import chat_body  # noqa: E402
from rollout.engine import Completion, SamplingParams, create_engine  # noqa: E402
from rollout.environments import EpisodeLimits, EpisodePlan, EpisodeStart, Observation, TurnRenderer  # noqa: E402
from rollout.prompts import PromptBuilder  # noqa: E402
from rollout.sampling import draw_tokens  # noqa: E402

TARGETS = {"walk": 0.9, "zoom": 0.85}
SETTINGS = {"walk": "--steps 100", "zoom": "--steps 120 --optimizer.lr 1e-3"}
AGENTS = {
    "walk": {"environment": None, "openai": "walk", "anthropic": "walk_by_anthropic"},
    "zoom": {"environment": None, "openai": "zoom"},
}
TURNS = 4
SIDE = 28  # of a picture in ``overhead``, in pixels


@cache
def pictures(side: int) -> list[Image.Image]:
    return [Image.new("RGB", (side, side), (50 * turn, 0, 0)) for turn in range(TURNS)]


@cache
def shown(side: int) -> list[Any]:
    """The pictures as an agent's messages."""
    contents = [[{"type": "image", "image": each}] for each in pictures(side)]
    return [task_messages([{"role": "user", "content": content}])[0] for content in contents]


def learning(options: argparse.Namespace) -> None:
    for recipe in options.recipes:
        for seed in options.seeds:
            for name, agent in AGENTS[recipe].items():
                folder = options.work / recipe / f"seed_{seed}" / name
                if not (folder / "used.json").is_file():
                    train(folder, recipe, seed, agent)
                print(f"{recipe}, seed {seed}, {name}: {told(folder, recipe)}", flush=True)


def train(folder: Path, recipe: str, seed: int, agent: str | None) -> None:
    """A run in a process of its own."""
    kept = f"--eval-every 20 --save-every 0 --keep-rollouts 0 --output-dir {folder}"
    command = f"-m recipes {recipe} --seed {seed} {SETTINGS[recipe]} {kept}"
    more = [] if agent is None else ["--agent", f"{HERE.parent / 'docs' / 'picture_agents.py'}:{agent}"]
    began = os.times()
    subprocess.run(
        [sys.executable, *command.split(), "--overwrite", *more], check=True, cwd=HERE.parent, stdout=subprocess.DEVNULL
    )
    used = os.times()
    processor = used.children_user + used.children_system - began.children_user - began.children_system
    (folder / "used.json").write_text(json.dumps({"processor": processor, "clock": used.elapsed - began.elapsed}))


def told(folder: Path, recipe: str) -> str:
    rows, used = read_metrics(folder / METRICS_FILE), json.loads((folder / "used.json").read_text())
    name, steps = f"val-core/{recipe}/acc/mean@1", int(rows[-1]["step"])
    accuracies = {int(row["step"]): row[name] for row in rows if name in row}
    reached = next((step for step in sorted(accuracies) if accuracies[step] >= TARGETS[recipe]), None)
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows if row["step"] <= (reached or steps))
    goal = f"{TARGETS[recipe]} after {reached} steps" if reached else f"{TARGETS[recipe]} not reached in {steps} steps"
    return (
        f"{goal}, {seconds:.0f} s of steps by the clock; best {max(accuracies.values()):.3f}; "
        f"{used['processor'] / steps:.2f} s of processor time a step, all in"
    )


class AnswersAtOnce:
    """An engine that says one word at once."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.ids = [*builder.encode_text("up"), builder.tokenizer.eos_token_id]
        self.asked, self.number = list[int](), 0

    def submit(self, request: Any, sampling: SamplingParams, keep: bool = False) -> int:
        self.number += 1
        self.asked.append(self.number)
        return self.number

    def fork(self, number: int, request: Any, sampling: SamplingParams, keep: bool = False) -> int:
        return self.submit(request, sampling, keep)

    def abort(self, number: int) -> None:
        pass

    def poll(self) -> list[Completion]:
        asked, self.asked = self.asked, []
        return [Completion(number, self.ids, [-1.0] * len(self.ids), "stop") for number in asked]


class Shows:
    """An environment that shows a picture in each turn."""

    def __init__(self, side: int) -> None:
        self.pictures = pictures(side)

    def reset(self, row: Any, seed: int) -> Observation:
        self.turn = 0
        return Observation([self.pictures[0]])

    def step(self, action: str) -> Observation:
        self.turn += 1
        return Observation([self.pictures[self.turn % TURNS]], done=self.turn == TURNS)


class Agent:
    """The same by httpx, with a connection for each conversation: a shared client looks at all of them for each request."""

    def __init__(self, side: int) -> None:
        self.side = side

    async def __call__(self, task: Any) -> float:
        messages, headers = list(task.messages), {"authorization": f"Bearer {task.api_key}"}
        without_tls = httpx.AsyncClient(timeout=None, verify=False, headers=headers)  # the endpoint has none
        async with without_tls as client:
            for picture in shown(self.side):
                messages.append(picture)
                body = {"model": task.model, "messages": messages}
                reply = (await client.post(f"{task.base_url}/chat/completions", json=body)).json()["choices"][0]
                messages.append(reply["message"])
                if reply["finish_reason"] == "length":  # here environments end
                    break
        return 1.0


@cache
def shared_client(app: Any) -> Any:
    """That of all conversations of a rollout."""
    return openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app))


class WithoutSockets:
    """The same by OpenAI's client, which all conversations share as far as a user can share it."""

    def __init__(self, side: int) -> None:
        self.side = side

    async def __call__(self, task: Any) -> float:
        await talk(shared_client(task.app), task.api_key, self.side)
        return 1.0


async def talk(http: Any, key: str, side: int) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http)
    messages: list[Any] = [{"role": "system", "content": "Walk."}]
    for picture in shown(side):
        messages.append(picture)
        reply = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        messages.append(reply.message)
        if reply.finish_reason == "length":
            break


class SaysUp(httpx2.AsyncBaseTransport):
    """Answers every request at once."""

    said = chat_body(Ask((), model="policy"), [Reply("7", "up", "", (), "stop")])

    async def handle_async_request(self, request: Any) -> Any:
        return httpx2.Response(200, json=self.said)


def client_alone(conversations: int) -> float:
    """Milliseconds of processor time of OpenAI's client for each request."""

    async def everyone() -> None:
        http = openai.DefaultAsyncHttpxClient(transport=SaysUp())
        await asyncio.gather(*(talk(http, "key", SIDE) for _ in range(conversations)))

    began = time.process_time()
    asyncio.run(everyone())
    return (time.process_time() - began) * 1000 / conversations / TURNS


def overhead(options: argparse.Namespace) -> None:
    used: dict[str, float] = {}

    class Endpoint(agent_host.Endpoint):
        def __exit__(self, *error: object) -> None:
            used["endpoint"] = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            super().__exit__(*error)

    agent_host.Endpoint = Endpoint  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), 0, WALK.model, WALK.texts)
        builder = PromptBuilder.from_pretrained(folder, 256)
    starts = starts_of(options.conversations)
    sampling, limits = SamplingParams(max_tokens=8), EpisodeLimits(TURNS, seconds=3600)
    requests = options.conversations * TURNS
    for _ in range(options.times):
        milliseconds = 1000 / requests
        began = time.process_time()
        plan = EpisodePlan(partial(Shows, SIDE), limits)
        played = plan.play(AnswersAtOnce(builder), TurnRenderer(builder), starts, sampling)
        native = (time.process_time() - began) * milliseconds
        assert [len(each.turns) for each in played] == [TURNS] * options.conversations
        print(f"ms of processor time a request: play {native:.2f}", flush=True)
        for name, agent in (("httpx", Agent(SIDE)), ("openai, no sockets", WithoutSockets(SIDE))):
            began, loop = time.process_time(), time.thread_time()
            agents = agent_loop.AgentPlan(agent, limits)
            run = agents.play(AnswersAtOnce(builder), TurnRenderer(builder), starts, sampling)
            loop, whole = (time.thread_time() - loop) * milliseconds, (time.process_time() - began) * milliseconds
            endpoint = used["endpoint"] * milliseconds
            assert [len(each.turns) for each in run] == [TURNS] * options.conversations
            print(
                f"  {name}: loop {loop:.2f}, endpoint {endpoint:.2f}, agents' thread {whole - loop - endpoint:.2f}; "
                f"loop and endpoint over play {loop + endpoint - native:.2f}",
                flush=True,
            )
        print(f"  OpenAI's client alone {client_alone(options.conversations):.2f}", flush=True)


def starts_of(conversations: int) -> list[EpisodeStart]:
    row = {"raw_prompt": [{"role": "system", "content": "Walk."}]}
    return [EpisodeStart(row, number, 7, "u", f"u/{number}") for number in range(conversations)]


def rate(options: argparse.Namespace) -> None:
    side, limits = options.side, EpisodeLimits(TURNS, seconds=3600)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or str(make_tiny_model(Path(folder), 0, WALK.model, WALK.texts))
        engine = create_engine(options.engine, path, **json.loads(options.options))
        renderer = TurnRenderer(PromptBuilder.from_pretrained(path, 8192))
    sampling, sample = SamplingParams(max_tokens=4 * options.turn_tokens), draw_tokens

    def ends(probs: Any, numbers: Any) -> Any:
        """Samples as the engine does, and ends a reply at one token in so many. A list of stop tokens would be slow in vLLM."""
        sampled = sample(probs, numbers)
        return sampled.where(sampled % options.turn_tokens != 0, renderer.builder.end_ids[0])

    starts = starts_of(options.conversations)
    plans = {
        "play": EpisodePlan(partial(Shows, side), limits),
        "httpx": agent_loop.AgentPlan(Agent(side), limits),
        "openai, no sockets": agent_loop.AgentPlan(WithoutSockets(side), limits),
        "httpx, in a process": agent_loop.AgentPlan(in_process(Agent(side)), limits),
        "openai, in a process": agent_loop.AgentPlan(in_process(WithoutSockets(side)), limits),
    }
    ways: dict[str, Any] = {
        name: partial(plan.play, engine, renderer, sampling=sampling) for name, plan in plans.items()
    }
    with mock.patch("rollout.sampling.draw_tokens", ends):
        found = {}
        for name, way in ways.items():
            way(starts[: len(starts) // 4])  # kernels, graphs, caches, and the process of an agent
            found[name] = [tokens_a_second(way, starts) for _ in range(options.times)]
    native = median(found["play"])
    for name, rates in found.items():
        listed = ", ".join(f"{each:,.0f}" for each in rates)
        print(f"{name}: {median(rates):,.0f} tokens/s ({listed}), {median(rates) / native:.3f} of play", flush=True)


def tokens_a_second(way: Any, starts: Sequence[EpisodeStart]) -> float:
    began = time.perf_counter()
    turns = [turn for each in way(starts) for turn in each.turns]
    seconds = time.perf_counter() - began
    tokens = sum(len(turn.token_ids) for turn in turns)
    print(f"  {len(turns)} turns, {tokens} tokens in {seconds:.1f} s", flush=True)
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["learning", "overhead", "rate"])
    parser.add_argument("--work", type=Path, default=Path("outputs/agents"))
    parser.add_argument("--recipes", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--engine", default="hf", help="of ``rate``")
    parser.add_argument("--options", default="{}", help="JSON: options of the engine")
    parser.add_argument("--model", help="checkpoint; default: a small Qwen2.5-VL with random weights")
    parser.add_argument("--side", type=int, default=280, help="pixels of a picture in ``rate`` (default: 280)")
    parser.add_argument(
        "--turn-tokens", type=int, default=128, help="mean length of a reply in ``rate``, about (default: 128)"
    )
    options = parser.parse_args()
    {"learning": learning, "overhead": overhead, "rate": rate}[options.what](options)


if __name__ == "__main__":
    main()
