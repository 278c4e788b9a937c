"""Functions as tools, called in the form that chat templates teach, and answered by messages of the role ``tool``."""

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from rollout.environments.environment import MakeEnvironment, Observation

Tool = Callable[..., Any]
"""Returns text, an image, a list of both or of parts of a message, or a value that JSON has. It may be ``async``."""
Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""
Parse = Callable[[str], list[Call]]
"""The calls in an action. Raises `ValueError` for a call that cannot be read."""
Score = Callable[[Mapping[str, Any], str], float | Awaitable[float]]
"""The row and the answer to a reward."""

CALL = "<tool_call>", "</tool_call>"
"""What begins and ends a call in the templates of Qwen and Hermes."""
CALLS = re.compile(f"{CALL[0]}(.*?){CALL[1]}", re.DOTALL)


def hermes_calls(action: str) -> list[Call]:
    """Calls as in the templates of Qwen and Hermes: JSON between ``<tool_call>`` and ``</tool_call>``.

    >>> hermes_calls('<tool_call>\\n{"name": "crop", "arguments": {"box": [0, 0, 9, 9]}}\\n</tool_call>')
    [('crop', {'box': [0, 0, 9, 9]})]
    """
    return [hermes_call(text) for text in CALLS.findall(action)]


def hermes_call(text: str) -> Call:
    """The call of its JSON. Raises `ValueError` for one that cannot be read."""
    call = json.loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call is {'name': ..., 'arguments': {...}}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call['name']} are not an object")
    return call["name"], arguments


class ToolEnvironment:
    """Calls tools until an action calls none: that action is the answer, which is scored and ends the episode.

    What a tool raises is told to the policy. A step waits only for tools and scores that are ``async``. The same
    functions belong into the template's arguments, so that the prompt describes them:
    ``RolloutConfig(path, prompts={"template_arguments": {"tools": tools}})``.
    """

    def __init__(self, tools: Sequence[Tool], score: Score | None = None, parse: Parse = hermes_calls) -> None:
        """``score`` is the reward of the answer; without it, 0."""
        self.tools = {tool.__name__: tool for tool in tools}
        self.score, self.parse = score, parse
        self.row: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Shows nothing: the prompt is that of the row."""
        self.row = row
        return Observation()

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """The results of the action's calls, or the end."""
        try:
            calls = self.parse(action)
        except (ValueError, RecursionError) as error:  # a policy may repeat a bracket without end
            return Observation([_text(f"Error: {error}")], role="tool")
        if not calls:
            reward = self.answered(action)
            return self._ended_later(reward) if inspect.isawaitable(reward) else _ended(reward)
        found = [self._call(name, arguments) for name, arguments in calls]
        return self._shown_later(found) if any(map(inspect.isawaitable, found)) else _shown(found)

    def answered(self, answer: str) -> float | Awaitable[float]:
        """The reward of the answer."""
        return 0.0 if self.score is None else self.score(self.row, answer)

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a tool returns, an awaitable of it, or what is wrong with the call."""
        if name not in self.tools:
            return f"Error: there is no tool {name!r}; there are {', '.join(self.tools)}"
        try:
            return self.tools[name](**arguments)
        except Exception as error:  # of the policy's arguments: it can try others
            return _failure(error)

    @staticmethod
    async def _ended_later(reward: Awaitable[float]) -> Observation:
        return _ended(await reward)

    @staticmethod
    async def _shown_later(found: Sequence[Any]) -> Observation:
        """The results, those of ``async`` tools made at the same time."""

        async def wait(each: Any) -> Any:
            try:
                return await each if inspect.isawaitable(each) else each
            except Exception as error:
                return _failure(error)

        return _shown(await asyncio.gather(*map(wait, found)))


def _ended(reward: float) -> Observation:
    return Observation(reward=float(reward), done=True)


def _failure(error: Exception) -> str:
    return f"Error: {type(error).__name__}: {error}"


def _shown(results: Sequence[Any]) -> Observation:
    parts = (part for found in results for part in (found if isinstance(found, list | tuple) else [found]))
    return Observation([_shown_part(part) for part in parts], role="tool")


def _shown_part(part: Any) -> str | Image.Image:
    """An image as it is, a part of a message as what it holds, and anything else as text.

    >>> _shown_part({"type": "text", "text": "7"}), _shown_part({"type": "text", "found": 1})
    ('7', '{"type": "text", "found": 1}')
    """
    if isinstance(part, Mapping) and part.get("type") in ("text", "image"):
        held = part.get(part["type"])
        part = held if isinstance(held, str | Image.Image) else part
    return part if isinstance(part, Image.Image) else _text(part)


def _text(part: Any) -> str:
    """Text, or a value as JSON, with ``?`` for halves of characters, which the policy may have written as JSON's escapes.

    >>> _text("no result for \\ud83d"), _text({"found": 1})
    ('no result for ?', '{"found": 1}')
    """
    try:
        text = part if isinstance(part, str) else json.dumps(part, default=str)
    except Exception as error:  # of a value that JSON does not have
        text = _failure(error)
    return text.encode(errors="replace").decode()


def with_tools(tools: Sequence[Tool], score: Score | None = None, parse: Parse = hermes_calls) -> MakeEnvironment:
    """Makes a `ToolEnvironment` for each episode."""
    return lambda: ToolEnvironment(tools, score, parse)
