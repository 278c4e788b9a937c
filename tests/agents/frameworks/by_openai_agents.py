"""openai-agents on /v1/responses, whose tool returns a picture."""

import os

from agents import Agent, Runner, ToolOutputImage, function_tool, set_tracing_disabled
from pictures import URIS, finish, question

set_tracing_disabled(True)
looks = iter(range(len(URIS)))


@function_tool
def look(a: str = "", b: int = 0):
    """Look at the picture."""
    return ToolOutputImage(image_url=URIS[next(looks)])


agent = Agent(name="looker", instructions="You look at pictures.", model=os.environ["MODEL"], tools=[look])
finish(Runner.run_sync(agent, question(), max_turns=5).final_output, next(looks))
