"""The reference of the site: every public package is in it, and docstrings become reStructuredText."""

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.rst"))
sys.path.append(str(ROOT / "docs"))
docstrings = importlib.import_module("docstrings")  # of the site, beside its configuration


def test_every_package_with_public_names_is_in_the_reference() -> None:
    named = re.findall(r"^\.\. automodule:: (\S+)$", REFERENCE, re.MULTILINE)
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("dataproto", "rollout", "workers", "recipes")
        for path in (ROOT / top).rglob("__init__.py")
    }
    public = {name for name in packages if "._" not in name and importlib.import_module(name).__all__}
    assert public - set(named) == set()
    assert len(named) == len(set(named))


def test_markdown_tables_become_list_tables() -> None:
    text = ["Losses.", "", "| name | paper |", "|---|---|", "| `ppo` | 1707 |", "", "More."]
    assert list(docstrings.with_tables(text)) == [
        *["Losses.", "", ".. list-table::", "   :header-rows: 1", ""],
        *["   * - name", "     - paper", "   * - `ppo`", "     - 1707", "", "", "More.", ""],
    ]


def test_indented_formulas_become_literal_blocks() -> None:
    text = ["With r,", "", "    A = r - b", "    B = r", "", "for each."]
    assert list(docstrings.with_formulas(iter(text))) == [*text[:2], "::", "", *text[2:]]
    unchanged = ["A call::", "", "    run()", "", "Args:", "    name: of it."]
    assert list(docstrings.with_formulas(iter(unchanged))) == unchanged


def test_comments_of_fields_become_arguments() -> None:
    from workers import OptimizerConfig

    lines = docstrings.field_lines(OptimizerConfig, ["Settings of AdamW."])
    assert "    lr: after the warm-up" in lines
    assert docstrings.field_lines(OptimizerConfig, ["Args:", "    lr: ..."]) == []
