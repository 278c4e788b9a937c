"""The walk of ``benchmarks/walk_beside_trl.py`` as an agent through OpenAI's client."""

import base64
import io
from functools import cache
from typing import Any

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from recipes.demo.grid_walk import GridWalk

TURNS = 6


@cache
def http_client(app: Any) -> Any:
    """That of all episodes of a step, which has an endpoint and an event loop of its own."""
    return DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app))


async def walk(task: Any) -> float:
    """The agent."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http_client(task.app))
    return await walked(client, task.model, list(task.messages), task.row["extra_info"], task.reward)


async def walked(client: Any, model: str, messages: list[Any], layout: dict[str, Any], give: Any) -> float:
    """Walks until the goal is reached or no turn is left."""
    world = GridWalk()
    shown = world.reset({"extra_info": layout}, 0)
    for _ in range(TURNS):
        file = io.BytesIO()
        shown.content[0].save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
        reply = await client.chat.completions.create(model=model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        shown = world.step(messages[-1]["content"])
        give(shown.reward)
        if shown.done:
            break
    return 0.0
