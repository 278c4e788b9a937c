"""What rollouts read from a checkpoint: the model, generation settings, tokenizer, image processor and config."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, raised_as
from dataproto.vlm import VLMFamily, family_of

IMAGE_BACKEND = "pil"
"""The backend of the image processor, for the actor and every engine: the pixels of PIL and torchvision differ."""


def family_and_config(model_path: str) -> tuple[VLMFamily, Any]:
    """The family of a checkpoint directory and the config of the model that is built for it. Raises `UnknownModel`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path)
    family = family_of(config)
    return family, family.used_config(config)


def load_model(family: VLMFamily, model_path: str, dtype: torch.dtype) -> Any:
    """The model of a checkpoint, on the host, in ``dtype``; `VLMFamily.float32_weights` are in float32 whatever it is.

    transformers keeps weights in float32 by an attribute of the model's class, so these models are of a subclass with its name.

    Raises:
        InvalidConfig: the weights are quantized.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path)
    check_not_quantized(model_path, config)
    model_class = family.model_class()
    if family.float32_weights and dtype != torch.float32:
        with torch.device("meta"):
            named = type(family.new_model(config))
        kept = [*(named._keep_in_fp32_modules_strict or ()), *family.float32_weights]
        attributes = {"__module__": named.__module__, "_keep_in_fp32_modules_strict": kept}
        model_class = type(named.__name__, (named,), attributes)
    model = model_class.from_pretrained(
        model_path, config=family.used_config(config), dtype=dtype, attn_implementation="sdpa"
    )
    _check_stored_numbers(model_path)
    return model


def _check_stored_numbers(model_path: str) -> None:
    """Raises `InvalidConfig` for weights in float8 or bytes, whose scales transformers leaves out if the config does not name
    them. Called when the files of a hub name are on this machine.
    """
    for name, file in _stored(model_path):
        kind = str(file.get_slice(name).get_dtype())
        if kind.startswith(("F8", "F6", "F4", "I8", "U8")):
            raise quantized(model_path, name, kind)


def quantized(source: str, name: str, kind: str) -> InvalidConfig:
    """The error for a checkpoint with a weight whose numbers need a scale."""
    return InvalidConfig(
        f"{source} holds quantized weights: {name} is of type {kind}, and its scale would be left out; "
        "name the checkpoint in bfloat16"
    )


def stored_tensors(model_path: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint's safetensors files whose names begin with ``prefix``, by the rest of their names.

    Called when the files of a hub name are on this machine.
    """
    stored = ((name, file) for name, file in _stored(model_path) if name.startswith(prefix))
    return {name.removeprefix(prefix): file.get_tensor(name) for name, file in stored}


def has_stored(model_path: str, prefix: str) -> bool:
    """Whether the safetensors files of a checkpoint have tensors whose names begin with ``prefix``."""
    return any(name.startswith(prefix) for name, _ in _stored(model_path))


def _stored(model_path: str) -> Iterator[tuple[str, Any]]:
    """The names of the tensors in a checkpoint's safetensors files, and the open file of each."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    for path in sorted(Path(str(cached_file(model_path, "config.json"))).parent.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file


def check_not_quantized(model_path: str, config: Any) -> None:
    """Raises `InvalidConfig` if the ``config`` of a checkpoint, or that of a part of its model, says that weights are quantized.

    The tensors of quantized weights have other names, so the weights would count as absent and be initialised.
    """
    parts = {"": config} | {name: getattr(config, name, None) for name in config.sub_configs}
    for name, part in parts.items():
        if getattr(part, "quantization_config", None) is not None:
            place = f" ({name} of its config says so)" if name else ""
            raise InvalidConfig(
                f"{model_path} holds quantized weights{place}, which are not read: name the checkpoint in bfloat16"
            )


def file_if_there(source: str, name: str, **options: Any) -> str | None:
    """The path of a checkpoint's file; ``None`` if it has none, or the hub does not give it. Options are transformers'."""
    from transformers.utils import cached_file

    for kind in ("missing_entries", "gated_repo", "connection_errors"):
        options[f"_raise_exceptions_for_{kind}"] = False
    return cached_file(source, name, **options)


def generation_config(model_path: str, config: Any) -> Any:
    """The checkpoint's ``GenerationConfig``. If it has none, one is made from the model's ``config``, as in transformers.

    Raises:
        InvalidConfig: the checkpoint's file cannot be read; names it.
    """
    from transformers import GenerationConfig

    file = file_if_there(model_path, "generation_config.json")
    if file is None:
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(model_path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def end_ids(generation_config: Any, config: Any = None) -> tuple[int, ...]:
    """The model's end tokens. Where the generation settings name none, they are those of the model's ``config``: without one
    every response would run to its greatest length.

    >>> from types import SimpleNamespace
    >>> end_ids(SimpleNamespace(eos_token_id=7))
    (7,)
    """
    from transformers import GenerationConfig

    end = generation_config.eos_token_id
    if end is None and config is not None:
        end = GenerationConfig.from_model_config(config).eos_token_id
    if end is None:
        return ()
    return tuple(end) if isinstance(end, (list, tuple)) else (int(end),)


def check_speculation(tokens: int) -> None:
    """Raises `InvalidConfig` if an engine cannot draft so many tokens."""
    if tokens < 0:
        raise InvalidConfig(f"speculate={tokens}: must be 0 (no drafts) or more")


def check_in_vllm(model_path: str) -> None:
    """Raises `InvalidConfig` for a checkpoint of a family from which vLLM does not sample as the policy does, with the reason,
    and `UnknownModel` for one of no family.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError):
        return  # vLLM says what is wrong with it
    family = family_of(config)
    if family.not_in_vllm:
        raise InvalidConfig(
            f"the vLLM engine takes no models of type {family.model_type}: {family.not_in_vllm}; use the hf engine"
        )


def load_prompt_parts(path: str | os.PathLike[str]) -> tuple[Any, Any, Any, Any]:
    """Tokenizer, image processor, config and feature extractor of a checkpoint directory. The image processor is ``None`` if the
    model's family reads only text, and so is the feature extractor if it reads no sounds. The tokenizer has the chat template
    that ``AutoProcessor`` takes.

    Raises:
        InvalidConfig: one of them is absent, or the template cannot be read.
        UnknownModel: the checkpoint is of no registered family.
    """
    from transformers import AutoFeatureExtractor, AutoTokenizer

    try:
        tokenizer, (family, config) = AutoTokenizer.from_pretrained(path), family_and_config(os.fspath(path))
        sees = family.media_layout.names("image")
        hears = AutoFeatureExtractor.from_pretrained(path) if family.media_layout.names("audio") else None
        parts = tokenizer, load_image_processor(path) if sees else None, config, hears
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path} lacks a part of a checkpoint: {str(error).splitlines()[0]}") from error
    if sees:
        tokenizer.chat_template = _processor_template(path) or tokenizer.chat_template
    return parts


def _processor_template(path: str | os.PathLike[str]) -> Any:
    """The chat template that processors of transformers prefer to that of the tokenizer; ``None`` if there is none.

    Raises:
        InvalidConfig: a file cannot be read; names it.
    """
    from transformers.utils import cached_file

    for name in ("processor_config.json", "chat_template.json"):
        file = cached_file(os.fspath(path), name, _raise_exceptions_for_missing_entries=False)
        with raised_as(InvalidConfig, f"{file} cannot be read", ValueError, AttributeError):
            settings = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
            template = settings.get("chat_template")
        if template is not None:
            return template
    return None


def _own_processor(path: str | os.PathLike[str]) -> Any:
    """This project's image processor by PIL for a checkpoint of a type for which transformers has one only for torchvision;
    ``None`` if there is none.
    """
    from transformers import AutoConfig
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    from rollout.image_processors import KimiImageProcessor, MuseImageProcessor

    own: dict[str, Any] = {
        "Kimi_K25ImageProcessor": KimiImageProcessor,
        "MuseGlimmerImageProcessor": MuseImageProcessor,
    }
    try:
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(AutoConfig.from_pretrained(path).model_type, {})
    except (OSError, ValueError):
        return None  # the folder says of no type that transformers knows
    found = None if names.get(IMAGE_BACKEND) else own.get(names.get("torchvision") or "")
    return None if found is None else found.from_pretrained(path)


def load_image_processor(path: str | os.PathLike[str]) -> Any:
    """The checkpoint's image processor with the backend `IMAGE_BACKEND`, whatever else is installed. Raises `InvalidConfig`."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # older top levels need torchvision

    if (own := _own_processor(path)) is not None:
        return own
    try:
        processor = AutoImageProcessor.from_pretrained(path, backend=IMAGE_BACKEND)
    except ValueError as error:
        if "Could not load any image processor class" in str(error):
            raise InvalidConfig(
                f"{path}: transformers has its image processor only for torchvision; prompts are made with the "
                f"{IMAGE_BACKEND} backend, on every machine the same"
            ) from error
        # The first Qwen2.5-VL checkpoints name a class that no longer exists. Its successor reads their settings.
        if "Unrecognized image processor" not in str(error):
            raise
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    if getattr(processor, "backend", None) != IMAGE_BACKEND:
        raise InvalidConfig(f"{path}: its image processor {type(processor).__name__} has no {IMAGE_BACKEND} backend")
    return processor
