import json
from itertools import islice

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder
from datasets.utils import are_progress_bars_disabled

from dataproto.errors import FileFormatError, InvalidConfig, InvalidRow
from helpers.geo3k_files import drawing, geometry3k, png, write_geometry3k
from helpers.tiny_prompts import tiny_builder
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import conversation_stream
from recipes.data.loader import check_row
from recipes.data.problem_rows import INSTRUCTION, load_rows, read_row


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_the_layout_of_geometry3k_loads_as_it_is(tmp_path):
    file = write_geometry3k(tmp_path / "geometry3k" / "data" / "train-00000-of-00001.parquet", geometry3k(3))
    row = load_dataset("parquet", data_files=str(file), split="train")[0]
    assert row["images"][0].size == (24, 16)  # `datasets` decodes the pictures, as in the original
    rows = load_rows(tmp_path / "geometry3k")
    assert len(rows) == 3
    row = rows[2]
    assert row["prompt"] == [{"role": "user", "content": f"<image>Find x of triangle 2. {INSTRUCTION}"}]
    assert row["images"] == [{"bytes": png(drawing(2)), "path": None}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 2,
        "answer": "2",
        "question": "<image>Find x of triangle 2.",
    }
    assert (row["data_source"], row["ability"], row["index"]) == ("geometry3k", "math", 2)
    batch = tiny_builder(max_prompt_length=1024)([rows[0], rows[2]])
    assert np.array_equal(np.asarray(batch["multi_modal_data"][1]["image"][0]), np.asarray(drawing(2)))
    assert batch["reward_model"][1]["ground_truth"] == "2"


def test_verls_schema_is_not_changed(tmp_path):
    source = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": png(drawing(1)), "path": None}],
        "ability": "geometry",
        "reward_model": {"style": "rule", "ground_truth": "65"},
        "extra_info": {"split": "test", "index": 9, "answer": "65", "question": "Find x."},
    }
    file = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([source]), file)
    row = load_rows(file, split="test", data_source="unused")[0]
    assert {name: row[name] for name in source} == source
    assert row["index"] == 0
    assert len(tiny_builder()([row])) == 1


def test_typed_messages_load_with_parquets_empty_keys(tmp_path):
    source = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "text": None, "image": {"bytes": png(drawing(1)), "path": None}},
                    {"type": "text", "text": "Find x.", "image": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "It is 9.", "image": None}]},
        ],
        "solution": "9",
        "level": 2,
    }
    file = tmp_path / "chat.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([source]), file)
    row = load_rows(file)[0]
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert row["reward_model"]["ground_truth"] == "9"
    assert row["extra_info"]["level"] == 2
    assert row["data_source"] == "chat"
    batch = tiny_builder()([row])
    assert batch["multi_modal_data"][0]["image"][0].size == (24, 16)


def test_a_json_file_with_relative_paths(tmp_path):
    (tmp_path / "pictures").mkdir()
    drawing(3).save(tmp_path / "pictures" / "3.png")
    row = {"prompt": "<image>Find x.", "image": "pictures/3.png", "answer": "3"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    loaded = load_rows(str(tmp_path / "problems.jsonl"))[0]
    assert loaded["prompt"] == [{"role": "user", "content": "<image>Find x."}]
    batch = tiny_builder()([loaded])
    assert np.array_equal(np.asarray(batch["multi_modal_data"][0]["image"][0]), np.asarray(drawing(3)))


def test_a_folder_has_splits_and_shards(tmp_path):
    rows = geometry3k(7)
    write_geometry3k(tmp_path / "train-00000-of-00002.parquet", rows[:3])
    write_geometry3k(tmp_path / "train-00001-of-00002.parquet", rows[3:5])
    write_geometry3k(tmp_path / "test.parquet", rows[5:])
    train, test = load_rows(tmp_path, split="train"), load_rows(tmp_path, split="test")
    assert [row["reward_model"]["ground_truth"] for row in train] == list("01234")
    assert [row["index"] for row in train[:]] == [0, 1, 2, 3, 4]
    assert [row["reward_model"]["ground_truth"] for row in test] == list("56")
    assert train[-1]["reward_model"]["ground_truth"] == "4"
    both = load_rows([tmp_path / "test.parquet", tmp_path / "train-00001-of-00002.parquet"])
    assert [row["reward_model"]["ground_truth"] for row in both] == list("5634")
    with pytest.raises(IndexError):
        train[5]
    with pytest.raises(InvalidConfig, match=r"no file of the split 'validation'; it has test\.parquet"):
        load_rows(tmp_path, split="validation")


def test_a_broken_image_does_not_affect_other_rows(tmp_path):
    rows = load_rows(write_geometry3k(tmp_path / "a.parquet", geometry3k(2, bad={0: [{"bytes": b"x", "path": None}]})))
    assert len(tiny_builder()([rows[1]])) == 1
    with pytest.raises(InvalidRow, match="row 0"):
        tiny_builder()([rows[0]])


def test_the_instruction_is_configurable(tmp_path):
    file = write_geometry3k(tmp_path / "a.parquet", geometry3k(1))
    content = "<image>Find x of triangle 0."
    assert load_rows(file, instruction="Be short.")[0]["prompt"][0]["content"] == f"{content} Be short."
    assert load_rows(file, instruction="")[0]["prompt"][0]["content"] == content


def test_names_of_files_may_end_in_capitals(tmp_path):
    row = {"problem": "Find x.", "answer": "9"}
    Dataset.from_list([row]).to_parquet(tmp_path / "train.PARQUET")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "train.JSONL").write_text(json.dumps(row) + "\n")
    (tmp_path / "array.Json").write_text(json.dumps([row]))
    for path in ("train.PARQUET", "lines/train.JSONL", "lines", "array.Json"):
        assert len(load_rows(tmp_path / path)) == 1, path
    for path in ("train.PARQUET", "lines"):
        assert next(iter(conversation_stream(str(tmp_path / path)).stream))["answer"] == "9"
    with pytest.raises(InvalidConfig, match=r"gone\.PARQUET: no such file or folder$"):
        load_rows("gone.PARQUET")


def test_loading_errors_are_one_line(tmp_path):
    with pytest.raises(
        InvalidConfig, match=r"gone\.parquet@train: no such file or folder: a path has no split after @"
    ):
        load_rows(tmp_path / "gone.parquet@train")
    with pytest.raises(InvalidConfig, match=r"gone\.parquet: no such file or folder$"):
        load_rows(tmp_path / "gone.parquet")
    with pytest.raises(InvalidConfig, match="no such file or folder"):
        load_rows("gone.parquet")
    (tmp_path / "a.csv").write_text("problem,answer\n")
    with pytest.raises(
        InvalidConfig, match=r"must end in \.parquet, .* convert it by datasets: .* load_dataset\('csv'"
    ):
        load_rows(tmp_path / "a.csv")
    saved = Dataset.from_dict({"problem": ["Find x."], "answer": ["9"]})
    for name, rows in (("saved", saved), ("splits", DatasetDict(train=saved))):
        rows.save_to_disk(str(tmp_path / name))
        with pytest.raises(InvalidConfig, match=r"no file of the split 'train'; .*load_from_disk.*to_parquet"):
            load_rows(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidConfig, match="no parquet or JSON file"):
        load_rows(tmp_path / "empty")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    with pytest.raises(FileFormatError, match="cannot be read as parquet"):
        load_rows(tmp_path / "broken.parquet")
    with pytest.raises(InvalidConfig, match="no data set given"):
        load_rows([])


@pytest.mark.parametrize("name", ["a.json", "a.parquet"])
def test_a_broken_file_is_told_without_the_lines_of_its_reader(name, tmp_path, capfd, caplog):
    """``datasets`` drew a bar of no rows, and logged the error, before the one line that tells it."""
    good = Dataset.from_dict({"problem": ["Find x."] * 2, "answer": ["9", "3"]})
    good.to_json(tmp_path / "a.json", lines=False) if name == "a.json" else good.to_parquet(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    capfd.readouterr()
    assert len(load_rows(tmp_path / name)) == 2
    half = len(whole) // 2
    (tmp_path / name).write_bytes(whole[:half] if name == "a.json" else b"PAR1" + bytes(half) + whole[4 + half :])
    with pytest.raises(FileFormatError, match="cannot be read as"):
        load_rows(tmp_path / name)
    assert capfd.readouterr().err == ""
    assert not caplog.records
    assert not are_progress_bars_disabled()


def test_a_hub_name_is_loaded_with_datasets(monkeypatch):
    asked = []

    def load(name):
        asked.append(name)
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset_builder", load)
    with pytest.raises(InvalidConfig, match="could not be loaded from the hub: offline"):
        load_rows("hiyouga/geometry3k", split="test")
    assert asked == ["hiyouga/geometry3k"]


def test_rows_of_the_hub_have_the_name_of_the_data_set(monkeypatch, tmp_path):
    file = write_geometry3k(tmp_path / "a.parquet", geometry3k(1))
    builder = load_dataset_builder("parquet", data_files=str(file), cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name: builder)
    row = load_rows("hiyouga/geometry3k")[0]
    assert row["data_source"] == "hiyouga/geometry3k"
    assert row["images"] == [{"bytes": png(drawing(0)), "path": None}]
    stream = conversation_stream("hiyouga/geometry3k", keys=ColumnKeys(prompt_key="problem"))
    ((_, _, raw),) = islice(stream.draws(0, False, 0), 1)
    assert stream.read_row(raw, 0)["images"] == row["images"]


def test_a_row_of_unknown_schema_raises_an_error_that_names_it():
    with pytest.raises(
        InvalidRow, match=r"row 5: no 'prompt', 'messages' or 'problem' among its columns \['text'\]: .* --prompt-key"
    ):
        read_row({"text": "x"}, index=5)


def test_the_answer_in_the_messages_becomes_the_ground_truth():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    row = read_row({"messages": messages}, index=0)
    assert row["prompt"] == messages[:1]
    assert row["reward_model"]["ground_truth"] == "4"


def test_blank_lines_are_no_rows(tmp_path):
    row = json.dumps({"problem": "Find x.", "answer": "9"})
    (tmp_path / "a.jsonl").write_text(f"\n{row}\n\n  \n{row}\n[1]\n\n", encoding="utf-8")
    rows = load_rows(tmp_path / "a.jsonl")
    assert len(rows) == 3
    assert rows[1]["reward_model"]["ground_truth"] == "9"
    with pytest.raises(InvalidRow, match=r"row 2: line 6 of .*a.jsonl is not a JSON object"):
        rows[2]


def test_of_several_files_a_row_that_cannot_be_used_names_its_own(tmp_path):
    row = {"problem": "Find x.", "answer": "9"}
    for name, second in (("train-0.jsonl", row), ("train-1.jsonl", {"answer": "9"}), ("train-2.jsonl", [1])):
        (tmp_path / name).write_text(f"{json.dumps(row)}\n\n{json.dumps(second)}\n", encoding="utf-8")
    Dataset.from_list([row | {"images": ["gone.png"]}]).to_parquet(tmp_path / "train-3.parquet")
    rows = load_rows(tmp_path)
    assert rows[1]["where"] == f"line 3 of {tmp_path}/train-0.jsonl"
    for place, says in ((3, "line 3 of .*/train-1.jsonl: no 'prompt'"), (5, "line 3 of .*/train-2.jsonl is not a")):
        with pytest.raises(InvalidRow, match=f"^row {place}: {says}"):
            rows[place]
    with pytest.raises(InvalidRow, match=r"^row 6: row 0 of .*/train-3.parquet: image .*gone.png"):
        check_row(rows, 6, tiny_builder())
    assert "where" not in tiny_builder()([rows[0]]).names()


def test_a_parquet_file_without_rows_is_named(tmp_path):
    table = pyarrow.table({"problem": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=r"a\.parquet has no rows"):
        load_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_an_empty_file_is_named_before_its_columns(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(InvalidConfig, match=rf"{name} has no rows"):
        load_rows(tmp_path / name, keys=ColumnKeys(prompt_key="question"))
