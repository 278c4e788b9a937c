"""The table of options of docs/moving.md: names of other libraries, and what they are here."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
VERL, EASY_R1, TRL, OURS = range(4)


def option_rows() -> list[list[str]]:
    """The cells of each row, without the head."""
    table = PAGE.read_text(encoding="utf-8").split("\n## Options\n")[1].split("\n## ")[0]
    return [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]


def names_in(cell: str) -> list[str]:
    """The names that a cell gives, and not the values that follow a colon."""
    return re.findall(r"`([\w.]+)(?:=\w+)?`", cell.partition("`: ")[0] + "`" * ("`: " in cell))


def option_names(column: int) -> list[str]:
    """All names of a column, each once."""
    return list(dict.fromkeys(name for row in option_rows() for name in names_in(row[column])))
