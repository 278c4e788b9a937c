"""The backend of the server, which computes in this process, on its CPU or its first CUDA device."""

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from dataproto.errors import CheckpointError, DataProtoError, InvalidConfig, end_after, raised_as
from dataproto_server.backend import (
    Failure,
    Later,
    LoraSpec,
    ModelInfo,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    Snapshot,
    at_once,
    nothing,
)
from dataproto_server.config import EngineOptions
from dataproto_server.engine.base_model import BaseModel, context_length
from dataproto_server.engine.passes import OpenPass, open_pass, run_passes
from dataproto_server.engine.sampling import OpenSample, open_sample
from dataproto_server.engine.trained_adapter import TrainedAdapter, TrainedMatrices, TrainedWeights
from dataproto_server.refusals import failure_of, server_failure
from rollout.adapters import Adapter, AdapterConfig
from workers.model.model_config import AdamParams

MOST_CHECKPOINTS = 2  # in memory
Polled = dict[str, SampleResult | Failure]
"""Requests that have ended, by their ids."""


class InProcessEngine:
    """Trains and samples adapters (LoRA) of base models. Models with the same path share their weights. It knows no clients, no
    order of requests and no files but the directories that it is given. A user's mistake is an error of `dataproto.errors`, or a
    `Failure` where that is returned.

    Log-probs are those of the model's own softmax over the whole vocabulary, as a forward pass of Hugging Face computes them; ids
    of media are never sampled, but they are not masked. On the CPU equal calls in the same grouping give equal results, bit for
    bit. Use it from one thread.
    """

    def __init__(
        self,
        models: Mapping[str, str | Path],
        options: EngineOptions | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``models``: checkpoint directories by the names that clients use. They are loaded by `start`, or when first used."""
        self.options, self.device = options or EngineOptions(), device
        self.paths = {name: str(path) for name, path in models.items()}
        self._bases: dict[str, BaseModel] = {}
        self._models: dict[str, TrainedMatrices] = {}
        self._adapters: OrderedDict[Path, Adapter] = OrderedDict()  # of snapshots; last used last
        self._checkpoints: OrderedDict[Path, BaseModel] = OrderedDict()  # the same with all weights
        self._open: dict[BaseModel, dict[int, OpenSample]] = {}  # those in flight, by their numbers in the sampler
        self._waiting: deque[SampleRequest] = deque()  # until a checkpoint has room
        self._ready: Polled = {}

    def start(self) -> None:
        """Loads what requests will need. With ``full_finetuning`` a model is loaded when it is first used: one that trains all
        weights has a copy of its own, and may be the only one.

        Raises:
            InvalidConfig: a model cannot be loaded, or the engine that samples does not start.
        """
        if self.options.full_finetuning:
            return
        for name in self.paths:
            self.base(name).start()

    def describe(self) -> list[ModelInfo]:
        """The base models that it has."""
        return [ModelInfo(name, path, context_length(path, self.options)) for name, path in self.paths.items()]

    def base(self, name: str) -> BaseModel:
        """A base model by the name that clients use. Raises `InvalidConfig`."""
        path = self._path(name)
        if path not in self._bases:
            self._bases[path] = BaseModel(path, self.options, self.device)
        return self._bases[path]

    def _path(self, name: str) -> str:
        if name not in self.paths:
            raise InvalidConfig(f"base model {name!r} is unknown: choose one of {', '.join(self.paths)}")
        return self.paths[name]

    # Training

    def create(self, model_id: str, base_model: str, lora: LoraSpec | None, *, replayed: bool = False) -> None:
        """Makes an adapter with the initial weights of its seed, without AdamW state; ``None`` trains all weights.

        Args:
            replayed: it has been made before: no limit applies to it.

        Raises:
            InvalidConfig: there is no such base model, the rank is too large, or no slot is free.
        """
        if model_id in self._models:
            raise InvalidConfig(f"model {model_id!r} exists already")
        if not replayed:
            self._check_limits(lora)
        self._models[model_id] = self._new_model(base_model, lora)

    def _check_limits(self, lora: LoraSpec | None) -> None:
        full = lora is None or lora.rank == 0
        models = self._models.values()
        if full and not self.options.full_finetuning:
            raise InvalidConfig("rank=0 trains all weights: start the engine with full_finetuning, or choose a rank")
        if full and any(model.adapter is None for model in models):
            raise InvalidConfig("a model trains all weights already, and there may be one")
        if lora is not None and not full and not 1 <= lora.rank <= self.options.max_lora_rank:
            raise InvalidConfig(f"rank={lora.rank}: must be from 1 to max_lora_rank={self.options.max_lora_rank}")
        if len(models) >= self.options.max_models:
            raise InvalidConfig(f"{len(models)} models are trained already, the most that there may be (--max-models)")

    def _new_model(self, base_model: str, lora: LoraSpec | None) -> TrainedMatrices:
        if lora is None or lora.rank == 0:
            copied = BaseModel(self._path(base_model), self.options, self.device, trains_weights=True)
            return TrainedWeights(base_model, copied)
        base = self.base(base_model)
        config = AdapterConfig(lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, head=lora.train_unembed)
        return TrainedAdapter(base.trainer.new_adapter(config, lora.seed or 0), base_model, base)

    def passes(self, passes: Sequence[Pass], *, between: Callable[[], None] = nothing) -> list[PassResult | Failure]:
        """Computes passes of any models in one packed batch; the gradients of a model add up until its `optim_step`.

        A pass that fails adds no gradient and does not fail the others; one whose gradient is not finite fails, and names a row,
        unless it is ``replayed``. If the call raises, none has added any.

        Args:
            between: is called between the parts of the batch, and calls methods that sample (`submit`, `poll`,
                `abort`, `forget`), so that samples do not wait for the whole batch.
        """
        results: dict[int, PassResult | Failure] = {}
        opened: dict[BaseModel, list[OpenPass]] = {}
        models: dict[str, TrainedMatrices] = {}
        for each in passes:
            if each.stand_in is not None and each.model_id not in models:
                models[each.model_id] = self._new_model(*each.stand_in)
        for number, given in enumerate(passes):
            try:
                if given.model_id not in models:
                    models[given.model_id] = self._model(given.model_id)
                model = models[given.model_id]
                one = open_pass(number, given, model.base, model.adapter, self.options.max_targets)
                opened.setdefault(model.base, []).append(one)
            except Exception as error:
                results[number] = failure_of(error)
        computed = [run_passes(base, group, between) for base, group in opened.items()]
        for gradients, found in computed:
            results |= found
            for model in models.values():
                model.add_gradients(gradients)
        return [results[number] for number in range(len(passes))]

    def optim_step(self, model_id: str, adam: AdamParams) -> Mapping[str, float]:
        """Makes a step of AdamW on the gradients of a model, and forgets them. None is made if their norm is not finite.

        Returns:
            metrics: ``grad_norm`` before clipping, ``lr``, and ``skipped_steps``, those that were not made.
        """
        return self._model(model_id).step(adam)

    def save(self, model_id: str, directory: Path, *, later: Later = at_once) -> None:
        """Writes the adapter (peft's files) and the AdamW state (`OPTIMIZER_FILE`) to an empty directory, without gradients.

        Args:
            later: gets the work of writing the files. The weights are copied before `save` returns, so other calls may follow
                before the work is done.

        Raises:
            CheckpointError: a weight is not finite; names the model.
        """
        model = self._model(model_id)
        model.check_finite(model_id)
        model.save(directory, later)

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replaces the adapter of a model by a saved one, drops its gradients, and reads or drops its AdamW state.

        Raises:
            CheckpointError: the files do not fit the model, or cannot be read.
        """
        self._model(model_id).load(directory, optimizer=optimizer)

    def export(self, model_id: str, directory: Path, *, sampled: bool = False, later: Later = at_once) -> None:
        """Writes the adapter to an empty directory, as a `Snapshot` and for peft.

        Args:
            sampled: it is for samplers only, so it is written in the precision in which they sample.
            later: see `save`.

        Raises:
            CheckpointError: a weight is not finite; names the model.
        """
        model = self._model(model_id)
        model.check_finite(model_id)
        in_vllm = sampled and model.base.options.sampler == "vllm"  # which has adapters in the model's dtype
        model.export(directory, model.base.trainer.model.dtype if in_vllm else torch.float32, later)

    def release(self, model_id: str) -> None:
        """Forgets a model; an unknown one is no error."""
        self._models.pop(model_id, None)

    def _model(self, model_id: str) -> TrainedMatrices:
        if model_id not in self._models:
            raise InvalidConfig(f"model {model_id!r} is unknown")
        return self._models[model_id]

    # Sampling

    def forget(self, directory: Path | None = None) -> None:
        """Frees the weights of a snapshot that nothing in flight needs, or of all."""
        for kept in (self._adapters, self._checkpoints):
            for each in [each for each in kept if directory in (None, each)]:
                del kept[each]
        gc.collect()  # parts of a model refer to each other

    def _adapter(self, directory: Path, base: BaseModel) -> Adapter:
        """The adapter of a snapshot, from memory or from its files. Raises `CheckpointError`."""
        if directory not in self._adapters:
            self._adapters[directory] = base.read_adapter(directory)
            if len(self._adapters) > self.options.max_samplers:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(directory)
        return self._adapters[directory]

    def _checkpoint(self, directory: Path) -> BaseModel | None:
        """The model of a snapshot with all weights, from memory or from its files; ``None`` if it has no room as long as requests
        in flight need others. Raises `CheckpointError`.
        """
        if directory not in self._checkpoints:
            if len(self._checkpoints) >= MOST_CHECKPOINTS:
                idle = [each for each, model in self._checkpoints.items() if model not in self._open]
                if not idle:
                    return None
                self.forget(idle[0])
            with raised_as(CheckpointError, f"snapshot {directory} cannot be read", DataProtoError, OSError):
                self._checkpoints[directory] = BaseModel(str(directory), self.options, self.device)
        self._checkpoints.move_to_end(directory)
        return self._checkpoints[directory]

    def submit(self, request: SampleRequest) -> None:
        """Takes a request in. A mistake in it becomes a `Failure` of `poll`.

        A request of a checkpoint waits while others have no room for it, and later ones after it.
        """
        if (self._waiting and is_checkpoint(request.snapshot)) or not self._begin(request):
            self._waiting.append(request)

    def _begin(self, request: SampleRequest) -> bool:
        """Hands a request to the sampler; ``False`` if its weights have no room now."""
        try:
            directory, adapter = request.snapshot.directory, None
            if directory is not None and is_checkpoint(request.snapshot):
                if (model := self._checkpoint(directory)) is None:
                    return False
                base = model
            else:
                base = self.base(request.snapshot.base_model)
                adapter = None if directory is None else self._adapter(directory, base)
            opened = open_sample(request, base, adapter)
        except CheckpointError as error:  # its files were there when it was asked for
            self._ready[request.request_id] = server_failure(error)
        except Exception as error:
            self._ready[request.request_id] = failure_of(error)
        else:
            self._open.setdefault(base, {}).update(dict.fromkeys(opened.numbers, opened))
        return True

    def poll(self) -> Polled:
        """Makes a decoding step of all requests, and returns the finished and the failed ones. Returns at once when nothing is in
        flight.
        """
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()
        for base, group in list(self._open.items()):
            self._ready |= self._decode(base, group)
        ready, self._ready = self._ready, {}
        return ready

    def _decode(self, base: BaseModel, group: dict[int, OpenSample]) -> Polled:
        """One decoding step of a base model's requests. If it fails, so do they, and the engine is as before them."""
        try:
            completions = [each for each in base.poll() if each.request in group]
        except Exception as error:
            ready: Polled = dict.fromkeys((each.request.request_id for each in group.values()), failure_of(error))
            end_after(error, partial(self.abort, list(ready)))
            return ready
        ready = {}
        for each in completions:
            opened = group[each.request]
            if each.error is not None:
                ready[opened.request.request_id] = Failure(str(each.error), "user")
                continue
            opened.done[each.request] = each
            if len(opened.done) == len(opened.numbers):
                ready[opened.request.request_id] = opened.result()
        self.abort(list(ready))
        return ready

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops requests; they never appear in `poll` again. Unknown ones are no error."""
        names = set(request_ids)
        for base, group in self._open.items():
            for number in [number for number, each in group.items() if each.request.request_id in names]:
                base.sampler.abort(number)
                del group[number]
        self._open = {base: group for base, group in self._open.items() if group}
        self._waiting = deque(each for each in self._waiting if each.request_id not in names)
        self._ready = {name: each for name, each in self._ready.items() if name not in names}


def is_checkpoint(snapshot: Snapshot) -> bool:
    """Whether a snapshot has all weights of a model. One with an adapter has no ``config.json``."""
    return snapshot.directory is not None and (snapshot.directory / "config.json").exists()
