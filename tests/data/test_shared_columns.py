"""What a row says reaches the model: the system's text, earlier turns, and all of a question."""

import json
from functools import partial

import pytest

from dataproto.errors import InvalidMedia, InvalidPrompt, InvalidRow
from recipes import grpo, sft
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import (
    CONVERSATION_COLUMNS,
    conversation_rows,
    conversation_stream,
    read_conversation_row,
)
from recipes.data.preferences import read_preference_row
from recipes.data.problem_rows import read_row
from recipes.data.row_values import columns_left_out
from recipes.demo.tiny_model import make_tiny_processors
from recipes.run.policy_gradient import open_problems, prompt_builder
from rollout.prompts.images import load_image
from rollout.prompts.messages import read_tools

ASKED = [{"role": "user", "content": "How many?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "3"}]


SYSTEM = {"role": "system", "content": "You count dots."}
ROWS = {
    "messages": {"system": "You count dots.", "messages": ANSWERED},
    "swift": {"system": "You count dots.", "query": "How many?", "response": "3"},
    "alpaca": {"system": "You count dots.", "instruction": "How many?", "input": "", "output": "3"},
    "sharegpt": {
        "system": "You count dots.",
        "conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "3"}],
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_the_systems_text_is_the_first_message(name):
    assert read_conversation_row(ROWS[name], 0)["prompt"] == [SYSTEM, *ANSWERED]
    asked = read_row(ROWS[name], 0, instruction="")
    assert asked["prompt"] == [SYSTEM, *ASKED]
    assert asked["reward_model"]["ground_truth"] == "3"


def test_two_different_system_texts_are_refused():
    row = {"system": "You count dots.", "messages": [SYSTEM, *ANSWERED]}
    assert read_conversation_row(row, 0)["prompt"] == [SYSTEM, *ANSWERED]
    with pytest.raises(InvalidRow, match="another system message"):
        read_conversation_row({**row, "system": "Be brief."}, 0)
    for role, messages in {
        "developer": [{"role": "developer", "content": "You count dots."}, *ANSWERED],
        "system": [*ASKED, SYSTEM, {"role": "assistant", "content": "3"}],
    }.items():
        with pytest.raises(InvalidRow, match=f"'system' column and another {role} message: leave one"):
            read_conversation_row({"system": "You count dots.", "messages": messages}, 0)
    for blank in (None, "", " \n"):
        assert read_conversation_row({"system": blank, "messages": ANSWERED}, 0)["prompt"] == ANSWERED


def test_earlier_turns_come_after_the_systems_text():
    row = {"messages": [SYSTEM, *ANSWERED], "history": [["What is it?", "Dots."]]}
    said = [message["content"] for message in read_conversation_row(row, 0)["prompt"]]
    assert said == ["You count dots.", "What is it?", "Dots.", "How many?", "3"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": None}, "'problem' holds nothing, but must be text or messages"),
        ({"problem": 5, "answer": 3}, "'problem' holds 5, but must be text or messages"),
        ({"prompt": 5, "answer": 3}, "the messages must be a list, or text, not 5"),
    ],
)
def test_a_question_that_is_no_text_is_named_by_what_it_is(row, reason):
    with pytest.raises(InvalidRow, match=f"row 0: {reason}$"):
        read_row(row, 0)
    named = {"question": row.get("problem", row.get("prompt"))}
    with pytest.raises(InvalidRow, match=r"'question' holds nothing|not 5$"):
        read_row(named, 0, keys=ColumnKeys(prompt_key="question"))
    with pytest.raises(InvalidRow, match="'answer' holds nothing"):
        read_conversation_row({"prompt": "How many?", "answer": None}, 0)
    with pytest.raises(InvalidRow, match="'messages' holds nothing"):
        read_conversation_row({"messages": None}, 0)


READERS = [partial(read_row, instruction=""), read_conversation_row, read_preference_row]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("first", ["<image>Hi.", "Hi."])
def test_media_of_the_first_question_may_be_in_the_history(first, read):
    """Such a picture had a second marker in the last question, and its row was refused."""
    row = {"query": "How many?", "response": "3", "history": [[first, "Hello."]], "images": ["a.png"]}
    row |= {"chosen": "3", "rejected": "4"} if read is read_preference_row else {}
    assert [each["content"] for each in read(row, 0)["prompt"]][:3] == ["<image>Hi.", "Hello.", "How many?"]


@pytest.mark.parametrize("read", READERS[:2])
def test_an_input_that_is_a_number_is_asked_and_others_are_refused(read):
    """It was left out of the question."""
    row = {"instruction": "Square it.", "output": "25"}
    for more, asked in ((5, "Square it.\n5"), (0, "Square it.\n0"), (float("nan"), "Square it."), (None, "Square it.")):
        assert read(row | {"input": more}, 0)["prompt"][0]["content"] == asked
    for more in ([5], {"x": 5}):
        with pytest.raises(InvalidRow, match="row 3: 'input' must be text or a number, not"):
            read(row | {"input": more}, 3)


def test_a_blank_picture_is_none_and_one_in_a_list_is_missing():
    assert read_row({"problem": "2 + 2?", "image": "", "video": " "}, 0) == read_row({"problem": "2 + 2?"}, 0) | {
        "own_columns": {"problem": "2 + 2?"}
    }
    with pytest.raises(InvalidMedia, match=r"the image is missing \(''\)"):
        load_image("")


def test_tools_are_a_list():
    for one in ({"name": "zoom"}, '{"name": "zoom"}', 3):
        with pytest.raises(InvalidPrompt, match="tools must be a list of objects"):
            read_tools(one)


def test_alpacas_input_and_swifts_history_are_read_with_named_columns_too():
    keys = ColumnKeys(prompt_key="instruction", answer_key="output")
    row = {"instruction": "<image>How many?", "input": "Only round ones.", "output": "3", "images": ["a.png"]}
    assert read_conversation_row(row, 0, keys=keys)["prompt"][0]["content"] == "<image>How many?\nOnly round ones."
    keys = ColumnKeys(prompt_key="query", answer_key="response")
    row = {"query": "How many?", "response": "3", "history": [["What is it?", "Dots."]]}
    before = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Dots."}]
    assert read_conversation_row(row, 0, keys=keys)["prompt"] == [*before, *ANSWERED]
    assert read_row(row, 0, instruction="")["prompt"] == [*before, *ASKED]
    assert read_conversation_row({**row, "history": json.dumps(row["history"])}, 0)["prompt"] == [*before, *ANSWERED]
    for none in (None, "", [], "[]", float("nan")):
        assert read_conversation_row({**row, "history": none}, 0)["prompt"] == ANSWERED
    for wrong in (["What is it?"], "What is it?", {"question": "What is it?"}, 3):
        with pytest.raises(InvalidRow, match="'history' must be a list of"):
            read_conversation_row({**row, "history": wrong}, 0)


def test_columns_that_nobody_reads_are_named(tmp_path):
    def left_out(row, known, *more, **keys):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in (row, *more)))
        both = conversation_rows, conversation_stream
        found, streamed = (
            columns_left_out(opened(str(file), keys=ColumnKeys(**keys)), known, ColumnKeys(**keys)) for opened in both
        )
        assert streamed == found
        return found

    known = CONVERSATION_COLUMNS
    assert left_out({"messages": ANSWERED, "system": "Count.", "tools": None, "id": 3, "level": "hard"}, known) == [
        "id",
        "level",
    ]
    alpaca = {"instruction": "Add.", "input": "2 + 2", "output": "4", "history": []}
    assert left_out(alpaca, known) == []
    assert left_out(alpaca, known, {"messages": ANSWERED, "note": "Only here."}) == ["note"]
    assert left_out(alpaca, known, prompt_key="instruction", answer_key="output") == []
    assert left_out(
        {"question": "2 + 2?", "label": "4", "input": "no"}, known, prompt_key="question", answer_key="label"
    ) == ["input"]


def test_a_run_names_them_once(tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}], "id": n}
        for n in range(12)
    ]
    file, model = tmp_path / "rows.jsonl", str(make_tiny_processors(tmp_path / "model"))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--preset", "tiny", "--data-path", str(file)]
    sft.conversation_task(sft.parse(given), model)
    assert capsys.readouterr().out.count(f"{file}: columns that are not read: id") == 1
    config = grpo.parse(given)
    open_problems(config, prompt_builder(config.data, model))
    assert capsys.readouterr().out.count(f"{file}: columns that only the reward gets: id") == 1


def test_media_without_a_place_come_before_the_first_question():
    asked = [SYSTEM, *ASKED, {"role": "user", "content": "?"}]
    shown = read_row({"prompt": asked, "images": ["a.png", "b.png"]}, 0)["prompt"]
    assert [turn["content"] for turn in shown] == ["You count dots.", "<image><image>How many?", "?"]
    assert (
        read_conversation_row({"messages": ANSWERED, "image": "a.png"}, 0)["prompt"][0]["content"] == "<image>How many?"
    )
    typed = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
    parts = read_row({"prompt": typed, "image": "a.png", "video": "a.mp4"}, 0)["prompt"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "video", "text"]
    placed = {"prompt": "How many? <image>", "images": ["a.png", "b.png"]}
    assert read_row(placed, 0)["prompt"][0]["content"] == placed["prompt"]  # a builder refuses it: one has no place
