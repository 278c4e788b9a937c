"""A loop over LiteLLM on /v1/chat/completions."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

import litellm
from pictures import URIS, finish, question

looks, call = 0, None
properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": properties}}
messages = [{"role": "system", "content": "You look at pictures."}, {"role": "user", "content": question()}]
while True:
    reply = litellm.completion(
        model=f"openai/{os.environ['MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        messages=messages,
        tools=[{"type": "function", "function": function}],
    )
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        json.loads(call.function.arguments)
        content = [{"type": "image_url", "image_url": {"url": URIS[looks]}}]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        looks += 1
finish(message.content, looks)
