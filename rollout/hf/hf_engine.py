"""The Hugging Face engine: batched sampling with a KV cache, on any device.

The prefill of a prompt and the encoding of its images run once per distinct prompt; its samples get copies of the cache.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of, media_spans
from rollout.engine import Completion, FinishReason, Request, SamplingParams, cpu_or_cuda, row_name
from rollout.pretrained import end_ids, generation_config
from rollout.sampling import check_sampled, project, sample, uniforms

MIN_RUNNING_SHARE = 0.75
"""Finished rows are removed from a wave once less than this share of its rows runs, because removal copies the cache."""


@dataclass
class _Wave:
    """Sequences that are generated together."""

    requests: np.ndarray  # (W,) request numbers
    seeds: np.ndarray  # (W,) uint64
    cache: DynamicCache
    attention_mask: Tensor  # (W, tokens in the cache)
    next_position: Tensor  # (4, W, 1) or (W, 1)
    hidden: Tensor  # (W, H) state that predicts the next token

    def keep(self, index: Tensor) -> None:
        """Removes all rows but those of ``index``. ``hidden`` is not changed: the next step replaces it."""
        chosen = index.cpu().numpy()
        self.requests, self.seeds = self.requests[chosen], self.seeds[chosen]
        self.cache.batch_select_indices(index)
        self.attention_mask = self.attention_mask[index]
        self.next_position = self.next_position[..., index, :]


class HFEngine:
    """Generates with its own Hugging Face model, separate from the one that trains."""

    def __init__(
        self,
        model_path: str,
        max_num_seqs: int = 256,
        dtype: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        """Loads the checkpoint at ``model_path``.

        Args:
            max_num_seqs: number of sequences that are generated at a time.
            dtype: "auto" is bfloat16 on CUDA and float32 elsewhere.

        Raises:
            InvalidConfig: ``max_num_seqs`` is below 1, or the checkpoint's ``generation_config.json`` cannot be read.
        """
        if max_num_seqs < 1:
            raise InvalidConfig(f"max_num_seqs={max_num_seqs}: must be at least 1")
        self.device = device or cpu_or_cuda()
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype: torch.dtype = getattr(torch, dtype)
        config = AutoConfig.from_pretrained(model_path)
        self.end_ids = end_ids(generation_config(model_path, config))
        self.family = family_of(config)
        self.model = self.family.model_class().from_pretrained(model_path, dtype=self.dtype, attn_implementation="sdpa")
        self.model.to(self.device)
        self.model.eval().requires_grad_(False)
        self.max_num_seqs = max_num_seqs
        self.banned_ids = tuple(self.family.banned_ids(self.model.config))
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._has_weights = True  # false after a `load_weights` that failed

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """Yields completions in the order in which they finish, in waves of ``max_num_seqs`` requests.

        Raises:
            NonFiniteLogits: no token can be sampled for a request; names its row. The engine stays usable.
        """
        for start in range(0, len(requests), self.max_num_seqs):
            yield from self._generate_wave(requests[start : start + self.max_num_seqs], sampling, start)

    @torch.inference_mode()
    def _generate_wave(self, requests: Sequence[Request], sampling: SamplingParams, start: int) -> list[Completion]:
        """The completions of requests, the first of which has number ``start``."""
        wave = self._prefill(requests)
        head = self.family.lm_head(self.model).weight
        stop = np.array(sorted({*self.end_ids, *sampling.stop_token_ids}), dtype=np.int64)
        tokens: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        done: list[Completion] = []
        running = np.ones(len(requests), dtype=bool)  # rows of the wave that have not finished
        for step in range(sampling.max_tokens):
            logits = project(wave.hidden, head)
            numbers = torch.from_numpy(uniforms(wave.seeds, step)).to(self.device)
            chosen, chosen_log_probs = sample(logits, sampling, numbers, self.banned_ids)
            ids, values = chosen.cpu().numpy(), chosen_log_probs.cpu().numpy()
            stopped = np.isin(ids, stop)
            last = step + 1 == sampling.max_tokens
            for row in np.flatnonzero(running):
                number = int(wave.requests[row])
                tokens[number].append(int(ids[row]))
                log_probs[number].append(float(values[row]))
                if not math.isfinite(values[row]) or ids[row] in self.banned_ids:
                    check_sampled(
                        tokens[number],
                        log_probs[number],
                        self.banned_ids,
                        row_name(start + number, requests[number].uid, sampling),
                    )
                if stopped[row] or last:
                    reason: FinishReason = "stop" if stopped[row] else "length"
                    done.append(Completion(start + number, tokens[number], log_probs[number], reason))
            running &= ~stopped
            if last or not running.any():
                break
            if running.mean() < MIN_RUNNING_SHARE:
                left = torch.from_numpy(np.flatnonzero(running)).to(self.device)
                wave.keep(left)
                chosen, running = chosen[left], running[running]
            self._advance(wave, chosen)
        return done

    def _prefill(self, requests: Sequence[Request]) -> _Wave:
        """Runs each distinct prompt once, left-padded, and gives each request a row of the cache."""
        prompt_of: dict[int, int] = {}
        rows = [prompt_of.setdefault(id(request.input_ids), len(prompt_of)) for request in requests]
        first = dict(zip(reversed(rows), reversed(requests), strict=True))
        prompts = [first[row] for row in range(len(prompt_of))]
        length = max(len(prompt.input_ids) for prompt in prompts)
        ids = torch.stack([_pad_left(prompt.input_ids, length) for prompt in prompts])
        types = torch.stack([_pad_left(prompt.token_types, length) for prompt in prompts])
        mask = torch.stack([_pad_left(torch.ones_like(prompt.input_ids), length) for prompt in prompts])
        positions = torch.stack([_pad_left(prompt.position_ids, length) for prompt in prompts])  # (P, 4, L) or (P, L)
        following = self.family.extend_positions(positions, mask, 1)
        if positions.ndim == 3:
            positions, following = positions.transpose(0, 1), following.transpose(0, 1)

        media = self.family.distinct_media([prompt.multi_modal_inputs for prompt in prompts], self.model.config)
        inputs = {name: tensor.to(self.device) for name, tensor in media.inputs.items()}
        spans = media_spans(types, media).to(self.device)
        embeddings, extras = self.family.embed(self.model, ids.to(self.device), inputs, spans)
        cache = DynamicCache(config=self.model.config.get_text_config())
        hidden = self._decode(embeddings, positions.to(self.device), extras, mask.to(self.device), cache)
        wave = _Wave(
            requests=np.arange(len(requests)),
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            cache=cache,
            attention_mask=mask.to(self.device),
            next_position=following.to(self.device),
            hidden=hidden[:, -1],
        )
        index = torch.tensor(rows, device=self.device)
        wave.cache.batch_select_indices(index)
        wave.attention_mask = wave.attention_mask[index]
        wave.next_position = wave.next_position[..., index, :]
        wave.hidden = wave.hidden[index]
        return wave

    def _advance(self, wave: _Wave, tokens: Tensor) -> None:
        wave.attention_mask = torch.cat([wave.attention_mask, wave.attention_mask.new_ones(len(tokens), 1)], dim=1)
        embeddings = self.model.get_input_embeddings()(tokens[:, None])
        hidden = self._decode(embeddings, wave.next_position, {}, wave.attention_mask, wave.cache)
        wave.hidden = hidden[:, -1]
        wave.next_position = wave.next_position + 1

    def _decode(
        self, embeddings: Tensor, positions: Tensor, extras: dict[str, Any], mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        return self.family.decode(
            self.model, embeddings, positions, extras, attention_mask=mask, past_key_values=cache, use_cache=True
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all parameters in place, one after another. Tied weights are required under one of their names only.

        After an error the engine may hold a mix of old and new weights: load all of them again.

        Raises:
            InvalidConfig: a name or shape does not exist in this model, tied weights have two values, or a parameter is missing.
        """
        self._has_weights = False
        left = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, tensor in weights:
            target = self.parameters.get(name)
            if target is None or target.shape != tensor.shape:
                known = "no such parameter" if target is None else f"its shape is {tuple(target.shape)}"
                raise InvalidConfig(f"weight {name!r} {tuple(tensor.shape)} does not fit the engine's model: {known}")
            first = left.pop(id(target), None) is not None
            if not first and not torch.allclose(target, tensor.to(target), rtol=0, atol=0, equal_nan=True):
                raise InvalidConfig(f"weight {name!r} was given twice with different values, under this or a tied name")
            target.data.copy_(tensor)
        if left:
            raise InvalidConfig(
                f"the engine's model has {len(left)} weights that were not given: {sorted(left.values())[:10]}"
            )
        self._has_weights = True

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of parameters that differ from the given ones, or that are missing among them."""
        left, differing = {id(parameter): name for name, parameter in self.model.named_parameters()}, []
        for name, weight in weights:
            target = self.parameters[name]
            left.pop(id(target), None)
            if not torch.equal(target, weight.to(target)):
                differing.append(name)
        return differing + list(left.values())

    def sleep(self) -> None:
        """Moves the model to the host, on CUDA."""
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> bool:
        """Moves the model back to its device."""
        self.model.to(self.device)
        return self._has_weights


def _pad_left(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (length - values.shape[-1], 0))
