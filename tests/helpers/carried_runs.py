"""Steps of runs that learn nothing and carry samples over, and engines that fail at a sample."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import torch

from dataproto import DataProto, object_array
from dataproto.errors import InvalidPrompt, NonFiniteLogits
from helpers.episodes import picture
from recipes.data.loader import PromptLoader
from recipes.run.carrying import CarryingRollout
from recipes.run.look_ahead import LookAhead
from rollout.agents.agent_loop import AgentRun
from rollout.engine import Completion, SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.environments.episode_loop import EnvironmentRun
from rollout.prompts import PromptBuilder
from workers.cluster.local import LocalGroup

BATCH = 2
STOP = tuple(range(0, 250, 7))
SAMPLING = SamplingParams(n=2, max_tokens=10, seed=3, stop_token_ids=STOP)


class Rows:
    """Prompts, every second one with a picture."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> dict:
        if place % 2:
            return {"prompt": f"number {place}", "images": []}
        return {"prompt": f"<image>number {place}", "images": [picture(16 + place, 24, place)]}


def loader_of(path: str) -> LookAhead:
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=300)
    return LookAhead(PromptLoader(Rows(), builder, BATCH, seed=1, shuffle=False))


class Run:
    """Steps of a run that learns nothing."""

    def __init__(self, group: LocalGroup, path: str, bound: int, done: int = 0) -> None:
        self.done = done
        self.rollout = CarryingRollout(group, loader_of(path), bound, lambda: self.done)

    def step(self, sample) -> DataProto:
        data = sample(self.rollout, next(self.rollout))
        self.done += 1
        return data


def generated(rollout, prompts) -> DataProto:
    return rollout.generate(prompts, SAMPLING)


class Corridor:
    """As many steps as the seed and the actions say, with a picture each; it remembers all actions."""

    def reset(self, row, seed):
        self.left, self.said = 1 + seed % 3, ""
        return Observation(["where to?", picture(16, 16, self.left)])

    def step(self, action):
        self.left -= 1
        self.said += action
        shown = picture(24, 16, len(self.said) % 5)
        return Observation([shown, self.said[:8]], reward=0.5 + len(self.said), done=self.left < 0)


def played(rollout, prompts) -> DataProto:
    return rollout.play(prompts, Corridor, SAMPLING, EpisodeLimits(turns=3, tokens=80))


def converse(task) -> float:
    """An agent of up to three requests, which sends back what it was told, and a picture."""
    seen, reply = list(task.messages), ""
    headers = {"authorization": f"Bearer {task.api_key}"}
    for _ in range(1 + task.seed % 3):
        body = {"model": "m", "messages": seen}
        answer = httpx.post(f"{task.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        said = answer.json()["choices"][0]["message"]
        reply += str(said["content"])
        seen += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "Go on."}]
    return len(reply) / 10


def talked(rollout, prompts) -> DataProto:
    return rollout.run(prompts, converse, SAMPLING, EpisodeLimits(turns=3, tokens=200))


class InStep:
    """An engine that decodes only while nobody else is at work, so that nothing depends on how fast threads are."""

    def __init__(self, engine, at_work) -> None:
        self.engine, self.at_work = engine, at_work

    def poll(self) -> list[Completion]:
        if not self.at_work():
            return self.engine.poll()
        time.sleep(0.001)
        return []

    def __getattr__(self, name: str):
        return getattr(self.engine, name)


def decode_in_step(monkeypatch) -> None:
    """Lets engines wait until all environments have answered and all agents have asked again or returned."""
    play, run_agents = EnvironmentRun.advance, AgentRun.advance

    def played(run, episodes, decoding):
        return play(run, episodes, replace(decoding, engine=InStep(decoding.engine, lambda: run.host.working)))

    def asked(run, episodes, decoding):
        at_work = lambda: not all(live.ended or live.in_flight for live in episodes)  # noqa: E731
        return run_agents(run, episodes, replace(decoding, engine=InStep(decoding.engine, at_work)))

    monkeypatch.setattr(EnvironmentRun, "advance", played)
    monkeypatch.setattr(AgentRun, "advance", asked)


def samples_of(parts: list[DataProto]) -> dict[str, list[tuple]]:
    """For each group, of each sample its tokens, log-probs to five digits, and score, in order."""
    found: dict[str, list[tuple]] = {}
    for data in parts:
        for row, uid in enumerate(data["uid"]):
            mask = data["attention_mask"][row, -data["responses"].shape[1] :].bool()
            log_probs = np.round(data["rollout_log_probs"][row, mask].numpy().astype(float), 4).tolist()
            score = data["score"][row] if "score" in data else None
            found.setdefault(uid, []).append((data["responses"][row, mask].tolist(), log_probs, score))
    return found


def uninterrupted(group: LocalGroup, path: str, sample, uids) -> dict[str, list[tuple]]:
    """The same samples, decoded to their end in one call for each batch."""
    loader, parts = loader_of(path), []
    while not set(uids) <= set(samples_of(parts)):
        parts.append(sample(group, next(loader)))
    return {uid: samples for uid, samples in samples_of(parts).items() if uid in uids}


def close(found, expected) -> None:
    assert found.keys() == expected.keys()
    for uid, samples in expected.items():
        assert [(ids, score) for ids, _, score in found[uid]] == [(ids, score) for ids, _, score in samples]
        for (_, mine, _), (_, theirs, _) in zip(found[uid], samples, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-4)


def reread(state, tmp_path: Path):
    """The state as a checkpoint holds it."""
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def refusing(engine, monkeypatch, uid, submissions=0):
    """Has the engine refuse prompts whose uids begin with ``uid`` from its submission number ``submissions`` on."""
    submit, calls = engine.submit, []

    def checked(request, *args):
        calls.append(request.uid)
        if request.uid.startswith(uid) and len(calls) >= submissions:
            raise InvalidPrompt("no room")
        return submit(request, *args)

    monkeypatch.setattr(engine, "submit", checked)


def failing(engine, monkeypatch, uid, polls):
    """Has the engine fail, once, at a sample that runs, of a prompt whose uid begins with ``uid``, from poll ``polls`` on."""
    poll, submit, numbers, calls = engine.poll, engine.submit, [], []

    def noted(request, *args):
        number = submit(request, *args)
        if request.uid.startswith(uid):
            numbers.append(number)
        return number

    def failed():
        done = poll()
        calls.append(1)
        while numbers and len(calls) >= polls:
            number = numbers.pop()
            if engine.abort(number) is not None:
                numbers.clear()
                return [*done, Completion(number, [], [], "error", error=NonFiniteLogits("NaN"))]
        return done

    monkeypatch.setattr(engine, "submit", noted)
    monkeypatch.setattr(engine, "poll", failed)


# An engine that answers with the number of its weights


class Numbers:
    """Batches of prompts, by default of two: 0 and 1, 2 and 3, ..."""

    def __init__(self, batch: int = 2) -> None:
        self.drawn, self.batch = 0, batch
        self.skipped: dict[int, str] = {}

    def __next__(self) -> DataProto:
        numbers = object_array([str(self.batch * self.drawn + number) for number in range(self.batch)])
        self.drawn += 1
        return DataProto.from_dict({"input_ids": torch.ones(self.batch, 1)}, {"uid": numbers})

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Group:
    """Finishes the last groups first. Calls are answered at once, with the weights at that time."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, tuple[str, ...]]] = []
        self.first: dict[str, int] = {}  # the weights that each group began with

    def submit(self, method, samples, sampling, wanted, weight_version, due, plan):
        assert method == "advance"
        self.calls.append((len(samples), wanted, due))
        self.first = dict.fromkeys(samples["uid"], weight_version) | self.first
        self.plan = plan
        last = [uid for uid in samples["uid"] if uid not in due][::-1][: max(wanted - len(due), 0)]
        done = torch.tensor([uid in (*last, *due) for uid in samples["uid"]])
        found = samples[:]
        ones = torch.ones(len(samples), 1)
        for name in ("rollout_log_probs", "response_mask", "responses"):
            found[name] = ones
        found["weight_version"] = weight_version * ones
        found["_finished"] = done
        found["info"] = object_array([{}] * len(samples))
        found["end_reason"] = object_array(["done"] * len(samples))
        found["turns"] = torch.ones(len(samples), dtype=torch.int64)
        found["_begun"] = np.array([None] * len(samples), dtype=object)
        found["_dealt"] = np.full(len(samples), 7)
        found["_failed"] = object_array([None] * len(samples))
        return SimpleNamespace(result=lambda: found)

    def generate(self, prompts, sampling):
        return prompts
