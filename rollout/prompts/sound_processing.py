"""Sounds to the model's inputs."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rollout.prompts.sounds import Sound


@dataclass(frozen=True)
class ProcessedSound:
    """A sound ``(S,)``, see `rollout.prompts.sounds.load_sound`, and the model's inputs for it."""

    kind: ClassVar[str] = "audio"
    key: bytes
    content: Sound
    inputs: dict[str, Tensor]
