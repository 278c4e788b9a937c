"""Images whose tokens see each other, in vLLM: on a CPU, where its attention is causal, and the longest ones elsewhere.

vLLM's kernel for CPUs computes causal attention. The outputs of the tokens of images are computed here, from the keys and values
of the step. So a prompt with images is read whole in one step, and none of it is taken from the cache of prefixes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dataproto.errors import InvalidConfig
from dataproto.vlm import VLMFamily
from dataproto.vlm.positions import IMAGE
from rollout.vllm.running_engine import model_of

READ_WHOLE = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
"""Options of vLLM by which a step computes the keys and values of whole prompts."""


def check_reads_whole(options: Mapping[str, Any]) -> None:
    """Raises `InvalidConfig` for options of vLLM that contradict `READ_WHOLE`."""
    for name in READ_WHOLE:
        if options.get(name):
            raise InvalidConfig(
                f"{name}={options[name]}: on a CPU vLLM reads prompts of this model whole, because the tokens of an image see "
                "each other; leave the option out"
            )


def see_whole_images(worker: Any, windowed: bool) -> None:
    """Lets the tokens of an image see each other in a worker on a CPU: in all layers, or in ``windowed`` ones."""
    for layer in model_of(worker).modules():
        impl = getattr(layer, "impl", None)
        if hasattr(layer, "kv_cache") and impl is not None and (impl.sliding_window > 0 or not windowed):
            impl.forward = WholeImages(impl, worker.model_runner)


class WholeImages:
    """The forward of one layer's attention; the signature is that of vLLM's implementations."""

    def __init__(self, impl: Any, runner: Any) -> None:
        self.causal: Callable[..., Tensor] = impl.forward
        self.runner, self.scale = runner, impl.scale
        self.window: int | None = impl.sliding_window if impl.sliding_window > 0 else None

    def __call__(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        at: Any,
        output: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """As vLLM's: ``query (N, H, D)``, ``key`` and ``value (N, H_kv, D)`` of the step's tokens into ``output``."""
        out = self.causal(layer, query, key, value, kv_cache, at, output, **kwargs)
        for first, images in self._prompts(at):
            stop = first + max(last for _, last in images) + 1
            q, k, v = (x[first:stop].transpose(0, 1) for x in (query, key, value))
            seen = visible(stop - first, images, self.window)
            places = torch.cat([torch.arange(begin, last + 1) for begin, last in images])
            found = scaled_dot_product_attention(q[:, places], k, v, seen[places], scale=self.scale, enable_gqa=True)
            output[first + places] = found.transpose(0, 1).reshape(output[first + places].shape)
        return out

    def _prompts(self, at: Any) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """For each prompt with images that the step reads, the place of its first token, and the ends of each image."""
        if at is None:  # a trial step
            return
        starts, lengths = at.query_start_loc.tolist(), at.seq_lens.tolist()
        for name, first, stop, length in zip(
            self.runner.input_batch.req_ids, starts, starts[1:], lengths, strict=False
        ):
            features = self.runner.requests[name].mm_features
            images = [image for each in features for image in each.mm_position.extract_embeds_range()]
            if images and stop - first == length:
                yield first, images


def visible(length: int, images: list[tuple[int, int]], window: int | None) -> Tensor:
    """Which tokens ``(length, length)`` bool each token of a prompt sees: those up to its own and of its image, in its window.

    >>> visible(4, [(1, 2)], None).int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    places = torch.arange(length)
    last = places.clone()
    for begin, end in images:
        last[begin : end + 1] = end
    seen = places <= last[:, None]
    return seen if window is None else seen & (places > places[:, None] - window)


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
    """Prepares a running ``vllm.LLM`` for images; returns the number of tokens that an image may have, ``None`` without limit."""
    mutual = family.mutual_images(llm.model_config.hf_config)
    if mutual is None:
        return None
    if device.type == "cpu":
        llm.collective_rpc(see_whole_images, args=(mutual == "windowed",))
        return None
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
