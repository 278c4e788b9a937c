"""Images whose tokens see each other, in vLLM: its attention is causal within the longest ones, and on a CPU within all."""

from typing import Any

import torch
from torch import Tensor, nn

from dataproto.vlm import VLMFamily
from dataproto.vlm.positions import IMAGE
from rollout.vllm.running_engine import model_of


def longest_image(worker: Any) -> int | None:
    """The number of tokens of an image above which a worker's model computes causal attention within it, ``None`` without limit.

    vLLM skips images that are longer than the sliding window, except in models that keep the window within images.
    """
    text: Any = worker.model_runner.model_config.hf_text_config
    model: nn.Module = model_of(worker)
    if any(getattr(each, "mm_prefix_clamp_sliding_window", False) for each in (model, text)):
        return None
    window = getattr(text, "sliding_window", None)
    return None if window is None else int(window)


def limit_of_images(llm: Any, family: VLMFamily, device: torch.device) -> int | None:
    """The number of tokens that an image may have in a running ``vllm.LLM``, ``None`` without limit; none on a CPU."""
    if family.mutual_images(llm.model_config.hf_config) is None:
        return None
    if device.type == "cpu":
        return 0
    (limit,) = set(llm.collective_rpc(longest_image))
    found: int | None = limit
    return found


def longest_run(token_types: Tensor) -> int:
    """The number of tokens of the longest image among those of a prompt, of which no two are side by side.

    >>> longest_run(torch.tensor([0, 1, 1, 0, 1, 1, 1]))
    3
    """
    ends = (token_types != IMAGE).nonzero().squeeze(1)
    bounds = torch.cat([ends.new_tensor([-1]), ends, ends.new_tensor([len(token_types)])])
    return int(bounds.diff().max()) - 1
