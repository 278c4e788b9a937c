"""The walk of ``benchmarks/walk_beside_trl.py`` as an environment of verifiers: tasks, a reward, and a harness."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult
from walk_agents import walked

from recipes.demo.grid_walk import TASK, WalkRows


class Layout(vf.TaskData):
    layout: dict[str, Any]


class WalkTask(vf.Task[Layout]):
    @vf.reward
    async def nearer(self, trace: vf.Trace) -> float:
        return sum(trace.info["rewards"])


class Walks(vf.Taskset[WalkTask]):
    INFINITE = True

    def load(self) -> Iterator[WalkTask]:
        rows = WalkRows(0)
        for place in count():
            yield WalkTask(Layout(prompt=TASK, layout=rows[place]["extra_info"]), self.config.task)


class Walking(vf.Harness):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        rewards = trace.info["rewards"] = []
        messages = [{"role": "system", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await walked(client, ctx.model, messages, data.layout, rewards.append)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Walking", "Walks"]
