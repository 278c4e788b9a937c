"""Bodies of three wires to one form: chat/completions, responses (OpenAI) and messages (Anthropic).

What changes the meaning of a request and cannot be done is refused by its name. Settings of sampling that a run fixes, such as
the temperature, and what has no meaning here, such as ``user``, are ignored.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rollout.agents.messages import Ask, Call, Medium, Message, Part, Refused, canonical, results_in_order

MOST_SAMPLES = 128
"""The largest ``n`` of a request."""
_COMMON = "model metadata service_tier temperature top_p top_k stream tools tool_choice"
_OPENAI = (
    f"{_COMMON} user store prompt_cache_key prompt_cache_retention safety_identifier top_logprobs parallel_tool_calls"
)
_CHAT = (
    f"{_OPENAI} messages n max_tokens max_completion_tokens stop seed logprobs stream_options reasoning_effort verbosity"
).split()
_RESPONSES = (
    f"{_OPENAI} input instructions max_output_tokens include reasoning truncation stream_options max_tool_calls"
).split()
_MESSAGES = f"{_COMMON} messages system max_tokens stop_sequences thinking cache_control betas output_config".split()
_TEXT = {"type": "text"}
_PLAIN = {"response_format": _TEXT, "modalities": ["text"]}
"""Fields that say what is the case anyway."""
_NO_FORM = (
    "this field is not supported, as nothing bounds what the policy writes: ask for JSON in a message, or by a tool"
)
_ADVICE = {
    "thread": "the history is not kept here: pass thread=False to the client's tool runner, which then sends all messages",
    "previous_message_id": "the history is not kept here: send all messages",
    **dict.fromkeys(("previous_response_id", "conversation"), "the history is not kept here: send all items as input"),
    **dict.fromkeys(("response_format", "text", "output_config.format"), _NO_FORM),
}
_ITEM = re.compile(r"(?:msg|rs|fc)_(\w{8}_\d{8})(?:_\d\d)?")


def read_chat(body: Mapping[str, Any]) -> Ask:
    """A body of /v1/chat/completions. Raises `Refused`."""
    _check_fields(body, _CHAT)
    messages = []
    for name, message in _mappings(_list(body.get("messages"), "messages", 1), "messages"):
        role = _role(message, name, ("system", "developer", "user", "assistant", "tool"))
        calls = []
        for place, call in _mappings(_list(message.get("tool_calls"), f"{name}.tool_calls"), f"{name}.tool_calls"):
            function = _mapping(call.get("function"), f"{place}.function")
            calls.append(_call(function.get("name"), function.get("arguments"), call.get("id"), name))
        thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
        content = tuple(_parts(message.get("content"), f"{name}.content"))
        call_id = str(message.get("tool_call_id") or "")
        messages.append(Message(role, content, tuple(calls), thoughts=str(thoughts), call_id=call_id))
    options = _mapping(body.get("stream_options") or {}, "stream_options")
    top = _whole(body, "top_logprobs", 0, 20)
    return _ask(
        body,
        messages,
        partial(_tool, inside="function"),
        body.get("tool_choice"),
        parallel=body.get("parallel_tool_calls") is not False,
        n=_whole(body, "n", 1, MOST_SAMPLES) or 1,
        max_tokens=_whole(body, "max_completion_tokens", 1) or _whole(body, "max_tokens", 1),
        stop=_stop(body, "stop"),
        seed=_whole(body, "seed"),
        top_log_probs=(top or 0) if body.get("logprobs") else None,
        stream_usage=bool(options.get("include_usage")),
    )


def read_responses(body: Mapping[str, Any]) -> Ask:
    """A body of /v1/responses. Raises `Refused`."""
    _check_fields(body, _RESPONSES)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input", 1)
    messages = [Message("system", (str(body["instructions"]),))] if body.get("instructions") else []
    answer: dict[str, Any] = {}
    for name, item in _mappings(items, "input"):
        message = _item(item, name, answer)
        if message is not None:
            messages += [*_joined(answer), message]
            answer = {}
    messages += _joined(answer)
    wants = "message.output_text.logprobs" in _list(body.get("include"), "include")
    top = _whole(body, "top_logprobs", 0, 20)
    return _ask(
        body,
        messages,
        _tool,
        body.get("tool_choice"),
        parallel=body.get("parallel_tool_calls") is not False,
        max_tokens=_whole(body, "max_output_tokens", 1),
        top_log_probs=(top or 0) if wants or top else None,
    )


def _item(item: Mapping[str, Any], name: str, answer: dict[str, Any]) -> Message | None:
    """The message of an input item; parts of an answer, which are items of their own, are added to ``answer``."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = _role(item, name, ("system", "developer", "user", "assistant"))
        content = tuple(_parts(item.get("content"), f"{name}.content"))
        if role != "assistant":
            return Message(role, content)
        answer.setdefault("content", []).extend(content)
    elif kind == "reasoning":
        place = "content" if item.get("content") else "summary"
        texts = _list(item.get(place), f"{name}.{place}")
        answer.setdefault("thoughts", []).extend(str(_mapping(each, name).get("text") or "") for each in texts)
    elif kind == "function_call":
        call_id = item.get("call_id") or item.get("id")
        answer.setdefault("calls", []).append(_call(item.get("name"), item.get("arguments"), call_id, name))
    elif kind == "function_call_output":
        content = tuple(_parts(item.get("output"), f"{name}.output"))
        return Message("tool", content, call_id=str(item.get("call_id") or ""))
    else:
        raise Refused(f"{name}.type: items of the type {kind!r} are not supported", f"{name}.type")
    if found := _ITEM.fullmatch(str(item.get("id") or "")):
        answer["id"] = found[1]
    answer.setdefault("content", [])
    return None


def _joined(answer: Mapping[str, Any]) -> list[Message]:
    """The parts of an answer as one message."""
    if not answer:
        return []
    thoughts = "".join(answer.get("thoughts", ()))
    content, calls = tuple(answer["content"]), tuple(answer.get("calls", ()))
    return [Message("assistant", content, calls, thoughts=thoughts, reply_id=answer.get("id", ""))]


def read_messages(body: Mapping[str, Any]) -> Ask:
    """A body of Anthropic's /v1/messages. Raises `Refused`."""
    _check_fields(body, _MESSAGES)
    output = _mapping(body.get("output_config") or {}, "output_config")
    _check_fields({f"output_config.{name}": each for name, each in output.items()}, ["output_config.effort"])
    system = tuple(_parts(body.get("system"), "system"))
    messages = [Message("system", system)] if system else []
    for name, message in _mappings(_list(body.get("messages"), "messages", 1), "messages"):
        role = _role(message, name, ("system", "user", "assistant"))
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, f"{name}.content")
        messages += _block_messages(role, blocks, f"{name}.content")
    if messages[-1].role == "assistant":
        raise Refused("messages: the last one is the assistant's, and an answer cannot be continued", "messages")
    choice = _mapping(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": {"name": choice.get("name")}}
    if (kind := choice.get("type")) not in list(kinds):
        raise Refused(f"tool_choice.type: {kind!r} is not one of {', '.join(kinds)}", "tool_choice.type")
    return _ask(
        body,
        messages,
        _anthropic_tool,
        kinds[kind],
        parallel=not choice.get("disable_parallel_tool_use"),
        max_tokens=_whole(body, "max_tokens", 1),
        stop=_stop(body, "stop_sequences"),
    )


def _ask(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    read_tool: Callable[[Any, str], dict[str, Any]],
    choice: Any,
    **more: Any,
) -> Ask:
    """The request with what all wires write alike: tools, each by ``read_tool``, ``stream`` and ``model``."""
    tools = tuple(read_tool(each, f"tools[{place}]") for place, each in enumerate(_list(body.get("tools"), "tools")))
    told: dict[str, Any] = {"stream": bool(body.get("stream")), "model": str(body.get("model") or "")}
    return Ask(results_in_order(messages), tools, _choice(choice, tools), **told, **more)


def _block_messages(role: Any, blocks: Sequence[Any], name: str) -> list[Message]:
    """The messages of a message's blocks: results of tools are messages of their own."""
    found: list[Message] = []
    content: list[Part] = []
    calls, thoughts, reply_id = list[Call](), list[str](), ""
    for field, block in _mappings(blocks, name):
        kind = block.get("type")
        if kind == "tool_result":
            if content:
                found.append(Message(role, tuple(content)))
                content = []
            result = tuple(_parts(block.get("content"), f"{field}.content"))
            found.append(Message("tool", result, call_id=str(block.get("tool_use_id") or "")))
        elif kind == "tool_use":
            calls.append(_call(block.get("name"), block.get("input") or {}, block.get("id"), field))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
            reply_id = str(block.get("signature") or "")
        elif kind != "redacted_thinking" and (part := _part(block, field)) != "":
            content.append(part)
    if content or calls or not found:
        found.append(Message(role, tuple(content), tuple(calls), thoughts="".join(thoughts), reply_id=reply_id))
    return found


def _parts(content: Any, field: str) -> Iterator[Part]:
    """Texts, pictures and sounds of a message's content, in any of the wires' forms."""
    if not isinstance(content, Sequence | None):
        raise Refused(f"{field}: content is a text or a list of parts, not {type(content).__name__}", field)
    for place, each in enumerate([content] if isinstance(content, str) else content or ()):
        name = f"{field}[{place}]"
        part = _part({"type": "text", "text": each} if isinstance(each, str) else _mapping(each, name), name)
        if part != "":
            yield part


def _part(part: Mapping[str, Any], field: str) -> Part:
    """A part of a message's content, in any of the wires' forms."""
    match part.get("type"):
        case "text" | "input_text" | "output_text" | "refusal":
            return str(part.get("text") or part.get("refusal") or "")
        case "image_url" | "input_image":
            url = part.get("image_url")
            return Medium.of_uri(url.get("url") if isinstance(url, Mapping) else url, f"{field}.image_url")
        case "image":
            given, place = _mapping(part.get("source"), f"{field}.source"), f"{field}.source.type"
            if given.get("type") != "base64":
                raise Refused(f"{place}: pictures come as base64, nothing is fetched", place)
            return Medium.of_uri(f"data:{given.get('media_type')};base64,{given.get('data')}", f"{field}.source.data")
        case "input_audio":
            given, place = _mapping(part.get("input_audio"), f"{field}.input_audio"), f"{field}.input_audio.data"
            if not isinstance(given.get("data"), str):
                raise Refused(f"{place}: sounds come as base64, nothing is fetched", place)
            return Medium.of_uri(f"data:audio/{given.get('format')};base64,{given['data']}", place, "audio")
        case kind:
            raise Refused(f"{field}.type: parts of the type {kind!r} are not supported", f"{field}.type")


def _call(name: Any, arguments: Any, call_id: Any, field: str) -> Call:
    if not isinstance(name, str) or not name:
        raise Refused(f"{field}: a call has no name", field)
    return Call(name, canonical("" if arguments is None else arguments), str(call_id or ""))


def _tool(tool: Any, field: str, inside: str = "") -> dict[str, Any]:
    """A tool in the form of chat/completions, which chat templates take."""
    given = _mapping(tool, field)
    if given.get("type", "function") != "function":
        raise Refused(f"{field}.type: tools of the type {given['type']!r} are not supported", f"{field}.type")
    function = _mapping(given.get(inside), f"{field}.{inside}") if inside else given
    if not isinstance(function.get("name"), str):
        raise Refused(f"{field}: the tool has no name", field)
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": kept}


def _anthropic_tool(tool: Any, field: str) -> dict[str, Any]:
    given = _mapping(tool, field)
    kind = "function" if given.get("type") in (None, "custom") else given["type"]
    return _tool({**given, "type": kind, "parameters": given.get("input_schema")}, field)


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """``tool_choice`` as in `Ask`."""
    if isinstance(choice, Mapping):
        name = _mapping(choice.get("function") or choice, "tool_choice.function").get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise Refused(f"tool_choice: {choice!r} names no tool of the request", "tool_choice")
        return str(name)
    if choice not in (None, "auto", "none", "required"):
        raise Refused(f"tool_choice: {choice!r} is not auto, none, required or a tool", "tool_choice")
    if choice == "required" and not tools:
        raise Refused("tool_choice: 'required' needs tools", "tool_choice")
    return choice or "auto"


def _check_fields(body: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises `Refused` for a field that is set and means something that is not supported."""
    for name, value in body.items():
        if name in known or not value or value == _PLAIN.get(name):
            continue
        if name == "text" and isinstance(value, Mapping) and value.get("format") in (None, _TEXT):
            continue
        raise Refused(f"{name}: {_ADVICE.get(name, 'this field is not supported')}", name, "unsupported_parameter")


def _whole(body: Mapping[str, Any], name: str, least: int | None = None, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{name}: {value!r} is not a whole number", name)
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise Refused(f"{name}: {value} must be {bounds}", name)
    return value


def _stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    texts = (value,) if isinstance(value, str) and value else tuple(_list(value, name))
    if not all(isinstance(text, str) and text for text in texts):
        raise Refused(f"{name}: must be texts that are not empty", name)
    return texts


def _list(value: Any, field: str, least: int = 0) -> list[Any]:
    """A list, which may be left out if it may be empty."""
    found = value or []
    if not isinstance(found, list):
        raise Refused(f"{field}: must be a list, not {type(value).__name__}", field)
    if len(found) < least:
        raise Refused(f"{field}: must be a list that is not empty", field)
    return found


def _mapping(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(f"{field}: must be an object, not {type(value).__name__}", field)
    return value


def _mappings(values: Sequence[Any], field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects of a list, each with its place for errors."""
    for place, each in enumerate(values):
        name = f"{field}[{place}]"
        yield name, _mapping(each, name)


def _role(message: Mapping[str, Any], field: str, known: Sequence[str]) -> Any:
    role = message.get("role")
    if role not in known:
        raise Refused(f"{field}.role: {role!r} is not one of {', '.join(known)}", f"{field}.role")
    return "system" if role == "developer" else role
