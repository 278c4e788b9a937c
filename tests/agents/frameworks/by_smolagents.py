"""smolagents on /v1/chat/completions: a step callback shows what the tool has looked at."""

import io
import os
import sys

from pictures import PICTURES, finish, question
from PIL import Image
from smolagents import OpenAIModel, Tool, ToolCallingAgent

shown = []


class Look(Tool):
    name = "look"
    description = "Look at the picture."
    inputs = {
        "a": {"type": "string", "description": "what", "nullable": True},
        "b": {"type": "integer", "description": "how", "nullable": True},
    }
    output_type = "string"

    def forward(self, a: str = "", b: int = 0) -> str:
        shown.append(Image.open(io.BytesIO(PICTURES[len(shown)])))
        return "taken"


def show(step, agent):
    if any(call.name == "look" for call in step.tool_calls or ()):
        step.observations_images = [shown[-1]]


model = OpenAIModel(
    model_id=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[Look()], model=model, step_callbacks=[show], max_steps=5, verbosity_level=0)
answer = agent.run(question())
sys.stdout.write("\n")
finish(answer, len(shown))
