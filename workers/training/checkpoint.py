"""Checkpoints: directories ``<dir>/global_step_N/{actor,...}``, complete or absent, and the training state in them.

A training state holds a model's weights, whole, sharded or adapted, and its optimizer's state. Moments and step are
written under the name of each parameter that has some: a parameter that no loss has reached yet, such as the vision tower's
before the first image, has none, and continues without. Gradients are not written.

The state is torch's distributed checkpoint, read without running code from its files: torch's reader unpickles the table of
contents and the values that are not tensors. Here only plain values and the classes that such a table consists of are accepted.
"""

import io
import json
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from enum import EnumMeta
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, checkpoint
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map_only

from dataproto.errors import WAY_OUT, CheckpointError, ending, raise_first, replace_file, undoing, wait_for_disk
from dataproto.planning import split_by_size
from workers.model.lora import base_name
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks
from workers.training.eight_bit import MomentReader, stored_parts
from workers.training.optimizer import Moments, Optimizer
from workers.weights.sharded_export import ShardedExport

FILE_BYTES = 1 << 30
"""Of a file of a training state."""


def write_state(state: dict[str, Any], directory: Path, group: ProcessGroup | None = None) -> None:
    """Writes ``state``, sharded tensors and plain values; every rank writes its own part.

    Args:
        group: the ranks' process group, the default one if ``None``.

    Raises:
        CheckpointError: a rank could not write; every rank raises it, and names that rank.
    """
    try:
        with alone_without_warning():
            checkpoint.save(
                state,
                storage_writer=FileByFile(directory),
                process_group=group,
                no_dist=not distributed.is_initialized(),
            )
    except checkpoint.CheckpointException as error:  # not a subclass of `Exception` in torch
        _raise_interrupt(error)
        causes = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{directory} could not be written: {'; '.join(causes)}{WAY_OUT}") from error


def _raise_interrupt(error: checkpoint.CheckpointException) -> None:
    """Raises the `KeyboardInterrupt` of a rank, which torch collects as if a file had failed."""
    for cause, _ in error.failures.values():
        if isinstance(cause, KeyboardInterrupt):
            raise cause from error


_WRITER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One thread, so that calls follow one another in their order: two at a time would mix up their collectives on the group of
`_background_group` if a rank is slower than the others.
"""


@cache
def _background_group() -> ProcessGroup:
    """A separate process group: meanwhile the ranks use the default one for other calls."""
    return cast("ProcessGroup", distributed.new_group(backend="gloo"))  # this rank is a member


def read_state(state: dict[str, Any], directory: Path) -> None:
    """Fills ``state`` from a checkpoint of any number of ranks; its tensors may be sharded in another way.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, hostile, or of another model.
    """
    with _reading(directory), alone_without_warning():
        checkpoint.load(
            state,
            storage_reader=PlainReader(directory),
            planner=PlainPlanner(),
            no_dist=not distributed.is_initialized(),
        )


def stored_names(directory: Path) -> frozenset[str]:
    """Names of the values in a checkpoint; keys of nested dictionaries are joined by dots.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or hostile.
    """
    with _reading(directory):
        return frozenset(_read_contents(directory).state_dict_metadata)


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Turns every error of reading a checkpoint into a `CheckpointError`."""
    if not (directory / ".metadata").is_file():
        raise CheckpointError(f"{directory} holds no training state")
    try:
        yield
    except (
        checkpoint.CheckpointException,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        OSError,
        EOFError,
    ) as error:
        cause: BaseException = error
        if isinstance(error, checkpoint.CheckpointException):
            _raise_interrupt(error)
            causes = (cause for cause, _ in error.failures.values() if isinstance(cause, _UnreadableContents))
            cause = next(causes, error)
        reason = next((line for line in reversed(str(cause).splitlines()) if line.strip()), type(error).__name__)
        raise CheckpointError(f"{directory} does not fit the model or is damaged: {reason.strip()}") from error


def missing_parts(directory: Path) -> list[str]:
    """Names of files that a complete checkpoint has in ``directory`` and that are absent."""
    if not (directory / ".metadata").is_file():
        return [".metadata"]
    parts = {str(part.relative_path) for part in (_read_contents(directory).storage_data or {}).values()}
    return sorted(part for part in parts if not (directory / part).is_file())


class FileByFile(FileSystemWriter):
    """Writes a rank's part in files of at most `FILE_BYTES`, or one tensor.

    torch keeps what it has copied to the host until the file is complete, so that one file for all would be a second copy of the
    weights and moments in host memory.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        """Writes one file after the other."""
        written: list[WriteResult] = []
        sized = ((item, item.tensor_storage_size() or 0) for item in plan.items)
        for number, items in enumerate(split_by_size(sized, FILE_BYTES)):
            place = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            written += super().write_data(replace(plan, items=items, storage_data=place), planner).wait()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(written)
        return done


@contextmanager
def alone_without_warning() -> Iterator[None]:
    """Silences torch's warning that a process is alone, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class PlainReader(FileSystemReader):
    """Reads a table of contents that holds only the classes that such tables consist of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            found = _read_contents(Path(self.path))
        except Exception as error:
            raise _UnreadableContents(str(error) or type(error).__name__) from error
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _UnreadableContents(BaseException):
    """No `Exception`: torch drops those, looks for a table of the rank, and (torch 2.11) says only that it found none."""


def _read_contents(directory: Path) -> Metadata:
    with open(directory / ".metadata", "rb") as file:
        found = _Contents(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"the table of contents is a {type(found).__name__}")
    return found


_HARMLESS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == contents.__name__ and isinstance(getattr(contents, name, None), type):
            return getattr(contents, name)
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 writes members of enumerations
            return _member
        raise pickle.UnpicklingError(f"the table of contents asks for {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    if not isinstance(kind, EnumMeta):
        raise pickle.UnpicklingError(f"the table of contents asks for {name} of {kind!r}")
    return kind[name]


class PlainPlanner(DefaultLoadPlanner):
    """Accepts values other than tensors only if they are plain."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The first parser refuses other values. The one below would run code, so it gets what was read, not the file's bytes.
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


_STEP = re.compile(r"global_step_(\d+)")


@contextmanager
def writing_checkpoint(root: Path, step: int) -> Iterator[Path]:
    """A directory to fill, which is renamed to ``root/global_step_<step>`` when the block ends without an error."""
    target = root / f"global_step_{step}"
    draft = root / f".{target.name}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    with undoing(lambda: shutil.rmtree(draft, ignore_errors=True)):
        yield draft
        for path in [*draft.rglob("*"), draft]:  # so that the rename below cannot overtake what is in it
            wait_for_disk(path)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    wait_for_disk(root)


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
    """Writes plain values, and others, such as paths, as their text; in the place of an earlier file only if all is written."""
    replace_file(path, (json.dumps(value, indent=2, default=str) + "\n").encode())


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
        in_background: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes ``huggingface/``, a checkpoint that `from_pretrained` reads, and ``training/``, the training state.

        Every rank writes its own part of both, and any other layout can read them. With ``in_background`` the state is copied to
        the host now and written while training continues, until `finish`.

        Args:
            dtype: of the weights in ``huggingface/``, by default their own; see `ShardedExport`.
        """
        export = ShardedExport(directory / "huggingface", module.model, module.family, ranks, dtype)
        export.collect(in_background)
        with ending(lambda: self._write(export.finish, in_background)):  # the other ranks wait there
            self.save_training(directory, module, optimizer, in_background)

    def save_training(self, directory: Path, module: PackedVLM, optimizer: Optimizer, in_background: bool) -> None:
        """Writes only ``training/``."""
        state = _weights_and_counts(module, optimizer)
        for name, value in _named_moments(module, optimizer.moments):
            state |= stored_parts(name, value)
        if in_background:
            state = tree_map_only(Tensor, lambda value: value.detach().to("cpu", copy=True), state)
        self._write(lambda group: write_state(state, directory / "training", group), in_background)

    def _write(self, write: Callable[[ProcessGroup | None], None], in_background: bool) -> None:
        if in_background:
            self._writes.append(_WRITER.submit(write, _background_group() if distributed.is_initialized() else None))
        else:
            write(None)

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
