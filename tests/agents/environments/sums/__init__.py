"""An environment of `verifiers` 0.4 as a package of its own: tasks, their reward, a tool, and a harness in this process."""

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def words(self, trace) -> float:
        return float(len(trace.last_reply.split()))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for number in range(6):
            yield SumTask(Sum(prompt=f"What is {number} + 1?", answer=str(number + 1)), self.config.task)


class AskingTwice(vf.Harness):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskingTwice", "Sums"]
