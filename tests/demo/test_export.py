"""``python -m recipes.demo.parquet`` writes a parquet file that `load_rows` reads."""

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from helpers.tiny_prompts import tiny_builder
from recipes.data.drawn_rows import ProblemRows
from recipes.data.problem_rows import load_rows
from recipes.demo.parquet import main
from recipes.demo.problems import make_problem


def test_file_has_the_layout_of_geometry3k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "test.parquet"
    arguments = ["--output", str(file), "--rows", "5", "--level", "3", "--seed", "2", "--split", "test"]
    assert main(arguments) == 0
    assert f"{file}: 5 problems of level 3, split test" in capsys.readouterr().out
    table = pq.read_table(file)
    assert table.column_names == ["images", "problem", "answer"]
    for index, row in enumerate(table.to_pylist()):
        problem = make_problem(index, 3, 2, "test")
        assert (row["problem"], row["answer"]) == (problem.text, problem.answer)
        (picture,) = row["images"]
        assert set(picture) == {"bytes", "path"}
        assert Image.open(io.BytesIO(picture["bytes"])).tobytes() == problem.image.tobytes()
    assert [path.name for path in file.parent.iterdir()] == ["test.parquet"]


def test_datasets_reads_the_pictures(tmp_path: Path) -> None:
    from datasets import load_dataset

    assert main(["--output", str(tmp_path / "a.parquet"), "--rows", "3"]) == 0
    table = load_dataset(
        "parquet", data_files=str(tmp_path / "a.parquet"), split="train", cache_dir=str(tmp_path / "c")
    )
    assert table[1]["images"][0].size == (56, 56)


def test_loader_and_prompt_builder_read_the_file_as_they_read_the_drawn_rows(tmp_path: Path) -> None:
    file = tmp_path / "drawn.parquet"
    assert main(["--output", str(file), "--rows", "4", "--level", "2"]) == 0
    read, drawn = load_rows(file, instruction="Look."), ProblemRows(2, instruction="Look.")
    assert len(read) == 4
    builder = tiny_builder()
    one, other = builder(read[:]), builder(drawn[:4])
    for name in ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids"):
        assert torch.equal(one[name], other[name])
    for row in range(4):
        pixels = [data["multi_modal_inputs"][row]["pixel_values"] for data in (one, other)]
        assert torch.equal(*pixels)
        assert one["reward_model"][row] == other["reward_model"][row]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "3"], "Missing"),
        (["--output", "a.parquet", "--nope", "1"], "Unrecognized options: --nope"),
        (["--output", "a.parquet", "--rows", "many"], "--rows"),
        (["--output", "a.parquet", "--rows", "0"], "rows=0: must be at least 1"),
        (["--output", "a.parquet", "--level", "9"], "level=9 is unknown"),
        (["--output", "a.parquet", "--split", "dev"], "'dev'"),
        (["--output", "a.csv"], "must be a file"),
    ],
)
def test_errors_exit_with_status_2_and_write_no_file(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--output", str(tmp_path / "file" / "a.parquet"), "--rows", "1"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")
