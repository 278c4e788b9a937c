"""A Hugging Face model with a KV cache: reading prompts, then one token of every row at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from dataproto.vlm import media_spans
from dataproto.vlm.costs import attention_window
from dataproto.vlm.family import VLMFamily
from rollout.continuation import Media, shown_media
from rollout.hf.batch import Batch, stack_prefixes
from rollout.hf.kept_prefixes import Prefix
from rollout.hf.layer_caches import select_rows
from rollout.hf.open_requests import OpenRequest


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
class Decoder:
    """Runs the model of a family on batches."""

    family: VLMFamily
    model: Any
    device: torch.device

    def read(self, requests: Sequence[OpenRequest]) -> Read:
        """Runs each distinct prompt once, left-padded, and gives each request a row of the cache.

        Either all requests continue a prefix that is cached, or none. Those of a model with recurrent layers or sliding windows
        then have equal numbers of new tokens: padding behind a prefix would change its state, or take places in the window.
        """
        parts: list[Unread] = []
        prompt_of: dict[tuple[int, ...], int] = {}
        prompts = []
        for request in requests:
            key = (id(request.request.input_ids), id(request.prefix), id(request) if request.token_ids else 0)
            if key not in prompt_of:
                prompt_of[key] = len(parts)
                parts.append(self._unread(request))
            prompts.append(prompt_of[key])
        prefixes = [part.prefix for part in parts if part.prefix is not None]
        if prefixes:
            cache, earlier = stack_prefixes(prefixes, self._cached_config, self.device)
        else:
            cache, earlier = DynamicCache(config=self._cached_config), torch.zeros(len(parts), 0, dtype=torch.int64)
        hidden, mask, following = self.run(parts, cache, earlier.to(self.device))
        batch = self._batch(requests, prompts, cache, mask, following, hidden[:, -1])
        return Read(batch, prompts, hidden, sum(len(part.input_ids) for part in parts))

    @property
    def _cached_config(self) -> Any:
        """What tells the cache which layers keep a state. Layers with a sliding window keep every token, as other layers do, so
        that rows join and leave, and the mask hides what is outside of the window.
        """
        text = self.model.config.get_text_config()
        return text if self.family.recurrent_mixers is not None else None

    def alike(self, requests: Sequence[OpenRequest]) -> list[list[OpenRequest]]:
        """The requests in groups that `read` takes."""
        groups: dict[int, list[OpenRequest]] = {}
        windowed = attention_window(self.model.config.get_text_config()) is not None
        unpadded = windowed or self.family.recurrent_mixers is not None
        for row in requests:
            if row.prefix is None:
                groups.setdefault(-1, []).append(row)
            else:
                new = len(row.request.input_ids) + len(row.token_ids) - row.prefix.cached_tokens
                groups.setdefault(new if unpadded else 0, []).append(row)
        return list(groups.values())

    def _unread(self, row: OpenRequest) -> Unread:
        request, prefix = row.request, row.prefix
        ids, types, positions = request.input_ids, request.token_types.to(torch.int8), request.position_ids
        if row.token_ids:
            tokens = torch.tensor(row.token_ids)
            more = self.family.extend_positions(positions[None], torch.ones_like(ids)[None], len(tokens))[0]
            ids, types = torch.cat([ids, tokens]), torch.cat([types, types.new_zeros(len(tokens))])
            positions = torch.cat([positions, more], dim=-1)
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

        embeddings, extras = self.embed(ids, types, parts)
        whole = torch.cat([earlier, mask.to(self.device)], dim=1)
        known = torch.cat([torch.zeros_like(earlier), types.to(earlier)], dim=1)  # images of a prefix end in it
        shown = self.family.decoder_masks(self.model, embeddings, whole, known, cache)
        hidden = self._decode(embeddings, positions.to(self.device), extras, shown, cache)
        return hidden, whole, following.to(self.device)

    def embed(self, ids: Tensor, types: Tensor, parts: Sequence[Unread]) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings ``(prompts, L, H)`` of tokens ``(prompts, L)`` with the media of the parts, and the decoder's extras."""
        media = self.family.distinct_media([part.media for part in parts], self.model.config)
        inputs = {name: tensor.to(self.device) for name, tensor in media.inputs.items()}
        spans = media_spans(types, media).to(self.device)
        return self.family.embed(self.model, ids.to(self.device), inputs, spans)

    def _batch(
        self,
        requests: Sequence[OpenRequest],
        prompts: Sequence[int],
        cache: DynamicCache,
        mask: Tensor,
        following: Tensor,
        hidden: Tensor,
    ) -> Batch:
        index = torch.tensor(prompts, device=self.device)
        for layer in cache.layers:
            select_rows(layer, index)
        return Batch(list(requests), cache, mask[index], following[..., index, :], hidden[index])

    def advance(self, batch: Batch, tokens: Tensor) -> None:
        """Reads one token ``(W,)`` of every row."""
        mask = batch.attention_mask
        batch.attention_mask = torch.cat([mask, mask.new_ones(len(tokens), 1)], dim=1)
        embeddings = self.model.get_input_embeddings()(tokens[:, None])
        batch.hidden = self._decode(embeddings, batch.next_position, {}, batch.attention_mask, batch.cache)[:, -1]
        batch.next_position = batch.next_position + 1

    def _decode(
        self, embeddings: Tensor, positions: Tensor, extras: dict[str, Any], mask: Any, cache: DynamicCache
    ) -> Tensor:
        return self.family.decode(
            self.model, embeddings, positions, extras, attention_mask=mask, past_key_values=cache, use_cache=True
        )


def _pad_left(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (length - values.shape[-1], 0))
