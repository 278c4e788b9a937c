"""Sounds from all sources that data sets use: arrays with their rate, paths, bytes, parquet structs, data URIs, audio decoders.

Every sound becomes one channel of float32 in [-1, 1] at the rate of the model's processor here, once, for the processor and the
rollout engine: channels are averaged, and another rate is resampled. ``soundfile`` decodes WAV, FLAC, OGG, MP3 and others. The
resampler is ``soxr`` at its quality HQ, librosa's default, so the samples are those of ``librosa.load(path, sr=16_000)``, with
which the processors of Qwen-Omni are shown; it is 0.25 MB and needs numpy only, where scipy's ``resample_poly`` needs scipy.
"""

import io
import re
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataproto.errors import DataProtoError, InvalidMedia
from dataproto.extras import require_extra
from dataproto.vlm.media import MediaLayout
from rollout.prompts.sources import Root, described, file_of, is_sampled, unwrapped, why_unread

RATE = 16_000
"""Samples a second of ``multi_modal_data["audio"]``, which all processors for sound in the registered families take."""
MAX_SECONDS = 2400
"""Longer sounds are refused before they are decoded. Qwen3-Omni is said to hear 40 minutes."""
_STREAMED = 0x7FFF0000  # and above: what programs that write a WAV to a pipe say of its size, which they do not know
_LOUDEST = 2.0  # what decoders and resamplers overshoot is clipped; larger values are of another scale

Sound = npt.NDArray[np.float32]


def load_sound(source: Any, root: Root = None, rate: int = RATE) -> Sound:
    """The sound ``(S,)`` as float32 in [-1, 1], mono, at ``rate``.

    ``source`` is a path, ``file://`` or ``data:`` URI, base64, bytes, an array with its rate as a pair or as ``datasets.Audio``
    gives it, an audio decoder of ``datasets``, a mapping that contains one of them, such as a part of a chat message, or a plain
    array, which has the ``rate`` already. Arrays are floats in [-1, 1] or integers of their full range, with at most one more
    dimension for channels. Raises `InvalidMedia` for a sound that is missing, broken, empty, longer than `MAX_SECONDS`, or of
    another range.

    >>> load_sound((np.zeros((2, 8_000), dtype=np.int16), 8_000)).shape
    (16000,)
    """
    given = _sampled(source, rate)
    if given is not None:
        samples, own_rate = given
    else:
        with _opened(source, root) as file:
            samples, own_rate = file.read(dtype="float32", always_2d=True), file.samplerate
            if len(samples) < file.frames:
                raise InvalidMedia(f"sound {described(source)} is cut: it ends after {len(samples)} samples")
    mono = samples.mean(axis=1) if samples.ndim == 2 else samples
    if own_rate != rate:
        require_extra("audio", "rollout.prompts.sounds", "soxr")
        import soxr

        mono = soxr.resample(mono, own_rate, rate)
    loudest = float(np.abs(mono).max(initial=0))
    if not loudest <= _LOUDEST:  # also for NaN
        raise InvalidMedia(
            f"sound {described(source)} has values up to {loudest:g}, of an unknown scale: give integers, or floats in [-1, 1]"
        )
    return np.clip(mono, -1, 1).astype(np.float32, copy=False)


def sound_samples(source: Any, root: Root = None, rate: int = RATE) -> int:
    """The length of the result of `load_sound`, read from the header. Samples are not decoded.

    >>> sound_samples((np.zeros(8_000), 8_000))
    16000
    """
    given = _sampled(source, rate)
    if given is not None:
        return _resampled(len(given[0]), given[1], rate)
    with _opened(source, root) as file:
        return _resampled(file.frames, file.samplerate, rate)


def wav_file(sound: Sound) -> bytes:
    """A WAV of 16 bits of a sound ``(S,)`` at `RATE`.

    >>> sound = load_sound(wav_file(np.array([0.5, -1.0], dtype=np.float32)))
    >>> np.abs(sound - [0.5, -1.0]).max() < 1e-4
    np.True_
    """
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.rint(sound * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _resampled(samples: int, own_rate: int, rate: int) -> int:
    """How many samples ``soxr`` makes: the nearest number."""
    return (2 * samples * rate + own_rate) // (2 * own_rate)


def _sampled(source: Any, rate: int) -> tuple[Sound, int] | None:
    """Samples ``(S,)`` or ``(S, channels)`` and their rate, of a source that is no file; else `None`."""
    outer, own_rate = source, None
    while isinstance(source, Mapping) and source.get("bytes") is None:
        own_rate = source.get("sampling_rate", source.get("sample_rate", own_rate))
        inner = next((source[name] for name in ("array", "audio") if source.get(name) is not None), None)
        if inner is None:
            return None
        if own_rate is None and "array" in source:
            raise InvalidMedia(f"sound {described(outer)} is an array without a sampling_rate")
        source = inner
    if hasattr(source, "get_all_samples"):  # torchcodec's decoder, which `datasets` gives
        decoded = source.get_all_samples()
        source = np.asarray(decoded.data), decoded.sample_rate
    if isinstance(source, list) and own_rate is not None:
        source = np.asarray(source)
    if not is_sampled(source):
        return None
    array, own_rate = source if isinstance(source, tuple) else (source, rate if own_rate is None else own_rate)
    _check(len(array) if array.ndim == 1 else max(array.shape), own_rate, outer)
    if array.ndim > 2:
        raise InvalidMedia(f"sound {described(outer)} must be (samples,), or with channels, not {array.shape}")
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        middle = 0 if array.dtype.kind == "i" else (limits.max + 1) / 2
        array = (array - middle) / (-limits.min or middle)
    array = array.astype(np.float32, copy=False)
    return array.T if array.ndim == 2 and array.shape[0] < array.shape[1] else array, int(own_rate)


@contextmanager
def _opened(source: Any, root: Root) -> Iterator[Any]:
    """The opened file of a sound, whose length is checked."""
    found = unwrapped(source, "sound")
    file = file_of(found, root, "sound")
    require_extra("audio", "rollout.prompts.sounds", "soundfile")
    import soundfile

    try:
        with open(file, "rb") if isinstance(file, Path) else file as content, soundfile.SoundFile(content) as opened:
            _check(opened.frames, opened.samplerate, source)
            if _is_cut(opened.extra_info):
                raise InvalidMedia(f"sound {described(source)} is cut: it ends after {opened.frames} samples")
            yield opened
    except DataProtoError:
        raise
    except Exception as error:  # of the system, or of any decoder
        reason = str(getattr(error, "error_string", "")) or why_unread(error, found, root)
        raise InvalidMedia(f"sound {described(source)} cannot be read: {reason}") from error


def _check(samples: int, rate: Any, source: Any) -> None:
    if not isinstance(rate, Integral) or int(rate) < 1:
        raise InvalidMedia(f"sound {described(source)}: a sampling rate of {rate!r} is none")
    if not samples:
        raise InvalidMedia(f"sound {described(source)} is empty")
    if samples > MAX_SECONDS * int(rate):
        raise InvalidMedia(
            f"sound {described(source)} has {samples / int(rate):,.0f} seconds, more than {MAX_SECONDS:,}"
        )


def _is_cut(header: str) -> bool:
    """Whether a WAV says that it has more than it has, in what ``soundfile`` tells of its header.

    >>> _is_cut("data : 88200 (should be 44078)"), _is_cut("data : 4294967295 (should be 44078)"), _is_cut("data : 88200")
    (True, False, False)
    """
    found = re.search(r"^data : (\d+) \(should be (\d+)\)", header, re.MULTILINE)
    return found is not None and int(found[2]) < int(found[1]) < _STREAMED


# The model's inputs


@dataclass(frozen=True)
class ProcessedSound:
    """A sound ``(S,)``, see `load_sound`, and the model's inputs for it."""

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
