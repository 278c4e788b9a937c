"""Drafts for vLLM's speculative decoding: the n-grams of `rollout.drafts`; vLLM imports the class by its name.

`rollout.vllm.policy.sampler.PolicySampler` verifies them, and knows which requests are samples of one prompt.
"""

from collections.abc import Sequence
from typing import Any


class SiblingDrafter:
    """Drafts from the tokens of a request, of its prompt and of the other samples of it."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        self.sampler: Any = None  # set once the policy's sampler is installed

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        """A draft for each row of the step that has just ended; ``num_tokens_no_spec`` tokens of a row are known."""
        if self.sampler is None:
            return [[] for _ in sampled_token_ids]
        drafts = self.sampler.next_drafts(sampled_token_ids, self._most)
        return [
            draft[: max(self._max_tokens - int(known) - 1, 0)]
            for draft, known in zip(drafts, num_tokens_no_spec, strict=False)
        ]
