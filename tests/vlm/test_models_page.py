"""`docs/models.md` says what the registry has and what the tests show."""

from pathlib import Path

from dataproto.vlm.family_registry import _SHIPPED
from helpers.shown_models import FIELD, MEASURED_ON_H200, models_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def test_every_shipped_family_has_a_line_of_the_table():
    listed = [model_type for _, _, families in FIELD for model_type in families]
    assert sorted(listed) == sorted(_SHIPPED)


def test_the_page_has_the_table_that_the_tests_make():
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert lines[: len(models_table())] == models_table(), "\n".join(models_table())


def test_what_was_measured_stands_in_the_results():
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for words in MEASURED_ON_H200.values():
        assert any(words in line for line in results.splitlines())
