"""An engine of the server on a tiny checkpoint, prompts with images for it, and Hugging Face's own forward as its reference."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from PIL import Image
from safetensors.torch import load_file

from dataproto.chunks import Chunk, EncodedTextChunk, ImageChunk
from dataproto_server.backend import Datum, LoraSpec, Pass, PassResult, SampleRequest, SampleResult, Sampling, Snapshot
from dataproto_server.config import EngineOptions
from dataproto_server.engine import InProcessEngine
from rollout.adapters import WEIGHTS_FILE
from workers.model.model_config import AdamParams

ADAM = AdamParams(learning_rate=2e-3)
BASE = Snapshot("tiny")


def png(width: int, height: int, colour: tuple[int, int, int] = (200, 10, 30)) -> bytes:
    """A file with a gradient of colours, so that patches differ."""
    ramp = np.linspace(0, 1, width * height * 3).reshape(height, width, 3) * np.array(colour)
    buffer = io.BytesIO()
    Image.fromarray(ramp.astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def chunks(engine: InProcessEngine, *parts: str | tuple[int, int], name: str = "tiny") -> list[Chunk]:
    """Text and images ``(width, height)`` as chunks, with the vision tokens that renderers write around an image."""
    encode = engine.base(name).renderer.builder.encode_text
    found: list[Chunk] = []
    for part in parts:
        if isinstance(part, str):
            found.append(EncodedTextChunk(encode(part)))
        else:
            found.append(EncodedTextChunk(encode("<|vision_start|>")))
            found.append(ImageChunk(png(*part), "png"))
            found.append(EncodedTextChunk(encode("<|vision_end|>")))
    return found


def length(engine: InProcessEngine, parts: list[Chunk], name: str = "tiny") -> int:
    """Tokens of the chunks."""
    return len(engine.base(name).rendered(parts))


def random_inputs(count: int, loss: str, seed: int = 0, vocabulary: int = 250) -> dict[str, np.ndarray]:
    """Loss inputs ``(count,)`` for a loss, with half of the tokens learned."""
    random = np.random.default_rng(seed)
    targets = random.integers(0, vocabulary, count)
    chosen = (random.random(count) < 0.5).astype(np.float32)
    if loss == "cross_entropy":
        return {"target_tokens": targets, "weights": chosen}
    drawn = {"logprobs": -5 * random.random(count), "advantages": random.normal(size=count)}
    return {"target_tokens": targets} | {name: (values * chosen).astype(np.float32) for name, values in drawn.items()}


def run_pass(
    engine: InProcessEngine, model: str, data: list[Datum], loss: str = "cross_entropy", **options: Any
) -> PassResult:
    """One pass, which succeeds."""
    (result,) = engine.passes([Pass(model, data, loss, **options)])
    assert isinstance(result, PassResult), result
    return result


def train(engine: InProcessEngine, model: str, data: list[Datum], steps: int = 2) -> None:
    """Some steps of cross-entropy, so that an adapter has an effect."""
    for _ in range(steps):
        run_pass(engine, model, data)
        engine.optim_step(model, ADAM)


def sample(
    engine: InProcessEngine, snapshot: Snapshot, prompt: list[Chunk], count: int = 1, **options: Any
) -> SampleResult:
    """The result of one request, which succeeds. Options of `Sampling` are given as ``sampling``."""
    sampling = Sampling(**{"max_tokens": 6, "seed": 3, **options.pop("sampling", {})})
    engine.submit(SampleRequest("request", snapshot, prompt, count, sampling, **options))
    result = until_done(engine, 1)["request"]
    assert isinstance(result, SampleResult), result
    return result


def until_done(engine: InProcessEngine, count: int) -> dict[str, Any]:
    """Polls until this number of results is there."""
    found: dict[str, Any] = {}
    for _ in range(10_000):
        found |= engine.poll()
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} results")


def hugging_face_logprobs(
    path: str, parts: list[Chunk], engine: InProcessEngine, adapter: Path | None = None
) -> torch.Tensor:
    """log softmax ``(N, V)`` of Hugging Face's own forward of the whole model, with the adapter loaded by peft."""
    rendered = engine.base("tiny").rendered(parts)
    family = engine.base("tiny").trainer.family
    model = family.model_class().from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    media: dict[str, torch.Tensor] = {}
    if rendered.images:
        media = {
            name: torch.cat([image.inputs[name] for image in rendered.images]) for name in rendered.images[0].inputs
        }
    types = {"mm_token_type_ids": rendered.token_types[None].int()} if family.mrope else {}
    ids = rendered.input_ids[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **types, **media).logits[0]
    return logits.float().log_softmax(-1)


def new_model(engine: InProcessEngine, model: str, rank: int = 4, **options: Any) -> None:
    """A model on the engine's base "tiny"."""
    engine.create(model, "tiny", LoraSpec(rank, **options))


def engine_of(path: Path, **options: Any) -> InProcessEngine:
    """An engine on the CPU with the model "tiny"."""
    return InProcessEngine({"tiny": path}, EngineOptions(**options) if options else None, device=torch.device("cpu"))


def rows(engine: InProcessEngine, loss: str, seed: int) -> list[Datum]:
    """Two rows of unequal length, one with two images."""
    prompts = [chunks(engine, "see", (24, 16), "angle", (16, 16)), chunks(engine, f"Find the angle {seed}")]
    return [
        Datum(prompt, random_inputs(length(engine, prompt), loss, seed=10 * seed + number))
        for number, prompt in enumerate(prompts)
    ]


def weights(engine: InProcessEngine, model: str, directory: Path) -> dict[str, torch.Tensor]:
    """Those of the adapter, through an export to a new directory."""
    directory.mkdir()
    engine.export(model, directory)
    return load_file(directory / WEIGHTS_FILE)


def gradients(engine: InProcessEngine, model: str) -> dict[str, torch.Tensor | None]:
    """Those that wait for the next step, by name."""
    return {name: matrix.grad for name, matrix in engine._models[model].matrices.items()}
