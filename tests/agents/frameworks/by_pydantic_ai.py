"""pydantic-ai on /v1/chat/completions: the picture follows the tool's result in a message of the user."""

import os

from pictures import PICTURES, finish, question
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

looks = iter(range(len(PICTURES)))
provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(OpenAIChatModel(os.environ["MODEL"], provider=provider), instructions="You look at pictures.")


@agent.tool_plain
def look(a: str = "", b: int = 0) -> BinaryContent:
    """Look at the picture."""
    return BinaryContent(PICTURES[next(looks)], media_type="image/png")


finish(agent.run_sync(question()).output, next(looks))
