"""Plays the environment of `sums` on an engine that says what it is told to; prints what becomes of it as JSON."""

import json
import sys

from helpers.agents import ScriptedEngine, tool_renderer
from rollout.agents import AgentPlan, VerifiersAgent
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart

LOCAL = {"taskset": {"id": "sums"}, "agent": {"runtime": {"type": "subprocess"}}}

agent = VerifiersAgent(LOCAL)
rows = [json.loads(line) for line in agent.write_rows(sys.argv[1]).read_text().splitlines()]
renderer = tool_renderer()
engine = ScriptedEngine(renderer, "It is 3.")
messages = [{"role": "user", "content": "of the row, which verifiers does not ask"}]
starts = [
    EpisodeStart({"raw_prompt": messages, **row}, 1, 7, "u", f"u/{place}") for place, row in enumerate([*rows[1:3], {}])
]
limits = EpisodeLimits(turns=4, seconds=100)
episodes = AgentPlan(agent, limits).play(engine, renderer, starts, SamplingParams(max_tokens=20))
told = [
    {
        "ended": episode.ended,
        "message": episode.message,
        "rewards": [turn.reward for turn in episode.turns],
        "info": episode.info,
        "new_rows": episode.new_rows,
    }
    for episode in episodes
]
prompts = [renderer.builder.tokenizer.decode(request.input_ids) for request in engine.requests]
print(json.dumps({"rows": rows, "episodes": told, "prompts": prompts}))
