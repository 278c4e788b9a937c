"""Environments of other libraries, and tools, as environments here."""

import abc
import asyncio
import json

import numpy as np
import pytest
from PIL import Image

from helpers.episodes import RandomEngine, hosting, picture, play_episodes, renderer_of, starts_of
from helpers.tiny_prompts import tiny_builder
from rollout.engine import SamplingParams
from rollout.environments import (
    EpisodeLimits,
    Observation,
    ToolEnvironment,
    TurnRenderer,
    from_gymnasium,
    from_trl,
    from_vagen,
    trl_tools,
    with_tools,
)

# Gymnasium


class Line:
    """Has the interface of `gymnasium.Env`: a place on a line of 4, drawn as pixels."""

    def reset(self, *, seed=None, options=None):
        self.place = int(np.random.default_rng(seed).integers(2))
        return self._seen(), {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        return self._seen(), float(self.place), self.place == 3, self.place < 0, {"place": self.place}

    def _seen(self):
        return np.full((8, 8, 3), 50 * max(self.place, 0), dtype=np.uint8)

    def render(self):
        return self._seen()

    def close(self):
        self.closed = True


@pytest.mark.parametrize("shows", ["render", "observation"])
def test_gymnasium(shows):
    inner = Line()
    environment = from_gymnasium(lambda: inner, {"Left": 0, "right": 1}, shows)()
    (shown,) = environment.reset({}, seed=2**40).content
    assert shown.size == (8, 8)
    assert environment.step("I do nothing").content == ["Choose one of: left, right."]
    start = inner.place
    seen = environment.step("To the RIGHT, then left.")
    assert inner.place == start + 1
    assert (seen.reward, seen.done, seen.info["terminated"]) == (start + 1.0, False, 0.0)
    while not (seen := environment.step("right")).done:
        pass
    assert seen.info["terminated"] == 1.0
    environment.close()
    assert inner.closed


def test_a_real_gymnasium_environment():
    gymnasium = pytest.importorskip("gymnasium")

    class RealLine(Line, gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    wrapped = from_gymnasium(
        lambda: gymnasium.wrappers.TimeLimit(RealLine(), 2), {"left": 0, "right": 1}, "observation"
    )()
    wrapped.reset({}, seed=1)
    assert not wrapped.step("right").done
    assert wrapped.step("left").done


# Tools


def crop(left: int, right: int) -> Image.Image:
    """Cuts a part out."""
    return picture(16, 16).crop((left, 0, right, 16))


def look(what: str) -> dict:
    return {"seen": what}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_are_called_until_an_answer():
    environment = with_tools([crop, look], lambda row, answer: float(row["truth"] in answer))()
    assert environment.reset({"truth": "7"}, seed=0).content == ()
    seen = environment.step("I crop. " + call("crop", left=0, right=8) + call("look", what="7"))
    assert seen.role == "tool"
    assert seen.content[0].size == (8, 16)
    assert seen.content[1] == '{"seen": "7"}'
    for action, told in (
        (call("zoom"), "Error: there is no tool 'zoom'; there are crop, look"),
        (call("crop", up=1), "Error: TypeError: "),
        ("<tool_call>{</tool_call>", "Error: "),
    ):
        (text,) = environment.step(action).content
        assert text.startswith(told)
    end = environment.step("It is a 7.")
    assert (end.done, end.reward) == (True, 1.0)


def test_tools_are_shown_in_the_templates_own_form():
    """A template that writes messages of the role tool, as Qwen's do; the ids are those of the whole conversation."""
    builder = tiny_builder("qwen2_5_vl", max_prompt_length=4096)
    tokenizer = builder.tokenizer
    kept = tokenizer.chat_template
    role = "{{ 'user' if message['role'] == 'tool' else message['role'] }}"
    tokenizer.chat_template = kept.replace("{{ message['role'] }}", role)
    try:
        renderer = TurnRenderer(builder)
        environment = ToolEnvironment([crop])
        environment.reset({}, 0)
        messages = [{"role": "user", "content": "Look."}]
        first = builder.prepare({"prompt": messages}).input_ids.tolist()
        action = call("crop", left=0, right=16)
        seen = environment.step(action)
        turn = renderer.turn(seen)
        ids = [*first, *builder.encode_text(action), tokenizer.eos_token_id, *turn.ids.tolist()]
        shown = {"role": "tool", "content": [{"type": "image", "image": seen.content[0]}]}
        whole = builder.prepare({"prompt": [*messages, {"role": "assistant", "content": action}, shown]})
        assert whole.input_ids.tolist() == ids
    finally:
        tokenizer.chat_template = kept


# TRL


class Guess:
    """As in TRL's documents of ``environment_factory``."""

    def reset(self, **kwargs):
        self.number, self.tries = kwargs["number"], 0
        return "Guess my number."

    def guess(self, value: int) -> str:
        """Guess.

        Args:
            value: the number.
        """
        self.tries += 1
        return "right" if value == self.number else "wrong"

    def get_reward(self):
        return 1.0 / self.tries

    def _hidden(self):
        raise AssertionError


def test_trl():
    environment = from_trl(Guess)()
    assert environment.reset({"number": 3, "raw_prompt": []}, 0).content == ["Guess my number."]
    assert environment.step(call("guess", value=2)).content == ["wrong"]
    assert environment.step(call("guess", value=3)).content == ["right"]
    end = environment.step("Found it.")
    assert (end.done, end.reward) == (True, 0.5)
    assert [tool.__name__ for tool in trl_tools(Guess)] == ["guess"]


class Screen:
    """Asynchronous, shows pictures as TRL's tools do, and names the one column that it takes."""

    def reset(self, number: int):
        self.number = number
        return [{"type": "text", "text": "Look."}, {"type": "image", "image": picture(16, 16)}]

    async def look(self, place: int) -> list:
        """Looks.

        Args:
            place: where.
        """
        await asyncio.sleep(0)
        return [{"type": "image", "image": picture(8, 8, place)}, {"type": "text", "text": f"at {[0, 1][place]}"}]

    def count(self) -> str:
        """Counts."""
        return str(self.number)

    async def get_reward(self):
        await asyncio.sleep(0)
        return 0.25


def test_pictures_and_coroutines_of_trl():
    """Pictures in parts of messages, and coroutines, were shown to the policy as Python and JSON write them."""
    with hosting(from_trl(Screen), seconds=10) as host:

        def answer():
            ((_, found),) = host.poll(None)
            return found

        host.reset(0, {"number": 3, "raw_prompt": [], "uid": "a"}, 1)
        assert [type(part) for part in answer().content] == [str, Image.Image]
        host.step(0, call("look", place=1) + call("count") + call("look", place=2))
        shown, *texts = answer().content
        assert shown.tobytes() == picture(8, 8, 1).tobytes()
        assert texts == ["at 1", "3", "Error: IndexError: list index out of range"]
        host.step(0, "Done.")
        end = answer()
        assert (end.done, end.reward) == (True, 0.25)


# VAGEN


class GymImageEnv(abc.ABC):
    """The interface that VAGEN publishes (``vagen/envs/gym_image_env.py``)."""

    def __init__(self, env_config):
        self.config = env_config

    @abc.abstractmethod
    async def close(self): ...

    @abc.abstractmethod
    async def system_prompt(self): ...

    @abc.abstractmethod
    async def reset(self, seed): ...

    @abc.abstractmethod
    async def step(self, action_str): ...


class Lake(GymImageEnv):
    """An environment as VAGEN's documents teach to write one."""

    async def close(self):
        await asyncio.sleep(0)

    async def system_prompt(self):
        return {"obs_str": f"You walk on ice of size {self.config['size']}, seed {self.seed}."}

    async def reset(self, seed):
        self.seed, self.steps = seed, 0
        return self._seen(), {}

    async def step(self, action_str):
        await asyncio.sleep(0)
        self.steps += 1
        done, valid = self.steps == 2, action_str == "up"
        metrics = {"turn_metrics": {"action_is_valid": valid}, "traj_metrics": {"success": done}}
        return self._seen(), 0.5, done, {"metrics": metrics, "success": done, "actions": [action_str]}

    def _seen(self):
        return {"obs_str": "Now <image> and?", "multi_modal_input": {"<image>": [picture(16, 16, self.steps)]}}


class NewLake(Lake):
    """The same in the contract of VAGEN's runner (``vagen/envs/_common/base.py``), with a reward for each token."""

    async def step(self, action, response_token_ids=None, tokenizer=None):
        seen, reward, done, info = await super().step(action)
        return seen, [0.0, reward], False, done, info


@pytest.mark.parametrize("kind", [Lake, NewLake])
def test_vagen(kind):
    with hosting(from_vagen(lambda: kind({"size": 4})), seconds=10) as host:
        host.reset(0, {"extra_info": {"seed": 7}}, 1)
        ((_, first),) = host.poll(None)
        assert first.system == ["You walk on ice of size 4, seed 7."]
        assert [type(part) for part in first.content] == [str, Image.Image, str]
        host.step(0, "up")
        ((_, seen),) = host.poll(None)
        assert (seen.reward, seen.done) == (0.5, False)
        assert (seen.info["action_is_valid"], seen.info["acc"]) == (1.0, 0.0)
        host.step(0, "down")
        ((_, seen),) = host.poll(None)
        assert (seen.done, seen.info["action_is_valid"], seen.info["acc"]) == (True, 0.0, 1.0)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"obs_str": "a <image>"}, "1 <image> marks, but there are 0 images"),
        ({"obs_str": "a", "multi_modal_input": {"<video>": [1]}}, "only <image> can be shown"),
    ],
)
def test_what_vagen_cannot_show_either_ends_the_episode(seen, message):
    class Wrong(Lake):
        def _seen(self):
            return seen

    with hosting(from_vagen(lambda: Wrong({"size": 4})), seconds=10) as host:
        host.reset(0, {}, 1)
        ((_, failed),) = host.poll(None)
        assert (failed.reason, message in str(failed)) == ("error", True)


def test_a_system_prompt_is_the_system_message():
    renderer = renderer_of("qwen2_5_vl")
    image = picture(16, 16)
    found = renderer.prompt({"raw_prompt": []}, Observation(["Go", image], system=["Be", " kind."]))
    told = [{"type": "text", "text": "Be"}, {"type": "text", "text": " kind."}]
    shown = [{"type": "text", "text": "Go"}, {"type": "image", "image": image}]
    messages = [{"role": "system", "content": told}, {"role": "user", "content": shown}]
    assert found.input_ids.tolist() == renderer.builder.prepare({"prompt": messages}).input_ids.tolist()


def test_episodes_of_an_adapter_are_played():
    renderer = renderer_of("qwen2_5_vl")
    limits, sampling = EpisodeLimits(turns=3), SamplingParams(max_tokens=5)
    found = play_episodes(
        RandomEngine(renderer), renderer, starts_of(4), from_vagen(lambda: Lake({"size": 4})), sampling, limits
    )
    assert [(episode.ended, len(episode.turns)) for episode in found] == [("done", 2)] * 4
