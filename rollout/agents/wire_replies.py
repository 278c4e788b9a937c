"""Replies in the forms of three wires, at once and as events, and errors in each wire's own shape.

The engine tells of a reply when it is whole, so events bring it in few pieces.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agents.messages import Ask, Call, Refused, Reply
from rollout.agents.wire_requests import read_chat, read_messages, read_responses

Body = dict[str, Any]
CONTEXT = "context_length_exceeded"
"""The code of an error that agents know: they shorten their history."""

LEAST_LOG_PROB = -9999.0
"""In the place of a smaller log-prob, as JSON has no infinity; OpenAI's API writes the same."""


@dataclass(frozen=True)
class Wire:
    """How a path reads requests, and writes replies, events and errors."""

    read: Callable[[Mapping[str, Any]], Ask]
    body: Callable[[Ask, Sequence[Reply]], Body]
    events: Callable[[Ask, Sequence[Reply]], Iterator[str]]
    error: Callable[[Refused], Body]


def openai_error(error: Refused) -> Body:
    """As OpenAI's API tells errors."""
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": error.field, "code": error.code}}


def anthropic_error(error: Refused) -> Body:
    """As Anthropic's API tells errors; its clients know a full context by the text."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    text = f"prompt is too long: {error} ({CONTEXT})" if error.code == CONTEXT else str(error)
    return {"type": "error", "error": {"type": kind, "message": text}}


# chat/completions


def chat_body(ask: Ask, replies: Sequence[Reply]) -> Body:
    """A ``chat.completion``."""
    choices = []
    for index, reply in enumerate(replies):
        message: Body = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["tool_calls"] = [_chat_call(call) for call in reply.calls]
        choice: Body = {"index": index, "message": message, "finish_reason": _chat_finish(reply)}
        choices.append(choice | _chat_logprobs(ask, reply))
    return {**_chat_head(ask, replies, "chat.completion"), "choices": choices, "usage": _chat_usage(replies)}


def chat_events(ask: Ask, replies: Sequence[Reply]) -> Iterator[str]:
    """``chat.completion.chunk`` events."""
    head = _chat_head(ask, replies, "chat.completion.chunk")

    def chunk(index: int, delta: Body, finish: str | None = None, **more: Any) -> str:
        return _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish, **more}]})

    for index, reply in enumerate(replies):
        yield chunk(index, {"role": "assistant", "content": ""})
        if reply.thoughts:
            yield chunk(index, {"reasoning_content": reply.thoughts})
        if reply.text:
            yield chunk(index, {"content": reply.text}, **_chat_logprobs(ask, reply))
        for number, call in enumerate(reply.calls):
            yield chunk(index, {"tool_calls": [{"index": number, **_chat_call(call)}]})
        yield chunk(index, {}, _chat_finish(reply))
    if ask.stream_usage:
        yield _event({**head, "choices": [], "usage": _chat_usage(replies)})
    yield "data: [DONE]\n\n"


def _chat_head(ask: Ask, replies: Sequence[Reply], kind: str) -> Body:
    return {"id": f"chatcmpl-{replies[0].id}", "object": kind, "created": int(time.time()), "model": ask.model}


def _chat_call(call: Call) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_finish(reply: Reply) -> str:
    return "tool_calls" if reply.finish == "calls" else reply.finish


def _chat_logprobs(ask: Ask, reply: Reply) -> Body:
    return {} if ask.top_log_probs is None else {"logprobs": {"content": _logprobs(reply), "refusal": None}}


def _logprobs(reply: Reply) -> list[Body]:
    def entry(text: str, log_prob: float) -> Body:
        return {"token": text, "logprob": max(log_prob, LEAST_LOG_PROB), "bytes": list(text.encode())}

    return [
        {**entry(each.text, each.log_prob), "top_logprobs": [entry(*other) for other in each.likeliest]}
        for each in reply.log_probs
    ]


def _chat_usage(replies: Sequence[Reply]) -> Body:
    prompt, sampled = replies[0].prompt_tokens, sum(reply.sampled_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


# messages


def messages_body(ask: Ask, replies: Sequence[Reply]) -> Body:
    """A ``message``. Thoughts are signed with the reply's id, so that clients send them back."""
    (reply,) = replies
    told = {"content": _blocks(reply), "usage": _message_usage(reply)}
    return _message_head(ask, reply) | told | _message_end(reply)


def messages_events(ask: Ask, replies: Sequence[Reply]) -> Iterator[str]:
    """``message_start`` to ``message_stop``."""
    (reply,) = replies
    start = {**_message_head(ask, reply), "content": [], "stop_reason": None, "stop_sequence": None}
    usage = {**_message_usage(reply), "output_tokens": 0}
    yield _named({"type": "message_start", "message": {**start, "usage": usage}})
    for index, block in enumerate(_blocks(reply)):
        begun, deltas = _streamed_block(block)
        yield _named({"type": "content_block_start", "index": index, "content_block": begun})
        for delta in deltas:
            yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    yield _named({"type": "message_delta", "delta": _message_end(reply), "usage": _message_usage(reply)})
    yield _named({"type": "message_stop"})


def _streamed_block(block: Body) -> tuple[Body, list[Body]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "thinking":
        names = "thinking", "signature"
        return {**block, **dict.fromkeys(names, "")}, [{"type": f"{name}_delta", name: block[name]} for name in names]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _message_head(ask: Ask, reply: Reply) -> Body:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": ask.model}


def _blocks(reply: Reply) -> list[Body]:
    thoughts = [{"type": "thinking", "thinking": reply.thoughts, "signature": reply.id}] if reply.thoughts else []
    texts = [{"type": "text", "text": reply.text}] if reply.text else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return [*thoughts, *texts, *calls]


def _message_end(reply: Reply) -> Body:
    if reply.stop_text is not None and reply.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    reasons = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
    return {"stop_reason": reasons[reply.finish], "stop_sequence": None}


def _message_usage(reply: Reply) -> Body:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.sampled_tokens,
    }


# responses


def responses_body(ask: Ask, replies: Sequence[Reply]) -> Body:
    """A ``response``."""
    (reply,) = replies
    cut = reply.finish == "length"
    details = {"reason": "max_output_tokens"} if cut else None
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
    status = "incomplete" if cut else "completed"
    return _response(ask, reply, status, _items(ask, reply)) | {"incomplete_details": details, "usage": usage}


def responses_events(ask: Ask, replies: Sequence[Reply]) -> Iterator[str]:
    """``response.created`` to ``response.completed``."""
    (reply,) = replies
    begun = _response(ask, reply, "in_progress", [])
    events: list[Body] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for index, item in enumerate(_items(ask, reply)):
        events += _item_events(index, item)
    done = responses_body(ask, replies)
    events.append({"type": f"response.{done['status']}", "response": done})
    for number, event in enumerate(events):
        yield _named({**event, "sequence_number": number})


def _response(ask: Ask, reply: Reply, status: str, output: list[Body]) -> Body:
    named = {"type": "function", "name": ask.choice}
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": ask.model,
        "output": output,
        **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p")),
        "metadata": {},
        "parallel_tool_calls": ask.parallel,
        "tool_choice": ask.choice if ask.choice in ("auto", "none", "required") else named,
        "tools": [{"type": "function", "strict": False, "parameters": None, **tool["function"]} for tool in ask.tools],
    }


def _items(ask: Ask, reply: Reply) -> list[Body]:
    items: list[Body] = []
    if reply.thoughts:
        head: Body = {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "status": "completed"}
        items.append({**head, "content": [{"type": "reasoning_text", "text": reply.thoughts}]})
    if reply.text or not reply.calls:
        logprobs = [] if ask.top_log_probs is None else _logprobs(reply)
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
        head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [text]})
    for number, call in enumerate(reply.calls):
        head = {"id": f"fc_{reply.id}_{number:02d}", "type": "function_call", "status": "completed"}
        items.append({**head, "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def _item_events(index: int, item: Body) -> list[Body]:
    """The events of an output item."""
    place: Body = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty: Body = {"arguments": ""}
        kind, whole = "response.function_call_arguments", {"name": item["name"], "arguments": item["arguments"]}
        added = [
            {"type": f"{kind}.delta", **place, "delta": item["arguments"]},
            {"type": f"{kind}.done", **place, **whole},
        ]
    else:
        (part,), empty = item["content"], {"content": []}
        place |= {"content_index": 0}
        kind = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        added = [
            {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
            {"type": f"{kind}.delta", **place, "delta": part["text"], **more},
            {"type": f"{kind}.done", **place, "text": part["text"], **more},
            {"type": "response.content_part.done", **place, "part": part},
        ]
    begun = {**item, **empty, "status": "in_progress"}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *added,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _event(data: Body) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _named(data: Body) -> str:
    return f"event: {data['type']}\n{_event(data)}"


WIRES = {
    "/v1/chat/completions": Wire(read_chat, chat_body, chat_events, openai_error),
    "/v1/responses": Wire(read_responses, responses_body, responses_events, openai_error),
    "/v1/messages": Wire(read_messages, messages_body, messages_events, anthropic_error),
}
"""The wires by their paths."""
