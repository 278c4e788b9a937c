"""The reference of the site: every public package is in it, and docstrings become reStructuredText."""

import ast
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
    tops = ("dataproto", "rollout", "workers", "recipes", "dataproto_server")
    packages = [path for top in tops for path in (ROOT / top).rglob("__init__.py")]
    public = {".".join(path.parent.relative_to(ROOT).parts) for path in packages if states_names(path)}
    assert "recipes.run" in public
    assert public - set(named) == set()
    assert len(named) == len(set(named))


def states_names(path: Path) -> bool:
    """Whether a package has an ``__all__`` with names in it, or a stub with those that are imported late; it is not imported."""
    assigned = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return path.with_suffix(".pyi").exists() or any(
        node.targets[0].id == "__all__" and node.value.elts for node in assigned if hasattr(node.targets[0], "id")
    )
