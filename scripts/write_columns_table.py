"""Replaces the table of well-known columns in docs/columns.md and keeps the text around it."""

from pathlib import Path

from dataproto import COLUMNS

DOCUMENT = Path(__file__).parents[1] / "docs" / "columns.md"


def columns_table() -> list[str]:
    """The lines of the table in Markdown."""
    lines = ["| column | dtype | shape | written by | read by | what |", "|---|---|---|---|---|---|"]
    for each in COLUMNS.values():
        shape = " or ".join(f"({', '.join(letters)}{',' * (len(letters) == 1)})" for letters in each.shapes)
        cells = (f"`{each.name}`", each.dtype, shape, each.written_by, each.read_by, each.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    lines = DOCUMENT.read_text().splitlines()
    table = [number for number, line in enumerate(lines) if line.startswith("|")]
    DOCUMENT.write_text("\n".join([*lines[: table[0]], *columns_table(), *lines[table[-1] + 1 :]]) + "\n")
