"""Rewards of agents, and agents that fail: each fault ends its episode with a named reason, and never the run."""

import asyncio
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import numpy as np
import pytest
from openai import APIStatusError, APITimeoutError, OpenAI

from dataproto.errors import InvalidConfig, NonFiniteLogits
from helpers.agents import ScriptedEngine, run, starts, tool_renderer
from helpers.episodes import picture
from rollout.agents import CommandAgent
from rollout.agents.agent_loop import AgentPlan
from rollout.agents.messages import Ask, read_reply
from rollout.engine import Completion, SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart
from rollout.environments.episode_rows import episode_columns


@pytest.fixture(scope="module")
def renderer():
    return tool_renderer()


def ask(task, text="Go.", **options):
    """One request by a plain client, which opens and closes its connection."""
    with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(model=task.model, messages=messages, **options)


def raises(task):
    ask(task)
    raise KeyError("no map")


def leaves(task):
    ask(task)
    sys.exit(3)


async def leaves_the_loop(task):
    await asyncio.to_thread(ask, task)
    sys.exit(3)


async def hangs(task):
    await asyncio.to_thread(ask, task)
    await asyncio.sleep(1000)


def hangs_in_its_thread(task):
    ask(task)
    time.sleep(3)


def never_calls(task):
    return 1.0


def rewards_nothing_yet(task):
    task.reward(1.0)
    ask(task)


def returns_text(task):
    ask(task)
    return "1.0"


def returns_nan(task):
    ask(task)
    return {"score": float("nan")}


def returns_more_than_floats_hold(task):
    ask(task)
    return 10**400


async def cancels_its_own(task):
    await asyncio.to_thread(ask, task)
    waiting = asyncio.create_task(asyncio.sleep(1000))
    waiting.cancel()
    await waiting


async def has_a_bug_in_a_group(task):
    async def looks():
        await asyncio.to_thread(ask, task)
        raise KeyError("no tool zoom")

    async with asyncio.TaskGroup() as group:
        group.create_task(looks())


def floods(task):
    for number in range(100):
        ask(task, str(number))


def floods_in_a_wrapper(task):
    try:
        floods(task)
    except Exception as error:
        raise RuntimeError("my framework gave up") from error


async def floods_without_reading_errors(task):
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {task.api_key}"}) as client:
        for number in range(100):
            body = {"model": task.model, "messages": [{"role": "user", "content": str(number)}]}
            (await client.post(f"{task.base_url}/chat/completions", json=body)).raise_for_status()


def asks_elsewhere_after_a_limit(task):
    with suppress(APIStatusError):
        floods(task)
    raise RuntimeError("Client error '400 Bad Request' for url 'https://tools.example/search'")


def has_a_bug_after_a_limit(task):
    with suppress(APIStatusError):
        floods(task)
    return {}["reward"]


@pytest.mark.parametrize(
    ("agent", "reason", "message"),
    [
        (raises, "error", "the agent raised KeyError: .*no map"),
        (leaves, "error", "the agent raised SystemExit: 3"),
        (leaves_the_loop, "error", "SystemExit: 3"),
        (hangs, "timeout", "more than 1 seconds between its requests"),
        (hangs_in_its_thread, "timeout", "more than 1 seconds between its requests"),
        (never_calls, "invalid", "returned before a request of it was answered"),
        (rewards_nothing_yet, "invalid", "a reward before a request was answered"),
        (returns_text, "invalid", "the reward '1.0', not a finite number"),
        (returns_nan, "invalid", "the reward nan, not a finite number"),
        (returns_more_than_floats_hold, "invalid", "not a finite number"),
        (cancels_its_own, "error", "its task was cancelled"),
        (has_a_bug_in_a_group, "error", r"KeyError: 'no tool zoom' \(.*, in looks"),
        (floods, "turns", "^$"),
        (floods_in_a_wrapper, "turns", "^$"),
        (floods_without_reading_errors, "turns", "^$"),
        (asks_elsewhere_after_a_limit, "error", "400 Bad Request"),
        (has_a_bug_after_a_limit, "error", r"KeyError: 'reward' \(.*test_agents.py:\d+, in has_a_bug_after_a_limit"),
    ],
)
def test_a_fault_ends_its_episode_with_a_named_reason(renderer, agent, reason, message):
    limits = EpisodeLimits(turns=4, seconds=1.0 if reason == "timeout" else 60.0)
    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent, limits=limits)
    assert episode.ended == reason
    assert re.search(message, episode.message)
    if reason == "turns":
        assert len(episode.turns) == 4


def test_a_wrapper_of_an_async_agent_is_one(renderer):
    async def agent(task):
        await asyncio.to_thread(ask, task)
        return 0.5

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), lambda task: agent(task))
    assert (episode.ended, episode.turns[-1].reward) == ("done", 0.5)


def test_agents_may_change_what_they_get(renderer):
    seen = []

    def agent(task):
        seen.append((len(task.messages), len(task.row["raw_prompt"]), task.tools[0]["function"].get("description")))
        task.row["raw_prompt"].append({"role": "user", "content": "Think first."})
        task.tools[0]["function"]["description"] = "mine"
        ask(task)
        return 1.0

    begun, rows = starts(2), starts(1)[0].row | {"tools": [{"type": "function", "function": {"name": "look"}}]}
    begun = [replace(start, row=rows) for start in begun]
    AgentPlan(agent, EpisodeLimits(turns=2)).play(
        ScriptedEngine(renderer, "ok"), renderer, begun, SamplingParams(max_tokens=20)
    )
    assert seen == [(1, 1, None)] * 2
    assert len(rows["raw_prompt"]) == 1


def test_the_limit_of_tokens_is_that_of_each_conversation(renderer):
    def agent(task):
        ask(task)
        ask(task, "long " * 60)  # another conversation
        messages = [{"role": "user", "content": "long " * 60}]
        for _ in range(30):
            with (
                suppress(APIStatusError),
                OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client,
            ):
                said = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
                messages += [said, {"role": "user", "content": "long " * 10}]
        return 1.0

    limits = EpisodeLimits(turns=40, tokens=100)
    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent, limits=limits)
    lengths = [len(row.ends.input_ids) - len(row.begins.input_ids) for row in episode.rows]
    assert len(lengths) >= 2
    assert max(lengths) <= 100


def test_rows_whose_last_reply_is_cut_are_truncated(renderer):
    def agent(task):
        ask(task)
        return 1.0

    plan, prompts = AgentPlan(agent, EpisodeLimits(turns=2)), [{"prompt": "Which colour is it?", "uid": "u"}]
    for most, cut in ((1, True), (20, False)):
        engine = ScriptedEngine(renderer, "ok")
        episodes = plan.play(engine, renderer, starts(1), SamplingParams(max_tokens=most))
        data = episode_columns(renderer.builder(prompts), episodes, renderer, most)
        plan.add_columns(data, episodes)
        assert data["truncated"].tolist() == [cut]


def test_a_request_that_is_not_answered_whole_is_dropped_whole(renderer):
    class Slow(ScriptedEngine):
        """Answers the second of two samples never."""

        def poll(self):
            held = self.waiting.pop(2, None)
            time.sleep(0.02)
            found = super().poll()
            self.waiting |= {} if held is None else {2: held}
            return found

    def agent(task):
        ask(task)
        with suppress(APITimeoutError):
            ask(task, "again", n=2, timeout=1.0)
        return 1.0

    (episode,) = run(renderer, Slow(renderer, "ok"), agent)
    assert [turn.reward for turn in episode.turns] == [1.0]


def test_turns_that_were_left_out_are_told_as_such(renderer):
    def agent(task):
        messages = [{"role": "user", "content": "Go."}]
        with OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            for _ in range(2):
                said = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
                messages += [said, {"role": "user", "content": "again"}]
            client.chat.completions.create(model=task.model, messages=[messages[0], *messages[-2:]])
        return 1.0

    (episode,) = run(renderer, ScriptedEngine(renderer, "a", "bb", "ccc"), agent)
    assert episode.new_rows == ["", "history"]


def test_stops_are_looked_for_after_what_a_call_begins_with():
    ask = Ask((), ({"type": "function", "function": {"name": "look"}},), choice="required", stop=("\n",))
    reply = read_reply("7", f'{ask.begins}{{"name": "look"}}</tool_call>', ask, "stop")
    assert [call.name for call in reply.calls] == ["look"]


def test_faults_end_no_other_episode(renderer):
    async def agent(task):
        await asyncio.to_thread(ask, task)
        if task.row["number"] == 1:
            raise ValueError("mine")
        return float(task.row["number"])

    all_starts = [each for number in range(3) for each in starts(1)]
    for number, each in enumerate(all_starts):
        object.__setattr__(each, "row", {**each.row, "number": number})
    limits = EpisodeLimits(turns=4, seconds=20)
    engine = ScriptedEngine(renderer, "ok")
    episodes = AgentPlan(agent, limits).play(engine, renderer, all_starts, SamplingParams(max_tokens=20))
    assert [episode.ended for episode in episodes] == ["done", "error", "done"]
    assert [sum(turn.reward for turn in episode.turns) for episode in episodes] == [0.0, 0.0, 2.0]


def test_a_wall_clock_ends_an_episode_while_it_is_decoded(renderer):
    class Never(ScriptedEngine):
        def poll(self):
            time.sleep(0.01)
            return []

    limits = EpisodeLimits(turns=4, seconds=5, wall_clock=0.5)
    (episode,) = run(renderer, Never(renderer, "ok"), raises, limits=limits)
    assert (episode.ended, episode.turns, episode.rows) == ("clock", [], [])


def test_an_agent_may_go_on_after_a_limit_of_tokens_with_a_shorter_history(renderer):
    codes = []

    def agent(task):
        with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": "Go."}]
            for _ in range(3):
                try:
                    reply = client.chat.completions.create(model="m", messages=messages)
                    messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
                    messages += [{"role": "user", "content": "on " * 20}]
                except Exception as error:
                    codes.append(error.code)
                    messages = [{"role": "user", "content": "Shortened."}]
        return 1.0

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent, limits=EpisodeLimits(turns=8, tokens=50))
    assert codes == ["context_length_exceeded"]
    assert (episode.ended, episode.new_rows, len(episode.turns)) == ("done", ["", "conversation"], 2)


def test_a_full_context_that_an_agent_does_not_know_ends_its_episode_as_cut(renderer):
    def agent(task):
        ask(task)
        ask(task, "long " * 100)

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok", most=200), agent)
    assert (episode.ended, len(episode.turns)) == ("tokens", 1)


def test_a_request_after_the_end_is_refused(renderer):
    late = []

    def agent(task):
        ask(task)
        late.append(task)
        return 1.0

    async def second(task):
        for _ in range(200):
            if late:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        with pytest.raises(Exception, match="episode of this key is over"):
            await asyncio.to_thread(ask, late[0])
        await asyncio.to_thread(ask, task)
        return 2.0

    def either(task):
        return agent(task) if task.row["number"] == 0 else asyncio.run(second(task))

    both = starts(2)
    for number, each in enumerate(both):
        object.__setattr__(each, "row", {**each.row, "number": number})
    limits = EpisodeLimits(turns=4, seconds=20)
    episodes = AgentPlan(either, limits).play(
        ScriptedEngine(renderer, "ok"), renderer, both, SamplingParams(max_tokens=20)
    )
    assert [(episode.ended, len(episode.turns)) for episode in episodes] == [("done", 1), ("done", 1)]


def test_rewards_of_turns_and_of_the_end_add_up(renderer):
    def agent(task):
        for number in range(3):
            ask(task, f"turn {number}")
            task.reward(number)
        return {"score": 10, "acc": True}

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent)
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0, 12.0]
    assert episode.info == {"acc": True}


def test_the_task_tells_messages_with_pictures_tools_and_the_row(renderer):
    tasks = []

    def agent(task):
        tasks.append(task)
        ask(task)

    content = [{"type": "image", "image": picture(16, 16)}, {"type": "text", "text": "Which?"}]
    row = {
        "tools": '[{"type": "function", "function": {"name": "zoom"}}]',
        "raw_prompt": [{"role": "user", "content": content}],
    }
    start = EpisodeStart(row, 1, 7, "u", "u/0")
    plan = AgentPlan(agent, EpisodeLimits(turns=2))
    plan.play(ScriptedEngine(renderer, "ok"), renderer, [start], SamplingParams(max_tokens=20))
    shown, text = tasks[0].messages[0]["content"]
    assert shown["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "Which?"}
    assert tasks[0].seed == 7
    assert tasks[0].tools[0]["function"]["name"] == "zoom"
    assert len(tasks[0].api_key) > 30


def test_an_engine_that_fails_ends_the_run(renderer):
    class Broken(ScriptedEngine):
        def poll(self):
            return [Completion(number, [], [], "error", error=NonFiniteLogits("broken")) for number in self.waiting]

    with pytest.raises(NonFiniteLogits, match="broken"):
        run(renderer, Broken(renderer, "ok"), raises)


def test_last_pictures_are_the_agents_own_choice(renderer):
    with pytest.raises(InvalidConfig, match="keeps its own history"):
        run(renderer, ScriptedEngine(renderer, "ok"), raises, limits=EpisodeLimits(turns=2, last_pictures=1))


COMMAND = """
import json, os, sys
from urllib.request import Request, urlopen
task = json.load(sys.stdin)
body = json.dumps({"model": os.environ["MODEL"], "messages": task["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
reply = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)))
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
print("said", reply["choices"][0]["message"]["content"])
print(json.dumps({"score": 2.5, "acc": 1}))
"""


@pytest.mark.slow
def test_an_agent_can_be_a_command(renderer, tmp_path):
    (tmp_path / "agent.py").write_text(COMMAND)
    engine = ScriptedEngine(renderer, "ok")
    (episode,) = run(renderer, engine, CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}"))
    assert (episode.ended, episode.message) == ("done", "")
    assert (episode.turns[0].reward, episode.info) == (2.5, {"acc": 1})
    (tmp_path / "agent.py").write_text("import sys; sys.exit('no task')")
    (episode,) = run(renderer, engine, CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}"))
    assert episode.ended == "error"
    assert "status 1: no task" in episode.message
    (tmp_path / "agent.py").write_text("x = bytearray(1 << 31)")
    (episode,) = run(renderer, engine, CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}", memory_gib=0.5))
    assert (episode.ended, "MemoryError" in episode.message) == ("memory", True)


@pytest.mark.slow
def test_commands_run_a_few_at_a_time_and_leave_nothing(renderer, tmp_path):
    """They write more than is kept, do not read their task, and start processes that would hold their output for ever."""
    started = "for apart in (False, True): subprocess.Popen(['sleep', '1000'], start_new_session=apart)\n"
    noise = f"{started}print('x' * (1 << 20))\n"
    places = f"folder = pathlib.Path({str(tmp_path / 'running')!r})\nme = folder / str(os.getpid())\nme.touch()\n"
    most = "task = json.load(sys.stdin)\nmost = len(list(folder.iterdir()))\n"
    told = "me.unlink()\nprint(json.dumps({'score': 1, 'most': most}))\n"
    code = COMMAND.replace("import json, os, sys", "import json, os, pathlib, subprocess, sys, time")
    code = code.replace("task = json.load(sys.stdin)\n", noise + places + "time.sleep(0.3)\n" + most)
    code = code.replace('print(json.dumps({"score": 2.5, "acc": 1}))\n', told)
    (tmp_path / "running").mkdir()
    (tmp_path / "agent.py").write_text(code)
    agent = CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}", at_once=2)
    episodes = run(renderer, ScriptedEngine(renderer, "ok"), agent, count=5, limits=EpisodeLimits(turns=2, seconds=100))
    assert [(episode.ended, episode.message) for episode in episodes] == [("done", "")] * 5
    assert max(episode.info["most"] for episode in episodes) <= 2
    (tmp_path / "agent.py").write_text(
        f"import time\n{places}time.sleep(1000)".replace("import", "import os, pathlib,", 1)
    )
    limits = EpisodeLimits(turns=2, seconds=100, wall_clock=3.0)
    episodes = run(renderer, ScriptedEngine(renderer, "ok"), agent, count=3, limits=limits)
    assert [episode.ended for episode in episodes] == ["clock"] * 3
    with pytest.raises(InvalidConfig, match=r"processes=0 must be at least 1"):
        CommandAgent("true", at_once=0)


def test_rows_of_several_conversations_hold_each_turn_once(renderer):
    """A sub-agent and a compaction: three rows, whose masks are 1 on what was sampled in them only."""

    def agent(task):
        with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:

            def say(messages):
                reply = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
                return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "on"}]

            talk = say(say([{"role": "user", "content": "one"}]))
            say([{"role": "system", "content": "You help."}, {"role": "user", "content": "two"}])
            say([{"role": "user", "content": "one, summed up"}, *talk[-2:]])
        return 1.0

    engine = ScriptedEngine(renderer, "a", "bb", "ccc", "dddd")
    episodes = run(renderer, engine, agent)
    assert episodes[0].new_rows == ["", "conversation", "history"]
    builder = renderer.builder
    prompts = builder([{"prompt": "Which colour is it?", "uid": "u"}])
    data = episode_columns(prompts, episodes, renderer, 100)
    assert len(data) == 3
    sampled = [row[mask.bool()].tolist() for row, mask in zip(data["responses"], data["response_mask"])]
    done = [each.token_ids for each in engine.done]
    assert sampled == [[*done[0], *done[1]], done[2], done[3]]
    assert set(data["trajectory"]) == {"u/0"}
    assert [float(rewards.sum()) for rewards in data["token_level_rewards"]] == [0, 0, 1]
    assert np.unique(data["turns"]).tolist() == [4]
