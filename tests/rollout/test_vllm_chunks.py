"""Chunked inputs through vLLM, which expands placeholders by itself."""

import io

import pytest
import torch

from dataproto.chunks import EncodedTextChunk, ImageChunk, ModelInput
from helpers.engines import GREEDY, ROWS, generate, start
from rollout.prompts import ChunkRenderer

pytestmark = pytest.mark.vllm


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def chunks_of(builder, row):
    """The row's text and images, with the vision tokens of Qwen in the text chunks."""
    pieces = row["prompt"].split("<image>")
    chunks = [EncodedTextChunk(builder.encode_text(pieces[0]))]
    for image, text in zip(row["images"], pieces[1:], strict=True):
        chunks += [
            EncodedTextChunk(builder.encode_text("<|vision_start|>")),
            ImageChunk(png(image), "png"),
            EncodedTextChunk(builder.encode_text(f"<|vision_end|>{text}")),
        ]
    return ModelInput(chunks)


def test_our_expansion_of_chunks_is_vllms(tmp_path):
    setup = start("qwen3_vl", tmp_path)
    prompts = ChunkRenderer(setup.builder).prompts([chunks_of(setup.builder, row) for row in ROWS])
    # The engine refuses a request whose expansion by vLLM is not ours (`check_expansion`).
    ours, theirs = (generate(setup, engine, GREEDY, prompts) for engine in (setup.hf, setup.vllm))
    assert torch.equal(ours["responses"], theirs["responses"])
    torch.testing.assert_close(ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4, rtol=0)
