"""Environments of other libraries: Gymnasium's, TRL's and VAGEN's.

Those of Gymnasium (``gymnasium.Env``, version 1) have discrete actions and are seen as pictures. Those of TRL's
``environment_factory`` (1.16) have tools, which are their public methods, and ``get_reward``. Those of VAGEN show a text with
``<image>`` marks and the images for them, by ``async`` methods.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from dataproto.errors import InvalidConfig
from rollout.environments.environment import Content, MakeEnvironment, Observation
from rollout.environments.tool_environment import Parse, Tool, ToolEnvironment, hermes_calls

MAX_SEED = 2**31


def from_gymnasium(
    make: Callable[[], Any], actions: Mapping[str, int], shows: Literal["render", "observation"] = "render"
) -> MakeEnvironment:
    """Adapts environments of Gymnasium.

    An action is the first of the words ``actions`` that the text contains; without one the environment does not step, and the
    policy is told the words. ``terminated`` and ``truncated`` end an episode; ``info`` says which as ``terminated``, 1 or 0.

    Args:
        make: for example ``lambda: gymnasium.make("CliffWalking-v1", render_mode="rgb_array")``.
        actions: words to numbers of the discrete action space.
        shows: pictures from ``render()``, or the observations: arrays ``(H, W)`` or ``(H, W, 3)`` uint8 as pictures, others as
            text.
    """
    return lambda: _GymnasiumEnvironment(make(), {word.lower(): number for word, number in actions.items()}, shows)


class _GymnasiumEnvironment:
    def __init__(self, inner: Any, actions: Mapping[str, int], shows: str) -> None:
        self.inner, self.actions, self.shows = inner, actions, shows

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Resets with the seed, and with ``row["extra_info"]["options"]`` if there are any."""
        seen, _ = self.inner.reset(seed=seed % MAX_SEED, options=(row.get("extra_info") or {}).get("options"))
        return Observation([self._shown(seen)])

    def step(self, action: str) -> Observation:
        """Steps by the first known word."""
        words = action.lower().replace(",", " ").replace(".", " ").split()
        known = next((word for word in words if word in self.actions), None)
        if known is None:
            return Observation([f"Choose one of: {', '.join(self.actions)}."])
        seen, reward, terminated, truncated, info = self.inner.step(self.actions[known])
        told = {**info, "terminated": float(terminated)}
        return Observation([self._shown(seen)], float(reward), bool(terminated or truncated), told)

    def close(self) -> None:
        """Closes the environment."""
        self.inner.close()

    def _shown(self, seen: Any) -> str | Image.Image:
        shown = self.inner.render() if self.shows == "render" else seen
        if shown is None:
            raise InvalidConfig('render() returned None: make the environment with render_mode="rgb_array"')
        array = np.asarray(shown)
        picture = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 3))
        return Image.fromarray(array).convert("RGB") if picture else str(seen)


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
    return [getattr(inner, name) for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]


class _TRLEnvironment(ToolEnvironment):
    def __init__(self, inner: Any, parse: Parse) -> None:
        super().__init__(_methods(inner), parse=parse)
        self.inner = inner

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """What the environment's own ``reset`` returns."""
        shown = self.inner.reset(**_taken(self.inner.reset, {"prompt": row.get("raw_prompt"), **row}))
        return Observation() if shown is None else Observation(_as_content(shown))

    def answered(self, answer: str) -> float | Awaitable[float]:
        """The environment's own reward."""
        return self.inner.get_reward() if hasattr(self.inner, "get_reward") else 0.0


def _taken(reset: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``reset`` takes: rows have more than those of the data set here.

    >>> _taken(lambda number: None, {"number": 3, "uid": "a"}), _taken(lambda **row: None, {"number": 3, "uid": "a"})
    ({'number': 3}, {'number': 3, 'uid': 'a'})
    """
    parameters = inspect.signature(reset).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(columns)
    return {name: columns[name] for name in parameters if name in columns}


def _as_content(shown: Any) -> Content:
    """Text, or parts of a message, as content.

    >>> _as_content([{"type": "text", "text": "Guess."}])
    ['Guess.']
    """
    parts = [shown] if isinstance(shown, str) else shown
    return [part if isinstance(part, str | Image.Image) else part.get("text", part.get("image")) for part in parts]


IMAGES = "multi_modal_input"
"""The key of the images."""
MARK = "<image>"
SUCCESS = ("success", "is_success")
"""The keys in ``info`` under which an environment tells whether the episode succeeded."""


def from_vagen(make: Callable[[], Any]) -> MakeEnvironment:
    """Adapts environments of VAGEN, such as its ``GymImageEnv``, whose methods are ``async``.

    ``reset(seed) -> (obs, info)``, then ``system_prompt()``; ``step(text) -> (obs, reward, done, info)``, or with ``terminated,
    truncated`` in place of ``done``; ``close()``. ``obs`` is ``{"obs_str": text, "multi_modal_input": {"<image>": [image]}}``, a
    system prompt is the same or a text. It becomes the system message. ``info`` keeps its numbers, those of ``metrics`` at the
    top, and has ``acc``, 1 or 0, if the environment tells whether it succeeded. A list of rewards counts as its sum.

    The seed is the one in ``row["extra_info"]["seed"]``, as VAGEN's data have one; without it the seed of the prompt.

    Args:
        make: for example ``lambda: Sokoban(env_config={"render_mode": "vision"})``.
    """
    return lambda: _VAGENEnvironment(make())


class _VAGENEnvironment:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Resets with the seed."""
        own = (row.get("extra_info") or {}).get("seed")
        seen, info = await self.inner.reset(seed=seed % MAX_SEED if own is None else int(own))
        prompt = await self.inner.system_prompt()
        return Observation(_content(seen), info=_numbers(info or {}), system=_content(prompt))

    async def step(self, action: str) -> Observation:
        """Passes the text on."""
        seen, reward, *ends, info = await self.inner.step(action)
        total = sum(reward) if isinstance(reward, Sequence) else reward
        return Observation(_content(seen), float(total), any(map(bool, ends)), _numbers(info or {}))

    async def close(self) -> None:
        """Closes the environment."""
        await self.inner.close()


def _numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` with the numbers of its metrics, which are nested, at the top, and its success as ``acc``.

    >>> _numbers({"metrics": {"turn_metrics": {"valid": True}}, "success": False})
    {'metrics': {'turn_metrics': {'valid': True}}, 'success': False, 'valid': 1.0, 'acc': 0.0}
    """
    nested = info.get("metrics")
    metrics = nested.values() if isinstance(nested, Mapping) else ()
    inner = {name: value for each in metrics if isinstance(each, Mapping) for name, value in each.items()}
    numbers = {name: float(value) for name, value in inner.items() if isinstance(value, bool | int | float)}
    told = [bool(found[name]) for found in (info, inner) for name in SUCCESS if name in found]
    return {**info, **numbers, **({"acc": float(told[0])} if told and "acc" not in info else {})}


def _content(seen: Any) -> list[str | Image.Image]:
    """The text with its marks replaced by the images, in order."""
    if not seen or isinstance(seen, str):
        return [seen] if seen else []
    media: Mapping[str, Any] = seen.get(IMAGES) or {}
    if others := [mark for mark, found in media.items() if found and mark != MARK]:
        raise ValueError(f"obs has {', '.join(others)}, but only {MARK} can be shown")
    images = [image for image in media.get(MARK) or () if image is not None]
    text = seen["obs_str"]
    if text.count(MARK) != len(images):
        raise ValueError(f"obs_str has {text.count(MARK)} {MARK} marks, but there are {len(images)} images")
    queue = iter(images)
    return [next(queue) if part == MARK else part for part in re.split(f"({MARK})", text) if part]
