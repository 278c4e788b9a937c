"""A deterministic engine in NumPy: adapters are vectors, passes add to a gradient, updates subtract, samples are hashes."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from dataproto.chunks import EncodedTextChunk
from dataproto.errors import CheckpointError, InvalidConfig
from dataproto_server.backend import (
    OPTIMIZER_FILE,
    Failure,
    LoraSpec,
    ModelInfo,
    Pass,
    PassResult,
    Sample,
    SampleRequest,
    SampleResult,
    SparseRows,
    at_once,
    nothing,
)
from workers.model.model_config import AdamParams

WIDTH = 8  # numbers of an adapter for each rank
VOCABULARY = 64
IMAGE_TOKENS = 4
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass
class Model:
    lora: LoraSpec
    weights: np.ndarray
    moments: np.ndarray
    steps: int = 0
    gradient: np.ndarray | None = None


@dataclass
class VectorBackend:
    """``delay`` seconds a call of passes make room for kills."""

    delay: float = 0.0
    models: dict[str, Model] = field(default_factory=dict)
    flying: dict[str, tuple[SampleRequest, np.ndarray]] = field(default_factory=dict)

    def start(self) -> None:
        """Has nothing to load."""

    def describe(self) -> list[ModelInfo]:
        names = ("tiny/vector", "Qwen/Qwen3-4B-Instruct-2507")
        return [ModelInfo(name, "", 4096) for name in names]

    def create(self, model_id: str, base_model: str, lora: LoraSpec | None, *, replayed: bool = False) -> None:
        self.models[model_id] = self._new_model(lora)

    def _new_model(self, lora: LoraSpec | None) -> Model:
        if lora is None or lora.rank > 32:
            raise InvalidConfig(f"{lora}: an adapter needs a rank of at most 32")
        weights = np.random.default_rng(lora.seed or 0).normal(size=lora.rank * WIDTH).astype(np.float32)
        return Model(lora, weights, np.zeros_like(weights))

    def passes(self, passes: Sequence[Pass], *, between=nothing) -> list[PassResult | Failure]:
        time.sleep(self.delay)
        return [self._pass(each) for each in passes]

    def _pass(self, each: Pass) -> PassResult | Failure:
        model = self.models[each.model_id] if each.stand_in is None else self._new_model(each.stand_in[1])
        if each.loss not in LOSSES:
            return Failure(f"loss {each.loss!r} has no public formula: there are {', '.join(LOSSES)}", "user")
        outputs, loss, gradient = [], np.float32(0), np.zeros_like(model.weights)
        for number, datum in enumerate(each.data):
            ids = self.ids(datum.chunks)
            targets = np.asarray(datum.inputs.get("target_tokens", ids))
            if len(targets) != len(ids):
                return Failure(f"datum {number}: {len(targets)} targets for {len(ids)} tokens", "user")
            logprobs = self.logprobs(model.weights, ids, targets if targets.ndim == 1 else targets[:, 0])
            weights = np.asarray(
                datum.inputs.get("weights", datum.inputs.get("advantages", np.ones(len(ids)))), np.float32
            )
            loss -= (logprobs * (weights if weights.ndim == 1 else weights[:, 0])).sum(dtype=np.float32)
            np.add.at(
                gradient,
                targets.ravel() % len(gradient),
                weights.ravel() * np.tanh(model.weights[ids[0] % len(gradient)]),
            )
            outputs.append({"logprobs": logprobs})
        if not each.forward_only:
            model.gradient = gradient if model.gradient is None else model.gradient + gradient
        return PassResult(outputs, {"loss:sum": float(loss), "rows:sum": float(len(each.data))})

    def ids(self, chunks) -> np.ndarray:
        parts = [
            chunk.ids() if isinstance(chunk, EncodedTextChunk) else np.zeros(IMAGE_TOKENS, np.int64) for chunk in chunks
        ]
        return np.concatenate(parts)

    def logprobs(self, weights: np.ndarray, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (-1 - np.abs(weights[(ids + targets) % len(weights)])).astype(np.float32)

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self.models[model_id]
        gradient = np.zeros_like(model.weights) if model.gradient is None else model.gradient
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(gradient))
        if not np.isfinite(norm):
            model.gradient = None
            return {"grad_norm": norm, "steps": float(model.steps)}
        model.moments = np.float32(0.9) * model.moments + np.float32(0.1) * gradient
        model.weights = model.weights - np.float32(adam.learning_rate) * model.moments
        model.steps, model.gradient = model.steps + 1, None
        return {"grad_norm": norm, "steps": float(model.steps)}

    def save(self, model_id: str, directory: Path, *, later=at_once) -> None:
        model = self.models[model_id]
        state = {"moments": model.moments.copy(), "steps": np.array([model.steps])}
        self.export(
            model_id,
            directory,
            later=lambda write: later(lambda: (write(), save_file(state, directory / OPTIMIZER_FILE))),
        )

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        model, weights = self.models[model_id], load_file(directory / ADAPTER_FILE)["weights"]
        if weights.shape != model.weights.shape:
            raise CheckpointError(f"{directory} holds an adapter of {weights.size} numbers, not {model.weights.size}")
        state = load_file(directory / OPTIMIZER_FILE) if optimizer else None
        model.weights, model.gradient = weights, None
        model.moments = np.zeros_like(weights) if state is None else state["moments"]
        model.steps = 0 if state is None else int(state["steps"][0])

    def export(self, model_id: str, directory: Path, *, sampled: bool = False, later=at_once) -> None:
        weights = {"weights": self.models[model_id].weights.copy()}
        later(lambda: save_file(weights, directory / ADAPTER_FILE))

    def release(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    def forget(self, directory: Path | None = None) -> None:
        """Keeps no weights of snapshots."""

    def submit(self, request: SampleRequest) -> None:
        directory = request.snapshot.directory
        zero = np.zeros(WIDTH, np.float32)
        weights = zero if directory is None else load_file(directory / ADAPTER_FILE)["weights"]
        self.flying[request.request_id] = request, weights

    def poll(self) -> dict[str, SampleResult | Failure]:
        requests, self.flying = self.flying, {}
        return {name: self._answer(*each) for name, each in requests.items()}

    def abort(self, request_ids: Sequence[str]) -> None:
        for request in request_ids:
            self.flying.pop(request, None)

    def _answer(self, request: SampleRequest, weights: np.ndarray) -> SampleResult | Failure:
        ids = self.ids(request.chunks)
        if ids.max(initial=0) >= 4096:
            return Failure(f"token {ids.max()} is not in the vocabulary", "user")
        count = request.sampling.max_tokens or 16
        samples = []
        for number in range(request.num_samples):
            text = f"{ids.tolist()}{weights.tobytes().hex()}{request.sampling.seed}{number}".encode()
            digest = hashlib.shake_128(text).digest(count)
            tokens = np.frombuffer(digest, np.uint8).astype(np.int32) % VOCABULARY
            topk = self._topk(count, request.topk_sample_logprobs)
            samples.append(Sample(tokens, np.full(count, -0.5, np.float32), "length", topk))
        found = self.logprobs(weights, ids, ids)
        prompt = np.concatenate([[np.float32(np.nan)], found[1:]]).astype(np.float32)
        targets = request.target_prompt_logprobs
        if isinstance(targets, SparseRows):
            scored = replace(targets, values=(-targets.values / 100).astype(np.float32))
        else:
            scored = None if targets is None else np.where(targets < 0, 0, -targets / 100).astype(np.float32)
        return SampleResult(
            samples,
            prompt if request.prompt_logprobs else None,
            self._topk(len(ids), request.topk_prompt_logprobs),
            scored,
        )

    def _topk(self, length: int, k: int) -> tuple[np.ndarray, np.ndarray] | None:
        if not k:
            return None
        ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
        return ids, -ids.astype(np.float32)


def open_backend(options: str) -> VectorBackend:
    """``options``: seconds that each call of passes takes."""
    return VectorBackend(float(options or 0))
