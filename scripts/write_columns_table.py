"""Replaces the table of well-known columns in docs/columns.md and keeps the text around it."""

from pathlib import Path

from dataproto.columns import columns_table

document = Path(__file__).parents[1] / "docs" / "columns.md"
lines = document.read_text().splitlines()
table = [number for number, line in enumerate(lines) if line.startswith("|")]
before, after = lines[: table[0]], lines[table[-1] + 1 :]
document.write_text("\n".join([*before, columns_table(), *after]) + "\n")
