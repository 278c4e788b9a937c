"""The reference of the site: every public package is in it, and docstrings become reStructuredText."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.rst"))
sys.path.append(str(ROOT / "docs"))
docstrings = importlib.import_module("docstrings")  # of the site, beside its configuration


def test_every_package_with_public_names_is_in_the_reference() -> None:
    named = re.findall(r"^\.\. automodule:: (\S+)$", REFERENCE, re.MULTILINE)
    tops = ("dataproto", "rollout", "workers", "recipes", "dataproto_server")
    packages = [path for top in tops for path in (ROOT / top).rglob("__init__.py")]
    public = {".".join(path.parent.relative_to(ROOT).parts) for path in packages if states_names(path)}
    assert "recipes.run" in public
    assert public - set(named) == set()
    assert len(named) == len(set(named))


def test_names_that_packages_import_late_are_in_the_reference() -> None:
    """Sphinx reads the names of a module from `dir`, which lacks names that are imported on first use."""
    script = (
        f"import sys; sys.path.append({str(ROOT / 'docs')!r})\n"
        "import docstrings, recipes.algorithms as algorithms, workers\n"
        "assert 'ActorWorker' not in dir(workers)\n"
        "docstrings.import_names(None, 'page', ['.. automodule:: workers\\n\\n.. automodule:: recipes.algorithms\\n'])\n"
        "for package in (workers, algorithms):\n"
        "    assert {*package.__all__} <= {*dir(package)}, package"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def states_names(path: Path) -> bool:
    """Whether a module has an ``__all__`` with names in it; it is not imported."""
    assigned = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return any(
        node.targets[0].id == "__all__" and node.value.elts for node in assigned if hasattr(node.targets[0], "id")
    )


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
    from rollout import SamplingParams

    lines = docstrings.field_lines(SamplingParams, ["How responses are sampled."])
    assert "    top_k: 0: all tokens" in lines
    assert docstrings.field_lines(SamplingParams, ["Args:", "    n: ..."]) == []


def test_an_object_is_shown_in_the_first_of_its_packages() -> None:
    import workers

    places = docstrings.packages_above(workers.ActorWorker.__module__)
    assert places == ["workers", "workers.roles", "workers.roles.actor"]
    assert [docstrings.exports(place, "ActorWorker", workers.ActorWorker) for place in places] == [True, False, False]
