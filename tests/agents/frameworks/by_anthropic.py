"""A loop over Anthropic's client with a tool."""

import base64
import os

import anthropic
from pictures import PICTURES, finish, question

looks, client = 0, anthropic.Anthropic()
properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
tool = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": properties}}
messages = [{"role": "user", "content": question()}]
while True:
    reply = client.messages.create(
        model=os.environ["MODEL"], system="You look at pictures.", messages=messages, tools=[tool], max_tokens=400
    )
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURES[looks]).decode()}
        shown = [{"type": "text", "text": "seen"}, {"type": "image", "source": source}]
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": shown})
        looks += 1
    messages.append({"role": "user", "content": results})
finish("".join(block.text for block in reply.content if block.type == "text"), looks)
