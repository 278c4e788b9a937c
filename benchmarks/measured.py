"""Which rows of the README's table time files that have changed since somebody said that the figure holds.

    python benchmarks/measured.py                         # names them, with the command that measures each again
    python benchmarks/measured.py --holds wire verbs      # says that the figures of these rows hold; `all` for every row

The rows are in `benchmarks/measured.toml`.
"""

import argparse
import hashlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "measured.toml"


def digest(files: Sequence[str], root: Path = ROOT) -> str:
    """Of the names and contents of files, and of the Python files in folders."""
    found = hashlib.sha256()
    for name in files:
        path = root / name
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(f"{each.relative_to(root).as_posix()}\0{each.stat().st_size}\0".encode() + each.read_bytes())
    return found.hexdigest()[:16]


def changed(table: str, root: Path = ROOT) -> dict[str, str]:
    """For each row whose files have changed: what to do."""
    return {
        name: f"measure again with `{row['command']}`, or say so: python benchmarks/measured.py --holds {name}"
        for name, row in tomllib.loads(table).items()
        if row["digest"] != digest(row["files"], root)
    }


def held(table: str, names: Sequence[str], root: Path = ROOT) -> str:
    """The table in which the figures of these rows hold for the files as they are."""
    rows = tomllib.loads(table)
    for name in names:
        line = f'[{name}]\ndigest = "{digest(rows[name]["files"], root)}"'
        table = re.sub(rf'^\[{name}\]\ndigest = "\w*"', line, table, flags=re.MULTILINE)
    return table


def main() -> None:
    table = TABLE.read_text(encoding="utf-8")
    known = list(tomllib.loads(table))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holds", nargs="+", metavar="NAME", choices=[*known, "all"], default=[], help="or `all`")
    names = parser.parse_args().holds
    table = held(table, known if "all" in names else names)
    if names:
        TABLE.write_text(table, encoding="utf-8")
    for name, advice in changed(table).items():
        print(f"{name}: {advice}")


if __name__ == "__main__":
    main()
