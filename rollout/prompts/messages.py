"""Chat messages in the formats of data sets, converted to messages with typed parts and the media in order."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dataproto.errors import InvalidPrompt

Messages = Sequence[Mapping[str, Any]]
"""Of a chat, as templates take them."""
Turns = Literal["all", "last"]
"""Which of the assistant's turns are learnt."""
THOUGHTS = "<think>", "</think>"
"""What begins and ends the thoughts of an answer."""
MEDIA = {"image": "images", "video": "videos", "audio": "audios"}
"""The kinds of media, each with the column of a row that holds them."""
VIDEO_SOUND = "use_audio_in_video"
"""What tells Hugging Face's processors to read the sound of a video from its file; of a row, or of a video in it."""
MARKERS = re.compile("(" + "|".join(f"<{kind}>" for kind in MEDIA) + ")")
_SPEAKERS = ("user", "assistant")  # whose messages say something
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the thoughts of a message that are not in its content, of which a chat template reads one or none."""
_WORDLESS = ("tool_calls", "function_call", *REASONING)  # instead of content
LEARNED = ("weight", "loss", "train")
"""What says of an answer whether it is learned, as OpenAI, ms-swift and axolotl name it."""
_KINDS = {name: kind for kind in MEDIA for name in (kind, f"{kind}_url")} | {"input_audio": "audio"}
_PAYLOADS = ("bytes", "array", *_KINDS, "data", "base64", "url", "path")


@dataclass(frozen=True)
class Conversation:
    """Messages whose content is a string or a list of parts ``{"type": "text" | "image" | "video" | "audio", ...}``. The sources
    of the media are in ``media``, in the order of their parts; ``tools`` are those that the chat template describes.
    """

    messages: list[dict[str, Any]]
    media: list[Any]
    tools: tuple[Any, ...] = ()

    def texts(self) -> Iterable[str]:
        """All pieces of text, and the JSON of the tools."""
        yield from (json.dumps(tool, ensure_ascii=False, default=str) for tool in self.tools)
        for message in self.messages:
            yield from (part["text"] for part in as_parts(message["content"]) if part["type"] == "text")

    def kinds(self) -> list[str]:
        """``"image"``, ``"video"`` or ``"audio"`` for each medium, in the order of the parts."""
        parts = (part for message in self.messages for part in as_parts(message["content"]))
        return [part["type"] for part in parts if part["type"] != "text"]

    def of_kind(self, kind: str) -> list[Any]:
        """The sources of the media of a kind."""
        return [source for source, found in zip(self.media, self.kinds(), strict=True) if found == kind]

    def with_frames(self, captions: Sequence[Sequence[str]]) -> "Conversation":
        """The conversation with its videos shown as images: ``captions[video]`` are n + 1 texts around and between n frames.

        A frame has no source: its place among the media is `None`.

        >>> chat = read_conversation("<video>What moves?", {"video": ["a.mp4"]}).with_frames([["at 0 s ", " at 1 s ", ": "]])
        >>> [part.get("text", part["type"]) for part in chat.messages[0]["content"]], chat.media
        (['at 0 s ', 'image', ' at 1 s ', 'image', ': ', 'What moves?'], [None, None])
        """
        sources, texts, media = iter(self.media), iter(captions), list[Any]()
        shown = []
        for message in self.messages:
            content = message["content"]
            parts: list[dict[str, Any]] = []
            for part in [] if isinstance(content, str) else content:
                source = None if part["type"] == "text" else next(sources)
                if part["type"] == "video":
                    first, *others = next(texts)
                    parts.append({"type": "text", "text": first})
                    for text in others:
                        parts += [{"type": "image"}, {"type": "text", "text": text}]
                        media.append(None)
                else:
                    parts.append(part)
                    media += [] if part["type"] == "text" else [source]
            shown.append({**message, "content": parts or content})
        return replace(self, messages=shown, media=media)

    def with_media(self, media: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """The messages with the media of each kind in their parts, as in verl's ``raw_prompt``."""
        queues = {kind: iter(found) for kind, found in media.items()}
        filled = []
        for message in self.messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [
                    part if part["type"] == "text" else {**part, part["type"]: next(queues[part["type"]])}
                    for part in content
                ]
            filled.append({**message, "content": content})
        return filled


def read_conversation(messages: Any, media: Mapping[str, Iterable[Any]] | None = None) -> Conversation:
    """Messages (or one string, the user's message) with markers or typed parts, and the media of each kind that belong to them.

    ``<image>``, ``<video>`` and ``<audio>`` in string content become parts. In typed parts text stays text, so a text part can
    contain "<image>" literally. Each marker, and each media part without a payload, takes the next of the media of its kind;
    without any, they come before the first question (`with_media`). Raises `InvalidPrompt` if their numbers differ or a message
    is malformed.

    >>> chat = read_conversation("<image>Which angle?", {"image": ["a.png"]})
    >>> chat.messages
    [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'Which angle?'}]}]
    >>> chat.media
    ['a.png']
    >>> read_conversation("Which angle?", {"image": ["a.png"]}) == chat
    True
    >>> own = [{"type": "audio"}, {"type": "text", "text": "What does <audio> mean in this page?"}]
    >>> read_conversation([{"role": "user", "content": own}], {"audio": ["a.wav"]}).messages[0]["content"] == own
    True
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, (Sequence, np.ndarray)) or len(messages) == 0:
        raise InvalidPrompt(f"the prompt must be a string or a list of messages, not {messages!r}")
    given = {kind: list((media or {}).get(kind, ())) for kind in MEDIA}
    found: list[tuple[str, Any]] = []
    heads = [_message_head(message) for message in messages]  # which refuses what is no message
    placed = with_media(list(messages), given)
    typed = [
        {**head, "content": _content(each.get("content"), found)} for head, each in zip(heads, placed, strict=True)
    ]
    for kind, own in given.items():
        marked = sum(payload is None for name, payload in found if name == kind)
        if marked != len(own):
            frames = f"; the {len(own)} frames of one video are a list in the list: [[frame, ...]]"
            raise InvalidPrompt(
                f"{marked} {kind} markers in the prompt, but {len(own)} {kind}s: write '<{kind}>' once for each, where it "
                'belongs (to write it literally, use a text part: {"type": "text", "text": ...}), '
                "or leave out the column if the parts have them" + (frames if kind == "video" and marked == 1 else "")
            )
    queues = {kind: iter(own) for kind, own in given.items()}
    return Conversation(typed, [next(queues[kind]) if payload is None else payload for kind, payload in found])


def with_media(messages: Sequence[Any], media: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    """The messages with their media before the first question, if neither a marker nor a part says where one of a kind belongs.

    So do TRL, R1-V and ms-swift.

    >>> asked = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
    >>> with_media(asked, {"image": ["a.png", "b.png"], "audio": ["a.wav"]})[1]
    {'role': 'user', 'content': '<image><image><audio>How many?'}
    """
    first = next((place for place, each in enumerate(messages) if each.get("role") == "user"), None)
    for kind in reversed(MEDIA):
        count = len(media.get(kind, ()))
        if count and first is not None and not any(_shows(each.get("content"), kind) for each in messages):
            content = messages[first].get("content")
            shown = f"<{kind}>" * count + content if isinstance(content, str) else content
            if content is None or isinstance(content, (list, tuple, np.ndarray)):
                shown = [{"type": kind}] * count + list(() if content is None else content)
            messages = [*messages[:first], {**messages[first], "content": shown}, *messages[first + 1 :]]
    return messages


def with_markers(question: str, media: Mapping[str, Sequence[Any]]) -> str:
    """A question with its media in front of it, unless it has markers that say where they belong.

    >>> with_markers("How many?", {"image": ["a.png", "b.png"]}), with_markers("How many? <audio>", {"audio": ["a.wav"]})
    ('<image><image>How many?', 'How many? <audio>')
    """
    (asked,) = with_media([{"role": "user", "content": question}], media)
    return str(asked["content"])


def _shows(content: Any, kind: str) -> bool:
    if isinstance(content, str):
        return f"<{kind}>" in content
    parts = content if isinstance(content, (list, tuple, np.ndarray)) else ()
    return any(_KINDS.get(str(part.get("type"))) == kind for part in parts if isinstance(part, Mapping))


def read_tools(tools: Any) -> tuple[Any, ...]:
    """The tools of a row, which are a list or the JSON of one; none if there is nothing. Raises `InvalidPrompt`.

    >>> read_tools('[{"type": "function", "function": {"name": "zoom"}}]')[0]["function"]["name"], read_tools(None)
    ('zoom', ())
    """
    found = tools
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(tools) if tools.strip() else None
    if found is None:
        return ()
    listed = isinstance(found, (Sequence, np.ndarray)) and not isinstance(found, str)
    if not listed or not all(isinstance(tool, Mapping) or callable(tool) for tool in found):
        raise InvalidPrompt(f"tools must be a list of objects, or the JSON of one, not {tools!r}")
    return tuple(found)


def joined_texts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the text parts of each content joined to one string, which is all that templates of language models read.

    >>> joined_texts([{"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}])
    [{'role': 'user', 'content': '2 + 3?'}]
    """
    return [
        {**message, "content": "".join(part["text"] for part in as_parts(message["content"]))} for message in messages
    ]


def thoughts_apart(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the thoughts at the beginning of an answer in ``reasoning_content``, as some templates want them. What
    begins them may be absent: often the prompt has it.

    >>> thoughts_apart({"role": "assistant", "content": "<think>\\n3 + 4\\n</think>\\n\\n7"})
    {'role': 'assistant', 'content': '7', 'reasoning_content': '3 + 4'}
    >>> thoughts_apart({"role": "assistant", "content": "3 + 4</think>7"}) == _
    True
    """
    content = message["content"]
    first = as_parts(content)[:1]
    text = first[0].get("text", "").lstrip() if first else ""
    thoughts, ended, answer = text.removeprefix(THOUGHTS[0]).partition(THOUGHTS[1])
    if message["role"] != "assistant" or "reasoning_content" in message or not ended or THOUGHTS[0] in thoughts:
        return dict(message)
    parts = (
        [{**first[0], "text": answer.lstrip("\n")}, *content[1:]] if isinstance(content, list) else answer.lstrip("\n")
    )
    return {**message, "content": parts, "reasoning_content": thoughts.strip("\n")}


def as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as a list of parts.

    >>> as_parts("Find x.")
    [{'type': 'text', 'text': 'Find x.'}]
    """
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def says_something(message: Mapping[str, Any]) -> bool:
    """Whether a message has content, or a call or thoughts in its place.

    >>> says_something({"role": "assistant", "content": ""}), says_something({"role": "assistant", "content": "3"})
    (False, True)
    """
    return bool(message["content"]) or any(has_some(message, name) for name in _WORDLESS)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer to learn. Raises `InvalidPrompt` for a weight that is neither 0 nor 1.

    >>> is_learned({"role": "assistant", "content": "3"}), is_learned({"role": "assistant", "content": "3", "weight": 0})
    (True, False)
    """
    if message["role"] != "assistant":
        return False
    told = {name: message[name] for name in LEARNED if name in message}
    if wrong := [name for name, value in told.items() if value not in (0, 1)]:
        raise InvalidPrompt(f"{wrong[0]!r} of a message must be 0 or 1, or true or false, not {message[wrong[0]]!r}")
    return all(told.values())


def _message_head(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidPrompt(f"a message must be a mapping with 'role' and 'content', not {message!r}")
    role = message["role"]
    if message.get("content") is None and role in _SPEAKERS and not any(has_some(message, name) for name in _WORDLESS):
        raise InvalidPrompt(f"a message of the {role} has no content (null)")
    if held := [name for name in (*MEDIA.values(), *MEDIA) if _holds(message.get(name))]:
        raise InvalidPrompt(f"{held[0]!r} of a message is not read: use typed parts, or that column of the row")
    head = {name: value for name, value in message.items() if name != "content" and value is not None}
    if "tool_calls" in head:
        if isinstance(head["tool_calls"], str) or not isinstance(head["tool_calls"], (Sequence, np.ndarray)):
            raise InvalidPrompt(f"'tool_calls' of a message must be a list of calls, not {head['tool_calls']!r}")
        head["tool_calls"] = [_tool_call(call) for call in head["tool_calls"]]
    return head


def _tool_call(call: Any) -> Any:
    """A call whose arguments are an object, as templates want it; in OpenAI's form they are the JSON of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            return {**call, "function": {**function, "arguments": json.loads(arguments) if arguments.strip() else {}}}
    return call


def has_some(message: Mapping[str, Any], name: str) -> bool:
    """Whether a value of a message is a list, or text, that is not empty."""
    value = message.get(name)
    return isinstance(value, (Sequence, np.ndarray)) and len(value) > 0


def _holds(media: Any) -> bool:
    """Whether a value has a medium, and not nothing, a blank text or an empty list."""
    return media is not None and (not hasattr(media, "__len__") or len(media) > 0)


def _content(content: Any, found: list[tuple[str, Any]]) -> str | list[dict[str, Any]]:
    """Typed content. For each media part its kind and its payload, or None if the medium is in the row's columns, is appended to
    ``found``.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        pieces = [piece for piece in MARKERS.split(content) if piece]
        parts = [{"type": p[1:-1]} if MARKERS.fullmatch(p) else {"type": "text", "text": p} for p in pieces]
        if all(part["type"] == "text" for part in parts):
            return content
    elif isinstance(content, (Sequence, np.ndarray)):
        parts = list(content)
    else:
        raise InvalidPrompt(f"a message's content must be a string or a list of parts, not {content!r}")
    return [_part(part, found) for part in parts]


def _part(part: Any, found: list[tuple[str, Any]]) -> dict[str, Any]:
    kind = str(part.get("type")) if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in _KINDS:
        raise InvalidPrompt(f"a part of a message must be text, image, video or audio, not {part!r}")
    payload = {name: value for name, value in part.items() if name != "type" and value is not None}
    of_row = not any(name in payload for name in _PAYLOADS)
    place = found.count((_KINDS[kind], None))
    if of_row and payload.get("index", place) != place:  # TRL's data number the pictures of a row
        raise InvalidPrompt(
            f"a part shows {kind} {payload['index']} of the row, but its place is {place}: put the column in that order"
        )
    found.append((_KINDS[kind], None if of_row else payload))
    return {"type": _KINDS[kind]}
