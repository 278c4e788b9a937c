"""Environments of TRL's ``environment_factory`` (1.16): public methods are tools, ``get_reward`` is the reward."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from PIL import Image

from rollout.environments.environment import Content, MakeEnvironment, Observation
from rollout.environments.tool_environment import Parse, Tool, ToolEnvironment, hermes_calls

NO_TOOLS = ("reset", "get_reward")


def from_trl(environment_factory: Callable[[], Any], parse: Parse = hermes_calls) -> MakeEnvironment:
    """Adapts an environment factory. An action that calls no tool ends the episode, with ``get_reward()`` as its reward if there
    is one.

    ``reset`` gets the columns of the row as keywords, or those that it names if it takes no others. Its text, or its list of
    parts, follows the prompt. Tools and ``get_reward`` may be ``async``, and tools may return parts of a message,
    ``{"type": "image", "image": ...}``. `trl_tools` are the functions for the chat template.
    """
    return lambda: _TRLEnvironment(environment_factory(), parse)


def trl_tools(environment_factory: Callable[[], Any]) -> list[Tool]:
    """The tools of an environment, whose signatures and docstrings describe them to the policy."""
    return _methods(environment_factory())


def _methods(inner: Any) -> list[Tool]:
    """Public methods, listed on the class as in TRL: listing on the object would evaluate properties."""
    names = [name for name, _ in inspect.getmembers(type(inner), predicate=inspect.isfunction)]
    return [getattr(inner, name) for name in names if name not in NO_TOOLS and not name.startswith("_")]


class _TRLEnvironment(ToolEnvironment):
    def __init__(self, inner: Any, parse: Parse) -> None:
        super().__init__(_methods(inner), parse=parse)
        self.inner = inner

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """What the environment's own ``reset`` returns."""
        shown = self.inner.reset(**_taken(self.inner.reset, {"prompt": row.get("raw_prompt"), **row}))
        return Observation() if shown is None else Observation(_content(shown))

    def answered(self, answer: str) -> float | Awaitable[float]:
        """The environment's own reward."""
        reward: float | Awaitable[float] = self.inner.get_reward() if hasattr(self.inner, "get_reward") else 0.0
        return reward


def _taken(reset: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``reset`` takes: rows have more than those of the data set here.

    >>> _taken(lambda number: None, {"number": 3, "uid": "a"}), _taken(lambda **row: None, {"number": 3, "uid": "a"})
    ({'number': 3}, {'number': 3, 'uid': 'a'})
    """
    parameters = inspect.signature(reset).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(columns)
    return {name: columns[name] for name in parameters if name in columns}


def _content(shown: Any) -> Content:
    """Text, or parts of a message, as content.

    >>> _content([{"type": "text", "text": "Guess."}])
    ['Guess.']
    """
    parts = [shown] if isinstance(shown, str) else shown
    return [part if isinstance(part, str | Image.Image) else part.get("text", part.get("image")) for part in parts]
