"""Easy-VQA's questions as rows: what they hold, and the controls."""

import collections
import sys

import pytest

from dataproto.errors import FileFormatError, InvalidConfig
from helpers.easy_vqa_files import write_easy_vqa
from recipes.data.easy_vqa_rows import answered, conversations, decoded, open_easy_vqa


@pytest.fixture(scope="module")
def easy_vqa(tmp_path_factory):
    return open_easy_vqa(write_easy_vqa(tmp_path_factory.mktemp("data") / "small"))


def test_a_row_has_the_question_its_picture_and_the_answer(easy_vqa):
    row = easy_vqa.train[4]  # of picture 1, the second question
    assert row["prompt"] == [{"role": "user", "content": "<image>what shape is present?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "circle"}
    assert (row["data_source"], row["extra_info"]["split"], row["index"]) == ("easy_vqa", "train", 4)
    assert row["images"][0].size == (64, 64)
    assert row["images"][0].getpixel((18, 18)) == (0, 0, 255)  # picture 1 is blue
    assert answered(easy_vqa.train)[4]["prompt"][1] == {"role": "assistant", "content": "circle"}
    assert (len(easy_vqa.train), len(easy_vqa.test)) == (36, 18)
    assert len(list(easy_vqa.test)) == 18  # iteration ends


def test_a_picture_is_decoded_once(easy_vqa):
    assert easy_vqa.train[0]["images"][0] is easy_vqa.train[2]["images"][0]
    assert easy_vqa.train.in_random_order().pictures is easy_vqa.train.pictures


def test_other_pictures_come_from_rows_with_the_same_question(easy_vqa):
    rows, other = easy_vqa.test, easy_vqa.test.with_other_pictures()
    own = {(asked.question, asked.picture) for asked in rows.questions}
    assert all((asked.question, shown) in own for asked, shown in zip(rows.questions, other.shown))
    assert not any(asked.picture == shown for asked, shown in zip(rows.questions, other.shown))
    for question in {asked.question for asked in rows.questions}:  # each picture of a question is shown once
        shown = [number for asked, number in zip(rows.questions, other.shown) if asked.question == question]
        assert sorted(shown) == sorted(asked.picture for asked in rows.questions if asked.question == question)
    assert other[0]["images"][0] is not rows[0]["images"][0]
    assert other[0]["reward_model"] == rows[0]["reward_model"]
    assert other[0]["data_source"] == "easy_vqa_other_pictures"


def test_a_question_that_is_asked_once_gets_the_picture_of_another_row(easy_vqa):
    pair = easy_vqa.test.at([0, 4])  # two questions, each once, about two pictures
    assert pair.with_other_pictures().shown == (1, 0)


def test_without_pictures_only_the_words_are_left(easy_vqa):
    row = easy_vqa.test.without_pictures()[1]
    assert (row["prompt"][0]["content"], row["images"]) == ("what shape is present?", [])
    assert row["data_source"] == "easy_vqa_without_pictures"


def test_a_random_order_has_the_same_rows(easy_vqa):
    mixed = easy_vqa.test.in_random_order()
    assert mixed.questions != easy_vqa.test.questions
    assert collections.Counter(mixed.questions) == collections.Counter(easy_vqa.test.questions)
    assert all(asked.picture == shown for asked, shown in zip(mixed.questions, mixed.shown))
    assert mixed[:4].questions == mixed.questions[:4]


def test_open_questions_and_the_others_are_all_rows(easy_vqa):
    open_rows, others = (easy_vqa.train.open_questions(wanted) for wanted in (True, False))
    assert {asked.answer for asked in others.questions} == {"yes", "no"}
    assert {asked.answer for asked in open_rows.questions} == {"red", "blue", "green", "circle", "rectangle"}
    assert (len(open_rows), len(others)) == (24, 12)


def test_what_has_another_layout_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"no folder .*: leave out --data-path"):
        open_easy_vqa(tmp_path / "missing")
    with pytest.raises(FileFormatError, match=r"has not the layout of easy-vqa: .*No such file"):
        open_easy_vqa(tmp_path)
    folder = tmp_path / "easy_vqa" / "data" / "train"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "0.png").write_bytes(b"")
    for content, reason in (
        ('[["what?", "this", 3]]', "no picture 3"),
        ("[[1]]", "not enough values"),
        ("{", "Expecting"),
    ):
        (folder / "questions.json").write_text(content)
        with pytest.raises(FileFormatError, match=reason):
            open_easy_vqa(tmp_path)


@pytest.mark.slow
def test_the_real_package_is_what_the_documents_say():
    easy_vqa = open_easy_vqa()
    assert "easy_vqa" not in sys.modules
    assert [len({*rows.shown}) for rows in (easy_vqa.train, easy_vqa.test)] == [4000, 1000]
    assert (len(easy_vqa.train), len(easy_vqa.test)) == (38_575, 9_673)
    answers = collections.Counter(asked.answer for asked in easy_vqa.test.questions)
    assert len(answers) == 13
    assert round(max(answers.values()) / 9673, 3) == 0.373
    best = {}  # the most common answer to each question in training
    for asked, _ in collections.Counter(
        (each.question, each.answer) for each in easy_vqa.train.questions
    ).most_common():
        best.setdefault(*asked)
    assert round(sum(best[asked.question] == asked.answer for asked in easy_vqa.test.questions) / 9673, 3) == 0.670
    pixels = [
        {decoded(rows.pictures[place]).tobytes() for place in {*rows.shown}} for rows in (easy_vqa.train, easy_vqa.test)
    ]
    assert not pixels[0] & pixels[1]


def test_a_conversation_asks_about_one_picture(easy_vqa):
    rows, talks = easy_vqa.train, conversations(easy_vqa.train, questions=2)
    asked = []
    for conversation in talks:
        messages = conversation["prompt"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert [message["content"].count("<image>") for message in messages] == [1] + [0] * (len(messages) - 1)
        (picture,) = [number for number, file in rows.pictures.items() if decoded(file) is conversation["images"][0]]
        words = [message["content"].removeprefix("<image>") for message in messages]
        asked += zip(words[::2], words[1::2], [picture] * len(words))
    assert sorted(asked) == sorted((each.question, each.answer, each.picture) for each in rows.questions)
    of_pictures = collections.Counter(each.picture for each in rows.questions)
    assert len(talks) == sum(-(-number // 2) for number in of_pictures.values())
