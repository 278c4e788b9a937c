"""A Sphinx extension for docstrings that are written for the source: Markdown tables, indented formulas, comments of fields.

It also shows a name that several packages export on one page alone, that of the first package.
"""

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from textwrap import dedent
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

TABLE_RULE = re.compile(r"\|[-| :]+\|$")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", with_readable_defaults)
    app.connect("autodoc-skip-member", skip_shown_elsewhere)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def process(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if what == "data":
        lines[:] = data_text(name)
    if isinstance(value, type) and is_dataclass(value):
        if lines and lines[0].startswith(f"{value.__name__}("):  # made by `dataclass`
            lines.clear()
        lines += field_lines(value, lines)
    lines[:] = with_formulas(with_tables(lines))


def with_readable_defaults(
    app: Sphinx, what: str, name: str, value: Any, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """``<factory>``, which is no Python and keeps Sphinx from reading a signature, as ``...``."""
    return re.sub(r"=\s*<\w+>", "=...", arguments) if arguments else arguments, result


def with_tables(lines: list[str]) -> Iterator[str]:
    """Markdown tables as reStructuredText."""
    rows: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            if not TABLE_RULE.match(line):
                rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if rows:
            yield from (".. list-table::", "   :header-rows: 1", "")
            for first, *others in rows:
                yield from (f"   * - {first}", *(f"     - {cell}" for cell in others))
            yield ""
            rows = []
        yield line


def with_formulas(lines: Iterable[str]) -> Iterator[str]:
    """Blocks indented below a paragraph, which are formulas or code, as literal blocks."""
    above, blank = " ", False
    for line in lines:
        if line.strip():
            is_text = not above.startswith((" ", ".. ", ">>>")) and not above.endswith("::")
            if blank and line.startswith("    ") and is_text:
                yield from ("::", "")
            above, blank = line, False
        else:
            blank = True
        yield line


def field_lines(config: type, lines: list[str]) -> list[str]:
    """The comments of a dataclass's fields as a section of arguments, unless the docstring has one."""
    if any(line.strip() in ("Args:", "Attributes:") for line in lines):
        return []
    commented = [comments_of(each) for each in config.__mro__ if is_dataclass(each)]
    texts = {
        name: next((texts[name] for texts in commented if name in texts), "")
        for name in inspect.signature(config).parameters
    }
    arguments = [f"    {name}: {text}" for name, text in texts.items() if text]
    return ["", "Args:", *arguments, ""] if arguments else []


@cache
def comments_of(config: type) -> dict[str, str]:
    """The comments of the fields that a class itself declares: after a field, or in the lines above it."""
    try:
        source = dedent(inspect.getsource(config))
    except (OSError, TypeError):  # made without a file
        return {}
    comments: dict[int, tuple[str, bool]] = {}  # line: text, whether it has the line to itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# "), not token.line[: token.start[1]].strip()
    found = {}
    (declaration,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in declaration.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while comments.get(above, ("", False))[1]:
                above -= 1
            lines = range(above + 1, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line][0] for line in lines if line in comments)
    return found


def data_text(name: str) -> list[str]:
    """The docstring of a value that a package imports from one of its modules."""
    module, _, variable = name.rpartition(".")
    for place in (module, *imported_from(module, variable)):
        try:
            found = ModuleAnalyzer.for_module(place).find_attr_docs()
        except PycodeError:
            continue
        if ("", variable) in found:
            return list(found["", variable])
    return []


def imported_from(module: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if isinstance(node, ast.ImportFrom) and node.module and name in (alias.name for alias in node.names):
            yield node.module
            yield from imported_from(node.module, name)


def skip_shown_elsewhere(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Whether another package shows the same object: the first, from the top, of those above its module and the shown one."""
    if what != "module":
        return None
    shown = app.env.current_document.autodoc_module
    places = {*packages_above(shown), *packages_above(getattr(value, "__module__", shown))}
    showing = [place for place in sorted(places, key=depth_and_name) if exports(place, name, value)]
    return True if showing and showing[0] != shown else None


def packages_above(module: str) -> list[str]:
    """A module and the packages that contain it, from the top."""
    parts = module.split(".")
    return [".".join(parts[: place + 1]) for place in range(len(parts))]


def depth_and_name(module: str) -> tuple[int, str]:
    return module.count("."), module


def exports(module: str, name: str, value: Any) -> bool:
    package = sys.modules.get(module)
    return name in getattr(package, "__all__", ()) and getattr(package, name) is value
