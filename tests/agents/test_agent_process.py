"""Agents in a process of their own: what they say and do is that of agents in this one, and their faults end no run."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cloudpickle
import httpx2
import openai
import pytest

from dataproto.errors import InvalidConfig, UserFunctionFailed
from helpers import agents as helper
from helpers.agents import ScriptedEngine, looker, run, starts, tool_renderer
from recipes.run.episode_roles import load_agent
from rollout.agents import in_process
from rollout.agents.agent_loop import AgentPlan
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def renderer():
    return tool_renderer()


@pytest.fixture(scope="module", autouse=True)
def _agents_are_those_of_a_users_file():
    """Else their process would import these modules, and all that they import."""
    modules = [sys.modules[__name__], helper]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


async def asks(task, messages=None):
    url, key = f"{task.base_url}/chat/completions", {"authorization": f"Bearer {task.api_key}"}
    async with httpx2.AsyncClient(headers=key, verify=False, timeout=60) as client:
        reply = await client.post(url, json={"messages": messages or task.messages})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


async def tells_its_process(task):
    await asks(task)
    return {"score": 1.0, "process": os.getpid()}


def played(renderer, agent, count=3):
    return run(renderer, ScriptedEngine(renderer, "one", "two", "three"), agent, count)


def test_episodes_are_those_of_an_agent_in_this_process(renderer):
    for here, apart in zip(played(renderer, looker, 1), played(renderer, in_process(looker), 1), strict=True):
        assert (apart.ended, apart.new_rows, apart.cut_rows) == (here.ended, here.new_rows, here.cut_rows)
        assert [(turn.token_ids, turn.reward, turn.state) for turn in apart.turns] == [
            (turn.token_ids, turn.reward, turn.state) for turn in here.turns
        ]
        for one, other in zip(apart.rows, here.rows, strict=True):
            assert one.ends.input_ids.tolist() == other.ends.input_ids.tolist()
            assert [image.tobytes() for image in one.ends.multi_modal_data["image"]] == [
                image.tobytes() for image in other.ends.multi_modal_data["image"]
            ]


async def shows_much(task):
    """Ten turns, each of whose requests has the same picture."""
    picture = {"type": "image_url", "image_url": {"url": helper.uri(1)}}
    task.messages.append({"role": "user", "content": [picture]})
    for turn in range(10):
        task.messages.extend([await asks(task), {"role": "user", "content": str(turn)}])
    return 1.0


def test_a_picture_crosses_to_the_engine_once_in_an_episode(renderer, monkeypatch):
    from rollout.agents import agent_process

    contents, load = [], agent_process._Unpickler.persistent_load
    monkeypatch.setattr(
        agent_process._Unpickler,
        "persistent_load",
        lambda self, pid: (contents.append(pid[2] is not None), load(self, pid))[1],
    )
    limits = EpisodeLimits(turns=12, seconds=60)
    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), in_process(shows_much), limits=limits)
    assert (episode.ended, len(episode.turns)) == ("done", 10), episode.message
    assert contents.count(True) == 1
    assert contents.count(False) >= 9


def test_the_policy_is_an_application_in_the_agents_process(renderer):
    async def agent(task):
        http = openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(task.app))
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http)
        reply = await client.chat.completions.create(model=task.model, messages=task.messages)
        return {"score": 1.0, "said": reply.choices[0].message.content}

    (episode,) = played(renderer, in_process(agent), 1)
    assert (episode.ended, episode.info) == ("done", {"said": "one"}), episode.message


def test_a_process_is_kept_for_later_rollouts_of_its_agent(renderer):
    agent = in_process(tells_its_process)
    first, second = (played(renderer, agent)[0].info["process"] for _ in range(2))
    assert first == second != os.getpid()
    other = played(renderer, in_process(looker))
    assert other[0].ended == "done"
    with pytest.raises(ProcessLookupError):  # it made room for that of another agent
        os.kill(first, 0)


def test_a_process_that_ends_ends_the_episodes_it_plays_and_no_others(renderer):
    async def agent(task):
        await asks(task)
        if "crash" in task.row:
            os._exit(3)
        return 1.0

    limits, agent = EpisodeLimits(turns=2, seconds=60), in_process(agent)
    begun = starts(2)
    begun[1].row["crash"] = begun[0].row["crash"] = True
    engine = ScriptedEngine(renderer, "ok")
    failed = AgentPlan(agent, limits).play(engine, renderer, begun, SamplingParams(max_tokens=20), 1)
    assert [each.ended for each in failed] == ["error"] * 2
    assert "the process of the agent was ended with exit status 3" in failed[0].message
    assert not engine.kept
    assert [each.ended for each in run(renderer, engine, agent, 2)] == ["done"] * 2


def test_an_agent_that_never_gives_way_is_ended_with_its_process(renderer):
    async def agent(task):
        await asks(task)
        while True:
            pass

    began = time.monotonic()
    limits = EpisodeLimits(turns=2, seconds=1.0)
    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), in_process(agent), limits=limits)
    assert episode.ended == "timeout"
    assert time.monotonic() - began < 40
    assert [each.ended for each in played(renderer, in_process(looker))] == ["done"] * 3


def test_an_error_of_an_sdk_may_be_returned(renderer):
    """Some cannot be unpickled: their episode fails, and no other."""

    async def agent(task):
        await asks(task)
        if "returns_an_error" not in task.row:
            return 1.0
        response = httpx2.Response(400, request=httpx2.Request("POST", "http://127.0.0.1"))
        return {"score": 0.0, "error": openai.APIStatusError("no", response=response, body=None)}

    begun = starts(2)
    begun[0] = replace(begun[0], row={**begun[0].row, "returns_an_error": True})
    episodes = AgentPlan(in_process(agent), EpisodeLimits(turns=2, seconds=60)).play(
        ScriptedEngine(renderer, "ok"), renderer, begun, SamplingParams(max_tokens=20), 1
    )
    assert [each.ended for each in episodes] == ["error", "done"]
    assert "what the agent gave cannot be read by another process: TypeError" in episodes[0].message


class ImportedSlowly:
    """An agent whose file takes four seconds to import."""

    def __reduce__(self):
        return slowly, ()


def slowly():
    time.sleep(4)
    return asks_once


async def asks_once(task):
    await asks(task)
    return 1.0


def test_the_time_of_an_agent_begins_when_its_file_is_imported(renderer):
    limits = EpisodeLimits(turns=2, seconds=3.0, wall_clock=3.5)  # of which a busy machine needs one or two
    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), in_process(ImportedSlowly()), limits=limits)
    assert (episode.ended, episode.message) == ("done", "")


POOL = """
import atexit
import multiprocessing
from pathlib import Path
from urllib.request import Request, urlopen

atexit.register(Path(__file__).with_suffix(".ended").touch)


def square(x):
    return x * x


def agent(task):
    headers = {"authorization": f"Bearer {task.api_key}"}
    urlopen(Request(f"{task.base_url}/chat/completions", b'{"messages": [{"role": "user", "content": "?"}]}', headers))
    with multiprocessing.Pool(1) as pool:
        return {"score": 1.0, "squares": sum(pool.map(square, [1, 2]))}
"""


def test_the_process_of_an_agent_is_one_as_any_other(renderer, tmp_path):
    """It may start further ones, and does at its end what the agent's file asks for."""
    (tmp_path / "own.py").write_text(POOL)
    (episode,) = played(renderer, load_agent(f"{tmp_path}/own.py:agent"), 1)
    assert (episode.ended, episode.info) == ("done", {"squares": 5}), episode.message
    played(renderer, in_process(looker))  # in whose place it ends
    assert (tmp_path / "own.ended").exists()


def test_a_picture_is_decoded_once_in_an_episode(renderer):
    """However many agents ask between its requests, and however long the agent thinks."""

    async def agent(task):
        from rollout.agents import messages

        count, load = [], messages.load_image
        messages.load_image = lambda uri: (count.append(uri), load(uri))[1]
        history = [
            *task.messages,
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": helper.uri(1)}}]},
        ]
        for turn in range(4):
            history += [await asks(task, history), {"role": "user", "content": str(turn)}]
            await asyncio.sleep(0.2)
        messages.load_image = load
        return {"score": 1.0, "decoded": len(count)}

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), in_process(agent))
    assert (episode.ended, episode.info) == ("done", {"decoded": 1}), episode.message


def test_a_process_that_cannot_begin_is_told(renderer):
    with pytest.raises(UserFunctionFailed, match="ended with exit status 5 as it began: standard error says why"):
        run(renderer, ScriptedEngine(renderer, "ok"), in_process(EndsAsItBegins()))


class EndsAsItBegins:
    def __reduce__(self):
        return os._exit, (5,)


def test_what_cannot_be_sent_is_told(renderer):
    lock = threading.Lock()

    async def holds_a_lock(task):
        with lock:
            return 1.0

    async def returns_a_lock(task):
        await asks(task)
        return threading.Lock()

    with pytest.raises(InvalidConfig, match=r"cannot be sent to a process of its own: cannot pickle '_thread.lock'"):
        in_process(holds_a_lock)
    (episode,) = played(renderer, in_process(returns_a_lock), 1)
    assert (episode.ended, "what the agent gave cannot be sent" in episode.message) == ("error", True)
    begun = starts(1)
    begun[0].row["lock"] = lock
    (episode,) = AgentPlan(in_process(looker), EpisodeLimits(turns=2)).play(
        ScriptedEngine(renderer, "ok"), renderer, begun, SamplingParams(max_tokens=20), 1
    )
    assert (episode.ended, "its row cannot be sent to the process" in episode.message) == ("error", True)


PROGRAM = """
import os, sys
from helpers.agents import ScriptedEngine, looker, run, tool_renderer
from recipes.run.episode_roles import load_agent
from rollout.agents import in_process
from rollout.agents.agent_loop import AgentRun
from rollout.environments import EpisodeLimits

if __name__ == "__main__":
    renderer = tool_renderer()
    run(renderer, ScriptedEngine(renderer, "ok"), in_process(looker))
    left_open = AgentRun(in_process(looker), EpisodeLimits(turns=2))
    print(left_open.agents._process.process.pid, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["returns", "killed"])
def test_processes_end_with_the_program(end, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), end],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == (0 if end == "returns" else -signal.SIGKILL), ended.stderr
    until = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(int(ended.stdout), 0)
            time.sleep(0.05)
        pytest.fail("the process of the agents is left")


CLIENTS = []


@pytest.fixture
def tool():
    """A server of the user's own, which keeps connections open."""

    class Tool(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tool)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("place", [lambda agent: agent, in_process], ids=["here", "in_process"])
def test_a_client_that_an_agent_keeps_serves_all_rollouts(renderer, tool, place):
    async def agent(task):
        if not CLIENTS:
            CLIENTS.append(httpx2.AsyncClient(verify=False))
        await asks(task)
        return {"score": 1.0, "status": (await CLIENTS[0].get(tool)).status_code}

    CLIENTS.clear()
    agent = place(agent)
    for _ in range(3):
        (episode,) = played(renderer, agent, 1)
        assert (episode.ended, episode.info) == ("done", {"status": 200}), episode.message
