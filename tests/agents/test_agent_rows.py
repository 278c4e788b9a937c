"""Rows of agents on the Hugging Face engine: their ids are those that it sampled, and the actor scores them alike."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.agents import TOOL_TEMPLATE, Client, checked_rows, sampled_as_told, shown
from helpers.checkpoints import write_checkpoint
from helpers.episodes import picture
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation
from rollout.prompts import PromptBuilder
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

SAMPLING = SamplingParams(n=2, max_tokens=6, seed=3, stop_token_ids=tuple(range(0, 250, 3)))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    path = write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=4000)
    builder.tokenizer.chat_template = TOOL_TEMPLATE
    builder.tokenizer.save_pretrained(path)
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    rollout = RolloutWorker(RolloutConfig(path), lambda dtype: actor.named_weights())
    return actor, rollout, builder


def run(roles, agent, rows=1, sampling=SAMPLING, **limits):
    """The rows of an agent, checked against the engine's own record and the actor."""
    actor, rollout, builder = roles
    prompts = builder([{"prompt": f"Walk {row}.", "uid": f"u{row}"} for row in range(rows)])
    return checked_rows(actor, rollout, prompts, agent, sampling, **{"turns": 12, "seconds": 60} | limits)


async def walker(task):
    client = Client(task)
    messages = list(task.messages)
    for turn in range(3):
        (reply,) = await client.say(messages, tools=TOOLS)
        messages += [reply, shown(turn)]
    return {"score": 1.5, "acc": 1}


def test_an_agents_rows_are_those_of_an_episode(roles):
    data, recorder = run(roles, walker, rows=2)
    assert len(data) == 4
    assert data["end_reason"].tolist() == ["done"] * 4
    assert data["turns"].tolist() == [3] * 4
    assert data["score"].tolist() == [1.5] * 4
    assert data["info"][0] == {"acc": 1}
    assert data["new_row"].tolist() == [""] * 4
    assert data["agent_scored"].all()
    assert all(len(media["image"]) == 2 for media in data["multi_modal_data"])
    assert all(len(states) == 3 and len(set(states)) == 3 for states in data["states"])
    assert len({states[0] for states in data["states"][:2]}) == 1
    prompts = {
        id(request.input_ids) for request in recorder.requests.values() if "image" not in request.multi_modal_data
    }
    assert len(prompts) == 2  # the samples of a prompt share it
    again, _ = run(roles, walker, rows=2)
    assert again["responses"].equal(data["responses"])


class Corridor:
    """The same as `walker`, as an environment."""

    def reset(self, row, seed):
        self.seen = 0
        return Observation()

    def step(self, action):
        self.seen += 1
        return Observation(["see", picture(16, 24, self.seen - 1)], done=self.seen == 3)


def test_greedy_rows_are_those_of_an_environment_that_shows_the_same(roles):
    async def agent(task):
        client, messages = Client(task), list(task.messages)
        for turn in range(3):
            messages += [*await client.say(messages), shown(turn)]

    greedy = replace(SAMPLING, n=1, temperature=0.0, stop_token_ids=tuple(range(300)))
    data, _ = run(roles, agent, sampling=greedy)
    _, rollout, builder = roles
    played = rollout.play(builder([{"prompt": "Walk 0.", "uid": "u0"}]), Corridor, greedy, EpisodeLimits(turns=3))
    assert played["end_reason"].tolist() == ["done"]
    for name in ("input_ids", "position_ids", "response_mask", "mm_token_type_ids"):
        assert data[name].equal(played[name]), name
    assert not data["agent_scored"].any()


async def wander(task, actions):
    """Talks as an agent with a history of its own that does to it what ``actions`` say."""
    client, rng = Client(task), random.Random(task.seed)
    talks = [list(task.messages)]
    for step, action in enumerate(actions):
        talk = talks[step % len(talks)]
        if action == "retry":
            first = await client.say(talk, tools=TOOLS)
            again = await client.say(talk, retry=1, tools=TOOLS)
            assert [each.get("content") for each in first] == [each.get("content") for each in again]
            talk += [*first, shown(step)]
        elif action == "parallel":
            replies = await asyncio.gather(*(client.say(talk, tools=TOOLS) for _ in range(2)))
            talks.append([*talk, *replies[1], {"role": "user", "content": f"other {step}"}])
            talk += [*replies[0], shown(step)]
        elif action == "samples":
            one, two = await client.say(talk, n=2, tools=TOOLS)
            talks.append([*talk, two, {"role": "user", "content": "second"}])
            talk += [one, {"role": "user", "content": [{"type": "text", "text": " first "}]}]
        else:
            (reply,) = await client.say(talk, tools=TOOLS)
            talk += [serialised_again(reply, rng), shown(step)]
            if action == "compact":
                talk[:] = [task.messages[0], {"role": "user", "content": "in short"}, *talk[-2:]]
            elif action == "edit":
                talk[-2] = {"role": "assistant", "content": "something else"}
            elif action == "sub-agent":
                await client.say([{"role": "system", "content": "help"}, shown(step)])
            elif action == "tools":
                await client.say(talk)
    return float(len(actions))


def serialised_again(reply, rng):
    """A reply as clients send it back: other white space, other order, other empty fields."""
    reply = {
        name: value for name, value in reply.items() if rng.random() < 0.5 or name in ("role", "content", "tool_calls")
    }
    if reply.get("content"):
        reply["content"] = rng.choice(
            [reply["content"], [{"type": "text", "text": reply["content"]}], f" {reply['content']}\n"]
        )
    for call in reply.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, indent=rng.choice([None, 1]))
    return reply


ACTIONS = ("turn", "turn", "retry", "parallel", "samples", "compact", "edit", "sub-agent", "tools")


PLANS = st.lists(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=4), min_size=4, max_size=4)
OF_ANY_HISTORY = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.slow
@settings(max_examples=12, **OF_ANY_HISTORY)
@given(PLANS)
def test_the_law_holds_for_any_history(roles, plans):
    check_histories(roles, plans)


@pytest.mark.long
@settings(max_examples=50, **OF_ANY_HISTORY)
@given(PLANS)
def test_the_law_holds_for_two_hundred_histories(roles, plans):
    check_histories(roles, plans)


def check_histories(roles, plans):
    """Four agents at a time, each with its own history; `run` checks ids and log-probs of all rows. A third of the replies are
    calls.
    """

    async def agent(task):
        return await wander(task, plans[int(task.messages[0]["content"][5])])

    def calls(request):
        if request.seed % 3:
            return None
        return f'So.<tool_call>{{"name": "look",  "arguments": {{"b": {request.seed % 10}, "a": "x"}}}}</tool_call>'

    with sampled_as_told(roles[2], calls):
        data, _ = run(roles, agent, rows=4, sampling=replace(SAMPLING, n=1, max_tokens=80), turns=40)
    assert set(data["end_reason"]) == {"done"}, data["end_message"].tolist()
    for name in set(data["trajectory"]):
        rows = [row for row in range(len(data)) if data["trajectory"][row] == name]
        plan = plans[int(name[1])]
        assert sum(not data["new_row"][row] for row in rows) == 1
        if set(plan) <= {"turn", "retry"}:
            assert len(rows) == 1
