"""Requests to vLLM's form of prompts, checked before anything is generated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from PIL import Image
from torch import Tensor

from dataproto.errors import InvalidPrompt, MediaMismatch
from dataproto.vlm.family import VLMFamily
from rollout.engine import Request, SamplingParams
from rollout.vllm.prepared_media import prepared_prompt
from rollout.vllm.versions import error_line
from rollout.vllm.whole_images import longest_run

MAX_REPORTED_ROWS = 5


@dataclass(frozen=True)
class PromptRenderer:
    """Renders prompts with the renderer of a ``vllm.LLM``, under the engine's limits."""

    llm: Any
    family: VLMFamily
    max_images: int | None
    processor_options: Mapping[str, Any]
    longest_image: int | None = None
    """Tokens of an image above which vLLM computes causal attention within it, unlike the model. ``None``: no limit."""
    last: list[tuple[Tensor, Any]] = field(default_factory=list)
    """The prompt that was rendered last, for the next samples of it: its ``input_ids``, and vLLM's form. At most one."""

    def render(self, requests: Sequence[Request], sampling: SamplingParams, names: Sequence[str]) -> dict[int, Any]:
        """vLLM's form of each distinct prompt, by the identity of its ``input_ids``. ``names`` of the requests are for messages.

        Raises:
            InvalidPrompt: prompts cannot be used; names them.
        """
        prompts: dict[int, Any] = {}
        errors: list[str] = []
        for name, request in zip(names, requests, strict=True):
            if id(request.input_ids) in prompts:
                continue
            try:
                prompts[id(request.input_ids)] = self.render_one(request, sampling)
            except MemoryError:
                raise
            except Exception as error:  # vLLM and image processors raise errors of any class
                prompts[id(request.input_ids)] = None
                errors.append(f"{name}: {error_line(error)}")
        if errors:
            more = f" (and {len(errors) - MAX_REPORTED_ROWS} more rows)" if len(errors) > MAX_REPORTED_ROWS else ""
            raise InvalidPrompt("; ".join(errors[:MAX_REPORTED_ROWS]) + more)
        return prompts

    def render_one(self, request: Request, sampling: SamplingParams) -> Any:
        """vLLM's form of one prompt."""
        media = request.multi_modal_data
        images = list(media.get("image", ()))
        length = len(request.input_ids)
        if length + sampling.max_tokens > (most := int(self.llm.model_config.max_model_len)):
            raise InvalidPrompt(
                f"{length} prompt tokens and max_tokens={sampling.max_tokens} exceed max_model_len={most}"
            )
        if self.last and self.last[0][0] is request.input_ids:
            return self.last[0][1]
        if self.max_images is not None and len(images) > self.max_images:
            raise InvalidPrompt(f"{len(images)} images exceed max_images={self.max_images}")
        if (
            images
            and self.longest_image is not None
            and (found := longest_run(request.token_types)) > self.longest_image
        ):
            raise InvalidPrompt(
                f"an image of {found} tokens exceeds the attention window of {self.longest_image}, where this model of vLLM "
                "computes causal attention within the image and the actor does not: use the hf engine, or smaller images if the "
                "model takes several sizes (max_pixels)"
            )
        if media.get("video"):
            rendered = prepared_prompt(self.llm, self.family, request)
        elif request.multi_modal_inputs and not images:
            raise InvalidPrompt("it has pixels but no images: the vLLM engine needs the column multi_modal_data")
        else:
            rendered = self._expanded(request, images)
        self.last[:] = [(request.input_ids, rendered)]
        return rendered

    def _expanded(self, request: Request, images: Sequence[Image.Image]) -> Any:
        """vLLM's form of a prompt whose placeholders vLLM expands and whose images it processes."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids) or request.input_ids.tolist()}
        if images:
            prompt["multi_modal_data"] = {"image": images}
            prompt["multi_modal_uuids"] = {"image": [image_key(image) for image in images]}
            prompt["mm_processor_kwargs"] = self.processor_options
        (rendered,) = self.llm.renderer.render_cmpl([prompt])
        check_expansion(rendered["prompt_token_ids"], request.input_ids)
        return rendered


def image_key(image: Image.Image) -> str:
    """A digest of an image's current content, by which vLLM's caches identify it.

    >>> white, same = Image.new("RGB", (2, 2), "white"), Image.new("RGB", (2, 2), "white")
    >>> key = image_key(white)
    >>> white.putpixel((0, 0), (0, 0, 0))
    >>> image_key(same) == key, image_key(white) == key
    (True, False)
    """
    pixels = image.convert("RGBA") if image.mode in ("P", "PA") else image  # palette indices do not define the colours
    digest = blake2b(f"{image.mode}{image.size}".encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return digest.hexdigest()


def check_expansion(engine_ids: Sequence[int], input_ids: Tensor) -> None:
    """Raises `MediaMismatch` if vLLM's tokens of a prompt differ from those of the training side.

    >>> import torch
    >>> check_expansion([1, 7, 7], torch.tensor([1, 7, 7, 7]))
    Traceback (most recent call last):
    ...
    dataproto.errors.MediaMismatch: vLLM expands the prompt to 3 tokens, the training side to 4; they differ from token 3 on
    """
    ours = input_ids.tolist()
    if list(engine_ids) != ours:
        pairs = zip(engine_ids, ours)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(engine_ids), len(ours)))
        raise MediaMismatch(
            f"vLLM expands the prompt to {len(engine_ids)} tokens, the training side to {len(ours)}; they differ from token "
            f"{first} on"
        )
