"""Exports in the Hugging Face format that all ranks write together, each its own files.

Weights are gathered a few at a time, and the rank whose file a weight belongs to keeps it until the file is full. So a rank holds
one file that it fills and one that it writes, and not the model. The index is written last, and every file under another name
first, so that an export that `from_pretrained` finds is complete.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dataproto.errors import WAY_OUT, CheckpointError, not_hiding
from dataproto.vlm import VLMFamily
from dataproto.vlm.prediction_head import holds_head
from rollout.pretrained import file_if_there
from workers.model.named_weights import base_parameters, meta_copy, named_buffers, named_weights
from workers.model.patches import set_on_module
from workers.ranks.mesh import Ranks, gathered
from workers.weights.hollow_model import absent_weights, hollow_model
from workers.weights.stored_tensors import CheckpointFiles, whole

FILE_BYTES = 2 << 30
"""Of a file, unless one layer is larger."""


@dataclass(frozen=True)
class ExportFile:
    """A file of an export, the weights in it under their names in the model, and the rank that writes it."""

    file: str
    weights: frozenset[str]
    writer: int


@dataclass(frozen=True)
class StageWeights:
    """What a pipeline stage holds and who can write it."""

    sizes: dict[str, int]  # of weights in bytes
    ranks: list[int]


def plan_export(stages: Sequence[StageWeights], layers: Sequence[str], file_bytes: int) -> list[ExportFile]:
    """Files in the order of the weights; those of a stage go to its ranks in turn, and each rank has one at least if it can.

    Args:
        layers: module paths of lists of layers. The weights of a layer are in one file.

    >>> alone = StageWeights({"head": 4, "layers.0.a": 2, "layers.0.b": 2, "layers.1.a": 4}, [0, 1])
    >>> for each in plan_export([alone], ["layers"], file_bytes=100):
    ...     print(each.file, each.writer, sorted(each.weights))
    model-00001-of-00002.safetensors 0 ['head', 'layers.0.a', 'layers.0.b']
    model-00002-of-00002.safetensors 1 ['layers.1.a']
    """
    planned: list[tuple[list[str], int]] = []
    written: set[str] = set()
    for stage in stages:
        # A tied weight is on two stages.
        sizes = {name: size for name, size in stage.sizes.items() if name not in written}
        written |= sizes.keys()
        limit = max(min(file_bytes, -(-sum(sizes.values()) // len(stage.ranks))), 1)
        files: list[list[str]] = []
        filled = limit
        for names, size in _groups(sizes, layers):
            if filled >= limit or filled + size > file_bytes:
                files.append([])
                filled = 0
            files[-1].extend(names)
            filled += size
        planned += [(names, stage.ranks[number % len(stage.ranks)]) for number, names in enumerate(files)]
    if len(planned) == 1:
        return [ExportFile(SAFE_WEIGHTS_NAME, frozenset(planned[0][0]), planned[0][1])]
    stem, suffix = SAFE_WEIGHTS_NAME.split(".")
    return [
        ExportFile(f"{stem}-{number:05d}-of-{len(planned):05d}.{suffix}", frozenset(names), writer)
        for number, (names, writer) in enumerate(planned, 1)
    ]


def _groups(sizes: dict[str, int], layers: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """Names of weights that are stored in one file, because they may be converted together, and their size in bytes."""
    found: dict[str, list[str]] = {}
    for name in sizes:
        inside = next((path for path in layers if name.startswith(f"{path}.")), None)
        count = name.count(".") if inside is None else inside.count(".") + 2
        found.setdefault(".".join(name.split(".")[:count]), []).append(name)
    for names in found.values():
        yield names, sum(sizes[name] for name in names)


def complete_config(config: Any, family: VLMFamily) -> None:
    """Adds `VLMFamily.rollout_config` to the config of an export, so that engines can read it."""
    for name, value in family.rollout_config(config).items():
        if isinstance(value, Mapping):
            getattr(config, name).update(value)
        else:
            config.update({name: value})


def write_index(directory: Path, places: Mapping[str, tuple[str, int]], parameters: int) -> None:
    """Writes the index of an export of several files, whole or not at all.

    Args:
        places: the file of each tensor, and its size in bytes.
        parameters: their number in the model.
    """
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(size for _, size in places.values())},
        "weight_map": {name: file for name, (file, _) in sorted(places.items())},
    }
    draft = directory / f".{SAFE_WEIGHTS_INDEX_NAME}.partial"
    draft.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / SAFE_WEIGHTS_INDEX_NAME)


class ShardedExport:
    """One export of a model. Every rank makes it, calls `collect` and then `finish`."""

    def __init__(
        self, directory: Path, model: PreTrainedModel, family: VLMFamily, ranks: Ranks, dtype: torch.dtype | None
    ) -> None:
        """``dtype``: of the weights, by default their own; `VLMFamily.float32_weights` keep theirs."""
        self.directory, self.model, self.family, self.ranks, self.dtype = directory, model, family, ranks, dtype
        self.rank = 0 if ranks.mesh is None else distributed.get_rank()
        self.shell = meta_copy(model)
        conversions = get_model_conversion_mapping(self.shell, add_legacy=False)
        reverted = [each for each in conversions if not isinstance(each, PrefixChange)]
        set_on_module(self.shell, "_weight_conversions", reverted)  # a file is written by their reverse
        self.unused = UnusedWeights(model, family)
        stages = ranks.all_gather(self._stage(), "pp")
        (stages, *_) = ranks.all_gather(stages, "dp", "sp", "tp")  # ranks that see other files have the same plan
        files = plan_export(stages, family.repeated_layers, FILE_BYTES)
        self.mine = [file for file in files if file.writer == self.rank]
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        self._writing: Future[None] | None = None
        self._waiting: list[tuple[ExportFile, dict[str, Tensor]]] = []
        self._written: dict[str, tuple[str, int]] = {}  # the file and the size of each tensor
        self._error: str | None = None

    def collect(self, in_background: bool) -> None:
        """Gathers the weights and writes this rank's files, or with ``in_background`` keeps a copy of them for `finish`."""
        file_of = {name: file for file in self.mine for name in file.weights}
        filling: dict[str, dict[str, Tensor]] = {file.file: {} for file in self.mine}
        missing = {file.file: len(file.weights - self.unused.sizes.keys()) for file in self.mine}
        full = [file for file in self.mine if not missing[file.file]]  # of weights that are not gathered
        for name, weight in named_weights(self.model, self.dtype, self.family.in_float32):
            if name in file_of:
                file = file_of[name]
                filling[file.file][name] = weight.to("cpu", copy=in_background).contiguous()
                missing[file.file] -= 1
                full += [] if missing[file.file] else [file]
            while full:
                file = full.pop()
                self._waiting.append((file, filling.pop(file.file)))
                if not in_background:
                    self._write_waiting()
        for file in (file for file in self.mine if file.file in filling):
            lacking = sorted(file.weights - filling[file.file].keys() - self.unused.sizes.keys())
            self._error = self._error or f"{file.file} lacks {len(lacking)} weights: {', '.join(lacking[:3])}"

    def finish(self, group: ProcessGroup | None = None) -> None:
        """Writes what is kept, waits for all ranks, and makes the export complete.

        Args:
            group: over which ranks wait for each other, the default one if ``None``.

        Raises:
            CheckpointError: a rank could not write; every rank raises it.
        """
        self._write_waiting()
        self._wait()
        self._writer.shutdown()
        with not_hiding(None if self._error is None else self._failure([self._error])):
            outcomes = self._gather((self._error, self._written), group)
        if self.rank == 0 and not any(error for error, _ in outcomes):
            try:
                self._complete({name: place for _, places in outcomes for name, place in places.items()})
            except Exception as error:  # whatever it is: the other ranks wait for it
                self._error = _reason(error)
        outcomes = self._gather((self._error, {}), group)
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(outcomes) if error is not None]
        if failed:
            raise self._failure(failed)

    def _failure(self, reasons: Sequence[str]) -> CheckpointError:
        return CheckpointError(f"{self.directory} could not be written: {'; '.join(reasons)}{WAY_OUT}")

    def _stage(self) -> StageWeights:
        """The weights of this rank's pipeline stage; the last one writes those that the model does not use as well."""
        weights = base_parameters(self.model, self.dtype, self.family.in_float32)
        sizes = {base: weight.numel() * dtype.itemsize for base, weight, dtype in weights}
        sizes |= {name: buffer.nbytes for name, buffer in named_buffers(self.model)}
        if self.ranks.rank("pp") == self.ranks.size("pp") - 1:
            sizes |= self.unused.sizes
        group = self.ranks.group("dp", "sp", "tp")
        return StageWeights(sizes, [self.rank] if group is None else distributed.get_process_group_ranks(group))

    def _write_waiting(self) -> None:
        """Begins to write the files that are full, one at a time."""
        while self._waiting:
            self._wait()
            self._writing = self._writer.submit(self._write, *self._waiting.pop(0))

    def _write(self, file: ExportFile, tensors: dict[str, Tensor]) -> None:
        reverted = revert_weight_conversion(self.shell, tensors)
        stored = {self.unused.before + self.family.stored_name(name): tensor for name, tensor in reverted.items()}
        stored |= self.unused.of(file.weights)
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{file.file}.partial"
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, draft, {"format": "pt"})
        draft.replace(self.directory / file.file)
        self._written |= {name: (file.file, tensor.nbytes) for name, tensor in stored.items()}

    def _wait(self) -> None:
        """Waits for the file that is being written. An error is kept: the ranks still have weights to gather together."""
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            self._error = self._error or _reason(error)

    def _gather(self, value: tuple[str | None, Any], group: ProcessGroup | None) -> list[tuple[str | None, Any]]:
        return [value] if self.ranks.mesh is None else gathered(value, group)

    def _complete(self, places: dict[str, tuple[str, int]]) -> None:
        """Writes the configuration, removes files of an earlier export, and writes the index."""
        config = self.shell.config
        named = {"architectures": [type(self.model).__name__], "dtype": self.dtype or self.model.dtype}
        config.update(named)
        complete_config(config, self.family)
        if self.unused.config is not None:
            config = self.family.whole_config(config, self.unused.config)
            config.update({"dtype": named["dtype"]})
        config.save_pretrained(self.directory)
        for file in self.unused.further_files:
            shutil.copy2(file, self.directory)
        if self.shell.can_generate():
            self.shell.generation_config.save_pretrained(self.directory)
        files = {file for file, _ in places.values()}
        for old in self.directory.glob("model*.safetensors*"):
            if old.name not in files:
                old.unlink()
        if files != {SAFE_WEIGHTS_NAME}:
            write_index(self.directory, places, sum(weight.numel() for weight in self.shell.parameters()))


class UnusedWeights:
    """The weights of the checkpoint that a model was loaded from and that it does not use; see `VLMFamily.unused_weights`.

    None if the checkpoint is no longer there.
    """

    def __init__(self, model: PreTrainedModel, family: VLMFamily) -> None:
        self.sizes: dict[str, int] = {}
        self.config: Any = None  # of the whole checkpoint, if the parts that the weights belong to have one
        self.before = ""  # names of weights in it
        self.further_files: list[str] = []
        source = str(model.config._name_or_path)
        if not family.unused_weights or not source:
            return
        self.files = CheckpointFiles(source, download=False)
        unused = [name for name in self.files.names if family.is_unused(name)]
        names = [] if holds_head(model, family) else unused
        with self.files.opened():
            self.sizes = {name: 2 * prod(self.files.tensor(name).shape) for name in names}  # as if in bfloat16
        if (family.part and self.files.names) or (names and family.unused_configs):
            self.config = AutoConfig.from_pretrained(source)
            self.before = f"{family.part}." if hasattr(self.config, f"{family.part}_config") else ""
            found = [file_if_there(source, name) for name in family.unused_files]
            self.further_files = [file for file in found if file is not None]

    def of(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Those with these names."""
        chosen = [name for name in self.sizes if name in names]
        if not chosen:
            return {}
        with self.files.opened():
            tensors = {name: self.files.tensor(name) for name in chosen}
            return {name: tensor.read(whole(tensor.shape)).clone() for name, tensor in tensors.items()}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def copy_weights(
    source: str, family: VLMFamily, directory: Path, dtype: torch.dtype, headless: bool = False
) -> CheckpointFiles:
    """Writes the weights of a checkpoint to ``directory`` under their names, in files of at most `FILE_BYTES` or one module.

    Args:
        source: directory or hub name.
        dtype: of floating-point weights; `VLMFamily.float32_weights` keep theirs.
        headless: whether the checkpoint may lack the language-model head, as that of a reward model does.

    Returns:
        What was read.

    Raises:
        CheckpointError: the checkpoint lacks weights of its model, has them in another shape, or is damaged.
        InvalidConfig: the weights are quantized.
    """
    model, files, sources = hollow_model(source, family)
    absent = absent_weights(model, sources)
    if absent := [name for name in absent if not (headless and name.startswith(family.head))]:
        raise CheckpointError(f"{source} lacks {len(absent)} weights of its model: {', '.join(absent[:3])}")
    exact = {name for weight, tensor in sources.stored.items() if family.in_float32(weight) for name in tensor.names}
    with files.opened():
        firsts = {name: tuple(slice(0, 1) for _ in files.tensor(name).shape) for name in files.names}
        kinds = {name: files.read(name, first).dtype for name, first in firsts.items()}
        dtypes = {name: kind if name in exact or not kind.is_floating_point else dtype for name, kind in kinds.items()}
        sizes = {name: prod(files.tensor(name).shape) * each.itemsize for name, each in dtypes.items()}
    places: dict[str, tuple[str, int]] = {}
    for file in plan_export([StageWeights(sizes, [0])], [], FILE_BYTES):
        _copy_file(files, {name: dtypes[name] for name in sizes if name in file.weights}, directory / file.file)
        places |= {name: (file.file, sizes[name]) for name in file.weights}
    if {file for file, _ in places.values()} != {SAFE_WEIGHTS_NAME}:
        write_index(directory, places, parameters=sum(weight.numel() for weight in model.parameters()))
    return files


def _copy_file(files: CheckpointFiles, dtypes: Mapping[str, torch.dtype], path: Path) -> None:
    tensors = {}
    for name, dtype in dtypes.items():
        with files.opened():  # mapped pages count as memory until the file is closed
            stored = files.tensor(name)
            tensors[name] = stored.read(whole(stored.shape)).to(dtype, copy=True).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"})
