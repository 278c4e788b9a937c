"""The registry of families."""

import pickle
from types import SimpleNamespace

import pytest
from transformers import GptOssConfig

import dataproto.vlm
from dataproto.errors import UnknownModel
from dataproto.vlm import family_of, known_families
from helpers.tiny_models import ALL_TYPES, tiny_config


def test_the_package_exports_exactly_this():
    assert sorted(dataproto.vlm.__all__) == [
        *("DistinctMedia", "Flops", "MediaLayout", "MediaSpans", "MediaTokens", "PatchGrids", "VLMFamily"),
        *("distinct_media", "extend_positions", "family_of", "frame_seconds", "image_grid", "known_families"),
        *("media_grids", "media_spans", "register_family"),
    ]
    assert all(hasattr(dataproto.vlm, name) for name in dataproto.vlm.__all__)


def test_families_are_found_by_type_config_and_model():
    assert set(known_families()) == set(ALL_TYPES)
    for model_type in known_families():
        config = tiny_config(model_type)
        family = family_of(model_type)
        assert family.model_type == model_type
        assert family_of(config) is family
        assert family_of(SimpleNamespace(config=config)) is family


@pytest.mark.parametrize("unknown", ["gpt2", None, SimpleNamespace(), SimpleNamespace(model_type="gpt2")])
def test_the_error_for_an_unknown_model_lists_the_known_types(unknown):
    with pytest.raises(
        UnknownModel,
        match="known: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, internvl,",
    ):
        family_of(unknown)


def test_a_kind_of_language_model_without_a_family_is_refused_with_the_reason():
    config = tiny_config("internvl")
    config.text_config = GptOssConfig()
    with pytest.raises(UnknownModel, match=r"internvl\+gpt_oss are not supported: .* learned sink in every head"):
        family_of(config)


def test_a_family_is_a_value():
    family = family_of("qwen3_vl_moe")
    assert pickle.loads(pickle.dumps(family)) == family
    assert hash(family) != hash(family_of("qwen3_vl"))
    with pytest.raises(AttributeError):
        family.head = "other"
