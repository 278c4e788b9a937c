"""An agent whose tools are those of an MCP server, through its own client: ``dataproto grpo --agent docs/mcp_agent.py:answer``.

The command of MCP_SERVER starts the server, which lives as long as the episode.
"""

import json
import os
import shlex

from mcp import Client, StdioServerParameters, stdio_client
from openai import AsyncOpenAI


async def answer(task):
    """Calls tools until the policy answers without a call; ``--reward`` scores the answer."""
    command, *arguments = shlex.split(os.environ["MCP_SERVER"])
    server = stdio_client(StdioServerParameters(command=command, args=arguments))
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as policy, Client(server) as tools:
        offered = [described(tool) for tool in (await tools.list_tools()).tools]
        messages = list(task.messages)
        while True:
            reply = await policy.chat.completions.create(model=task.model, messages=messages, tools=offered)
            messages.append(reply.choices[0].message)
            if not messages[-1].tool_calls:
                return None
            for call in messages[-1].tool_calls:
                result = await tools.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": [*map(part, result.content)]})


def described(tool):
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def part(content):
    """A text or a picture that a tool returned."""
    if content.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{content.mime_type};base64,{content.data}"}}
    return {"type": "text", "text": content.text}
