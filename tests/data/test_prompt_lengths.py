"""Lengths of prompts are counted once, and again after anything that they depend on has changed."""

import json
import os
from importlib.metadata import PackageNotFoundError, version

import pytest

from helpers.geo3k_files import drawing, geometry3k, write_geometry3k
from helpers.tiny_prompts import tiny_builder
from recipes.data.column_keys import ColumnKeys
from recipes.data.loader import drop_overlong
from recipes.data.problem_rows import load_rows
from recipes.data.prompt_lengths import cache_folder, prompt_lengths


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def builder(monkeypatch):
    """A builder that notes which prompts it counts."""
    return counting(tiny_builder(max_prompt_length=1024), monkeypatch)


def counting(made, monkeypatch):
    made.counted = []
    count = made.prompt_length
    monkeypatch.setattr(
        made, "prompt_length", lambda row: made.counted.append(row["index"]) or count(row), raising=True
    )
    return made


def test_an_unchanged_file_is_not_counted_again(tmp_path, builder):
    file = write_geometry3k(tmp_path / "train.parquet", geometry3k(3, bad={1: [{"bytes": b"x", "path": None}]}))
    first = prompt_lengths(load_rows(file), builder)
    assert builder.counted == [0, 1, 2]
    assert first[1] is None  # its image is broken
    assert first[0] == builder.prompt_length(load_rows(file)[0])
    builder.counted.clear()
    assert prompt_lengths(load_rows(file), builder) == first
    assert builder.counted == []
    assert [len(part) for part in drop_overlong(load_rows(file), builder)] == [3, 0]
    assert builder.counted == []


def test_lengths_are_kept_where_this_package_is_not_installed(tmp_path, builder, monkeypatch):
    """A checkout on ``PYTHONPATH`` has no metadata."""

    def of_others(name):
        if name == "dataproto-vlm":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("recipes.data.prompt_lengths.version", of_others)
    file = write_geometry3k(tmp_path / "train.parquet", geometry3k(2))
    assert prompt_lengths(load_rows(file), builder) == prompt_lengths(load_rows(file), builder)
    assert builder.counted == [0, 1]


def test_whatever_lengths_depend_on_has_them_counted_again(tmp_path, builder, monkeypatch):
    file = write_geometry3k(tmp_path / "train.parquet", geometry3k(2))
    lengths = prompt_lengths(load_rows(file), builder)
    builder.counted.clear()
    longer = prompt_lengths(load_rows(file, instruction="Be short. " * 9), builder)  # text
    assert builder.counted == [0, 1]
    assert all(new != old for new, old in zip(longer, lengths, strict=True))
    larger = counting(tiny_builder(max_prompt_length=1024, min_pixels=56 * 56), monkeypatch)  # image processor
    assert prompt_lengths(load_rows(file), larger) > lengths
    for change in (
        lambda: load_rows(file, keys=ColumnKeys(answer_key="answer")),  # how rows are read
        lambda: os.utime(file, ns=(1, 1)) or load_rows(file),  # time of change
        lambda: write_geometry3k(file, geometry3k(4)) and load_rows(file),  # content
    ):
        builder.counted.clear()
        rows = change()
        prompt_lengths(rows, builder)
        assert len(builder.counted) == len(rows)
    monkeypatch.setattr(builder, "template_arguments", {"enable_thinking": False})
    builder.counted.clear()
    prompt_lengths(load_rows(file), builder)
    assert builder.counted == [0, 1, 2, 3]
    monkeypatch.setattr(builder.tokenizer, "chat_template", builder.tokenizer.chat_template + " ")
    builder.counted.clear()
    prompt_lengths(load_rows(file), builder)
    assert builder.counted == [0, 1, 2, 3]


def test_images_in_files_of_their_own_are_checked(tmp_path, builder):
    lines = [{"problem": "<image>?", "answer": "1", "images": [name]} for name in ("a.png", "b.png")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawing(1).save(tmp_path / "a.png")
    assert prompt_lengths(load_rows(tmp_path), builder)[1] is None  # b.png is missing
    small = prompt_lengths(load_rows(tmp_path), builder)
    assert builder.counted == [0, 1]
    drawing(1, (240, 160)).save(tmp_path / "a.png")
    drawing(2).save(tmp_path / "b.png")
    large = prompt_lengths(load_rows(tmp_path), builder)
    assert large[0] > small[0]
    assert large[1] == small[0]


def test_a_broken_cache_is_replaced_and_a_missing_one_is_no_error(tmp_path, builder, monkeypatch):
    file = write_geometry3k(tmp_path / "train.parquet", geometry3k(2))
    lengths = prompt_lengths(load_rows(file), builder)
    (kept,) = cache_folder().iterdir()
    for broken in ("", "[]", '{"lengths": [1]}', '{"lengths": [1], "images": {}}'):
        kept.write_text(broken)
        assert prompt_lengths(load_rows(file), builder) == lengths
    assert json.loads(kept.read_text())["lengths"] == lengths
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be written below it
    assert prompt_lengths(load_rows(file), builder) == lengths


def test_rows_that_are_not_from_files_are_counted_each_time(builder):
    rows = [{"prompt": "hello", "index": 0}]
    assert prompt_lengths(rows, builder) == prompt_lengths(rows, builder)
    assert builder.counted == [0, 0]
    assert not cache_folder().exists()
