import base64
import gzip
import io
import json
import re
from itertools import islice

import datasets
import numpy as np
import pytest
from PIL import Image
from pyarrow import Table
from pyarrow.parquet import write_table

from dataproto.errors import FileFormatError, InvalidConfig, InvalidRow
from recipes.data.column_keys import KNOWN, ColumnKeys
from recipes.data.conversations import (
    conversation_rows,
    conversation_stream,
    last_questions,
    read_conversation_row,
)
from recipes.data.loader import draws
from recipes.data.mixture import Mixture
from recipes.data.problem_rows import load_rows
from recipes.data.tables import JsonRows, StreamRows
from rollout.prompts.images import load_image
from rollout.prompts.messages import is_learned, read_conversation


def png(colour=(200, 10, 30)):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(buffer, format="PNG")
    return buffer.getvalue()


URI = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
ASKED, ANSWERED = {"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}
TYPED = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": URI}}, {"type": "text", "text": "What?"}],
}
SCHEMAS = {
    "messages": {"messages": [ASKED, ANSWERED], "images": [URI]},
    "typed parts": {"messages": [TYPED, ANSWERED]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}],
        "image": URI,
    },
    "prompt and completion": {"prompt": [ASKED], "completion": [ANSWERED], "images": [URI]},
    "prompt and answer": {"prompt": "<image>What?", "answer": "A cat.", "images": [URI]},
    "the_cauldron": {"images": [URI], "texts": [{"user": "What?", "assistant": "A cat.", "source": "pets"}]},
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_schema_gives_the_same_conversation(schema, tmp_path):
    row = read_conversation_row(SCHEMAS[schema], 0, "here")
    chat = read_conversation(row["prompt"], {"image": row["images"]})
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert chat.messages == [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    assert load_image(chat.media[0]).getpixel((0, 0)) == (200, 10, 30)
    assert row["data_source"] == ("pets" if schema == "the_cauldron" else "here")


@pytest.mark.parametrize(("who", "said"), [("from", "content"), ("role", "value")])
def test_names_of_roles_and_of_texts_may_be_mixed(who, said):
    turns = [{who: "human", said: "How many?"}, {who: "gpt", said: "3", "weight": 0}]
    assert read_conversation_row({"conversations": turns}, 0)["prompt"] == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "3", "weight": 0},
    ]


def test_answers_in_the_prompt_of_an_answer_are_not_learned():
    """They were, while TRL learns the completion only."""
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    raw = {"prompt": [*turns, {"role": "user", "content": "What?"}], "completion": [ANSWERED]}
    for keys, row in ((KNOWN, raw), (ColumnKeys(prompt_key="q", answer_key="a"), {"q": raw["prompt"], "a": "A cat."})):
        read = read_conversation_row(row, 0, keys=keys)["prompt"]
        assert [message["content"] for message in read if is_learned(message)] == ["A cat."]
    assert is_learned(
        read_conversation_row({"prompt": "What?", "answer": "A cat.", "history": [["Hi.", "Hello."]]}, 0)["prompt"][1]
    )


def test_a_cauldron_row_is_one_conversation_about_all_its_images():
    texts = [{"user": f"q{i}", "assistant": f"a{i}", "source": "s"} for i in range(3)]
    row = read_conversation_row({"images": [URI, URI], "texts": texts}, 0)
    assert [turn["content"] for turn in row["prompt"]] == ["<image><image>q0", "a0", "q1", "a1", "q2", "a2"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"text": "x"}, "row 4: no 'messages'"),
        ({"prompt": "x"}, "no 'messages'"),
        ({"texts": [{"user": "x"}], "images": []}, r"texts\[0\] lacks"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "from 'robot'"),
        ({"messages": ["hi"]}, "a turn must be a mapping"),
        ({"texts": 5}, r"texts\[0\] lacks a 'user' or an 'assistant': 5"),
        ({"prompt": "x", "answer": [2, 3]}, r"the answer must be text, a number or messages, not \[2, 3\]"),
    ],
)
def test_rows_of_unknown_schemas_raise_an_error_with_their_number(raw, reason):
    with pytest.raises(InvalidRow, match=reason):
        read_conversation_row(raw, 4)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_types_in_json_lines_may_vary_by_row(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", SCHEMAS.values())
    rows = conversation_rows(path)
    assert len(rows) == len(SCHEMAS)
    assert [read_conversation(row["prompt"], {"image": row["images"]}).messages[-1]["content"] for row in rows] == [
        "A cat."
    ] * 6
    with path.open("a") as file:
        file.write("{broken\n[1]\n")
    lines = JsonRows(path)
    with pytest.raises(InvalidRow, match=r"line 7 of .* is not JSON"):
        lines[6]
    with pytest.raises(InvalidRow, match=r"line 8 of .* is not a JSON object"):
        lines[7]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "lines.json"])
def test_json_keeps_the_types_of_its_values_also_as_a_stream(name, tmp_path):
    answers = ["2021-03-04", "1999-12-31T08:00:00", 5, 2.5, "5", "\u00e9\u4e2d\U0001f600"]
    rows = [{"prompt": "Which?", "answer": answer} for answer in answers]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    text = json.dumps(rows, indent=1, ensure_ascii=False) if name == "a.json" else lines
    (tmp_path / name).write_text(f"\ufeff{text}\n", encoding="utf-8")
    assert [row["reward_model"]["ground_truth"] for row in load_rows(tmp_path / name)] == answers
    learnt = [row["prompt"][-1]["content"] for row in conversation_rows(tmp_path / name)]
    stream = conversation_stream(str(tmp_path / name))
    streamed = [stream.read_row(raw, place)["prompt"][-1]["content"] for _, place, raw in islice(draws(stream, 0), 6)]
    assert learnt == [str(answer) for answer in answers]
    assert sorted(streamed) == sorted(learnt)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_of_the_hub_keeps_the_types_of_its_values(name, tmp_path, monkeypatch):
    rows = [{"prompt": "Which?", "answer": answer} for answer in ("2021-03-04", 5, 2.5)]
    text = json.dumps(rows) if name == "a.json" else "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    files_of_hub(monkeypatch, tmp_path, {"train": [name, name]})
    assert [row["reward_model"]["ground_truth"] for row in load_rows("org/rows")] == 2 * ["2021-03-04", 5, 2.5]
    assert [row["prompt"][-1]["content"] for row in conversation_rows("org/rows")][3:] == ["2021-03-04", "5", "2.5"]
    stream = conversation_stream("org/rows")
    read = [stream.read_row(raw, place) for _, place, raw in islice(stream.draws(0, False, 0), 6)]
    assert [row["prompt"][-1]["content"] for row in read] == 2 * ["2021-03-04", "5", "2.5"]
    for opened in (conversation_rows, conversation_stream):
        with pytest.raises(InvalidConfig, match=r"has no split 'test'; it has train"):
            opened("org/rows", "test")


def test_a_broken_line_of_the_hub_is_named_by_its_file_there(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "a"}\n{broken\n')
    files_of_hub(monkeypatch, tmp_path, {"train": ["a.jsonl"]})
    rows = conversation_rows("org/rows")
    with pytest.raises(InvalidRow, match=r"row 1: line 2 of .*/a\.jsonl is not JSON"):
        rows[1]


def files_of_hub(monkeypatch, folder, splits):
    """Makes any name of the hub that of local files, with the builder that `datasets` has for them."""
    files = {split: [str(folder / name) for name in names] for split, names in splits.items()}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(folder / "cache"))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda name: builder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1},, {"a": 2}]', "Expecting value"),
        ('[{"a": 1} {"a": 2}]', "Expecting ',' or ']'"),
        ('[{"a": 1}', "Expecting ',' or ']'"),
        ('[{"a": 1}] more', "Extra data"),
        ('{"data":\n[{"a": 1}]}', "it must be an array of objects, or have one object on each line"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_json_that_is_no_list_of_rows_is_named_with_the_place(text, reason, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileFormatError, match=rf"a\.json cannot be read as json.*{re.escape(reason)}"):
        conversation_rows(tmp_path / "a.json")


def test_a_line_of_a_stream_that_is_no_row_can_be_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "a"}\n{broken\n' + "[" * 100_000)
    stream = conversation_stream(str(tmp_path / "a.jsonl"))
    for _, place, raw in islice(stream.draws(0, False, 0), 1, 3):
        with pytest.raises(InvalidRow, match=rf"row {place}: line {place + 1} of .*a\.jsonl is not JSON"):
            stream.read_row(raw, place)


def test_images_in_parquet_stay_bytes_until_they_are_decoded(tmp_path):
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "texts": [{"user": datasets.Value("string"), "assistant": datasets.Value("string")}],
        }
    )
    table = datasets.Dataset.from_list(
        [{"images": [Image.new("RGB", (16, 16), "blue")], "texts": [{"user": "q", "assistant": "a"}]}],
        features=features,
    )
    table.to_parquet(tmp_path / "train.parquet")
    row = conversation_rows(tmp_path)[0]
    assert row["images"][0]["bytes"].startswith(b"\x89PNG")
    assert load_image(row["images"][0]).getpixel((0, 0)) == (0, 0, 255)


def test_a_stream_yields_every_row_once_per_epoch_and_resumes_anywhere(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(10)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    stream = conversation_stream(str(path), buffer=4)
    drawn = list(islice(draws(stream, seed=5), 25))
    for epoch in range(2):
        assert sorted(place for _, place, _ in drawn[10 * epoch : 10 * epoch + 10]) == list(range(10))
        for block in ((0, 4), (4, 8), (8, 10)):
            places = [place for _, place, _ in drawn[10 * epoch + block[0] : 10 * epoch + block[1]]]
            assert sorted(places) == list(range(*block))
    assert [place for _, place, _ in drawn[:10]] != [place for _, place, _ in drawn[10:20]]
    for start in (0, 3, 4, 9, 10, 13, 20):
        assert list(islice(draws(stream, seed=5, start=start), 25 - start)) == drawn[start:]
    uid, place, raw = drawn[7]
    assert stream.read_row(raw, place)["prompt"][0]["content"] == f"q{place}"
    assert uid == f"0-{place}"
    in_order = list(islice(draws(stream, seed=5, shuffle=False), 12))
    assert [place for _, place, _ in in_order] == [*range(10), 0, 1]


def test_an_empty_stream_raises_an_error():
    with pytest.raises(InvalidConfig, match="no rows"):
        next(draws(StreamRows([], None, read_conversation_row), 0))


def test_a_mixture_draws_by_weight_and_resumes_anywhere():
    mixture = Mixture(
        [["a0", "a1", "a2"], ["b0"], StreamRows([{"c": 1}, {"c": 2}], None, lambda raw, _: raw)], [2, 1, 1]
    )
    drawn = list(islice(draws(mixture, seed=3), 10_000))
    shares = np.bincount([int(uid[0]) for uid, _, _ in drawn]) / len(drawn)
    assert np.abs(shares - [0.5, 0.25, 0.25]).max() < 0.02
    firsts = [mixture[place] for uid, place, raw in drawn if uid[0] == "0"]
    for epoch in range(5):
        assert sorted(firsts[3 * epoch : 3 * epoch + 3]) == ["a0", "a1", "a2"]
    assert len({uid for uid, _, _ in drawn}) == len(drawn)
    for start in (1, 17, 4095, 4096, 5000):
        assert list(islice(draws(mixture, seed=3, start=start), 40)) == drawn[start : start + 40]
    streamed = next((place, raw) for uid, place, raw in drawn if uid[0] == "2")
    assert mixture.read_row(streamed[1], streamed[0])["c"] in (1, 2)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, float("nan")]])
def test_invalid_weights_raise_an_error(weights):
    with pytest.raises(InvalidConfig, match="weights"):
        Mixture([["a"], ["b"]], weights)


def test_questions_end_before_the_last_answer():
    row = {
        "prompt": [ASKED, ANSWERED, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": " Yes. "}]
    }
    thanked = {"prompt": [*row["prompt"], {"role": "user", "content": "Thanks."}]}
    for asked in last_questions([row, thanked], repr):
        assert asked["prompt"] == [ASKED, ANSWERED, {"role": "user", "content": "Sure?"}]
        assert asked["reward_model"]["ground_truth"] == "Yes."
    with pytest.raises(InvalidRow, match="must contain an answer"):
        last_questions([{"prompt": [ASKED]}], repr)[0]


@pytest.mark.parametrize("completion", ["B", [{"role": "assistant", "content": "B"}]])
def test_a_prompt_that_begins_the_answer_itself_is_an_unusable_row(completion):
    prompt = [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "It is "}]
    with pytest.raises(InvalidRow, match="row 4: the prompt ends with a message of the assistant"):
        read_conversation_row({"prompt": prompt, "completion": completion}, 4)
    later = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    read = read_conversation_row({"prompt": prompt, "completion": later}, 4)["prompt"]
    assert [message["role"] for message in read] == ["user", "assistant"] * 2


@pytest.mark.parametrize("content", [5, {"a": 1}, [{"type": "text", "text": 5}], ["A cat."]])
def test_a_held_out_answer_that_is_no_text_is_an_unusable_row(content):
    row = {"prompt": [ASKED, {"role": "assistant", "content": content}], "index": 3}
    with pytest.raises(InvalidRow, match=r"row 3: the answer must be text or parts of text, not .*"):
        last_questions([row], repr)[0]


def test_calls_and_tools_have_the_names_that_they_were_written_with(tmp_path):
    """Arrow gives all mappings of a column the same names; JSON Lines keep what they say."""
    written = [
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "zoom", "arguments": given}}],
                },
            ],
            "tools": [
                {"function": {"name": "zoom", "parameters": {"properties": {key: {"type": "x"} for key in given}}}}
            ],
            "extra_info": dict.fromkeys(["kept"]),
        }
        for given in ({"box": [1, 2]}, {"names": ["left"]})
    ]
    table = Table.from_pylist(written)
    write_table(table, tmp_path / "train.parquet")
    streamed = conversation_stream(str(tmp_path / "train.parquet"), buffer=1)
    read = [streamed.read_row(raw, place) for _, place, raw in islice(streamed.draws(0, False, 0), 2)]
    for rows in (
        conversation_rows(write_jsonl(tmp_path / "train.jsonl", written)),
        conversation_rows(tmp_path / "train.parquet"),
        read,
    ):
        assert [row["prompt"][1] for row in rows] == [row["messages"][1] for row in written]
        assert [row["tools"] for row in rows] == [row["tools"] for row in written]
    assert load_rows(tmp_path / "train.parquet")[0]["extra_info"] == {"kept": None}  # not a message
