"""A Hugging Face model with a KV cache: reading prompts, then one token of every row at a time."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dataproto.grouping import grouped_by
from dataproto.transfer import move
from dataproto.vlm import MediaSpans, VLMFamily, media_spans
from dataproto.vlm.costs import attention_window
from dataproto.vlm.family import cache_argument
from dataproto.vlm.prediction_head import PredictionHead
from rollout.continuation import Media, continued, shown_media
from rollout.engine import expert_dtype
from rollout.hf.batch import Batch, select_rows, stack_prefixes
from rollout.hf.prediction_head import states_before
from rollout.hf.requests import OpenRequest, Prefix
from rollout.hf.speculation import KeptStates


class RouteRecorder:
    """Keeps what the routers of a model choose from `begin` to `take`."""

    def __init__(self, model: Any, family: VLMFamily) -> None:
        text = model.config.get_text_config()
        self.dtype = expert_dtype(family.expert_count(text))
        self._chosen: list[Tensor] = []  # (rows * L, k) of each layer, pass after pass
        routers = family.routers(model)
        self._layers, self._choices = len(routers), family.experts_per_token(text)
        for router in routers:
            router.register_forward_hook(lambda _, args, output: self._chosen.append(output[2].to(self.dtype)))

    def begin(self) -> None:
        """Forgets what a pass that was interrupted has left."""
        self._chosen = []

    @property
    def nothing(self) -> Tensor:
        """The experts ``(0, M, k)`` of no token."""
        return torch.zeros(0, self._layers, self._choices, dtype=self.dtype)

    def take(self, rows: int) -> Tensor:
        """The experts ``(rows, L, M, k)`` of all tokens that the ``rows`` rows have read, on the host.

        A long prompt is read in several forward passes.
        """
        chosen, self._chosen = self._chosen, []
        passes = [
            torch.stack(chosen[first : first + self._layers], dim=1) for first in range(0, len(chosen), self._layers)
        ]
        return torch.cat([each.unflatten(0, (rows, -1)) for each in passes], dim=1).cpu()


class Unread(NamedTuple):
    """The part of a prompt that is not in a cache."""

    input_ids: Tensor  # (L,)
    token_types: Tensor  # (L,)
    position_ids: Tensor  # (4, L) or (L,)
    media: Sequence[Media]
    prefix: Prefix | None  # whose cache comes before
    row: OpenRequest  # the first one with this prompt


@dataclass(frozen=True)
class Read:
    """A batch of requests whose prompts have been read, and the states of their prompts."""

    batch: Batch
    prompts: list[int]  # for each request the number of its prompt
    hidden: Tensor  # (prompts, L, H), right-aligned
    tokens: int  # tokens that were read


@dataclass(frozen=True)
class ReadAhead:
    """Sampled tokens of a batch, and drafted ones after them, which have been read."""

    hidden: Tensor  # (W, L, H)
    first: int  # column of the sampled tokens in the cache
    experts: Tensor | None  # (W, L, M, k), if they are recorded


@dataclass(frozen=True)
class Decoder:
    """Runs the model of a family on batches."""

    family: VLMFamily
    model: Any
    device: torch.device
    token_budget: int
    """Tokens of prompts, with padding, that the model reads at a time."""
    recorder: RouteRecorder | None = field(default=None, kw_only=True)
    states: KeptStates | None = field(default=None, kw_only=True)
    """Of recurrent layers; without them `read_ahead` takes single tokens only."""
    head: PredictionHead | None = field(default=None, kw_only=True)
    """What predicts drafts. Its keys and values are the last layer of each cache."""

    def read(self, requests: Sequence[OpenRequest]) -> Read:
        """Runs each distinct prompt once, left-padded, and gives each request a row of the cache.

        Either all requests continue a prefix that is cached, or none. Those of a model with recurrent layers or sliding windows
        then have equal numbers of new tokens: padding after a prefix would change its state, or take places in the window.
        """
        parts: list[Unread] = []
        prompt_of: dict[Hashable, int] = {}
        prompts = []
        for request in requests:
            key = _prompt_key(request)
            if key not in prompt_of:
                prompt_of[key] = len(parts)
                parts.append(self._unread(request))
            prompts.append(prompt_of[key])
        prefixes = [part.prefix for part in parts if part.prefix is not None]
        if prefixes:
            cache, earlier = stack_prefixes(prefixes, self._new_cache(), self.device)
        else:
            cache, earlier = self._new_cache(), torch.zeros(len(parts), 0, dtype=torch.int64)
        if self.recorder is not None:
            self.recorder.begin()
        hidden, mask, following = self.run(parts, cache, move(earlier, self.device))
        if self.recorder is not None:
            experts = self.recorder.take(len(parts))
            for row, prompt in zip(requests, prompts, strict=True):
                row.add_experts(experts[prompt, -len(parts[prompt].input_ids) :], parts[prompt].prefix)
        index = move(torch.tensor(prompts), self.device)
        for layer in cache.layers:
            select_rows(layer, index)
        batch = Batch(list(requests), cache, mask[index], following[..., index, :], hidden[index, -1])
        return Read(batch, prompts, hidden, sum(len(part.input_ids) for part in parts))

    def _new_cache(self) -> DynamicCache:
        """An empty cache. Its config says which layers keep a state. Layers with a sliding window keep every token, as other
        layers do, so that rows join and leave, and the mask hides what is outside of the window.
        """
        text = self.model.config.get_text_config()
        cache = DynamicCache(config=text if self.family.recurrent_mixers is not None else None)
        if self.head is not None:
            cache.layers.append(DynamicLayer())
        return cache

    def groups(self, requests: Sequence[OpenRequest]) -> list[list[OpenRequest]]:
        """The requests in groups that `read` takes under the token budget."""
        windowed = attention_window(self.model.config.get_text_config()) is not None
        unpadded = windowed or self.family.recurrent_mixers is not None
        alike = grouped_by(requests, lambda row: -1 if row.prefix is None else row.unread_tokens if unpadded else 0)
        return [part for rows in alike.values() for part in self._within_budget(rows)]

    def _within_budget(self, rows: list[OpenRequest]) -> list[list[OpenRequest]]:
        """The rows in groups whose distinct prompts keep the budget with padding, longest first. A longer prompt is
        a group of its own.
        """
        ordered = sorted(
            grouped_by(rows, _prompt_key).values(), key=lambda samples: samples[0].unread_tokens, reverse=True
        )
        if ordered[0][0].unread_tokens * len(ordered) <= self.token_budget:
            return [rows]
        groups: list[list[OpenRequest]] = []
        count = most = 0
        for samples in ordered:
            if count == most:
                groups.append([])
                count, most = 0, max(1, self.token_budget // samples[0].unread_tokens)
            groups[-1] += samples
            count += 1
        return groups

    def _unread(self, row: OpenRequest) -> Unread:
        request, prefix = continued(row.request, row.token_ids, self.family), row.prefix
        ids, types, positions = request.input_ids, request.token_types.to(torch.int8), request.position_ids
        start, parts = 0, shown_media(request.multi_modal_inputs)
        if prefix is not None:
            start, parts = prefix.cached_tokens, parts[len(prefix.media) :]
        return Unread(ids[start:], types[start:], positions[..., start:], parts, prefix, row)

    def run(self, parts: Sequence[Unread], cache: DynamicCache, earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``(prompts, L, H)``, the attention mask ``(prompts, T)`` with the ``earlier`` one, and the positions that
        follow.
        """
        length = max(len(part.input_ids) for part in parts)
        ids = torch.stack([_pad_left(part.input_ids, length) for part in parts])
        types = torch.stack([_pad_left(part.token_types, length) for part in parts])
        mask = torch.stack([_pad_left(torch.ones_like(part.input_ids), length) for part in parts])
        positions = torch.stack([_pad_left(part.position_ids, length) for part in parts])  # (P, 4, L) or (P, L)
        following = self.family.extend_positions(positions, mask, 1)
        if positions.ndim == 3:
            positions, following = positions.transpose(0, 1), following.transpose(0, 1)

        ids, positions = move(ids, self.device), move(positions, self.device)
        whole = torch.cat([earlier, move(mask, self.device)], dim=1)
        shown_types = move(types.to(earlier.dtype), self.device)
        known = torch.cat([torch.zeros_like(earlier), shown_types], dim=1)  # images of a prefix end in it
        features, spans = self.media(types, parts)
        together = self.family.mutual_images(self.model.config) is not None
        budget, decode = self.token_budget if len(parts) == 1 else length, self.family.decode
        hidden: list[Tensor] = []
        for start, stop in prompt_pieces(types[0].tolist(), budget, together):
            own = spans.window(start, stop) if spans is not None and stop - start < length else spans
            end = earlier.shape[1] + stop
            with self.routed(parts, stop - start):
                embeddings, extras = self.family.merge(self.model, ids[:, start:stop], features, own)
                shown = self.family.decoder_masks(self.model, embeddings, whole[:, :end], known[:, :end], cache)
                before = hidden[-1][:, -1] if hidden else None
                own_positions = positions[..., start:stop]
                hidden.append(decode(self.model, embeddings, own_positions, extras, cache, attention_mask=shown))
            at = positions[..., max(start - 1, 0) : stop - 1] if start else pad(positions[..., : stop - 1], (1, 0))
            self._predict(embeddings, states_before(before, hidden[-1]), at, whole[:, :end], cache)
        return torch.cat(hidden, dim=1), whole, move(following, self.device)

    def _predict(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Outputs ``(W, L, H)`` of the head, if there is one, for the last L of the tokens of ``mask (W, T)``; see
        `PredictionHead`. The cache takes its keys and values.
        """
        if self.head is None:
            return states
        rotary = self.model.get_submodule(self.family.language_model).rotary_emb
        seen = (mask & (mask.cumsum(1) > 1)).bool()  # no token comes before the first one
        columns = torch.arange(mask.shape[1], device=mask.device)
        own = columns[-embeddings.shape[1] :, None]
        visible = (seen[:, None] & (columns <= own)) | (columns == own)  # a row that sees nothing would be NaN
        cached = {cache_argument(type(self.head.layers[0]).forward): cache}
        return self.head(rotary, embeddings, states, positions, attention_mask=visible[:, None], **cached)

    def predicted(self, batch: Batch, tokens: Tensor, most: int, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Drafts ``(W, most)`` of what follows the sampled ``tokens (W,)``, which are not read yet.

        ``choose(outputs (W, H), ahead)`` says which token ``(W,)`` comes after ``ahead`` drafted ones.
        """
        layer, mask, states, found = batch.layers[-1], batch.attention_mask, batch.hidden, list[Tensor]()
        known = layer.keys, layer.values
        for ahead in range(most):
            mask = pad(mask, (0, 1), value=1)
            embeddings, _ = self.family.merge(self.model, tokens[:, None], None)
            at = batch.next_position - 1 + ahead
            states = self._predict(embeddings, states[:, None], at, mask, batch.cache)[:, 0]
            tokens = choose(states, ahead)
            found.append(tokens)
        layer.keys, layer.values = known  # these tokens are read by the model and then by the head once more
        return torch.stack(found, dim=1)

    def media(self, types: Tensor, parts: Sequence[Unread]) -> tuple[Tensor | None, MediaSpans | None]:
        """Features ``(F, levels, H)`` of the media of the parts, and where they are in the tokens ``(prompts, L)``."""
        media = self.family.distinct_media([part.media for part in parts], self.model.config)
        inputs = {name: move(tensor, self.device) for name, tensor in media.inputs.items()}
        spans = media_spans(types, media).to(self.device)
        return self.family.features(self.model, inputs) if inputs else None, spans

    def routed(self, parts: Sequence[Unread], length: int) -> AbstractContextManager[None]:
        """A context in which the model reads ``length`` tokens of each part."""
        return nullcontext()

    def advance(self, batch: Batch, tokens: Tensor) -> None:
        """Reads one token ``(W,)`` of every row."""
        read = self.read_ahead(batch, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.bool))
        batch.hidden, batch.next_position = read.hidden[:, -1], batch.next_position + 1

    def read_ahead(self, batch: Batch, tokens: Tensor, filled: Tensor) -> ReadAhead:
        """Reads tokens ``(W, L)`` of every row, those of the mask ``filled`` one after another; the first one is sampled.

        `keep_ahead` says which others are kept, and `go_on` ends this.
        """
        mask, steps = batch.attention_mask, torch.arange(tokens.shape[1], device=self.device)
        batch.attention_mask = torch.cat([mask, filled.to(mask)], dim=1)
        embeddings, extras = self.family.merge(self.model, tokens, None)
        positions = batch.next_position + steps
        if self.recorder is not None:
            self.recorder.begin()
        with self.states.record() if self.states is not None and tokens.shape[1] > 1 else nullcontext():
            seen, cache = batch.attention_mask, batch.cache
            hidden = self.family.decode(self.model, embeddings, positions, extras, cache, attention_mask=seen)
        self._predict(embeddings, states_before(batch.hidden, hidden), positions - 1, batch.attention_mask, batch.cache)
        experts = None
        if self.recorder is not None:
            experts = self.recorder.take(len(tokens))
            for place in np.flatnonzero(batch.running):
                batch.rows[place].add_experts(experts[place, :1])
        return ReadAhead(hidden, mask.shape[1], experts)

    def keep_ahead(self, batch: Batch, read: ReadAhead, place: int, ahead: int) -> None:
        """Notes, before a row takes the drafted token after ``ahead`` others, that these have been read.

        If the row ends with that token, its cache ends before it.
        """
        row = batch.rows[place]
        if read.experts is not None and ahead:
            row.add_experts(read.experts[place, ahead : ahead + 1])
        if row.keep:
            batch.attention_mask[place, read.first :] = torch.arange(read.hidden.shape[1], device=self.device) <= ahead
            if self.states is not None:
                self.states.go_back(batch, *torch.tensor([[place], [ahead]], device=self.device))

    def go_on(self, batch: Batch, read: ReadAhead, taken: np.ndarray) -> None:
        """Continues after the sampled token of each row and the ``taken (W,)`` drafted ones; the others are forgotten."""
        counts = move(torch.from_numpy(taken), self.device)
        length = read.hidden.shape[1]
        batch.attention_mask[:, read.first :] = torch.arange(length, device=self.device) <= counts[:, None]
        batch.hidden = read.hidden[torch.arange(len(taken), device=self.device), counts]
        batch.next_position = batch.next_position + 1 + counts[:, None]
        if read.experts is not None:
            for place in np.flatnonzero(batch.running & (taken > 0)):
                batch.rows[place].add_experts(read.experts[place, taken[place]][None])
        if (taken + 1 < length).any():
            batch.align()
            if self.states is not None:
                self.states.go_back(batch, torch.arange(len(taken), device=self.device), counts)


def prompt_pieces(token_types: Sequence[int], budget: int, whole_images: bool) -> Iterator[tuple[int, int]]:
    """Starts and ends of the pieces of at most ``budget`` tokens in which a prompt is read.

    Args:
        whole_images: no piece ends within an image, because its tokens see each other. An image may exceed the budget.

    >>> list(prompt_pieces([0, 0, 1, 1, 0, 0], 3, whole_images=False))
    [(0, 3), (3, 6)]
    >>> list(prompt_pieces([0, 0, 1, 1, 0, 0], 3, whole_images=True))
    [(0, 2), (2, 5), (5, 6)]
    """
    start, length = 0, len(token_types)
    while start < length:
        stop = min(start + budget, length)
        ends = chain(range(stop, start, -1), range(stop + 1, length + 1))  # the next smaller ones, then larger ones
        if whole_images:
            stop = next(end for end in ends if end == length or not token_types[end - 1] == token_types[end] != 0)
        yield start, stop
        start = stop


def _prompt_key(row: OpenRequest) -> Hashable:
    """Equal for requests whose prompts are read once for all of them."""
    return row.request.prompt_key, id(row.prefix), id(row) if row.token_ids else 0


def _pad_left(values: Tensor, length: int) -> Tensor:
    return pad(values, (length - values.shape[-1], 0))
