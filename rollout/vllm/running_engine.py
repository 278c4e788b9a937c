"""What vLLM knows of its requests and their steps, and where it keeps it."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


def own_name(engine: Any, name: str) -> str:
    """vLLM's own name of a request, which is another one in later versions."""
    (own,) = getattr(engine.output_processor, "external_req_ids", {}).get(name) or [name]
    return str(own)


def cached_tokens(engine: Any, name: str) -> int:
    """Of the prompt of a request that vLLM has, how many tokens it found in its cache."""
    return engine.output_processor.request_states[own_name(engine, name)].num_cached_tokens or 0


def tokens_of(engine: Any, name: str) -> list[int]:
    """The tokens that a request has sampled so far; none if vLLM has dropped it."""
    request = engine.engine_core.engine_core.scheduler.requests.get(own_name(engine, name))
    return [] if request is None else list(request.output_token_ids)


def error_line(error: BaseException) -> str:
    """The root cause of an error of vLLM's, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if not re.match(r"\d+ validation errors? for ", line)]
    line = lines[0].strip().partition(" [type=")[0] if lines else type(error).__name__
    if "cached item" in line:
        line += "; its images are larger than vLLM's cache of processed images: raise mm_processor_cache_gb"
    return line


def model_of(worker: Any) -> nn.Module:
    """The model of a worker."""
    return worker.model_runner.get_model()


def batch_of(runner: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The rows of the current step: names of the requests, the number of tokens that each has after its prompt, and whether its
    next token is discarded because only a part of its prompt has been read.
    """
    batch = runner.input_batch
    rows = batch.num_reqs
    tokens = runner.optimistic_seq_lens_cpu[:rows].numpy() - batch.num_prompt_tokens[:rows]
    return list(batch.req_ids[:rows]), tokens, runner.discard_request_mask.np[:rows]


def attention_group(runner: Any) -> int:
    """The group of layers whose KV cache has a slot for each token: those with full attention."""
    groups = [type(group.kv_cache_spec).__name__ for group in runner.kv_cache_config.kv_cache_groups]
    return next((number for number, name in enumerate(groups) if "FullAttention" in name), 0)


def slots_of_step(runner: Any, group: int) -> torch.Tensor:
    """The slots ``(N,)`` of the tokens of the current step in the KV cache of a group of layers."""
    batch = runner.input_batch
    return batch.block_table[group].slot_mapping.gpu[: int(runner.query_start_loc.np[batch.num_reqs])]


def slots_of_request(runner: Any, name: str, group: int, tokens: int) -> np.ndarray | None:
    """The slots ``(tokens,)`` of the first tokens of a request, by vLLM's own name of it; ``None`` if it does not run."""
    state = runner.requests.get(name)
    if state is None or name not in runner.input_batch.req_id_to_index:
        return None
    return slots_in_blocks(runner, np.asarray(state.block_ids[group], dtype=np.int64), group, tokens)


def slots_in_blocks(runner: Any, blocks: np.ndarray, group: int, tokens: int) -> np.ndarray | None:
    """The slots ``(tokens,)`` of the first tokens in these blocks of a group of layers; ``None`` if they have no room."""
    size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
    if len(blocks) * size < tokens:
        return None
    return (blocks[:, None] * size + np.arange(size)).ravel()[:tokens]


def clear_kv_cache(worker: Any) -> None:
    """Fills the KV cache with zeros. Attention multiplies masked values by 0, so NaN of an earlier row would spread."""
    for tensor in tensors_in(worker.model_runner.kv_caches):
        tensor.zero_()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested lists: a layer's KV cache may be several."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from tensors_in(each)
