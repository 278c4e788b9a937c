"""Pictures of the console and of the plan for the documentation: ``python scripts/console_pictures.py [--folder docs/images]``.

Runs the commands of docs/first_hour.md with 150 steps, which takes some minutes on a CPU, and a plan of Qwen2.5-VL-3B, of
which it needs the config alone. ``--only plan.png`` makes one of the pictures.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipes.plan.command import make_published_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first_hour.md"
COLUMNS, WIDE = 112, 150
SIZE, LINE, CHARACTER = 9, 0.155, 0.0753  # points of the font; inches of a line and of a character
DARK, LIGHT, SOFT = "#181a20", "#dee2e8", "#9aa2ae"
START, END, PLAN = "console_start.png", "console_end.png", "plan.png"
PLANNED = "dataproto plan grpo --preset 3b --model-path Qwen2.5-VL-3B-Instruct --device h200"


def console_picture(lines: Sequence[str], path: Path, title: str, columns: int = COLUMNS) -> None:
    """Draws lines of text as a terminal with so many columns shows them into an image file."""
    rows = [line[start : start + columns] for line in lines for start in range(0, len(line) or 1, columns)]
    width = (max(len(row) for row in rows) + 4) * CHARACTER
    height = (len(rows) + 3) * LINE
    figure = Figure(figsize=(width, height), dpi=150, facecolor=DARK)
    style = {"family": "monospace", "fontsize": SIZE, "va": "top", "parse_math": False}
    left = 2 * CHARACTER / width
    figure.text(left, 1 - 0.6 * LINE / height, title, color=SOFT, **style)
    for number, row in enumerate(rows):
        figure.text(left, 1 - (number + 2.2) * LINE / height, row, color=LIGHT, **style)
    figure.savefig(path, facecolor=DARK)


def output_of(command: str, folder: Path) -> list[str]:
    """The lines that a ``dataproto`` command prints in a folder, the command itself first."""
    program = [Path(sys.executable).with_name("dataproto"), *shlex.split(command)[1:]]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stderr}")
    home = str(Path.home())
    told = done.stdout.replace(str(folder.resolve()), "~/first_hour").replace(home, "~")
    shown = (
        line for line in told.rstrip().splitlines() if not line.endswith(" ...")
    )  # on a terminal its end replaces it
    return [f"$ {command}", *shown]


def run_of_the_first_hour(folder: Path) -> list[str]:
    """What the run with a reward of one's own prints: the data and the functions are those of the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "make_dots.py"], cwd=folder, check=True)
    (command,) = re.findall(r"^dataproto grpo .*--reward mine.py:closeness --steps 20 .*$", page, re.MULTILINE)
    return output_of(command.replace("--steps 20", "--steps 150"), folder)


def plan_of_3b(folder: Path) -> list[str]:
    """What the plan prints for the published sizes, with the tokenizer and the image processor of the small model."""
    make_published_model(folder / "Qwen2.5-VL-3B-Instruct", "3b")
    return output_of(PLANNED, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images", help="of the pictures")
    parser.add_argument("--only", choices=(START, END, PLAN), help="make this picture alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, PLAN):
            console_picture(plan_of_3b(folder), options.folder / PLAN, "dataproto plan", WIDE)
        if options.only != PLAN:
            lines = run_of_the_first_hour(folder)
            first = next(number for number, line in enumerate(lines) if line.strip().startswith("1/150"))
            if options.only != END:
                console_picture(lines[: first + 10], options.folder / START, "dataproto grpo, at the start")
            if options.only != START:
                last = next(number for number, line in enumerate(lines) if line.strip().startswith("150/150"))
                console_picture(lines[last - 8 :], options.folder / END, "dataproto grpo, at the end")


if __name__ == "__main__":
    main()
