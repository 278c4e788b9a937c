"""Columns of data sets in no known schema, named by options."""

import json
import math
from decimal import Decimal
from itertools import islice

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dataproto.errors import InvalidConfig, InvalidRow
from helpers.geo3k_files import drawing, png
from recipes import classify, grpo, sft
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import conversation_rows, conversation_stream, read_conversation_row
from recipes.data.preferences import preference_rows
from recipes.data.problem_rows import load_rows, read_row
from rollout.prompts.images import load_image

KEYS = ColumnKeys(prompt_key="question", answer_key="label", image_key="figure")
ROW = {"question": "<image>Find x.", "label": "9", "figure": png(drawing(1)), "problem": "unused", "answer": "unused"}


def write_parquet(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_named_columns_of_a_parquet_file_are_read(tmp_path):
    row = load_rows(write_parquet(tmp_path / "a.parquet", ROW), instruction="Be short.", keys=KEYS)[0]
    assert row["prompt"] == [{"role": "user", "content": "<image>Find x. Be short."}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "9"}
    assert [load_image(image).size for image in row["images"]] == [(24, 16)]
    assert row["extra_info"]["question"] == "<image>Find x."


def test_a_named_answer_replaces_that_of_a_known_schema():
    raw = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "old"}, "label": "new"}
    row = read_row(raw, 0, keys=ColumnKeys(answer_key="label"))
    assert row["reward_model"]["ground_truth"] == "new"
    assert row["prompt"] == raw["prompt"]


def test_named_messages_may_end_with_the_answer():
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    row = read_row({"chat": chat}, 0, keys=ColumnKeys(messages_key="chat"))
    assert (row["prompt"], row["reward_model"]["ground_truth"]) == (chat[:1], "4")
    messages = read_row({"chat": chat[:1]}, 0, instruction="unused", keys=ColumnKeys(prompt_key="chat"))
    assert messages["prompt"] == chat[:1]  # the instruction is added to text only


def test_a_video_column_may_hold_one_or_several():
    one, two = ({"problem": "?", "clip": clip} for clip in ("a.mp4", ["a.mp4", "b.mp4"]))
    keys = ColumnKeys(video_key="clip")
    assert [read_row(raw, 0, keys=keys)["videos"] for raw in (one, two)] == [["a.mp4"], ["a.mp4", "b.mp4"]]


def test_a_class_is_read_by_its_name(tmp_path):
    """It was its number: ``sft`` learned to answer "1", and KTO took the label 0 for "undesirable" whatever its name."""
    kinds = datasets.ClassLabel(names=["good", "bad"])
    features = datasets.Features({"question": datasets.Value("string"), "kind": kinds, "label": kinds})
    rows = {"question": ["What?"] * 3, "kind": [1, 0, None], "label": [0, -1, 1]}
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    keys = ColumnKeys(prompt_key="question", answer_key="kind")
    problems = load_rows(file, keys=keys)
    assert [row["reward_model"]["ground_truth"] for row in problems] == ["bad", "good", None]
    assert [row["own_columns"]["label"] for row in problems] == ["good", None, "bad"]
    stream = conversation_stream(str(file), keys=keys)
    (_, _, raw), *_ = islice(stream.draws(0, False, 0), 1)
    for row in (conversation_rows(file, keys=keys)[0], stream.read_row(raw, 0)):
        assert row["prompt"][-1] == {"role": "assistant", "content": "bad"}
    with pytest.raises(InvalidRow, match="the label must be true or false, or 1 or 0, not 'good'"):
        preference_rows(file, keys=keys)[0]


def test_a_float_of_32_bits_is_the_number_that_was_written(tmp_path):
    """The truth 5.3 was 5.300000190734863, with which no answer agrees."""
    table = pyarrow.table({"problem": ["What?"], "answer": pyarrow.array([5.3], pyarrow.float32())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = load_rows(tmp_path / "a.parquet")
    assert row["reward_model"]["ground_truth"] == 5.3
    stream = conversation_stream(str(tmp_path / "a.parquet"), keys=ColumnKeys(prompt_key="problem"))
    (_, _, raw), *_ = islice(stream.draws(0, False, 0), 1)
    assert stream.read_row(raw, 0)["prompt"][-1]["content"] == "5.3"


@pytest.mark.parametrize(
    ("written", "read"),
    [([7.0, None], [7, None]), ([7.0, math.nan], [7, None]), ([7.0, 8.0], [7.0, 8.0]), ([7.5, None], [7.5, None])],
)
def test_integers_that_pandas_wrote_as_floats_are_integers(written, read, tmp_path):
    """The answer 7 was learned as 7.0, because another row of the column had none."""
    table = pyarrow.table({"problem": ["What?", "And?"], "n": pyarrow.array(written)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = load_rows(tmp_path / "a.parquet", keys=ColumnKeys(prompt_key="problem", answer_key="n"))
    assert [repr(row["reward_model"]["ground_truth"]) for row in rows] == [repr(value) for value in read]


def test_conversations_are_read_from_named_columns(tmp_path):
    text = {"question": "What?", "label": "A cat.", "figure": "a.png"}
    chat = {"chat": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A cat."}]}
    expected = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]
    file = write_jsonl(tmp_path / "b.jsonl", chat)
    assert conversation_rows(file, keys=ColumnKeys(messages_key="chat"))[0]["prompt"] == expected
    expected[0]["content"] = "<image>What?"  # a question without markers has its picture in front of it
    row = conversation_rows(write_jsonl(tmp_path / "a.jsonl", text), keys=KEYS)[0]
    assert (row["prompt"], row["images"]) == (expected, ["a.png"])
    stream = conversation_stream(str(tmp_path / "a.jsonl"), keys=KEYS)
    _, place, raw = next(stream.draws(0, False, 0))
    assert stream.read_row(raw, place)["prompt"] == expected
    assert read_row(text, 0, instruction="", keys=KEYS)["prompt"] == expected[:1]


@pytest.mark.parametrize("number", [3, Decimal(3), np.int64(3)])
def test_an_answer_may_be_a_number(number):
    """Decimals, as tables of databases have them, were refused."""
    row = read_conversation_row({"question": "How many?", "label": number}, 0, keys=KEYS)
    assert row["prompt"][-1] == {"role": "assistant", "content": "3"}


def test_a_column_that_the_data_lacks_is_named_with_those_it_has(tmp_path):
    parquet = write_parquet(tmp_path / "a.parquet", ROW)
    with pytest.raises(InvalidConfig, match="--prompt-key ask: a has no such column; it has question, label, figure"):
        load_rows(parquet, keys=ColumnKeys(prompt_key="ask"))
    lines = write_jsonl(tmp_path / "b.jsonl", {"question": "a"}, {"question": "b", "label": "1"})
    assert load_rows(lines, keys=ColumnKeys("question", answer_key="label"))[1]["reward_model"]["ground_truth"] == "1"
    with pytest.raises(InvalidConfig, match="--image-key figure: b has no such column; it has question, label"):
        load_rows(lines, keys=KEYS)
    with pytest.raises(InvalidConfig, match="--image-key figure: b has no such column; it has question, label"):
        conversation_stream(str(lines), keys=ColumnKeys(image_key="figure"))


def test_a_row_without_the_question_is_named():
    with pytest.raises(InvalidRow, match=r"row 7: no 'question' among its columns \['label'\]"):
        read_row({"label": "9"}, 7, keys=KEYS)


def test_the_command_lines_take_them():
    model = ["--preset", "any", "--model-path", "a", "--data-path", "b"]
    config = grpo.parse([*model, "--prompt-key", "question", "--image-key", "figure", "--answer-key", "label"])
    assert config.data.keys == KEYS
    assert sft.parse([*model, "--messages-key", "chat"]).data.keys == ColumnKeys(messages_key="chat")
    labelled = classify.parse([*model, "--image-key", "figure", "--answer-key", "kind"]).data
    assert (labelled.image_column, labelled.label_column) == ("figure", "kind")
    assert classify.parse([*model, "--label-column", "kind"]).data.label_column == "kind"
    with pytest.raises(InvalidConfig, match="both name the question"):
        grpo.parse([*model, "--prompt-key", "a", "--messages-key", "b"])
    for recipe in (grpo, sft):
        with pytest.raises(InvalidConfig, match=r"^--prompt-key without --data-path"):
            recipe.parse(["--prompt-key", "a"])
