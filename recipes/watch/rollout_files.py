"""Files of rollouts in a run's directory: answers of evaluations, kept rows of training, and the pictures and sounds of both."""

import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from dataproto.columns import COLUMNS
from dataproto.errors import FileFormatError, raised_as, replace_file
from rollout.prompts.messages import MARKERS

if TYPE_CHECKING:
    from dataproto import DataProto

FOLDER, TRAINING = "rollouts", "training"
MAX_FRAMES = 8  # of a video, evenly spaced
MAX_SIDE = 448  # pixels; larger pictures are stored smaller
LARGEST_PNG = 2**16  # bytes; of larger ones a JPEG is stored
MAX_SECONDS = 60  # of a sound; of longer ones the first minute is stored


Row = dict[str, Any]


@dataclass(frozen=True)
class RolloutSample:
    """One response to one problem.

    ``key`` names the problem and is the same at every evaluation; ``accuracy`` is ``None`` where answers are not right or wrong.
    ``actions`` are the answers of an episode, turn by turn. ``parts`` are the other numbers of the reward, `reward_parts`.
    """

    key: str
    prompt: str
    response: str
    ground_truth: str
    reward: float
    accuracy: float | None = None
    images: tuple[Image.Image, ...] = ()
    sounds: tuple[bytes, ...] = ()  # files, see `rollout.prompts.sounds.wav_file`
    actions: Sequence[str] = ()
    source: str = ""
    parts: Mapping[str, float | None] = field(default_factory=dict)


def rollout_samples(data: "DataProto", limit: int) -> list[RolloutSample]:
    """The first response to each of the first ``limit`` problems of a scored rollout batch.

    Args:
        data: with object columns ``response_text`` (B,) and ``score`` (B,); if present, ``acc``, ``raw_prompt`` (messages),
            ``reward_model``, ``multi_modal_data``, ``data_source``, ``actions`` of episodes; and ``index`` or ``uid``, which name
            the problem.
        limit: the largest number of samples.
    """
    samples: dict[str, RolloutSample] = {}
    parts = reward_parts(data)
    for row in range(len(data)):
        source, index = _cell(data, "data_source", row, ""), _cell(data, "index", row, _cell(data, "uid", row, row))
        key = f"{source} {index}".strip()
        if key in samples:
            continue
        if len(samples) == limit:
            break
        numbers = {name: None if (value := each[row]) is None else float(value) for name, each in parts.items()}
        samples[key] = RolloutSample(
            key,
            **texts_of(data, row),
            reward=float(data["score"][row]),
            accuracy=numbers.pop("acc", None),
            images=tuple(pictures_of(media := _cell(data, "multi_modal_data", row, None))),
            sounds=tuple(sounds_of(media)),
            actions=tuple(_cell(data, "actions", row, ())),
            parts=numbers,
        )
    return list(samples.values())


def texts_of(data: "DataProto", row: int) -> dict[str, str]:
    """Where a row is from, what was asked, what was answered, and the truth: for each an empty text without its column."""
    return {
        "source": str(_cell(data, "data_source", row, None) or ""),
        "prompt": prompt_text(_cell(data, "raw_prompt", row, "")),
        "response": str(_cell(data, "response_text", row, None) or ""),
        "ground_truth": str((_cell(data, "reward_model", row, None) or {}).get("ground_truth", "")),
    }


def reward_parts(data: "DataProto") -> dict[str, list[float | None]]:
    """The numbers that the reward function returned next to the score: object columns of numbers that no one else writes."""
    known = COLUMNS.keys() - {"acc"}
    columns = {name: list(column) for name, column in data.non_tensor_batch.items() if name not in known}
    return {
        name: column
        for name, column in columns.items()
        if all(value is None or isinstance(value, int | float | np.number) for value in column)
    }


def pictures_of(media: Mapping[str, Any] | None) -> list[Image.Image]:
    """The images of a row's ``multi_modal_data``, and of each of its videos at most `MAX_FRAMES` frames.

    >>> import numpy as np
    >>> frames = np.zeros((20, 4, 4, 3), dtype=np.uint8)
    >>> len(pictures_of({"image": [Image.new("RGB", (2, 2))], "video": [(frames, {})]})), pictures_of(None)
    (9, [])
    """
    found = list((media or {}).get("image", ()))
    for frames, _ in (media or {}).get("video", ()):
        count = min(len(frames), MAX_FRAMES)
        places = [round(place * (len(frames) - 1) / max(count - 1, 1)) for place in range(count)]
        found += [Image.fromarray(frames[place]) for place in places]
    return found


def sounds_of(media: Mapping[str, Any] | None) -> list[bytes]:
    """The sounds of a row's ``multi_modal_data`` as files, see `wav_file`."""
    from rollout.prompts.sounds import RATE, wav_file  # which loads torch

    return [wav_file(sound[: MAX_SECONDS * RATE]) for sound in (media or {}).get("audio", ())]


def prompt_text(messages: Any) -> str:
    """The text of the user's turns, without media markers.

    >>> prompt_text([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}])
    'Find x.'
    >>> prompt_text([{"role": "system", "content": "Think."}, {"role": "user", "content": "<image>Find y."}])
    'Find y.'
    >>> prompt_text([{"role": "user", "content": [{"type": "text", "text": "What is <image>?"}]}])
    'What is <image>?'
    """
    if isinstance(messages, str):
        return messages
    turns = [turn.get("content", "") for turn in messages if turn.get("role") == "user"]
    parts = [part for content in turns for part in ([content] if isinstance(content, str) else content)]
    texts = [MARKERS.sub("", part) if isinstance(part, str) else part.get("text") or "" for part in parts]
    return "\n".join(text for text in texts if text).strip()


def save_rollouts(directory: str | Path, step: int, rows: Iterable[RolloutSample]) -> Path:
    """Writes ``<directory>/rollouts/step_<step>.jsonl``, and each distinct picture and sound once, in
    ``rollouts/images`` (see `save_image`)."""
    folder = Path(directory) / FOLDER
    (folder / "images").mkdir(parents=True, exist_ok=True)
    fields = [
        {name: value for name, value in vars(sample).items() if name != "sounds"}
        | saved_media(folder / "images", sample.images, sample.sounds)
        for sample in rows
    ]
    return replace_file(answers_file(directory, step), "".join(json.dumps(each) + "\n" for each in fields).encode())


def answers_file(directory: str | Path, step: int) -> Path:
    """The file of the answers of an evaluation in a run's directory."""
    return Path(directory) / FOLDER / f"step_{step}.jsonl"


def rollout_steps(directory: str | Path) -> list[int]:
    """The steps whose rollouts a run saved, in order."""
    return _steps(Path(directory) / FOLDER)


def _steps(folder: Path) -> list[int]:
    names = (re.fullmatch(r"step_(\d+)\.jsonl", path.name) for path in folder.glob("step_*.jsonl"))
    return sorted(int(match[1]) for match in names if match)


def load_rollouts(directory: str | Path, step: int) -> list[RolloutSample]:
    """Reads the rollouts that `save_rollouts` wrote, without pictures and sounds that are missing or broken.

    Raises:
        FileFormatError: a line is not a rollout; the message names the line.
    """
    path = answers_file(directory, step)
    samples = []
    for number, fields in enumerate(read_lines(path, "key"), 1):
        what = f"{path}, line {number}: not a rollout"
        with raised_as(FileFormatError, what, ValueError, TypeError, KeyError, AttributeError):
            images = _load_images(path.parent / "images", fields["images"])
            files = [path.parent / "images" / Path(name).name for name in fields.get("sounds", ())]
            sounds = tuple(file.read_bytes() for file in files if file.is_file())
            media = {"images": images, "sounds": sounds, "actions": tuple(map(str, fields.get("actions", ())))}
            samples.append(RolloutSample(**fields | media))
    return samples


def saved_media(folder: Path, images: Iterable[Image.Image], sounds: Sequence[bytes]) -> dict[str, list[str]]:
    """Writes pictures and sounds, each under the name of its content, and returns the names as fields of a row."""
    found = {"images": [save_image(folder, image) for image in images]}
    if sounds:
        found["sounds"] = [save_sound(folder, sound) for sound in sounds]
    return found


def save_image(folder: Path, image: Image.Image) -> str:
    """Writes a picture, smaller if it is large, under the name of its content, and returns the name.

    It is a PNG, but a JPEG where the PNG is above `LARGEST_PNG`, as of photographs.
    """
    small = image.convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    content = hashlib.sha256(repr(small.size).encode() + small.tobytes()).hexdigest()[:16]
    for name in (f"{content}.png", f"{content}.jpg"):
        if (folder / name).exists():
            return name
    name, buffer = f"{content}.png", io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    if buffer.tell() > LARGEST_PNG:
        name, buffer = f"{content}.jpg", io.BytesIO()
        small.save(buffer, format="JPEG", quality=90)
    return replace_file(folder / name, buffer.getvalue()).name


def save_sound(folder: Path, wav: bytes) -> str:
    """Writes a sound under the name of its content, and returns the name."""
    name = f"{hashlib.sha256(wav).hexdigest()[:16]}.wav"
    return name if (folder / name).exists() else replace_file(folder / name, wav).name


def rows_file(directory: str | Path, step: int) -> Path:
    """The file of a step's kept rows in a run's directory."""
    return Path(directory) / FOLDER / TRAINING / f"step_{step}.jsonl"


def tokens_file(directory: str | Path, step: int) -> Path:
    """The file of their tokens."""
    return rows_file(directory, step).with_suffix(".tokens.jsonl.gz")


def kept_steps(directory: str | Path) -> list[int]:
    """The steps whose rollouts of training a run kept, in order."""
    return _steps(Path(directory) / FOLDER / TRAINING)


def load_tokens(directory: str | Path, step: int) -> list[Row]:
    """The tokens of the kept rows of a step, in their order.

    Raises:
        FileFormatError: the file is damaged; the message names it.
    """
    return read_lines(tokens_file(directory, step), "tokens")


def read_lines(path: Path, needed: str, may_be_cut: bool = False) -> list[Row]:
    """The objects of the lines of a file, which ``.gz`` are compressed; each has the field ``needed``.

    Args:
        may_be_cut: ignore the last line if it is half-written, as a killed process may leave it.

    Raises:
        FileFormatError: a line is something else; the message names it.
    """
    rows, content = [], path.read_bytes()
    with raised_as(FileFormatError, str(path), OSError, EOFError):
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda name: None)  # NaN and infinities, which JSON does not have
            if row[needed] is None:
                raise LookupError(needed)
        except (ValueError, TypeError, LookupError) as error:
            if may_be_cut and not line.endswith(b"\n"):
                break
            found = f"{path}, line {number}: not an object with {needed!r}: {line[:80]!r}"
            raise FileFormatError(f"{found}: mend or delete that line") from error
        rows.append(row)
    return rows


def _cell(data: "DataProto", name: str, row: int, default: Any) -> Any:
    return data[name][row] if name in data else default


def _load_images(folder: Path, names: Sequence[str]) -> tuple[Image.Image, ...]:
    images = []
    for name in names:
        try:
            with Image.open(folder / Path(name).name) as image:
                images.append(image.convert("RGB"))
        except (OSError, SyntaxError):  # Pillow raises SyntaxError for a broken PNG
            continue
    return tuple(images)
