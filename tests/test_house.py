"""The source tree keeps its order: stated public names, no import by string, no document that names what is not there."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dataproto", "rollout", "workers", "recipes", "dataproto_server")
MODULES = sorted(path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})
# Where a backend, which may not be installed or is slow to import, is chosen by name.
LAZY_TABLES = {
    Path("dataproto/_verl/verl_conversion.py"),
    Path("dataproto/vlm/family_registry.py"),
    Path("recipes/commands/__init__.py"),
    Path("recipes/watch/loggers.py"),
    Path("dataproto_server/engine_process.py"),
    Path("rollout/engine.py"),
    Path("workers/cluster/launcher.py"),
    Path("workers/cluster/host.py"),  # in processes of Ray, before anything else is imported
}


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if not folder.name.startswith("_")], ids=str)
def test_a_package_has_the_public_names_that_it_states(folder: Path) -> None:
    package = importlib.import_module(".".join(folder.parts))
    assert package.__doc__
    assert [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)] == []


def test_a_name_that_is_imported_when_used_is_no_module_of_its_package() -> None:
    """Importing a module sets its name in the package, in the place of the function."""
    lazy = [path.parent for path in MODULES if (ROOT / path).with_suffix(".pyi").exists()]
    found = {str(folder): importlib.import_module(".".join(folder.parts)).__all__ for folder in lazy}
    assert lazy
    assert [name for folder, names in found.items() for name in names if (ROOT / folder / f"{name}.py").exists()] == []


def test_modules_are_imported_by_statements_except_where_a_backend_is_chosen() -> None:
    found = set()
    for path in MODULES:
        text = (ROOT / path).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"import_module|__import__", text) else ():
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("import_module", "__import__"):
                    found.add(path)
    assert found <= LAZY_TABLES


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_files_and_modules_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if link and not (document.parent / link).exists()] == []
    paths = re.findall(rf"`((?:{'|'.join(PACKAGES)}|tests|benchmarks|scripts)/[\w/.]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = {path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".") for path in MODULES}
    dotted = re.findall(rf"(?:python -m |from )((?:{'|'.join(PACKAGES)})(?:\.\w+)*)", text)
    assert [name for name in dotted if name not in modules and name != "recipes.NAME"] == []


@pytest.mark.slow
def test_two_folders_of_tests_with_settings_are_collected_in_one_command(tmp_path: Path) -> None:
    """The settings of both are modules of one name, `conftest`."""
    folders = [tmp_path / name for name in ("one", "another")]
    for folder in folders:
        folder.mkdir()
        (folder / "conftest.py").touch()
        (folder / f"test_{folder.name}.py").write_text("def test_it():\n    pass\n")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, folders)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in found.stdout, found.stdout
