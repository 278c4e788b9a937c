"""Images whose tokens see each other in vLLM on a CPU, whose kernels compute causal attention.

The outputs of the tokens of images are computed here, from the keys and values of the step. So a prompt with images is read whole
in one step, and none of it is taken from the cache of prefixes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollout.vllm.running_engine import model_of

READ_WHOLE = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
"""Options of vLLM by which a step computes the keys and values of whole prompts."""


def with_whole_images(engine: Any) -> Any:
    """The engine, started with `READ_WHOLE`, which then takes images of any size."""
    mutual = engine.family.mutual_images(engine.llm.model_config.hf_config)
    if mutual is not None:
        engine.llm.collective_rpc(see_whole_images, args=(mutual == "windowed",))
        engine.prompts = replace(engine.prompts, longest_image=None)
    return engine


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
