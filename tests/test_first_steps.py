"""docs/first_steps.ipynb: it runs, and its committed outputs are of the kinds that a run gives.

After a change, `jupyter execute --inplace docs/first_steps.ipynb` writes the outputs again.
"""

from itertools import groupby
from pathlib import Path

import nbclient
import nbformat
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "first_steps.ipynb"


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """For each cell of code the media types of its outputs, without what is written to stderr.

    Text that a cell writes in several pieces counts once: where the kernel cuts it depends on the time.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [[output for output in cell.outputs if output.get("name") != "stderr"] for cell in cells]
    kinds = [[",".join(sorted(output.get("data", ["text"]))) for output in outputs] for outputs in shown]
    return [[kind for kind, _ in groupby(cell)] for cell in kinds]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parents[1]), prepend=":")
    done = nbclient.NotebookClient(nbformat.read(PAGE, as_version=4), timeout=240).execute()
    assert kinds(done) == kinds(nbformat.read(PAGE, as_version=4))
    shown = [kind for cell in kinds(done) for kind in cell]
    assert sum("image/png" in kind for kind in shown) == 3  # a problem, a group, a curve
    scores = [
        line for cell in done.cells for out in cell.get("outputs", []) for line in out.get("text", "").splitlines()
    ]
    assert any(line.startswith("score ") for line in scores)


def test_text_written_in_pieces_counts_once() -> None:
    pieces = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a", "b")]
    picture = nbformat.v4.new_output("display_data", {"image/png": ""})
    warning = nbformat.v4.new_output("stream", name="stderr", text="w")
    cell = nbformat.v4.new_code_cell("", outputs=[pieces[0], warning, pieces[1], picture])
    assert kinds(nbformat.v4.new_notebook(cells=[cell])) == [["text", "image/png"]]


def test_its_outputs_are_small_and_quiet() -> None:
    assert PAGE.stat().st_size < 150_000
    outputs = [out for cell in nbformat.read(PAGE, as_version=4).cells for out in cell.get("outputs", [])]
    assert all(out.get("name") != "stderr" for out in outputs)
