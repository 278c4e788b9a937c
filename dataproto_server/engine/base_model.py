"""A base model of the engine: what trains and what samples its adapters, on the same frozen weights."""

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig

from dataproto.chunks import Chunk
from dataproto.errors import InvalidPrompt
from dataproto_server.config import EngineOptions
from dataproto_server.engine.adapter_trainer import AdapterTrainer, ScoredPrompt
from rollout.adapters import Adapter, PromptScores, read_adapter
from rollout.engine import Completion, RequestEngine
from rollout.hf import AdapterEngine
from rollout.prompts import ChunkRenderer, PlacedSequence, PromptBuilder, TokenSequence, images_by_content
from rollout.vllm import VLLMAdapterEngine

log = logging.getLogger("dataproto.serve.engine")
LONGEST = 1 << 20  # tokens that are rendered at most; the limit that counts is the context


class BaseModel:
    """A checkpoint with its tokenizer and image processor. Images are processed, and read by the tower, once by their bytes."""

    def __init__(
        self, path: str, options: EngineOptions, device: torch.device | None = None, trains_weights: bool = False
    ) -> None:
        """Loads the checkpoint at ``path``; with ``trains_weights`` to train all of them."""
        self.path, self.options = path, options
        log.info("loading the model %s", path)
        began = time.perf_counter()
        checkpointing = options.activation_checkpointing
        self.trainer = AdapterTrainer(path, device, options.token_budget, checkpointing, trains_weights)
        self.renderer = ChunkRenderer(PromptBuilder.from_pretrained(path, LONGEST, image_cache_bytes=0))
        self.images = images_by_content(options.image_bytes)
        self._unscored: list[ScoredPrompt] = []
        self.vocabulary = int(self.trainer.model.config.get_text_config().vocab_size)
        self.max_context_length = context_length(path, options)
        log.info("the model has been loaded in %.1f s", time.perf_counter() - began)

    def start(self) -> None:
        """Starts the engine that samples, unless it has been started."""
        self.sampler  # noqa: B018

    @cached_property
    def sampler(self) -> RequestEngine:
        """The engine for `AdapterRequest`, started by `start` or when the first one comes.

        Raises:
            InvalidConfig: vLLM does not start.
        """
        options = self.options
        if options.sampler == "hf":
            return AdapterEngine(self.path, self.trainer.features, options.max_num_seqs, self.trainer.device)
        log.info("vLLM starts on %s", self.path)
        began = time.perf_counter()
        engine = VLLMAdapterEngine(
            self.path,
            options.max_lora_rank,
            options.vllm_adapters,
            max_num_seqs=options.max_num_seqs,
            max_model_len=self.max_context_length,
            image_options=self.renderer.builder.image_options,
            memory_share=options.vllm_memory_share,
        )
        log.info("vLLM has started in %.1f s", time.perf_counter() - began)
        return engine

    def read_adapter(self, directory: Path) -> Adapter:
        """See `rollout.adapters.read_adapter`."""
        return read_adapter(directory, self.trainer.model, self.trainer.family, self.trainer.device)

    def score_later(self, prompt: PlacedSequence, adapter: Adapter | None, scores: PromptScores) -> None:
        """Lets `poll` score a prompt, unless the sampler does while it reads it."""
        if self.options.sampler == "vllm":
            self._unscored.append(ScoredPrompt(prompt, adapter, scores))

    def poll(self) -> list[Completion]:
        """Scores the prompts that wait for it, together, and makes a step of the sampler."""
        unscored, self._unscored = self._unscored, []
        self.trainer.score(unscored)
        return self.sampler.poll()

    def sequence(self, chunks: Sequence[Chunk]) -> TokenSequence:
        """Tokens and images of chunks. Raises the errors of `ChunkRenderer.sequence`."""
        return self.renderer.sequence(chunks, self.images)

    def rendered(self, chunks: Sequence[Chunk]) -> PlacedSequence:
        """`sequence` with its positions."""
        return self.renderer.placed([self.sequence(chunks)])[0]

    def check_context(self, tokens: int, more: int = 0) -> None:
        """Raises `InvalidPrompt` if a row with ``more`` tokens to come is longer than the context."""
        if tokens + more > self.max_context_length:
            raise InvalidPrompt(
                f"{tokens} tokens" + (f" and max_tokens={more}" if more else "") + f" exceed the model's context of "
                f"{self.max_context_length} tokens"
            )


def context_length(path: str, options: EngineOptions) -> int:
    """The longest row of a checkpoint: its number of positions, or the options' limit if that is smaller."""
    positions = int(AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings)
    return min(positions, options.max_context_length or positions)
