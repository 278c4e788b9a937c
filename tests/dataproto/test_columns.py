"""The table of well-known columns."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto import COLUMNS, DataProto, require
from dataproto.errors import MissingColumn


def test_the_table_is_well_formed() -> None:
    for name, column in COLUMNS.items():
        assert name == column.name
        for letters in column.shapes:
            assert set(letters) <= {"B", "P", "R", "L", "4", "n", "M", "k"}
            assert letters[0] == "B"
        assert column.dtype == "object" or all(getattr(torch, each) for each in column.dtype.split(" or "))
        assert column.written_by
        assert column.read_by
        assert column.meaning


def test_require_is_silent_where_all_is_there() -> None:
    data = DataProto.from_dict({"responses": torch.zeros(1, 2)}, {"uid": ["a"]})
    assert require(data) is None
    assert require(data, "uid", "responses") is None


def test_require_lists_what_is_absent_present_and_who_writes_it() -> None:
    data = DataProto.from_dict({"responses": torch.zeros(1, 2)}, {"uid": np.array(["a"])})
    for error in (MissingColumn, KeyError, AssertionError):
        with pytest.raises(error) as caught:
            require(data, "uid", "values", "mine")
        assert str(caught.value) == (
            "missing columns: 'values' (written by CriticWorker.values), 'mine'; present: 'responses', 'uid'"
        )
    with pytest.raises(MissingColumn, match="missing column: 'x'; present: no columns"):
        require(DataProto(), "x")


def test_the_document_shows_the_table() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_columns_table.py"))
    lines = [line for line in script["DOCUMENT"].read_text().splitlines() if line.startswith("|")]
    assert lines == script["columns_table"](), "docs/columns.md is behind: run `python scripts/write_columns_table.py`"
    assert (
        lines[2]
        == "| `prompts` | int64 | (B, P) | RolloutWorker.generate | rewards, reports | prompt tokens, left-padded |"
    )
    assert len(lines) == len(COLUMNS) + 2
