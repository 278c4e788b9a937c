"""Rows as data sets have them: JSON as text, turns under other names, truths in messages and tags, templates, roots of media."""

import base64
import json
from datetime import datetime

import numpy as np
import pytest

from dataproto.errors import InvalidConfig, InvalidPrompt, InvalidRow
from helpers.geo3k_files import drawing, png
from helpers.tiny_prompts import tiny_builder
from recipes import grpo, sft
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import conversation_rows, last_questions, read_conversation_row
from recipes.data.loader import drop_overlong
from recipes.data.problem_rows import load_rows, read_row
from recipes.rewards.geometry3k import check_truth, compute_score
from rollout.prompts.messages import read_conversation

ASKED = [{"role": "user", "content": "<image>How many?"}]
SAID = {"role": "assistant", "content": "3"}
NAN = float("nan")


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Questions


def test_no_answer_is_shown_in_the_question():
    """An answer there would be sampled after; in ``messages`` it is the truth."""
    ends = "row 4: the prompt ends with a message of the assistant"
    with pytest.raises(InvalidRow, match=ends):
        read_row({"prompt": [*ASKED, SAID], "answer": "3", "images": ["a.png"]}, 4)
    with pytest.raises(InvalidRow, match=ends):
        read_row({"messages": [*ASKED, SAID, SAID], "images": ["a.png"]}, 4)
    assert read_row({"messages": [*ASKED, SAID], "images": ["a.png"]}, 4)["prompt"] == ASKED


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_a_truth_that_is_missing_is_sought_where_another_may_be(nothing):
    """Arrow gives an object of names to rows that have none, where other rows of a file have one; tables of text have blanks."""
    row = read_row({"prompt": ASKED, "answer": "3", "images": ["a.png"], "reward_model": {"ground_truth": nothing}}, 0)
    assert row["reward_model"]["ground_truth"] == "3"
    row = read_row({"messages": [*ASKED, SAID], "answer": nothing, "images": ["a.png"]}, 0)
    assert row["reward_model"]["ground_truth"] == SAID["content"] == row["extra_info"]["answer"]


def test_a_problem_may_be_messages():
    row = read_row({"problem": ASKED, "answer": 3, "images": ["a.png"]}, 0)
    assert (row["prompt"], row["reward_model"]["ground_truth"]) == (ASKED, 3)


@pytest.mark.parametrize("read", [read_row, read_conversation_row])
def test_pictures_in_two_columns_are_not_left_out_in_silence(read):
    row = {"prompt": "<image>How many?", "answer": "3", "images": ["a.png"], "image": "b.png"}
    with pytest.raises(InvalidRow, match=r"row 2: both 'image' and 'images' have images: name .* by --image-key"):
        read(row, 2)
    assert read(row, 2, keys=ColumnKeys(image_key="image"))["images"] == ["b.png"]
    assert read(row | {"image": None}, 2)["images"] == ["a.png"]


# Truths


@pytest.mark.parametrize(
    "truth",
    ["3", 3, "<answer> 3 </answer>", "1 + 2 = 3\n#### 3", r"So it is \boxed{3}.", r"<answer>\boxed{3}</answer>"],
)
def test_a_right_answer_agrees_with_each_form_of_truth(truth):
    assert compute_score("x", r"<think>so</think> \boxed{3}", truth)["acc"] == 1
    assert compute_score("x", r"<think>so</think> \boxed{4}", truth)["acc"] == 0


@pytest.mark.parametrize(
    "truth",
    [
        SAID,
        [SAID],
        {"from": "gpt", "value": "3"},
        [{"type": "text", "text": "3", "image": None}],
        {"role": "assistant", "content": [{"type": "text", "text": "3"}]},
        np.array([SAID]),
        json.dumps([SAID]),
    ],
)
def test_a_truth_that_is_a_message_or_typed_parts_is_its_text(truth):
    row = read_row({"prompt": ASKED, "solution": truth}, 0)
    assert (row["reward_model"]["ground_truth"], row["extra_info"]["answer"]) == ("3", "3")
    if isinstance(truth, str):
        return
    given = {"style": "rule", "ground_truth": truth}
    assert read_row({"prompt": ASKED, "reward_model": given}, 0)["reward_model"]["ground_truth"] == "3"
    assert given["ground_truth"] is truth


@pytest.mark.parametrize("truth", [[6, 6, 16, 16], ["3", "three"], [{"label": "cat"}], {"x": 1}, "[6, 6]", "3", 2.5])
def test_other_truths_stay_as_they_are(truth):
    assert read_row({"problem": "?", "solution": truth}, 0)["reward_model"]["ground_truth"] == truth


def test_a_date_of_the_reader_of_datasets_is_text_again():
    for value, text in ((datetime(2021, 3, 4), "2021-03-04"), (datetime(2021, 3, 4, 5), "2021-03-04T05:00:00")):
        assert read_row({"problem": "?", "answer": value}, 0)["reward_model"]["ground_truth"] == text
        assert read_conversation_row({"prompt": "?", "answer": value}, 0)["prompt"][-1]["content"] == text


@pytest.mark.parametrize("keys", [ColumnKeys(), ColumnKeys(messages_key="conversations")])
def test_conversations_with_from_and_value_are_problems_too(keys):
    turns = [{"from": "human", "value": "<image><image>How many?"}, {"from": "gpt", "value": "7"}]
    row = read_row({"id": 1, "image": ["a.png", "b.png"], "conversations": turns}, 0, keys=keys)
    assert row["prompt"] == [{"role": "user", "content": "<image><image>How many?"}]
    assert (row["images"], row["reward_model"]["ground_truth"]) == (["a.png", "b.png"], "7")
    assert "conversations" not in row["extra_info"]


# JSON as text


def test_json_as_text_is_read_as_what_it_says():
    verl = {
        "data_source": "x",
        "prompt": json.dumps(ASKED),
        "images": '["a.png"]',
        "reward_model": '{"style": "rule", "ground_truth": "3"}',
        "extra_info": '{"split": "train", "index": 7}',
    }
    row = read_row(verl, 0)
    assert (row["prompt"], row["images"]) == (ASKED, ["a.png"])
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert row["extra_info"] == {"split": "train", "index": 7}
    learnt = read_conversation_row({"messages": json.dumps([*ASKED, SAID]), "images": '["a.png"]'}, 0)
    assert (learnt["prompt"], learnt["images"]) == ([*ASKED, SAID], ["a.png"])
    apart = read_conversation_row({"prompt": json.dumps(ASKED), "completion": json.dumps([SAID])}, 0)
    assert apart["prompt"] == [*ASKED, SAID]


@pytest.mark.parametrize("text", ["[1, 2, 3]: which is the largest?", "[1, 2]", '[{"a": 1}]', "{x}"])
def test_a_question_that_only_looks_like_json_stays_text(text):
    assert read_row({"prompt": text}, 0)["prompt"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("reward_model", "3", "'reward_model' must be an object, or the JSON of one, not 3"),
        ("reward_model", "{broken", "must be an object, or the JSON of one, not '{broken'"),
        ("extra_info", [1], "'extra_info' must be an object"),
        ("prompt", "[{'role': 'user', 'content': '?'}]", "'prompt' looks like messages, but is not JSON"),
        ("messages", '[{"role": "user"', "'messages' looks like messages"),
        ("messages", "How many?", r"must be a list, not 'How many\?' .*--prompt-key"),
        ("messages", ["How many?"], "a turn must be a mapping"),
        ("conversations", [{"from": "robot", "value": "?"}], "from 'robot', but must be from one of human, gpt"),
    ],
)
def test_a_column_of_another_type_is_named(column, value, reason):
    for read in (read_row, read_conversation_row):
        with pytest.raises(InvalidRow, match=f"row 4: .*{reason}"):
            read({"prompt": "?", "answer": "3", column: value}, 4)


def test_calls_of_tools_are_messages_of_the_assistant():
    call = {"name": "zoom", "arguments": {"box": [1, 2]}}
    calls = [{"type": "function", "function": call}]
    turns = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "done"},
        {"from": "gpt", "value": "3"},
    ]
    roles = [
        {"role": "user", "content": "?"},
        {"role": "tool_call", "content": json.dumps([{**call, "arguments": json.dumps(call["arguments"])}])},
        {"role": "tool_response", "content": "done"},
        SAID,
    ]
    for row in ({"conversations": turns}, {"messages": roles}):
        prompt = read_conversation_row(row, 0)["prompt"]
        assert [message["role"] for message in prompt] == ["user", "assistant", "tool", "assistant"]
        assert (prompt[1]["tool_calls"], prompt[2]["content"]) == (calls, "done")
    with pytest.raises(InvalidRow, match=r"'function_call' must be the JSON of .*not 'zoom'"):
        read_row({"conversations": [turns[0], {"from": "function_call", "value": "zoom"}]}, 0)


# What is missing


@pytest.mark.parametrize("answer", [None, NAN, "", "  ", [1, 2]])
@pytest.mark.parametrize("form", ["column", "reward_model"])
def test_a_row_without_a_truth_is_bad_for_a_reward_that_compares(answer, form, tmp_path):
    good = {"problem": "1 + 1?", "answer": "2"}
    bad = {"answer": answer} if form == "column" else {"reward_model": {"ground_truth": answer}}
    file = write(tmp_path / "a.jsonl", good, {"problem": "?", **bad}, good)
    assert len(drop_overlong(load_rows(file), tiny_builder(), "stop")[0]) == 3  # a reward may need none
    rows = load_rows(file, check_truth=check_truth)
    with pytest.raises(InvalidRow, match=r"row 1: .*ground truth.*its columns are .*problem"):
        drop_overlong(rows, tiny_builder(), "stop")
    kept, _ = drop_overlong(rows, tiny_builder(), "skip")
    with pytest.raises(InvalidRow, match="row 1"):
        kept[1]
    only = load_rows(write(tmp_path / "b.jsonl", {"problem": "?", **bad}), check_truth=check_truth)
    with pytest.raises(InvalidRow, match="none of the 1 rows can be used"):
        drop_overlong(only, tiny_builder(), "skip")


@pytest.mark.parametrize("missing", [None, NAN])
def test_an_answer_that_is_missing_is_not_learnt(missing):
    with pytest.raises(InvalidRow, match="'answer' holds nothing, but must be"):
        read_conversation_row({"prompt": "?", "answer": missing}, 0)
    with pytest.raises(InvalidPrompt):
        read_conversation([*ASKED, {"role": "assistant", "content": missing}])
    with pytest.raises(InvalidRow, match="must be text, a number or messages"):
        read_conversation_row({"prompt": "?", "answer": b"3"}, 0)


@pytest.mark.parametrize("read", [read_conversation_row, read_row])
def test_marks_of_boxes_are_not_learned(read):
    """ "<bbox>" itself was the answer to learn, and the truth."""
    talk = [{"role": "user", "content": "Find <ref-object>."}, {"role": "assistant", "content": "<bbox>"}]
    objects = {"ref": ["the cat"], "bbox": [[1, 2, 3, 4]]}
    with pytest.raises(
        InvalidRow, match="row 0: <ref-object> stands for what 'objects' holds, which is not read: write it"
    ):
        read({"messages": talk, "objects": objects}, 0)
    assert read({"messages": talk}, 0)["prompt"][0] == talk[0]
    written = [talk[0] | {"content": "Find the cat."}, talk[1] | {"content": "[1, 2, 3, 4]"}]
    assert read({"messages": written, "objects": objects}, 0)["prompt"][0] == written[0]


def test_a_call_of_a_tool_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "zoom"}}]}
    assert read_conversation([{"role": "user", "content": "?"}, call]).messages[1]["content"] == ""
    with pytest.raises(InvalidPrompt, match="message of the assistant has no content"):
        read_conversation([{"role": "user", "content": "?"}, {**call, "tool_calls": []}])
    with pytest.raises(InvalidPrompt, match="message of the user has no content"):
        read_conversation([{"role": "user", "content": None}])


def test_a_held_out_conversation_may_end_with_a_call_and_must_not_be_empty():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "zoom"}}]}
    row = last_questions([{"prompt": [*ASKED, call]}], written=lambda row: str(row["prompt"][-1]["tool_calls"]))[0]
    assert row["reward_model"]["ground_truth"] == "[{'function': {'name': 'zoom'}}]"
    for messages in ([], ASKED):
        with pytest.raises(InvalidRow, match="must contain an answer"):
            last_questions([{"prompt": messages}], repr)[0]


# Templates of EasyR1


TEMPLATE = r"{{ content | trim }} You FIRST think. Put it in \boxed{}."
FILLED = r"<image>How many? You FIRST think. Put it in \boxed{}."


def test_a_template_of_easyr1_is_rendered(tmp_path):
    file = write(tmp_path / "a.jsonl", {"problem": " <image>How many? ", "answer": "3", "image": "a.png"})
    (tmp_path / "math.jinja").write_text(f"\n{TEMPLATE}\n")
    for instruction in (TEMPLATE, str(tmp_path / "math.jinja")):
        assert load_rows(file, instruction=instruction)[0]["prompt"] == [{"role": "user", "content": FILLED}]
        keys = ColumnKeys(prompt_key="problem")
        assert load_rows(file, instruction=instruction, keys=keys)[0]["prompt"][0]["content"] == FILLED
    plain = read_row({"problem": "2?"}, 0, instruction=r"Write \boxed{{}}, and {content}.")["prompt"][0]["content"]
    assert plain == r"2? Write \boxed{{}}, and {content}."  # no template of jinja


@pytest.mark.parametrize(
    ("row", "keys", "is_added"),
    [
        ({"problem": "How many?"}, ColumnKeys(), True),
        ({"prompt": "How many?"}, ColumnKeys(prompt_key="prompt"), True),
        ({"prompt": "How many?"}, ColumnKeys(), False),
        ({"messages": [{"role": "user", "content": "How many?"}]}, ColumnKeys(), False),
    ],
)
def test_an_instruction_that_is_not_added_is_told(row, keys, is_added, tmp_path, capsys):
    """So that nobody waits for answers in a form that no question asks for."""
    file = write(tmp_path / "a.jsonl", {"prompt": None}, *[row | {"answer": "3"}] * 2)
    rows = load_rows(file, instruction="Think.", keys=keys)
    assert ("Think." in rows[1]["prompt"][0]["content"]) == is_added
    assert ("--instruction is added to none of the first rows" in capsys.readouterr().out) != is_added
    load_rows(file, keys=keys)
    assert not capsys.readouterr().out


def test_the_command_line_records_what_a_file_of_an_instruction_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math.jinja").write_text(TEMPLATE)
    (tmp_path / "words.txt").write_text("Think first.\n")
    assert grpo.parse(["--instruction", "math.jinja"]).data.instruction == TEMPLATE
    assert grpo.parse(["--instruction", "words.txt"]).data.instruction == "Think first."
    assert grpo.parse(["--instruction", "Think."]).data.instruction == "Think."
    with pytest.raises(InvalidConfig, match=r"--instruction gone\.jinja cannot be read: .*No such file"):
        grpo.parse(["--instruction", "gone.jinja"])
    for broken in ("{{ content | nothing }}", "{{ content + question }}", "{% for x in content %}"):
        with pytest.raises(InvalidConfig, match="--instruction: the template cannot be rendered"):
            grpo.parse(["--instruction", broken])
    with pytest.raises(InvalidConfig, match=r"data\.format_prompt=math\.jinja is --instruction here"):
        grpo.parse(["data.format_prompt=math.jinja"])


# Media


def test_relative_paths_start_at_the_media_root(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png(drawing(3)))
    row = {"messages": [*ASKED, SAID], "images": ["a.png"]}
    file = write(tmp_path / "a.jsonl", row)
    builder = tiny_builder()
    with pytest.raises(
        InvalidRow, match=rf"'a.png' cannot be read: No such file or directory in {tmp_path}, .*--media-root"
    ):
        builder([load_rows(file)[0]])
    for rows in (
        load_rows(file, media_root=tmp_path / "pictures"),
        conversation_rows(file, media_root=tmp_path / "pictures"),
    ):
        assert builder([rows[0]])["multi_modal_data"][0]["image"][0].size == (24, 16)
    assert drop_overlong(load_rows(file, media_root=tmp_path / "pictures"), builder, "stop")[1] == []
    with pytest.raises(InvalidRow):  # lengths are kept for a root
        drop_overlong(load_rows(file), builder, "stop")
    with pytest.raises(InvalidConfig, match=r"media_root .*gone: no such folder"):
        load_rows(file, media_root=tmp_path / "gone")
    given = ["--preset", "any", "--model-path", "m", "--data-path", "d", "--media-root", "pictures"]
    assert grpo.parse(given).data.media_root == sft.parse(given).data.media_root == "pictures"
    for recipe in (grpo, sft):
        with pytest.raises(InvalidConfig, match=r"--media-root without --data-path"):
            recipe.parse(["--media-root", "pictures"])
        for theirs in ("data.image_dir", "media_dir", "image_folder"):
            with pytest.raises(InvalidConfig, match="is --media-root here"):
                recipe.parse([f"{theirs}=pictures"])


def test_base64_without_its_head_is_a_picture():
    row = {"prompt": "<image>", "images": [base64.b64encode(png(drawing(3))).decode()]}
    assert np.array_equal(np.asarray(tiny_builder()([row])["multi_modal_data"][0]["image"][0]), np.asarray(drawing(3)))
    with pytest.raises(InvalidRow, match="its base64 content is broken"):
        tiny_builder()([{**row, "images": [row["images"][0] + "!"]}])


def test_frames_in_a_flat_list_are_told_from_videos():
    with pytest.raises(
        InvalidPrompt, match=r"1 video markers .* 8 videos.*the 8 frames of one video are a list in the list"
    ):
        read_conversation("<video>What moves?", {"video": [f"{n}.png" for n in range(8)]})


@pytest.mark.parametrize("role", ["usr", None, "model"])
def test_an_unknown_role_is_refused_by_name(role):
    """It was trained on in silence, or left to the chat template."""
    messages = [{"role": role, "content": "How many?"}, {"role": "assistant", "content": "3"}]
    for read in (read_row, read_conversation_row):
        with pytest.raises(InvalidRow, match=rf"row 4: a turn is from {role!r}, but must be .*user.*: rename the role"):
            read({"messages": messages}, 4)
    for known in ("system", "developer", "user", "assistant", "tool"):
        said = [{"role": known, "content": "x"}, *messages[1:]]
        assert read_conversation_row({"messages": said}, 4)["prompt"][0]["role"] == known


def test_an_empty_question_is_refused_unless_it_has_a_picture():
    """It was answered in silence."""
    for raw in (
        {"problem": " ", "answer": "3"},
        {"prompt": "", "answer": "3"},
        {"problem": "", "answer": "3", "images": []},
    ):
        with pytest.raises(InvalidRow, match="row 4: the question is empty: fill it in"):
            read_row(raw, 4)
    for content in ("", " ", None, [], [{"type": "text", "text": " "}]):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}]
        for read in (read_row, read_conversation_row):
            with pytest.raises(InvalidRow, match="row 4: the question is empty"):
                read({"messages": messages}, 4)
            assert read({"messages": messages, "images": ["a.png"]}, 4)["images"] == ["a.png"]
    assert read_row({"problem": "", "answer": "3", "images": ["a.png"]}, 4)["images"] == ["a.png"]


@pytest.mark.parametrize("none", [[], None, "", "[]"])
def test_an_empty_column_of_images_leaves_the_picture_next_to_it(none):
    image = drawing(0)
    row = read_row({"problem": "How many?", "images": none, "image": image, "answer": 1}, 0, "x")
    assert row["images"] == [image]
