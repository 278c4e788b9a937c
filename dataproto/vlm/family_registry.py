"""Which family belongs to a model type: the shipped families, those that a program registers, and those of installed packages."""

import os
import sys
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from dataproto.errors import InvalidConfig, UnknownModel, raised_as
from dataproto.grouping import grouped_by
from dataproto.vlm.family import VLMFamily

ENTRY_POINTS = "dataproto.vlm_families"
"""The entry-point group in which a package names its families, as ``model_type = "package.module:Class"``."""

_SHIPPED = {
    "qwen2_vl": "dataproto.vlm.families.qwen2_vl:Qwen2VL",
    "qwen2_5_vl": "dataproto.vlm.families.qwen2_5_vl:Qwen25VL",
    "qwen3_vl": "dataproto.vlm.families.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "dataproto.vlm.families.qwen3_vl:Qwen3VLMoe",
    "qwen3_5": "dataproto.vlm.families.qwen3_5:Qwen35",
    "qwen3_5_moe": "dataproto.vlm.families.qwen3_5:Qwen35Moe",
    "internvl": "dataproto.vlm.families.internvl:InternVL",
    "internvl+qwen3_moe": "dataproto.vlm.families.internvl:InternVLMoe",
    "glm4v": "dataproto.vlm.families.glm4v:GLM4V",
    "glm4v_moe": "dataproto.vlm.families.glm4v:GLM4VMoe",
    "glm46v": "dataproto.vlm.families.glm4v:GLM46V",
    "glm46v+glm4v_moe_text": "dataproto.vlm.families.glm4v:GLM46VMoe",
    "minicpmv4_6": "dataproto.vlm.families.minicpmv4_6:MiniCPMV46",
    "smolvlm": "dataproto.vlm.families.idefics3:SmolVLM",
    "idefics3": "dataproto.vlm.families.idefics3:Idefics3",
    "gemma3": "dataproto.vlm.families.gemma3:Gemma3",
    "gemma4": "dataproto.vlm.families.gemma4:Gemma4",
    "gemma4+per_layer": "dataproto.vlm.families.gemma4:Gemma4PerLayer",
    "gemma4+moe": "dataproto.vlm.families.gemma4:Gemma4Moe",
    "muse_glimmer": "dataproto.vlm.families.muse_glimmer:MuseGlimmer",
    "kimi_k25": "dataproto.vlm.families.kimi_k25:KimiK25",
    "qwen2_5_omni_thinker": "dataproto.vlm.families.qwen_omni:Qwen25OmniThinker",
    "qwen3_omni_moe_thinker": "dataproto.vlm.families.qwen_omni:Qwen3OmniMoeThinker",
    "llama": "dataproto.vlm.families.text_only:Llama",
    "mistral": "dataproto.vlm.families.text_only:Mistral",
    "qwen2": "dataproto.vlm.families.text_only:Qwen2",
    "qwen3": "dataproto.vlm.families.text_only:Qwen3",
}
"""``config.model_type`` to import path; ``model_type+text_model_type`` for one kind of language model in a model type that takes
several, ``model_type+kind`` for one that `VLMFamily.kind` names. The file is imported on first use.
"""

_LARGER = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
"""Types of models of which a part has a family, see `VLMFamily.part`."""

_REFUSED = {
    "internvl+gpt_oss": (
        "the attention of gpt-oss has a learned sink in every head and a sliding window in every other layer, which packed "
        "attention does not compute"
    )
}
"""Types that transformers builds and no family fits, with the reason."""

_registered: dict[str, VLMFamily] = {}

FamilyClass = TypeVar("FamilyClass", bound=type[VLMFamily])


def family_of(model: Any) -> VLMFamily:
    """The family of a model type (``"qwen2_5_vl"``), a Hugging Face config, or a model with a config.

    A family whose type names a language model too (``"internvl+qwen3_moe"``) is found by configs with that language model, and
    one of a kind of models (``"gemma4+moe"``) by configs of that kind (`VLMFamily.kind`). Families that this process registered
    come first, then the shipped ones, then entry points of installed packages.

    Raises:
        UnknownModel: no family has this model type, or its kind of language model is not supported. The message lists the known
            types, or gives the reason.
        InvalidConfig: the entry point of this model type cannot be used.

    >>> family_of("qwen2_5_vl").vision_tower
    'model.visual'
    """
    config = getattr(model, "config", model)
    if isinstance(config, str):
        return _named(config, None)
    model_type = getattr(config, "model_type", None)
    found = _named(model_type, getattr(getattr(config, "text_config", None), "model_type", None))
    kind = found.kind(config)
    return _named(f"{model_type}+{kind}", None) if kind else found


def _named(model_type: Any, text_type: str | None) -> VLMFamily:
    for name in (f"{model_type}+{text_type}", _LARGER.get(model_type, model_type)):
        if name in _registered:
            return _registered[name]
        if name in _SHIPPED:
            return _shipped(name)
        if name in (points := _entry_points(_search_path())):
            register_family(_load(points[name]))
            return _registered[name]
        if name in _REFUSED:
            raise UnknownModel(f"models of type {name} are not supported: {_REFUSED[name]}")
    raise UnknownModel(
        f"no model family for model type {model_type!r}; known: {', '.join(known_families())}. To add one, call "
        f"register_family in every process that uses it, or name it in the entry-point group {ENTRY_POINTS!r} of an installed "
        "package (docs/adding_a_vlm.md)"
    )


def known_families() -> tuple[str, ...]:
    """Model types that have a family, the shipped ones first."""
    return tuple(dict.fromkeys([*_SHIPPED, *_registered, *_entry_points(_search_path())]))


def register_family(family: FamilyClass, *, replace: bool = False) -> FamilyClass:
    """Make a subclass of `VLMFamily` the family of its ``model_type`` in this process. Usable as a decorator.

    Registering a class twice changes nothing. Other processes (of Ray, or spawned ones) find the family only if they register
    it too, or if an installed package names it in the entry-point group ``dataproto.vlm_families``.

    Args:
        replace: also if the model type has another family.

    Raises:
        InvalidConfig: it is no concrete subclass of `VLMFamily` with a model type, or the model type is taken.
    """
    if not (isinstance(family, type) and issubclass(family, VLMFamily)):
        raise InvalidConfig(f"register_family takes a subclass of VLMFamily, not {family!r}")
    model_type = getattr(family, "model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise InvalidConfig(f"{family.__qualname__} needs a class attribute `model_type`: the config's model_type")
    with raised_as(InvalidConfig, f"{family.__qualname__} cannot be registered", TypeError):
        value = family()
    other = _registered.get(model_type)
    taken = type(other).__qualname__ if other else _SHIPPED.get(model_type)
    if taken is not None and other != value and not replace:
        raise InvalidConfig(
            f"model type {model_type!r} has a family already ({taken}): pass replace=True to replace it"
        )
    _registered[model_type] = value
    return family


@cache
def _shipped(model_type: str) -> VLMFamily:
    module, _, name = _SHIPPED[model_type].partition(":")
    family: VLMFamily = getattr(import_module(module), name)()
    return family


def _search_path() -> tuple[tuple[str, int], ...]:
    """The folders of ``sys.path``, each with the time of its last change: an installed package changes it."""
    return tuple((folder, _changed(folder)) for folder in sys.path)


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _entry_points(_path: tuple[tuple[str, int], ...]) -> dict[str, list[EntryPoint]]:
    """Entry points of the installed packages, by model type. Reading them takes 40 ms: only where `_search_path` changed."""
    return grouped_by(entry_points(group=ENTRY_POINTS), lambda point: point.name)


def _load(points: list[EntryPoint]) -> Any:
    """The class that the entry points of a model type name."""
    point = points[0]
    values = sorted({each.value for each in points})
    if len(values) > 1:
        raise InvalidConfig(
            f"installed packages name several families for model type {point.name!r}: {' and '.join(values)}"
        )
    what = f"the family {point.value} of model type {point.name!r} cannot be imported"
    with raised_as(InvalidConfig, what, ImportError, AttributeError):
        family = point.load()
    if getattr(family, "model_type", None) != point.name:
        raise InvalidConfig(
            f"entry point {point.name!r} names {point.value}, whose model_type is {getattr(family, 'model_type', None)!r}"
        )
    return family
