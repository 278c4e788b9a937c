"""An actor, a vLLM engine and a Hugging Face engine with the same weights, and prompts for them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from benchmarks.engine_weights import differing_weights
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.interpreted_triton import interpreted
from rollout.engine import SamplingParams, create_engine
from rollout.hf.engine import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests
from workers.model.named_weights import named_weights
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig


def picture(width, height, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


ROWS = [
    {"prompt": "<image>what <image> is", "images": [picture(24, 40, 0), picture(64, 17, 1)]},
    {"prompt": "no picture", "images": []},
    {"prompt": "<image><image><image>", "images": [picture(100, 90, 2), picture(24, 40, 0), picture(16, 16, 3)]},
    {"prompt": "one <image>", "images": [picture(40, 40, 4)]},
]


FILM = np.random.default_rng(5).integers(0, 255, (4, 16, 16, 3), dtype=np.uint8), {"fps": 2.0}
NOISE = np.random.default_rng(6).uniform(-0.5, 0.5, (2, 33_000)).astype(np.float32)
HEARD = [
    {
        "prompt": "<audio>what <audio> is <image>",
        "audios": [NOISE[0], NOISE[1][:17_000]],
        "images": [picture(24, 40, 0)],
    },
    {"prompt": "<video>who speaks", "videos": [{"video": FILM, "audio": NOISE[1]}]},
]
"""For models that hear: sounds next to a picture, and a film with its sound."""


def write_published(model_type, path):
    """Writes a checkpoint with other weights, under the parameter names of published checkpoints."""
    return publish(model_type, write_checkpoint(model_type, path, seed=1))


def publish(model_type, checkpoint):
    """Rewrites the weights of a checkpoint under the names, and in the layout, of published ones, which vLLM reads."""
    model = family_of(model_type).model_class().from_pretrained(checkpoint)
    detached = ((name, weight.detach()) for name, weight in named_weights(model))
    named = family_of(model).rollout_weights(detached, model.config)
    save_file(
        {name: weight.contiguous() for name, weight in named}, Path(checkpoint) / "model.safetensors", {"format": "pt"}
    )
    if (part := family_of(model_type).part) != "":  # published as a part of a larger model
        whole = {"qwen2_5_omni_thinker": "Qwen2_5Omni", "qwen3_omni_moe_thinker": "Qwen3OmniMoe"}[model_type]
        config = getattr(transformers, f"{whole}Config")(enable_audio_output=False)
        config.update(
            {"dtype": "float32", f"{part}_config": model.config, "architectures": [f"{whole}ForConditionalGeneration"]}
        )
        config.save_pretrained(checkpoint)
    return checkpoint


def start(model_type, path, engine="vllm", **options):
    """The prompt builder, actor and both engines of a new checkpoint, with the same weights; ``engine`` and ``options`` are
    vLLM's.
    """
    checkpoint = write_checkpoint(model_type, path / "actor")
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300)
    actor = ActorWorker(
        ActorConfig(checkpoint, temperature=0.8, optimizer=OptimizerConfig(lr=1e-2)), torch.device("cpu")
    )
    vllm = create_engine(
        engine,
        write_published(model_type, path / "engine"),
        **{"max_num_seqs": 16, "max_model_len": 400, "max_images": 3, "kv_cache_bytes": 1 << 26} | options,
        image_options=builder.image_options,
    )
    assert (type(vllm.sampler).__name__ == "SecondRunnerSampler") == interpreted()
    assert differing_weights(vllm, actor.named_weights())
    vllm.load_weights(actor.named_weights())
    hf = HFEngine(checkpoint, device=torch.device("cpu"))
    rows = ROWS if builder.family.vision_parts else [_without_images(row) for row in ROWS]
    rows = [*rows, *HEARD] if "audio" in builder.family.media_layout.kinds else rows
    return SimpleNamespace(builder=builder, actor=actor, vllm=vllm, hf=hf, rows=rows, prompts=builder(rows))


def _without_images(row):
    return {"prompt": row["prompt"].replace("<image>", "words "), "images": []}


def generate(setup, engine, sampling, prompts=None):
    prompts = setup.prompts if prompts is None else prompts
    completions = engine.generate(build_requests(prompts, sampling), sampling)
    return attach_responses(prompts, completions, sampling, setup.builder.family, pad_token_id=0)


GREEDY = SamplingParams(temperature=0, max_tokens=8)
SAMPLED = SamplingParams(n=3, temperature=0.8, max_tokens=8, seed=1)
RESTRICTED = SamplingParams(n=3, temperature=0.8, top_p=0.8, top_k=30, max_tokens=8, seed=2)
