"""Checkpoint directories: ``<dir>/global_step_N/{actor,...}``, whole or not there at all."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

_STEP = re.compile(r"global_step_(\d+)")


@contextmanager
def writing_checkpoint(root: Path, step: int, keep: int | None = None) -> Iterator[Path]:
    """A directory to fill beside ``root/global_step_<step>``, which it becomes once the block ends without an error.

    Args:
        keep: how many checkpoints to leave, the newest ones; ``None`` leaves all.
    """
    target = root / f"global_step_{step}"
    draft = root / f".{target.name}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        _flush(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    if keep is not None:
        for old in sorted(checkpoint_steps(root))[:-keep]:
            shutil.rmtree(root / f"global_step_{old}", ignore_errors=True)


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the whole checkpoints under ``root``."""
    if not root.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest_checkpoint(root: Path) -> tuple[int, Path] | None:
    """Step and directory of the newest whole checkpoint, if there is one."""
    steps = checkpoint_steps(root)
    return (steps[-1], root / f"global_step_{steps[-1]}") if steps else None


def random_states() -> dict[str, Any]:
    """States of the Python, NumPy and torch generators, of plain types that `torch.load` reads without running code."""
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (libraries draw from it)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def seed_everything(seed: int) -> None:
    """Seeds the Python, NumPy and torch generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def set_random_states(states: dict[str, Any]) -> None:
    """Sets what `random_states` returned, as far as there are such devices here."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def write_json(path: Path, value: Any) -> None:
    """Writes plain values; paths and the like as their text."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def _flush(directory: Path) -> None:
    """Waits until everything under ``directory`` is on disk, so that the rename cannot overtake its content."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
