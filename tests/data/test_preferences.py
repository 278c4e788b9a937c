"""Rows of preferred answers in the schemas of TRL and LLaMA-Factory, and their batches."""

import json

import pytest
import torch
from PIL import Image

from dataproto.errors import InvalidPrompt, InvalidRow
from helpers.tiny_prompts import tiny_builder
from recipes.data.loader import check_row
from recipes.data.preferences import read_preference_row
from recipes.demo.rows import DrawnPairs
from rollout.answers import AnswersBuilder

PICTURE = Image.new("RGB", (56, 56), "red")
QUESTION = "Which colour?"
ASKED = {"role": "user", "content": QUESTION}
SHOWN = [{"type": "image"}, {"type": "text", "text": QUESTION}]


def said(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


def turn(text: str, who: str = "gpt") -> dict[str, str]:
    return {"from": who, "value": text}


PAIRS = {
    "TRL, text": {"prompt": QUESTION, "chosen": "red", "rejected": "blue", "images": [PICTURE]},
    "TRL, messages": {"prompt": [ASKED], "chosen": [said("red")], "rejected": [said("blue")], "images": [PICTURE]},
    "TRL, typed parts": {
        "prompt": [{"role": "user", "content": SHOWN}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "blue"}]}],
        "images": [PICTURE],
    },
    "TRL, two conversations": {"chosen": [ASKED, said("red")], "rejected": [ASKED, said("blue")], "image": PICTURE},
    "TRL, two conversations with their prompt as text": {
        "prompt": f"{QUESTION}\n",
        "messages": [ASKED, said("red")],
        "chosen": [ASKED, said("red")],
        "rejected": [ASKED, said("blue")],
        "images": [PICTURE],
    },
    "TRL, two conversations with their prompt": {
        "prompt": [ASKED],
        "chosen": [ASKED, said("red")],
        "rejected": [ASKED, said("blue")],
        "images": [PICTURE],
    },
    "TRL, messages as JSON": {
        "prompt": QUESTION,
        "chosen": json.dumps([said("red")]),
        "rejected": json.dumps([said("blue")]),
        "images": [PICTURE],
    },
    "LLaMA-Factory, sharegpt": {
        "conversations": [turn(f"<image>{QUESTION}", "human")],
        "chosen": turn("red"),
        "rejected": turn("blue"),
        "images": [PICTURE],
    },
    "LLaMA-Factory, alpaca": {
        "instruction": QUESTION,
        "input": "",
        "chosen": "red",
        "rejected": "blue",
        "images": [PICTURE],
    },
}
LABELLED = {
    "TRL": {"prompt": [ASKED], "completion": [said("red")], "label": True, "images": [PICTURE]},
    "LLaMA-Factory, sharegpt": {
        "conversations": [turn(f"<image>{QUESTION}", "human"), turn("red")],
        "kto_tag": True,
        "images": [PICTURE],
    },
    "LLaMA-Factory, messages": {
        "messages": [said(f"<image>{QUESTION}", "user"), said("red")],
        "label": True,
        "images": [PICTURE],
    },
    "LLaMA-Factory, alpaca": {"instruction": QUESTION, "output": "red", "kto_tag": "true", "images": [PICTURE]},
}


@pytest.fixture(scope="module")
def builder() -> AnswersBuilder:
    plain = tiny_builder(max_prompt_length=256)
    return AnswersBuilder(plain.tokenizer, plain.image_processor, plain.config, 256)


@pytest.mark.parametrize("raw", PAIRS.values(), ids=list(PAIRS))
def test_a_pair_of_each_schema_gives_the_same_rows(builder: AnswersBuilder, raw: dict) -> None:
    row = read_preference_row(raw, 0)
    assert row["labels"] == (True, False)
    data = builder.grouped("pairs")([row])
    first = builder([read_preference_row(PAIRS["TRL, text"], 0)])
    assert torch.equal(data["input_ids"], first["input_ids"])
    texts = [builder.tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(data["responses"], data["response_mask"])]
    assert texts == ["red<|im_end|>", "blue<|im_end|>"]
    assert data["pair"].tolist() == [0, 0]
    assert torch.equal(data["prompts"][0], data["prompts"][1])
    one, other = data["multi_modal_inputs"]
    assert one["pixel_values"] is other["pixel_values"]


@pytest.mark.parametrize("raw", LABELLED.values(), ids=list(LABELLED))
def test_an_answer_with_a_label_of_each_schema(raw: dict) -> None:
    row = read_preference_row(raw, 0)
    assert (row["labels"], row["answers"][0][0]["role"], len(row["prompt"])) == ((True,), "assistant", 1)


def test_answers_without_a_partner_come_with_one_to_another_prompt(builder: AnswersBuilder) -> None:
    first, last = LABELLED["TRL"], LABELLED["TRL"] | {"completion": "grey"}
    rows = [read_preference_row(raw, place) for place, raw in enumerate([first, PAIRS["TRL, text"], last])]
    data = builder.grouped("answers")(rows)
    texts = builder.tokenizer.batch_decode(data["responses"], skip_special_tokens=True)
    assert texts[::2] == ["red", "red", "blue", "grey"]
    assert texts[1::2] == ["blue", "grey", "red", "red"]  # to the second prompt, the third, the first and the second
    assert data["mismatched"].tolist() == [0, 1] * 4
    assert data["desirable"].tolist()[::2] == [1, 1, 0, 1]
    assert len(set(data["answer_key"])) == 3  # equal prompts, media and answers have one key


def test_the_length_is_that_of_the_longest_answer(builder: AnswersBuilder) -> None:
    row = DrawnPairs()[0]
    data = builder.grouped("pairs")([row])
    assert builder.prompt_length(row) == int(data["attention_mask"].sum(1).max())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"prompt": QUESTION, "answer": "red"}, "no question with 'chosen' and 'rejected'"),
        ({"prompt": QUESTION, "completion": "red", "label": "good"}, "true or false, or 1 or 0, not 'good'"),
        ({"prompt": QUESTION, "completion": "red", "label": None}, "'label' holds nothing, but must be true or false"),
        (
            {"question": QUESTION, "chosen": "red", "rejected": "blue"},
            "name the column of the question by --prompt-key",
        ),
        ({"prompt": "?", "chosen": [ASKED, said("a")], "rejected": [ASKED, said("b")]}, "begin with another question"),
        ({"messages": [ASKED, said("a")], "chosen": "red", "rejected": "blue"}, "ends with a message of the assistant"),
        ({"prompt": QUESTION, "chosen": "[{'role': 'assistant'", "rejected": "blue"}, "looks like messages"),
        ({"prompt": QUESTION, "chosen": "red"}, "'chosen' has no partner"),
        ({"prompt": QUESTION, "chosen": None, "rejected": "red"}, "'rejected' has no partner"),
        ({"prompt": QUESTION, "label": True}, "no answer that the label is about"),
        ({"messages": [], "label": True}, "no answer that the label is about"),
        ({"prompt": QUESTION, "completion": "red", "label": True, "kto_tag": "0"}, "'label' and 'kto_tag' contradict"),
        ({"prompt": QUESTION, "chosen": "red", "rejected": "<image>"}, "'rejected' has a marker or a part of a medium"),
        ({"prompt": "?", "answer": [{"type": "image"}], "label": True}, "'answer' has a marker .*: move it there"),
        ({"prompt": " ", "chosen": "red", "rejected": "blue"}, "the question is empty"),
        (
            {"chosen": [ASKED, said("red")], "rejected": [said("What?", "user"), said("blue")]},
            "differ in the last message",
        ),
    ],
)
def test_a_row_of_no_schema_is_refused(raw: dict, reason: str) -> None:
    with pytest.raises(InvalidRow, match=reason):
        read_preference_row(raw, 3)


@pytest.mark.parametrize(
    ("label", "meaning"), [(True, True), (1, True), (0.0, False), ("1.0", True), (" False ", False), ("0", False)]
)
def test_labels_are_read_as_tables_write_them(label: object, meaning: bool) -> None:
    row = {"prompt": QUESTION, "completion": "red", "label": label}
    assert read_preference_row(row, 0)["labels"] == (meaning,)
    assert read_preference_row(row | {"kto_tag": meaning}, 0)["labels"] == (meaning,)


@pytest.mark.parametrize(
    ("content", "message"),
    [(5, "must be a string or a list of parts, not 5"), ([{"text": "yes"}], "must be text, image")],
)
def test_an_answer_of_another_form_is_refused(builder: AnswersBuilder, content: object, message: str) -> None:
    row = {"prompt": QUESTION, "chosen": [{"role": "assistant", "content": content}], "rejected": "blue"}
    with pytest.raises(InvalidPrompt, match=message):
        builder.grouped("pairs").prepare(read_preference_row(row, 0))


def test_an_answer_with_a_label_is_no_pair(builder: AnswersBuilder) -> None:
    with pytest.raises(InvalidPrompt, match="`dataproto dpo` takes it by loss kto"):
        builder.grouped("pairs").prepare(read_preference_row(LABELLED["TRL"], 0))


def test_a_pair_of_equal_answers_is_refused(builder: AnswersBuilder) -> None:
    row = read_preference_row(PAIRS["TRL, text"] | {"rejected": PAIRS["TRL, text"]["chosen"]}, 7)
    with pytest.raises(
        InvalidRow, match=r"row 7: both answers are the same: neither is preferred [(]--on-bad-row skip"
    ):
        check_row([row], 0, builder.grouped("pairs"))
    with pytest.raises(InvalidRow, match="neither is preferred"):
        check_row([row], 0, builder.grouped("answers"))


def test_a_single_row_of_answers_has_no_other_prompt(builder: AnswersBuilder) -> None:
    data = builder.grouped("answers")([read_preference_row(PAIRS["TRL, text"], 0)])
    assert (data["desirable"].tolist(), data["mismatched"].tolist()) == ([1, 0], [0, 0])


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("empty", ["chosen", "rejected"])
def test_an_empty_answer_is_refused_when_its_row_is_read(builder: AnswersBuilder, empty: str, blank: str) -> None:
    """So each row has response tokens, and micro-batches, which leave out rows without any, keep pairs whole."""
    raw = PAIRS["TRL, text"] | {empty: blank}
    with pytest.raises(InvalidRow, match="row 7: the answer in message 1 is empty"):
        check_row([read_preference_row(raw, 7)], 0, builder.grouped("pairs"))
