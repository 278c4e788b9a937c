"""Plays the agent of docs/mcp_agent.py with the tools of picture_server.py; prints what becomes of it as JSON."""

import json
import os
import sys
from pathlib import Path

from mcp_agent import answer

from helpers.agents import ScriptedEngine, run, tool_renderer
from rollout.environments import EpisodeLimits

SERVER = Path(__file__).parent / "picture_server.py"
CALL = '<tool_call>\n{"name": "look", "arguments": {"side": 28}}\n</tool_call>'

os.environ["MCP_SERVER"] = f"{sys.executable} {SERVER}"
renderer = tool_renderer()
engine = ScriptedEngine(renderer, CALL, "It is red.")
(episode,) = run(renderer, engine, answer, limits=EpisodeLimits(turns=4, seconds=100))
told = {
    "ended": episode.ended,
    "message": episode.message,
    "new_rows": episode.new_rows,
    "scored": episode.scored,
    "prompts": [renderer.builder.tokenizer.decode(request.prompt_ids) for request in engine.requests],
    "sizes": [picture.size for picture in engine.requests[-1].multi_modal_data["image"]],
}
print(json.dumps(told))
