"""Environments of VAGEN: a text with ``<image>`` marks and the images for them, by plain methods or ``async`` ones."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollout.environments.environment import MakeEnvironment, Observation

MARK = "<image>"
IMAGES = ("multi_modal_data", "multi_modal_input")
"""The key of the images, in older and in newer versions."""


def from_vagen(make: Callable[[], Any]) -> MakeEnvironment:
    """Adapts environments with ``reset(seed) -> (obs, info)``, ``step(text) -> (obs, reward, done, info)`` and, optionally,
    ``system_prompt()`` and ``close()``, where ``obs`` is ``{"obs_str": text, "multi_modal_data": {"<image>": [image, ...]}}``.

    The system prompt is shown before the first observation.
    """
    return lambda: _VAGENEnvironment(make())


class _VAGENEnvironment:
    """Its methods wait for those of the inner environment only where these are ``async``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        if hasattr(inner, "close"):
            self.close = inner.close

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Resets with the seed."""
        first = self.inner.system_prompt() if hasattr(self.inner, "system_prompt") else ""
        return _joined((first, self.inner.reset(seed=seed % 2**31)), _begun)

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Passes the text on."""
        return _joined((self.inner.step(action),), _stepped)


def _begun(prompt: Any, found: tuple[Any, Mapping[str, Any]]) -> Observation:
    return Observation([*_content(prompt), *_content(found[0])], info=found[1])


def _stepped(found: tuple[Any, float, bool, Mapping[str, Any]]) -> Observation:
    seen, reward, done, info = found
    return Observation(_content(seen), float(reward), bool(done), _numbers(info))


def _joined(found: Sequence[Any], convert: Callable[..., Observation]) -> Observation | Awaitable[Observation]:
    """The results converted, at once if none of them has to be waited for."""
    if not any(map(inspect.isawaitable, found)):
        return convert(*found)

    async def wait() -> Observation:
        return convert(*[await each if inspect.isawaitable(each) else each for each in found])

    return wait()


def _numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` with the numbers of its metrics, which are nested, at the top.

    >>> _numbers({"metrics": {"turn_metrics": {"valid": True}}})
    {'metrics': {'turn_metrics': {'valid': True}}, 'valid': 1.0}
    """
    nested = info.get("metrics")
    metrics = nested.values() if isinstance(nested, Mapping) else ()
    inner = {name: value for each in metrics if isinstance(each, Mapping) for name, value in each.items()}
    return {**info, **{name: float(value) for name, value in inner.items() if isinstance(value, bool | int | float)}}


def _content(seen: Any) -> list[Any]:
    """The text with its marks replaced by the images, in order."""
    if isinstance(seen, str):
        return [seen] if seen else []
    images: list[Any] = next((seen[key].get(MARK, []) for key in IMAGES if seen.get(key)), [])
    texts = seen["obs_str"].split(MARK)
    if len(texts) - 1 != len(images):
        raise ValueError(f"obs_str has {len(texts) - 1} {MARK} marks, but there are {len(images)} images")
    queue = iter(images)
    parts = [text for text in re.split(f"({MARK})", seen["obs_str"]) if text]
    return [next(queue) if part == MARK else part for part in parts]
