"""Checkpoints: directories ``<dir>/global_step_N/{actor,...}``, complete or absent, and the training state in them.

A training state holds a model's weights, whole, sharded or adapted, and its optimizer's state. Moments and step are
written under the name of each parameter that has some: a parameter that no loss has reached yet, such as the vision tower's
before the first image, has none, and continues without. Gradients are not written.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from dataproto.errors import CheckpointError, ending, raise_first, writing
from workers.model.lora import base_name
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks
from workers.training.checkpoint_files import read_state, run_behind, stored_names, write_state, write_state_behind
from workers.training.eight_bit import MomentReader, stored_parts
from workers.training.optimizer import Moments, Optimizer
from workers.weights.sharded_export import ShardedExport

_STEP = re.compile(r"global_step_(\d+)")


@contextmanager
def writing_checkpoint(root: Path, step: int) -> Iterator[Path]:
    """A directory to fill, which is renamed to ``root/global_step_<step>`` when the block ends without an error."""
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


def prune_checkpoints(root: Path, keep: int, spared: int | None = None) -> None:
    """Deletes all checkpoints under ``root`` but the ``keep`` newest ones and that of the step ``spared``."""
    for old in checkpoint_steps(root)[:-keep]:
        if old != spared:
            shutil.rmtree(root / f"global_step_{old}", ignore_errors=True)


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under ``root``."""
    if not root.is_dir():
        return []
    matches = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest_checkpoint(root: Path) -> tuple[int, Path] | None:
    """Step and directory of the newest complete checkpoint, if there is one."""
    steps = checkpoint_steps(root)
    return (steps[-1], root / f"global_step_{steps[-1]}") if steps else None


def random_states() -> dict[str, Any]:
    """States of the Python, NumPy and torch generators, of plain types that `torch.load` reads without running code."""
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (libraries sample from it)
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
    """Sets the states that `random_states` returned, of devices that exist here."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def write_json(path: Path, value: Any) -> None:
    """Writes plain values; others, such as paths, as their text."""
    with writing(path):
        path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def _flush(directory: Path) -> None:
    """Waits until everything under ``directory`` is on disk, so that the rename cannot overtake its content."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Saving:
    """Writes of a model's state, some of them in the background while training continues."""

    def __init__(self) -> None:
        self._writes: list[Future[Any]] = []

    def save_all(
        self,
        directory: Path,
        module: PackedVLM,
        optimizer: Optimizer,
        ranks: Ranks,
        behind: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes ``huggingface/``, a checkpoint that `from_pretrained` reads, and ``training/``, the training state.

        Every rank writes its own part of both, and any other layout can read them. With ``behind`` the state is copied to the
        host now and written in the background, until `finish`.

        Args:
            dtype: of the weights in ``huggingface/``, by default their own; see `ShardedExport`.
        """
        export = ShardedExport(directory / "huggingface", module.model, module.family, ranks, dtype)
        export.collect(behind)

        def finish() -> None:
            if behind:
                self._writes.append(run_behind(export.finish))
            else:
                export.finish()

        with ending(finish):  # the other ranks wait there
            self.save_training(directory, module, optimizer, behind)

    def save_training(self, directory: Path, module: PackedVLM, optimizer: Optimizer, behind: bool) -> None:
        """Writes only ``training/``."""
        state = _training_state(module, optimizer, optimizer.moments)
        if behind:
            self._writes.append(write_state_behind(state, directory / "training"))
        else:
            write_state(state, directory / "training")

    def finish(self) -> None:
        """Waits until all is written; raises the error of a write that failed."""
        writes, self._writes = self._writes, []
        wait(writes)
        raise_first([error for each in writes if (error := each.exception()) is not None])


def load_training_state(directory: Path, module: PackedVLM, optimizer: Optimizer, ranks: Ranks) -> None:
    """Reads what `Saving` wrote, in this layout or another, to the last bit. Every rank calls it.

    Gradients are cleared: they belong to other weights.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another model, or holds weights that are frozen here.
        RankFailure: another rank cannot read it.
    """
    with ranks.fail_together():
        stored = stored_names(directory / "training")
    names = ranks.all_gather(list(get_model_state_dict(module, options=TRAINED_ALONE)), "pp")
    with ranks.fail_together():
        _check_none_is_frozen(directory, stored, {f"model.{name}" for mine in names for name in mine})
    with_state = {name.rpartition(".")[0] for name in stored}
    present = optimizer.moments
    moments: Moments = {
        parameter: present.get(parameter) or optimizer.new_moments(parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and f"optimizer.state.{name}" in with_state
    }
    readers = [MomentReader(name, value, stored) for name, value in _named_moments(module, moments)]
    with ranks.fail_together():
        _check_kind(readers, stored, directory / "training", optimizer.config.kind)
    state = _weights_and_counts(module, optimizer)
    state |= {name: target for reader in readers for name, target in reader.targets.items()}
    read_state(state, directory / "training")
    for reader in readers:
        reader.finish()
    set_model_state_dict(module, state["model"], options=TRAINED_ALONE)
    optimizer.restore(moments, state["steps"], state["skipped_steps"])


def _training_state(module: PackedVLM, optimizer: Optimizer, moments: Moments) -> dict[str, Any]:
    """The state to write, with the moments of these parameters."""
    found = _weights_and_counts(module, optimizer)
    for name, value in _named_moments(module, moments):
        found |= stored_parts(name, value)
    return found


def _weights_and_counts(module: PackedVLM, optimizer: Optimizer) -> dict[str, Any]:
    counts = {"steps": optimizer.steps, "skipped_steps": optimizer.skipped_steps}
    return {"model": get_model_state_dict(module, options=TRAINED_ALONE)} | counts


def _named_moments(module: PackedVLM, moments: Moments) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        for kind, value in moments.get(parameter, {}).items():
            yield f"optimizer.state.{name}.{kind}", value


def _check_kind(readers: Sequence[MomentReader], stored: Collection[str], training: Path, kind: str) -> None:
    """Raises `CheckpointError` if another kind of optimizer wrote the moments: those of AdamW and of Muon have no common
    meaning.
    """
    lacking = [name for reader in readers for name in reader.targets if name not in stored]
    if lacking:
        raise CheckpointError(
            f"{training} has another optimizer's state than optimizer.kind={kind!r} needs: it lacks {len(lacking)} tensors, "
            f"such as {lacking[0]!r}; continue with the kind that wrote it"
        )


def _check_none_is_frozen(directory: Path, stored: Collection[str], trained: Collection[str]) -> None:
    """Raises `CheckpointError` if the checkpoint has weights that are not ``trained`` here.

    They would have the values from before their training, here and in what this model saves.
    """
    left = sorted(name for name in stored if name.startswith("model.") and name not in trained)
    if left:
        raise CheckpointError(
            f"{directory / 'training'} has {len(left)} weights that this model does not train, such as "
            f"{left[0].removeprefix('model.')!r}: continue with the options that it was trained with (freeze_vision, "
            f"freeze_language, lora_rank), or take {directory / 'huggingface'} as the model"
        )


# Frozen weights come from the model's own checkpoint.
TRAINED_ALONE = StateDictOptions(ignore_frozen_params=True, strict=False)


def load_model_weights(directory: Path, module: PackedVLM, ranks: Ranks) -> None:
    """Reads the weights that `Saving` wrote, without the optimizer's state. Every rank calls it.

    Weights that were frozen when the state was written are not in it and keep the values of the model's own checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model.
        RankFailure: another rank cannot read it.
    """
    training = directory / "training"
    with ranks.fail_together():
        stored = stored_names(training)
    mine = get_model_state_dict(module)
    known = {f"model.{name}" for names in ranks.all_gather(list(mine), "pp") for name in names}
    with ranks.fail_together():
        _check_fits(training, {name for name in stored if name.startswith("model.")}, known)
    state = {"model": {name: value for name, value in mine.items() if f"model.{name}" in stored}}
    read_state(state, training)
    set_model_state_dict(module, state["model"], options=StateDictOptions(strict=False))


def _check_fits(training: Path, stored: set[str], known: set[str]) -> None:
    """Raises `CheckpointError` unless the names of the stored weights, all or the trained ones, fit the names of the model."""
    of_the_model = "model.model."  # the prefix of weights that a checkpoint of the Hugging Face model holds as well
    added = {name for name in known if not name.startswith(of_the_model) or base_name(name) is None}
    unknown, missing = sorted(stored - known), sorted(added - stored)
    if unknown or missing:
        example = [*missing, *unknown][0].removeprefix("model.")
        raise CheckpointError(
            f"{training} is of another model: {len(unknown)} of its weights are not this model's, and {len(missing)} of this "
            f"model's are not in it, such as {example!r}"
        )
