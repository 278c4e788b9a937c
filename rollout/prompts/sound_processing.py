"""Sounds to the model's inputs."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import InvalidMedia
from dataproto.vlm.media import MediaLayout
from rollout.prompts.sounds import Sound


@dataclass(frozen=True)
class ProcessedSound:
    """A sound ``(S,)``, see `rollout.prompts.sounds.load_sound`, and the model's inputs for it."""

    kind: ClassVar[str] = "audio"
    key: bytes
    content: Sound
    inputs: dict[str, Tensor]


def process_sound(sound: Sound, extractor: Any, layout: MediaLayout) -> ProcessedSound:
    """The mel frames ``(frames, mel)`` that the model's processor makes of a sound ``(S,)``, and their number ``(1,)``.

    The processor fills up every sound to 300 seconds. A window of silence gives the same frames.

    Raises:
        InvalidMedia: the sound is longer than the processor reads; it would cut it.
    """
    frames = mel_frames(len(sound), extractor)
    silent = np.zeros(len(sound) + int(extractor.n_fft), dtype=np.float32)
    silent[: len(sound)] = sound
    made = extractor(
        silent, sampling_rate=extractor.sampling_rate, padding=False, truncation=False, return_tensors="np"
    )
    features = torch.from_numpy(np.ascontiguousarray(made["input_features"][0][:, :frames].T))
    inputs = dict(zip(layout.names("audio"), (features, torch.tensor([frames])), strict=True))
    return ProcessedSound(b"sound" + blake2b(sound.tobytes(), digest_size=16).digest(), sound, inputs)


def mel_frames(samples: int, extractor: Any) -> int:
    """The number of mel frames of a sound of so many samples. Raises `InvalidMedia` for a sound that is too long."""
    if samples > extractor.n_samples:
        rate = extractor.sampling_rate
        raise InvalidMedia(
            f"a sound of {samples / rate:.1f} seconds: the model's processor reads at most {extractor.n_samples / rate:.0f}"
        )
    return -(-samples // int(extractor.hop_length))
