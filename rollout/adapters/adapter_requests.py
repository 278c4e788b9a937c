"""Requests of engines that sample from many adapters, and the scores of their prompts."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.adapters.adapter import Adapter
from rollout.engine import Request
from rollout.image_features import KeyedImage
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

    def fill(self, ids: Tensor, types: Tensor, states: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Computes the scores.

        Args:
            ids, types: of the prompt, ``(P,)``.
            states: ``(P, H)``, after each token.
            logits_of: from states ``(n, H)`` to logits ``(n, V)`` float32.
        """
        count = len(ids)
        first = max(1, count - (self.last or count))
        values = np.full(count, np.nan, dtype=np.float32)
        tokens = np.zeros((count, self.top), dtype=np.int32)
        likely = np.full((count, self.top), NO_LOG_PROB, dtype=np.float32)
        found = None if self.targets is None else np.zeros(self.targets.shape, dtype=np.float32)
        for begin in range(first if found is None else 1, count, SCORED_PLACES):
            places = slice(begin, min(begin + SCORED_PLACES, count))
            before = slice(places.start - 1, places.stop - 1)
            log_probs = logits_of(states[before]).log_softmax(-1)
            own = ids[places].to(log_probs.device)
            values[places] = log_probs.gather(1, own[:, None]).squeeze(1).cpu().numpy()
            if self.top:
                top = log_probs.topk(min(self.top, log_probs.shape[1]), dim=-1)
                width = top.values.shape[1]
                tokens[places, :width], likely[places, :width] = top.indices.cpu(), top.values.cpu()
            if found is not None and self.targets is not None:
                wanted = torch.from_numpy(self.targets[before]).to(log_probs.device)
                found[before] = log_probs.gather(1, wanted.clamp_min(0)).where(wanted >= 0, 0.0).cpu().numpy()
        values[:first], likely[:first], tokens[:first] = np.nan, NO_LOG_PROB, 0
        media = (types != 0).numpy() & (np.arange(count) >= first)
        values[media], likely[media], tokens[media] = 0.0, NO_LOG_PROB, 0
        self.log_probs, self.target_log_probs = values, found
        self.top_tokens, self.top_log_probs = tokens, likely


@dataclass(frozen=True)
class AdapterRequest(Request):
    """A request for an adapter."""

    adapter: Adapter | None = None  # None: the base model
    images: Sequence[KeyedImage] = ()  # for engines that read features; others read `multi_modal_data`
    scores: PromptScores | None = field(default=None, compare=False)  # filled once; samples of a prompt share it

    @property
    def prompt_key(self) -> Hashable:
        """See `Request.prompt_key`; each adapter reads a prompt on its own."""
        return super().prompt_key, self.adapter, tuple(image.key for image in self.images)
