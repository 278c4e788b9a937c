"""An environment of OpenEnv as an agent, through its own client: ``dataproto grpo --agent docs/openenv_agent.py:play``.

OPENENV_URL is the address of the environment's server, which gives each client an episode of its own.
"""

import json
import os

from openai import AsyncOpenAI
from openenv import GenericEnvClient


async def play(task):
    """Observations are messages of the user, and what the policy says is the ``message`` of an action."""
    environment = GenericEnvClient(base_url=os.environ["OPENENV_URL"])
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as policy, environment:
        messages, result = list(task.messages), await environment.reset(seed=task.seed)
        while not result.done:
            messages.append({"role": "user", "content": json.dumps(result.observation)})
            reply = await policy.chat.completions.create(model=task.model, messages=messages)
            messages.append(reply.choices[0].message)
            result = await environment.step({"message": reply.choices[0].message.content})
            task.reward(result.reward or 0.0)
    return 0.0
