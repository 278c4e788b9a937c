"""Environments of Gymnasium (``gymnasium.Env``, version 1) with discrete actions, seen as pictures."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from PIL import Image

from dataproto.errors import InvalidConfig
from rollout.environments.environment import MakeEnvironment, Observation

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
        options = (row.get("extra_info") or {}).get("options")
        seen, _ = self.inner.reset(seed=seed % MAX_SEED, options=options)
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
