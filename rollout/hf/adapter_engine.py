"""The Hugging Face engine for many adapters of one base model: rows of any adapters are decoded together.

Its log-probs are those of the model's own softmax over the whole vocabulary, as a forward pass of Hugging Face gives them: ids of
media are never drawn, but they are not masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from rollout.adapters import Adapter, AdapterRouter, Run
from rollout.engine import Request
from rollout.hf.batch import Batch
from rollout.hf.decoder import Decoder, Read, Unread
from rollout.hf.hf_engine import HFEngine
from rollout.hf.open_requests import OpenRequest
from rollout.image_features import ImageFeatures, KeyedImage
from rollout.sampling import SCORED_PLACES

NO_LOG_PROB = -99999.0
"""Beside token 0: the filler of a list of likeliest tokens."""


@dataclass(eq=False)
class PromptScores:
    """Log-probs of a prompt of P tokens at temperature 1: which ones to compute and, once the prompt is read, what was found.

    Token t is predicted from the tokens before it. Nothing predicts the first token: NaN. Tokens of media get 0.0, and tokens
    before the last ``last`` ones NaN.

    Args:
        top: number of likeliest tokens at each place; 0: none.
        last: how many tokens at the end of the prompt have a score; ``None``: all.
        targets: ``(P - 1, K)`` further tokens, row i for the place of token i + 1; -1 for none, which gets 0.0.
    """

    top: int = 0
    last: int | None = None
    targets: npt.NDArray[np.int64] | None = None
    log_probs: npt.NDArray[np.float32] | None = None  # (P,)
    top_tokens: npt.NDArray[np.int32] | None = None  # (P, top), 0 where there are none
    top_log_probs: npt.NDArray[np.float32] | None = None  # (P, top), NO_LOG_PROB where there are none
    target_log_probs: npt.NDArray[np.float32] | None = None  # (P - 1, K)


@dataclass(frozen=True)
class AdapterRequest(Request):
    """A request for an adapter. Its images are given as they are, not as ``multi_modal_inputs``."""

    adapter: Adapter | None = None  # None: the base model
    images: Sequence[KeyedImage] = ()
    scores: PromptScores | None = field(default=None, compare=False)  # filled once; samples of a prompt share it


@dataclass(frozen=True)
class AdapterDecoder(Decoder):
    """A decoder that computes each row with its adapter, and each image once."""

    router: AdapterRouter
    features: ImageFeatures

    def embed(self, ids: Tensor, types: Tensor, parts: Sequence[Unread]) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Decoder.embed`; features come from the store."""
        features, spans = self.features.placed(types, [request_of(part.row).images for part in parts])
        where = None if features is None else spans
        return self.family.merge(self.model, ids.to(self.device), features, where)

    def read(self, requests: Sequence[OpenRequest]) -> Read:
        """See `Decoder.read`; rows of one adapter come one after the other."""
        order = {request_of(row).adapter: place for place, row in reversed(list(enumerate(requests)))}
        return super().read(sorted(requests, key=lambda row: order[request_of(row).adapter]))

    def run(self, parts: Sequence[Unread], cache: DynamicCache, earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Decoder.run`."""
        length = max(len(part.input_ids) for part in parts)
        with self.router.routed([(request_of(part.row).adapter, length) for part in parts]):
            return super().run(parts, cache, earlier)

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
            for name, parameter in self.parameters.items():
                if name in theirs and theirs[name].shape == parameter.shape:
                    parameter.data = theirs[name].data
        self.router = AdapterRouter(self.model, self.family)
        self._decoder = AdapterDecoder(self.family, self.model, self.device, self.router, features)

    def _logits(self, batch: Batch) -> Tensor:
        return self.router.logits(batch.hidden, runs_of(batch))

    def _score_prompts(self, read: Read) -> None:
        for row, prompt in zip(read.batch.rows, read.prompts, strict=True):
            request = request_of(row)
            if request.scores is not None and request.scores.log_probs is None:
                length = len(request.input_ids) + len(row.token_ids)
                hidden = read.hidden[prompt, -length:][: len(request.input_ids)]
                self._score(request, request.scores, hidden)

    def _score(self, request: AdapterRequest, scores: PromptScores, hidden: Tensor) -> None:
        """Fills ``scores`` from the states ``(P, H)`` after each token."""
        ids, media = request.input_ids, (request.token_types != 0).numpy()
        count = len(ids)
        first = max(1, count - (scores.last or count))
        values = np.full(count, np.nan, dtype=np.float32)
        tokens = np.zeros((count, scores.top), dtype=np.int32)
        likely = np.full((count, scores.top), NO_LOG_PROB, dtype=np.float32)
        targets = None if scores.targets is None else torch.from_numpy(scores.targets)
        found = None if targets is None else np.zeros(tuple(targets.shape), dtype=np.float32)
        start = first if targets is None else 1
        for begin in range(start, count, SCORED_PLACES):
            places = slice(begin, min(begin + SCORED_PLACES, count))
            before = slice(places.start - 1, places.stop - 1)
            states = hidden[before]
            log_probs = self.router.logits(states, [(request.adapter, len(states))]).log_softmax(-1)
            chosen = ids[places].to(log_probs.device)
            values[places] = log_probs.gather(1, chosen[:, None]).squeeze(1).cpu().numpy()
            if scores.top:
                top = log_probs.topk(min(scores.top, log_probs.shape[1]), dim=-1)
                width = top.values.shape[1]
                tokens[places, :width], likely[places, :width] = top.indices.cpu(), top.values.cpu()
            if targets is not None and found is not None:
                wanted = targets[before].to(log_probs.device)
                of_targets = log_probs.gather(1, wanted.clamp_min(0)).where(wanted >= 0, 0.0)
                found[before] = of_targets.cpu().numpy()
        values[:first], likely[:first], tokens[:first] = np.nan, NO_LOG_PROB, 0
        hidden_media = media & (np.arange(count) >= first)
        values[hidden_media], likely[hidden_media], tokens[hidden_media] = 0.0, NO_LOG_PROB, 0
        scores.log_probs, scores.target_log_probs = values, found
        scores.top_tokens, scores.top_log_probs = tokens, likely


def request_of(row: OpenRequest) -> AdapterRequest:
    """The request of a row of an `AdapterEngine`."""
    return cast(AdapterRequest, row.request)


def runs_of(batch: Batch) -> list[Run]:
    """One token of every row."""
    return [(request_of(row).adapter, 1) for row in batch.rows]
