"""Plays the agent of docs/openenv_agent.py in an environment on a server of OpenEnv; prints what becomes of it as JSON."""

import json
import os
import socket
import threading

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv_agent import play

from helpers.agents import ScriptedEngine, run, tool_renderer
from rollout.environments import EpisodeLimits


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Guessing(Environment):
    """A number to guess; its hints say whether it is more."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options) -> Hint:
        self.number = seed
        return Hint(text="Which number?", reward=None, done=False)

    def step(self, action: Guess, timeout_s=None, **options) -> Hint:
        right = int(action.message) == self.number
        return Hint(text="more" if int(action.message) < self.number else "less", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


listening = socket.create_server(("127.0.0.1", 0))
app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
os.environ["OPENENV_URL"] = f"http://127.0.0.1:{listening.getsockname()[1]}"

renderer = tool_renderer()
engine = ScriptedEngine(renderer, "5", "5", "7", "7")  # of two episodes, whose number is 7
episodes = run(renderer, engine, play, count=2, limits=EpisodeLimits(turns=4, seconds=100))
told = [
    {
        "ended": episode.ended,
        "message": episode.message,
        "rewards": [turn.reward for turn in episode.turns],
        "new_rows": episode.new_rows,
    }
    for episode in episodes
]
last = renderer.builder.tokenizer.decode(engine.requests[-1].input_ids)
print(json.dumps({"episodes": told, "last": last}))
