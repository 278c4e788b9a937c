"""Data sets of pictured problems, in the schemas that Geometry3K's users have.

* verl: ``data_source, prompt, images, ability, reward_model {style, ground_truth}, extra_info``
* EasyR1, as in ``hiyouga/geometry3k``: ``problem, answer, images``; the instruction below is added to the problem
* chat messages, typed parts or markers: ``messages`` (or ``prompt``), with ``answer`` or ``solution``

Files are read as data only, paths in them as images only; relative paths start at the file's folder.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig, InvalidRow
from recipes.loader import EvaluationLoader, PromptLoader, drop_overlong
from rollout.media import media_list

__all__ = ["INSTRUCTION", "EvaluationLoader", "Geo3KDataset", "PromptLoader", "drop_overlong", "load_rows", "read_row"]

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)
"""What verl (``examples/data_preprocess/geo3k.py``) and EasyR1 (``examples/format_prompt/math.jinja``) ask of the model."""

_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_MEDIA = ("images", "image", "videos", "video")
_ANSWERS = ("answer", "solution", "ground_truth")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Geo3KDataset(Sequence[dict[str, Any]]):
    """Rows for `PromptBuilder`, read from disk when asked for.

    ``rows[i]`` holds ``prompt``, ``images``, ``videos``, ``data_source``, ``ability``, ``reward_model``, ``extra_info``,
    ``index`` (i), ``media_root``. Raises `InvalidRow` for a row of none of the schemas.
    """

    def __init__(
        self, tables: Sequence[tuple[Any, Path | None]], split: str, data_source: str, instruction: str = INSTRUCTION
    ) -> None:
        """``tables``: `datasets.Dataset` objects, each with the folder where its relative paths start."""
        self.tables = [(table.with_format("arrow"), root) for table, root in tables]
        self.ends = list(accumulate(len(table) for table, _ in tables))
        self.split = split
        self.data_source = data_source
        self.instruction = instruction

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self.ends, place)
        table, root = self.tables[number]
        raw = table[place - (self.ends[number] - len(table))].to_pylist()[0]
        try:
            row = read_row(raw, place, self.split, self.data_source, self.instruction)
        except InvalidRow:
            raise
        except DataProtoError as error:
            raise InvalidRow(place, str(error)) from error
        return row | {"media_root": root}


def load_rows(
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    data_source: str | None = None,
    instruction: str = INSTRUCTION,
) -> Geo3KDataset:
    """Open a data set: parquet (or JSON) file or files, a folder of them, or a name on the Hugging Face hub.

    Args:
        split: which files of a folder (``train-00000-of-00001.parquet``, ``train.parquet``, also under ``data/``), or
            which split on the hub. A file is taken whole.
        data_source: for rows that do not name theirs; the hub's name, or the file's or folder's, unless given.
        instruction: what is added to the problem of an EasyR1 row.

    Raises:
        InvalidConfig: no such file, folder or data set.
        FileFormatError: a file cannot be read.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    if not sources:
        raise InvalidConfig("no data set given")
    tables: list[tuple[Any, Path | None]] = []
    for one in sources:
        if Path(one).exists():
            tables += [(_read_file(file), file.parent) for file in _files(Path(one), split)]
        else:
            tables.append((_download(str(one), split), None))
    name = str(sources[0]) if tables[0][1] is None else Path(sources[0]).resolve().stem
    rows = Geo3KDataset(tables, split, data_source or name, instruction)
    if not len(rows):
        raise InvalidConfig(f"data set {name!r} has no rows")
    return rows


def read_row(
    raw: Mapping[str, Any], index: int, split: str = "", data_source: str = "", instruction: str = INSTRUCTION
) -> dict[str, Any]:
    """A row of any of the schemas, in verl's. Raises `InvalidRow` if it is of none.

    >>> row = read_row({"problem": "<image>Find x.", "answer": "9", "images": ["a.png"]}, index=3, split="train")
    >>> row["prompt"][0]["content"][:24], row["reward_model"], row["extra_info"]["index"]
    ('<image>Find x. You FIRST', {'style': 'rule', 'ground_truth': '9'}, 3)
    """
    messages, problem = raw.get("messages"), raw.get("problem")
    prompt = raw.get("prompt") if messages is None else messages
    if prompt is None and isinstance(problem, str):
        prompt = [{"role": "user", "content": f"{problem} {instruction}".strip()}]
    if prompt is None:
        raise InvalidRow(index, f"no 'prompt', 'messages' or 'problem' among its columns {sorted(raw)}")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    answer = next((raw[name] for name in _ANSWERS if raw.get(name) is not None), None)
    if not isinstance(prompt, (Sequence, np.ndarray)) or not all(isinstance(message, Mapping) for message in prompt):
        raise InvalidRow(index, f"the prompt must be a string or a list of messages, not {prompt!r}")
    if messages is not None and prompt and prompt[-1].get("role") == "assistant":  # a worked example: ask for it again
        answer = prompt[-1].get("content") if answer is None else answer
        prompt = prompt[:-1]
    extra = {"split": split, "index": index, "answer": answer, "question": problem}
    extra |= {
        name: value for name, value in raw.items() if name not in (*_MEDIA, *_ANSWERS, "prompt", "messages", "problem")
    }
    return {
        "prompt": prompt,
        "images": _media(raw, "images", "image"),
        "videos": _media(raw, "videos", "video"),
        "data_source": raw.get("data_source") or data_source,
        "ability": raw.get("ability") or "math",
        "reward_model": raw.get("reward_model") or {"style": "rule", "ground_truth": answer},
        "extra_info": raw.get("extra_info") or extra,
        "index": index,
    }


def _media(raw: Mapping[str, Any], several: str, single: str) -> list[Any]:
    if raw.get(several) is not None:
        return media_list(raw[several])
    return [] if raw.get(single) is None else [raw[single]]


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for folder in (path, path / "data") for file in sorted(folder.glob("*")) if file.suffix in _READERS]
    files = [file for file in found if re.match(rf"{re.escape(split)}(\W|_|$)", file.stem)]
    if not files:
        names = ", ".join(file.name for file in found[:10]) or "no parquet or JSON file"
        raise InvalidConfig(f"{path} has no file of split {split!r}; it has {names}")
    return files


def _read_file(file: Path) -> Any:
    from datasets import load_dataset

    if file.suffix not in _READERS:
        raise InvalidConfig(f"{file}: data files end in {', '.join(_READERS)}")
    try:
        return load_dataset(_READERS[file.suffix], data_files=str(file), split="train")
    except Exception as error:  # datasets wraps whatever its readers raise
        raise FileFormatError(
            f"{file} cannot be read as {_READERS[file.suffix]}: {error.__cause__ or error}"
        ) from error


def _download(name: str, split: str) -> Any:
    from datasets import load_dataset

    if not _HUB_NAME.fullmatch(name) or Path(name).suffix in _READERS:
        raise InvalidConfig(f"{name}: there is no such file or folder")
    try:
        return load_dataset(name, split=split)
    except Exception as error:  # network, name or split
        raise InvalidConfig(
            f"{name} is no file or folder here, and could not be loaded from the hub: {error}"
        ) from error
