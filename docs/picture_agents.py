"""Agents that walk to a goal and read a digit, in worlds of their own, through the clients of OpenAI and Anthropic::

    dataproto walk --agent docs/picture_agents.py:walk
    dataproto walk --agent docs/picture_agents.py:walk_by_anthropic
    dataproto zoom --agent docs/picture_agents.py:zoom

Their worlds are those of ``dataproto walk`` and ``dataproto zoom`` without ``--agent``, so that both can be compared.
"""

import base64
import io

import anthropic
import httpx2
import openai

from recipes.demo.digit_zoom import DigitZoom
from recipes.demo.grid_walk import GridWalk

MOST_MOVES, MOST_LOOKS = 6, 2
CLIENTS = {}  # by the policy of the rollout


async def walk(task):
    """Walks in a grid, of which each turn has a new picture."""
    return await play(task, GridWalk(), MOST_MOVES)


async def zoom(task):
    """Looks at a part of a picture, and says the digit that it sees."""
    return await play(task, DigitZoom(), MOST_LOOKS)


async def play(task, world, turns):
    """An episode through OpenAI's client. The rewards of turns are given as they come."""
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http_client(openai, task))
    messages = list(task.messages)
    shown = world.reset(task.row, task.seed)
    for _ in range(turns):
        url = f"data:image/png;base64,{png(shown.content[0])}"
        messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        messages.append(reply.choices[0].message)
        shown = world.step(reply.choices[0].message.content or "")
        task.reward(shown.reward)
        if shown.done:
            break
    return {"score": 0.0, **shown.info}


async def walk_by_anthropic(task):
    """The same walk through Anthropic's client."""
    http = http_client(anthropic, task)
    client = anthropic.AsyncAnthropic(base_url=task.server_url, api_key=task.api_key, http_client=http)
    world, messages = GridWalk(), []
    shown = world.reset(task.row, task.seed)
    for _ in range(MOST_MOVES):
        source = {"type": "base64", "media_type": "image/png", "data": png(shown.content[0])}
        messages.append({"role": "user", "content": [{"type": "image", "source": source}]})
        reply = await client.messages.create(
            model=task.model, system=task.messages[0]["content"], messages=messages, max_tokens=16
        )
        messages.append({"role": "assistant", "content": reply.content})
        shown = world.step("".join(block.text for block in reply.content if block.type == "text"))
        task.reward(shown.reward)
        if shown.done:
            break
    return {"score": 0.0, **shown.info}


def http_client(library, task):
    """Without connections, as the policy is in this process; shared by all episodes of a rollout, as it takes long to make."""
    if task.app not in CLIENTS:
        CLIENTS.clear()  # that of the rollout before
        CLIENTS[task.app] = library.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(task.app))
    return CLIENTS[task.app]


def png(image):
    """A picture as the base64 of a file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
