"""Environments of VAGEN: a text with ``<image>`` marks and the images for them, by ``async`` methods or plain ones."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from rollout.environments.environment import MakeEnvironment, Observation

IMAGES = ("multi_modal_input", "multi_modal_data")
"""The key of the images, in newer and in older versions."""
MARK = "<image>"
SUCCESS = ("success", "is_success")
"""The keys in ``info`` under which an environment tells whether the episode succeeded."""


def from_vagen(make: Callable[[], Any]) -> MakeEnvironment:
    """Adapts environments of VAGEN, such as its ``GymImageEnv`` and, in older versions, ``BaseEnv``.

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
    """Its methods wait for those of the inner environment only where these are ``async``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        if hasattr(inner, "close"):
            self.close = inner.close

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Resets with the seed."""
        own = (row.get("extra_info") or {}).get("seed")
        found = self.inner.reset(seed=seed % 2**31 if own is None else int(own))
        if not inspect.isawaitable(found):
            return _joined((found, self._prompt()), _begun)

        async def wait() -> Observation:
            begun, prompt = await found, self._prompt()
            return _begun(begun, await prompt if inspect.isawaitable(prompt) else prompt)

        return wait()

    def _prompt(self) -> Any:
        return self.inner.system_prompt() if hasattr(self.inner, "system_prompt") else ""

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Passes the text on."""
        return _joined((self.inner.step(action),), _stepped)


def _begun(found: tuple[Any, Mapping[str, Any]], prompt: Any) -> Observation:
    return Observation(_content(found[0]), info=_numbers(found[1] or {}), system=_content(prompt))


def _stepped(found: tuple[Any, ...]) -> Observation:
    seen, reward, *ends, info = found
    total = sum(reward) if isinstance(reward, Sequence) else reward
    return Observation(_content(seen), float(total), any(map(bool, ends)), _numbers(info or {}))


def _joined(found: Sequence[Any], convert: Callable[..., Observation]) -> Observation | Awaitable[Observation]:
    """The results converted, at once if none of them has to be waited for."""
    if not any(map(inspect.isawaitable, found)):
        return convert(*found)

    async def wait() -> Observation:
        return convert(*[await each if inspect.isawaitable(each) else each for each in found])

    return wait()


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
    media: Mapping[str, Any] = next((seen[key] for key in IMAGES if seen.get(key)), {})
    if others := [mark for mark, found in media.items() if found and mark != MARK]:
        raise ValueError(f"obs has {', '.join(others)}, but only {MARK} can be shown")
    images = [image for image in media.get(MARK) or () if image is not None]
    text = seen["obs_str"]
    if text.count(MARK) != len(images):
        raise ValueError(f"obs_str has {text.count(MARK)} {MARK} marks, but there are {len(images)} images")
    queue = iter(images)
    return [next(queue) if part == MARK else part for part in re.split(f"({MARK})", text) if part]
