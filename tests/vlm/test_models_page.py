"""`docs/models.md` says what the registry has and what the tests show."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from dataproto.vlm import family_of
from dataproto.vlm.family_registry import _SHIPPED
from helpers.shown_models import (
    FIELD,
    HF_ENGINE_TYPES,
    LAYOUT_TYPES,
    MEASURED_ON_H200,
    TILED_TYPES,
    VLLM_HALF_TYPES,
    VLLM_TYPES,
    VLLM_WINDOWED_TYPES,
    layouts,
    models_table,
)
from helpers.tiny_models import ALL_TYPES, MOE_TYPES
from workers.ranks.layout import Layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_every_shipped_family_has_a_line_of_the_table():
    listed = [model_type for _, _, families in FIELD for model_type in families]
    assert sorted(listed) == sorted(_SHIPPED)


def test_the_page_has_the_table_that_the_tests_make():
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert lines[: len(models_table())] == models_table(), "\n".join(models_table())


@pytest.fixture(scope="module")
def tests_of_layouts():
    """The modules that compare layouts with one process, by the degree of parallelism."""
    names = {
        "dp": "test_fsdp",
        "sp": "test_ulysses",
        "tp": "test_tensor_parallel",
        "pp": "test_pipeline",
        "ep": "test_expert_parallel",
        "families": "test_family_layouts",
        "products": "test_layout_products",
    }
    return {degree: loaded(ROOT / "tests" / "workers" / f"{name}.py") for degree, name in names.items()}


def loaded(path):
    spec = spec_from_file_location(f"cases_of_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(model_type, tests):
    """The degrees of parallelism for which there is a case of this family."""
    pipelines = [*tests["pp"].TWO.values(), *tests["pp"].MORE_OF_TWO.values()]
    found = {
        "dp": f"{model_type}, uneven, 30 tokens" in tests["dp"].SCENARIOS | tests["dp"].MORE_SCENARIOS,
        "sp": f"mixed rows, {model_type}" in tests["sp"].CASES,
        "tp": f"mixed rows, {model_type}" in tests["tp"].CASES,
        "pp": any((model, layout) == (model_type, Layout(pp=2)) for model, layout, _ in pipelines),
        "ep": model_type == tests["ep"].MOE,
    }
    further = tests["families"].layouts_of(model_type) if model_type in LAYOUT_TYPES else []
    further += ["pp 2"] * (model_type in tests["families"].STAGED_TYPES)
    return {degree for degree, case in found.items() if case or any(degree in name.split() for name in further)}


def test_layouts_of_the_table_are_those_that_tests_compare(tests_of_layouts):
    for model_type in _SHIPPED:
        assert set(layouts(model_type).split()) == compared(model_type, tests_of_layouts), model_type


def test_every_family_is_in_the_lists_of_the_tests(tests_of_layouts):
    """A family that is in none of them would be left out in silence."""
    every, families = set(_SHIPPED), tests_of_layouts["families"]
    assert set(ALL_TYPES) == every
    assert set(MOE_TYPES) == {each for each in every if family_of(each).experts is not None}
    assert set(families.STAGED_TYPES) == every
    assert {*HF_ENGINE_TYPES, *TILED_TYPES} == every
    in_vllm = {*VLLM_TYPES, *VLLM_HALF_TYPES, *VLLM_WINDOWED_TYPES}
    assert in_vllm == {each for each in every if not family_of(each).not_in_vllm}
    products = tests_of_layouts["products"]
    wanted = {(each, name) for each in every for name in products.LAYOUTS}
    wanted |= {(each, name) for each in MOE_TYPES for name in products.WITH_EXPERTS}
    assert wanted <= {tuple(case.split(", ", 1)) for case in products.CASES}


def test_what_was_measured_stands_in_the_results():
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for words in MEASURED_ON_H200.values():
        assert any(words in line for line in results.splitlines())
