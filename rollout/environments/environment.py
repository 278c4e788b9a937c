"""What an environment is: text and images out, text in, no tokens."""

import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image

from dataproto.errors import DataProtoError, describe

Content = Sequence[str | Image.Image]
"""Texts and images in the order in which they are shown."""


@dataclass(frozen=True)
class Observation:
    """What an environment shows after a reset or an action.

    >>> Observation(["You are at the door."], reward=0.5).done
    False
    """

    content: Content = ()
    reward: float = 0.0  # of the action; that of a reset does not count
    done: bool = False  # the episode is over, and the content is not shown to the policy
    info: Mapping[str, Any] = field(default_factory=dict)  # the last one is kept with the episode
    role: Literal["user", "tool"] = "user"  # of the message that shows the content
    system: Content = ()  # of the first one: a system message before all others


class Environment(Protocol):
    """One episode at a time. Methods may be ``async``; plain ones run in a thread that belongs to the environment.

    A method ``close()``, if there is one, is called once after the episode.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begins an episode.

        Args:
            row: the object columns of the prompt's row, such as ``extra_info`` and ``reward_model``.
            seed: the same for all samples of a prompt.

        Returns:
            What is shown after the messages of the row.
        """

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Answers an action: the text that the policy sampled in this turn, without special tokens."""


_DECODING = Lock()  # Pillow decodes an image in its own object, which several environments may show
MAX_REWARD = float(np.finfo(np.float32).max)
"""The largest reward: rows hold rewards in float32."""

MakeEnvironment = Callable[[], Environment]
"""Makes the environment of an episode; called once for each."""

Failure = Literal["error", "timeout", "memory", "invalid"]
"""It raised or crashed, it took too long, it got no memory, or it returned something that is no observation."""


class EnvironmentFailed(DataProtoError, RuntimeError):
    """The environment of an episode failed. It ends this episode, not the run."""

    def __init__(self, reason: Failure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def awaited(value: Awaitable[Any]) -> Any:
    """A coroutine of any awaitable, as event loops take one."""
    return await value


def raised(method: str, error: BaseException, environment: object) -> str:
    """What a method of an environment raised, in one line, with the last line of the environment's file that it passed."""
    code = getattr(getattr(type(environment), method, None), "__code__", None)
    return f"{method} raised {describe(error, getattr(code, 'co_filename', None))}"


def check_observation(value: Any, method: str) -> Observation:
    """The value that ``method`` returned, if it is an observation, in plain lists, numbers and dicts of its own.

    Raises:
        EnvironmentFailed: it is something else, or a part of it is; names the part.

    >>> check_observation(Observation(["go"], reward=float("nan")), "step")
    Traceback (most recent call last):
    ...
    rollout.environments.environment.EnvironmentFailed: step returned the reward nan, not a finite number of float32
    """
    if not isinstance(value, Observation):
        raise EnvironmentFailed("invalid", f"{method} returned a {type(value).__name__}, not an Observation")
    reward = value.reward
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not abs(reward) <= MAX_REWARD:
        raise EnvironmentFailed("invalid", f"{method} returned the reward {reward!r}, not a finite number of float32")
    if value.role not in ("user", "tool"):
        raise EnvironmentFailed("invalid", f"{method} returned the role {value.role!r}, not 'user' or 'tool'")
    if not isinstance(value.done, bool | np.bool_ | numbers.Real):
        raise EnvironmentFailed("invalid", f"{method} returned done={value.done!r}, not True or False")
    if not isinstance(value.info, Mapping):
        raise EnvironmentFailed("invalid", f"{method} returned info that is a {type(value.info).__name__}, not a dict")
    content, system = (
        _parts(each, name, method) for name, each in (("content", value.content), ("system", value.system))
    )
    return Observation(content, float(reward), bool(value.done), dict(value.info), value.role, system)


def _parts(content: Any, name: str, method: str) -> list[str | Image.Image]:
    """The parts of ``content``, decoded. Raises `EnvironmentFailed` for one that is neither text nor an image."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        raise EnvironmentFailed("invalid", f"{method} returned {name} that is a {type(content).__name__}, not a list")
    parts = list(content)
    for place, part in enumerate(parts):
        if isinstance(part, Image.Image):
            try:
                decoded(part)  # of one that was opened from a file, in the time of the environment
            except Exception as error:  # Pillow's plugins raise errors of any class
                what = f"{method} returned as {name}[{place}] an image that cannot be read: {describe(error)}"
                raise EnvironmentFailed("invalid", what) from error
        elif not isinstance(part, str):
            what = f"{method} returned a {type(part).__name__} as {name}[{place}], not text or an image"
            raise EnvironmentFailed("invalid", what)
    return parts


def decoded(image: Image.Image) -> Image.Image:
    """The image, with its pixels in memory, whichever threads ask for them. Raises what Pillow raises."""
    with _DECODING:
        image.load()
    return image
