"""The Hugging Face engine for many adapters of one base model: rows of any adapters are decoded together.

Its log-probs are those of the model's own softmax over the whole vocabulary, as a forward pass of Hugging Face gives them: ids of
media are never drawn, but they are not masked.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from dataproto.vlm import MediaSpans
from rollout.adapter_layers import AdapterRouter, Run
from rollout.adapters import AdapterRequest
from rollout.engine import Request, SamplingParams
from rollout.hf.batch import Batch
from rollout.hf.decoder import Decoder, Read, Unread
from rollout.hf.engine import HFEngine
from rollout.hf.requests import OpenRequest
from rollout.image_features import ImageFeatures


@dataclass(frozen=True)
class AdapterDecoder(Decoder):
    """A decoder that computes each row with its adapter, and each image once."""

    router: AdapterRouter
    features: ImageFeatures

    def media(self, types: Tensor, parts: Sequence[Unread]) -> tuple[Tensor | None, MediaSpans | None]:
        """See `Decoder.media`; features come from the store."""
        features, spans = self.features.placed(types, [request_of(part.row).images for part in parts])
        return features, None if features is None else spans

    def read(self, requests: Sequence[OpenRequest]) -> Read:
        """See `Decoder.read`; rows of one adapter come one after the other."""
        order = {request_of(row).adapter: place for place, row in reversed(list(enumerate(requests)))}
        return super().read(sorted(requests, key=lambda row: order[request_of(row).adapter]))

    def routed(self, parts: Sequence[Unread], length: int) -> AbstractContextManager[None]:
        """See `Decoder.routed`."""
        return self.router.routed([(request_of(part.row).adapter, length) for part in parts])

    def advance(self, batch: Batch, tokens: Tensor) -> None:
        """See `Decoder.advance`."""
        with self.router.routed(runs_of(batch)):
            super().advance(batch, tokens)


class AdapterEngine(HFEngine):
    """An `HFEngine` whose requests are `AdapterRequest`. Requests with a stop rule of their own set ``ignore_eos``."""

    def __init__(
        self, model_path: str, features: ImageFeatures, max_num_seqs: int = 256, device: torch.device | None = None
    ) -> None:
        """Loads the language model. Its parameters become those of ``features.model`` where that has the same in the same dtype,
        so that the weights are in memory once.
        """
        super().__init__(model_path, max_num_seqs, str(features.model.dtype).removeprefix("torch."), device)
        self.undrawn_ids, self.banned_ids = self.banned_ids, ()
        with torch.no_grad():
            theirs = dict(features.model.named_parameters(remove_duplicate=False))
            for name, parameter in self.weights.items():
                if name in theirs and theirs[name].shape == parameter.shape:
                    parameter.data = theirs[name].data
        self.router = AdapterRouter(self.model, self.family)
        budget = self._decoder.token_budget
        self._decoder = AdapterDecoder(self.family, self.model, self.device, budget, self.router, features)

    def fork(self, number: int, request: Request, sampling: SamplingParams, keep: bool = False) -> int:
        """See `HFEngine.fork`. The whole prompt is read again: what is kept belongs to the adapter that read it."""
        self._kept.continued_by(request, number)
        return self.submit(request, sampling, keep)

    def _logits(self, batch: Batch) -> Tensor:
        return self.router.logits(batch.hidden, runs_of(batch))

    def _score_prompts(self, read: Read) -> None:
        for row, prompt in zip(read.batch.rows, read.prompts, strict=True):
            request = request_of(row)
            scores, adapter = request.scores, request.adapter
            if scores is not None and scores.log_probs is None:
                length = len(request.input_ids) + len(row.token_ids)
                states = read.hidden[prompt, -length:][: len(request.input_ids)]
                scores.fill(request.input_ids, request.token_types, states, partial(self.router.logits_of, adapter))


def request_of(row: OpenRequest) -> AdapterRequest:
    """The request of a row of an `AdapterEngine`."""
    return cast(AdapterRequest, row.request)


def runs_of(batch: Batch) -> list[Run]:
    """One token of every row."""
    return [(request_of(row).adapter, 1) for row in batch.rows]
