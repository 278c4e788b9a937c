"""What clients say and hear, whichever wire they use: messages, requests and replies, equal where they mean the same."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal
from weakref import WeakValueDictionary

from dataproto.errors import DataProtoError, InvalidMedia, MissingPackage, raised_as
from rollout.environments.tool_environment import CALL, CALLS, hermes_call
from rollout.prompts.images import load_image
from rollout.prompts.messages import THOUGHTS, Conversation
from rollout.prompts.sounds import load_sound

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "calls"]
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
TEXT_CLIENTS = "Calling tools:\n[", "</code>"
"""What clients that keep no calls write after our text in their history."""
LEFT_OUT = re.compile(r"\[tool output omitted\]|Stored '[^']*\.png' in memory")
"""What clients that cannot send the picture of a tool write in its place."""


class Refused(DataProtoError, ValueError):
    """A request that is answered by an error of its wire.

    ``field`` is the field of the body at fault, ``code`` what clients tell errors apart by.
    """

    def __init__(self, message: str, field: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.field, self.code, self.status)


@dataclass(frozen=True)
class Decoded:
    """The content of a medium, equal to others of the same pixels or samples."""

    digest: bytes
    content: Any = field(compare=False, repr=False)  # an RGB image, or a sound, see `load_sound`


@dataclass(frozen=True)
class Medium:
    """An image or a sound of a request, and the field of the body that has it."""

    kind: str
    decoded: Decoded
    place: str = field(compare=False)

    @classmethod
    def of_uri(cls, uri: Any, field: str, kind: str = "image") -> "Medium":
        """Decodes a data URI, once for as long as somebody holds the medium: clients send all of them in each request.

        Raises `Refused` for all else: nothing is read from elsewhere.
        """
        if not isinstance(uri, str) or not uri.startswith("data:"):
            raise Refused(f"{field}: pictures come as data URIs (data:image/png;base64,...), nothing is fetched", field)
        key = blake2b(f"{kind} {uri}".encode(), digest_size=16).digest()
        with raised_as(partial(Refused, field=field), field, InvalidMedia, MissingPackage):
            if (found := _DECODED.get(key)) is None:
                content = load_image(uri) if kind == "image" else load_sound(uri)
                size, data = (content.size, content.tobytes())
                _DECODED[key] = found = Decoded(blake2b(repr(size).encode() + data, digest_size=16).digest(), content)
        return cls(kind, found, field)


_DECODED: WeakValueDictionary[bytes, Decoded] = WeakValueDictionary()
"""The contents of media by the digests of their data URIs."""

Part = str | Medium


@dataclass(frozen=True)
class Call:
    """A call of a tool, equal to others with the same name and the same arguments as parsed JSON."""

    name: str
    arguments: str  # `canonical`
    id: str = field(default="", compare=False)


def canonical(arguments: Any) -> str:
    """Arguments in one form for all texts that parse to the same JSON; text that is no JSON stays as it is.

    >>> canonical('{"b": 1.0,  "a": "x"}') == canonical({"a": "x", "b": 1}), canonical(""), canonical('{"a":')
    (True, '{}', '{"a":')
    >>> canonical({"INVALID_JSON": '{"a":'})
    '{"a":'
    """
    text = arguments.strip() or "{}" if isinstance(arguments, str) else json.dumps(arguments)
    try:
        found = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return str(arguments)
    if isinstance(found, dict) and list(found) == ["INVALID_JSON"]:
        return str(found["INVALID_JSON"])
    return json.dumps(found, sort_keys=True, ensure_ascii=False)


def _number(text: str) -> int | float:
    """A number of JSON; whole ones as integers: some clients write 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def normalised(content: Iterable[Part]) -> tuple[Part, ...]:
    """Content with adjoining texts joined and outer white space left out, for comparisons.

    >>> normalised(["", " Let me", " look. "]), normalised([" "])
    (('Let me look.',), ())
    """
    found: list[Part] = []
    for is_text, parts in groupby(content, lambda part: isinstance(part, str)):
        run = list(parts)
        found += ["".join(map(str, run)).strip()] if is_text else run
    return tuple(part for part in found if part != "")


@dataclass(frozen=True)
class Message:
    """A message of a client's history, equal to others that say the same; thoughts and ids do not count."""

    role: Role
    content: tuple[Part, ...] = field(default=(), compare=False)
    calls: tuple[Call, ...] = ()
    said: tuple[Part, ...] = field(init=False)  # ``content``, normalised
    thoughts: str = field(default="", compare=False)
    call_id: str = field(default="", compare=False)  # of the call that a tool answers
    reply_id: str = field(default="", compare=False)  # of our reply, where the wire brings it back

    def __post_init__(self) -> None:
        object.__setattr__(self, "said", normalised(self.content))

    @property
    def text(self) -> str:
        """The texts of the content, joined and stripped."""
        return "".join(part for part in self.said if isinstance(part, str))

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal messages, in any process."""
        parts = [part if isinstance(part, str) else part.decoded.digest for part in self.said]
        calls = [(call.name, call.arguments) for call in self.calls]
        return blake2b(repr((self.role, parts, calls)).encode(), digest_size=16).digest()


def shown(messages: Sequence[Message], tools: Sequence[Any] = ()) -> Conversation:
    """Messages as the chat template takes them."""
    found, media = [], []
    for message in messages:
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in message.content
        ]
        media += [part.decoded.content for part in message.content if isinstance(part, Medium)]
        shown_message: dict[str, Any] = {"role": message.role, "content": parts}
        if message.calls:
            shown_message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _parsed(call)}}
                for call in message.calls
            ]
        if message.thoughts:
            shown_message["reasoning_content"] = message.thoughts
        if message.call_id:
            shown_message["tool_call_id"] = message.call_id
        found.append(shown_message)
    return Conversation(found, media, tuple(tools))


def _parsed(call: Call) -> Any:
    with suppress(ValueError):
        return json.loads(call.arguments)
    return call.arguments


def results_in_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the results of tools in the order of the calls that they answer: templates pair them by place."""
    found: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        if message.calls:
            order = {call.id: place for place, call in enumerate(message.calls)}
        place = len(found)
        if message.role == "tool" and message.call_id in order:
            rank = order[message.call_id]
            while place and found[place - 1].role == "tool" and order.get(found[place - 1].call_id, -1) > rank:
                place -= 1
        found.insert(place, message)
    return tuple(found)


@dataclass(frozen=True)
class Ask:
    """A request for replies to a history, whichever wire it came by."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # in the form of chat/completions
    choice: str = "auto"  # "auto", "none", "required", or the name of a tool
    parallel: bool = True  # several calls in a reply
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_log_probs: int | None = None  # None: no log-probs are returned
    stream: bool = False
    stream_usage: bool = False
    model: str = ""

    @cached_property
    def tools_key(self) -> str:
        """Equal for equal tools."""
        return json.dumps(self.tools, sort_keys=True)

    @property
    def begins(self) -> str:
        """The text with which the answer has to begin, so that it is a call."""
        if self.choice in ("auto", "none"):
            return ""
        name = "" if self.choice == "required" else f'{{"name": {json.dumps(self.choice)}, "arguments": '
        return f"{CALL[0]}\n{name}"

    @property
    def stops(self) -> tuple[str, ...]:
        """All texts that end the answer."""
        return self.stop if self.parallel or not self.tools else (*self.stop, CALL[1])


@dataclass(frozen=True)
class TokenLogProb:
    """A sampled token, and the likeliest ones in its place."""

    text: str
    log_prob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Reply:
    """What the policy said. ``said`` are the texts by which a client may name it when it sends it back."""

    id: str  # of fixed width, unique over all turns, in their order
    text: str
    thoughts: str
    calls: tuple[Call, ...]
    finish: Finish
    said: frozenset[str] = frozenset()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    log_probs: tuple[TokenLogProb, ...] = ()
    stop_text: str | None = None  # of the request, that ended it

    @cached_property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.id for call in self.calls)

    def is_named_by(self, message: Message) -> bool:
        """Whether a client's message has one of our ids."""
        return message.reply_id == self.id or any(call.id in self.call_ids for call in message.calls)

    def is_sent_back_as(self, message: Message) -> bool:
        """Whether a client's message is this reply: by the ids of its calls with equal names and arguments, else by its text."""
        if message.role != "assistant":
            return False
        if any(call.id in self.call_ids for call in message.calls):
            return {call.id: call for call in message.calls} == {call.id: call for call in self.calls}
        if message.calls == self.calls:
            return message.text in self.said
        return not message.calls and CALL[0] in message.text and message.text in self.said


def read_reply(reply_id: str, text: str, ask: Ask, finish: Finish, **facts: Any) -> Reply:
    """An answer's text as a reply: thoughts, content and calls. Calls that cannot be read stay text.

    >>> reply = read_reply("7", '<think>\\nhm\\n</think>\\n\\nHi.<tool_call>{"name": "f"}</tool_call>', Ask((), ({},)), "stop")
    >>> reply.thoughts, reply.text, reply.calls, reply.finish
    ('hm', 'Hi.', (Call(name='f', arguments='{}', id='call_7_00'),), 'calls')
    """
    begun = len(ask.begins)
    cut, stop = min(((at, stop) for stop in ask.stop if (at := text.find(stop, begun)) >= 0), default=(len(text), None))
    sent = text[:cut]
    before, ended, answer = sent.rpartition(THOUGHTS[1])
    thoughts = before.strip().removeprefix(THOUGHTS[0]).strip() if ended else ""
    content, calls = answer, list[Call]()
    if ask.tools and ask.choice != "none":
        found = []
        with suppress(ValueError, RecursionError):
            found = [_read_call(each) for each in CALLS.findall(answer)]
        # Clients write INVALID_JSON in the place of arguments, see `canonical`.
        if found and not any("INVALID_JSON" in arguments for _, arguments in found):
            content = CALLS.sub("", answer)
            calls = [
                Call(name, canonical(arguments), f"call_{reply_id}_{number:02d}")
                for number, (name, arguments) in enumerate(found)
            ]
    content = content.strip()
    said = frozenset(each.strip() for each in (content, answer, sent, text))
    return Reply(reply_id, content, thoughts, tuple(calls), "calls" if calls else finish, said, stop_text=stop, **facts)


def _read_call(text: str) -> tuple[str, dict[str, Any]]:
    """The call between two marks: Hermes' JSON, or the functions of Qwen3.5, whose values are JSON or text. Raises `ValueError`.

    >>> _read_call("<function=look><parameter=a>\\nx\\n</parameter>\\n<parameter=b>2</parameter></function>")
    ('look', {'a': 'x', 'b': 2})
    """
    written = _FUNCTION.fullmatch(text)
    if written is None:
        return hermes_call(text)
    arguments: dict[str, Any] = {}
    for name, value in _PARAMETER.findall(written[2]):
        arguments[name] = value
        with suppress(ValueError):
            arguments[name] = json.loads(value)
    return written[1].strip(), arguments
