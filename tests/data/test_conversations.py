import numpy as np
import pytest

from dataproto.errors import InvalidPrompt
from rollout.prompts.images import load_image
from rollout.prompts.messages import read_conversation
from rollout.prompts.sources import media_list


def test_markers_become_parts_in_order():
    chat = read_conversation(
        [{"role": "system", "content": "Look."}, {"role": "user", "content": "a <image>b<video><image><audio>"}],
        {"audio": ["s.wav"], "image": ["1.png", "2.png"], "video": ["v.mp4"]},
    )
    assert chat.messages[0] == {"role": "system", "content": "Look."}
    assert chat.messages[1]["content"] == [
        {"type": "text", "text": "a "},
        {"type": "image"},
        {"type": "text", "text": "b"},
        {"type": "video"},
        {"type": "image"},
        {"type": "audio"},
    ]
    assert chat.media == ["1.png", "v.mp4", "2.png", "s.wav"]
    assert (chat.of_kind("image"), chat.of_kind("audio")) == (["1.png", "2.png"], ["s.wav"])
    assert list(chat.texts()) == ["Look.", "a ", "b"]


def test_typed_parts_bring_their_image_or_take_the_next_of_the_rows():
    chat = read_conversation(
        [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": "and"},
                    {"type": "image_url", "image_url": {"url": "own.png"}},
                    {"type": "image", "image": None, "text": None},  # as parquet fills in
                ],
            }
        ],
        {"image": ["first.png", "last.png"]},
    )
    assert chat.media == ["first.png", {"image_url": {"url": "own.png"}}, "last.png"]
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "text", "image", "image"]


def test_a_marker_inside_a_typed_text_part_stays_text():
    chat = read_conversation([{"role": "user", "content": [{"type": "text", "text": "what is <image>?"}]}])
    assert chat.messages[0]["content"] == [{"type": "text", "text": "what is <image>?"}]


def test_messages_may_be_arrays_as_pandas_reads_them():
    messages = np.array([{"role": "user", "content": np.array([{"type": "text", "text": "hi"}], dtype=object)}])
    assert read_conversation(messages).messages == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def test_media_go_back_into_their_parts():
    chat = read_conversation("<image>x<image>", {"image": ["a", "b"]})
    assert chat.with_media({"image": ["A", "B"]}) == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "A"},
                {"type": "text", "text": "x"},
                {"type": "image", "image": "B"},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("messages", "images", "says"),
    [
        ("<image><image>", ["a"], "2 image markers in the prompt, but 1 images"),
        ([{"role": "system", "content": "Look."}], ["a"], "0 image markers in the prompt, but 1 images"),
        ([{"role": "user", "content": 5}], ["a"], "a message's content must be a string or a list of parts, not 5"),
        ("<image>", [], "1 image markers in the prompt, but 0 images"),
        ("<video>", [], "1 video markers in the prompt, but 0 videos"),
        ("<audio>", [], "1 audio markers in the prompt, but 0 audios"),
        ([], [], "list of messages"),
        (None, [], "list of messages"),
        ([{"content": "x"}], [], "'role' and 'content'"),
        (["x"], [], "'role' and 'content'"),
        ([{"role": "user", "content": [{"type": "smell"}]}], [], "text, image, video or audio"),
        ([{"role": "user", "content": ["x"]}], [], "text, image, video or audio"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], [], "text, image, video or audio"),
        ([{"role": "user", "content": [{"type": "text"}]}], [], "text, image, video or audio"),
    ],
)
def test_malformed_prompts_are_refused(messages, images, says):
    with pytest.raises(InvalidPrompt, match=says):
        read_conversation(messages, {"image": images})


@pytest.mark.parametrize("messages", [5, {"role": "user"}, ["hi"], [{"role": "user", "content": 5}]])
def test_malformed_messages_are_named(messages):
    with pytest.raises(InvalidPrompt):
        read_conversation(messages)


@pytest.mark.parametrize("calls", [float("nan"), 3, "[{}]", {"function": {"name": "zoom"}}])
@pytest.mark.parametrize("content", ["Let me see.", None])
def test_tool_calls_that_are_no_list_are_refused(calls, content):
    turns = [{"role": "user", "content": "Find x."}, {"role": "assistant", "content": content, "tool_calls": calls}]
    with pytest.raises(InvalidPrompt, match=r"'tool_calls' of a message must be a list|has no content"):
        read_conversation(turns)


@pytest.mark.parametrize("image", [3, float("nan"), True])
def test_a_value_that_is_no_medium_is_one_that_cannot_be_loaded(image):
    (given,) = media_list(image)
    with pytest.raises(InvalidPrompt, match="neither a PIL image, a path"):
        load_image(given)


@pytest.mark.parametrize(
    "held", [{"images": ["a.png"]}, {"image": "a.png"}, {"image": {"bytes": b"."}}, {"video": "a.mp4"}]
)
def test_media_of_a_message_itself_are_refused(held):
    (name,) = held
    with pytest.raises(InvalidPrompt, match=f"'{name}' of a message is not read: use typed parts"):
        read_conversation([{"role": "user", "content": "q", **held}])
    for empty in ({"images": []}, {"image": ""}, {"image": None}):
        assert read_conversation([{"role": "user", "content": "q", **empty}]).media == []


def test_parts_that_number_the_pictures_of_a_row_number_them_in_order():
    def chat(*indexes):
        shown = [{"type": "image", "index": index, "text": None} for index in indexes]
        return read_conversation([{"role": "user", "content": shown}], {"image": ["a.png", "b.png"]})

    assert chat(0, 1).media == chat(None, None).media == ["a.png", "b.png"]
    with pytest.raises(
        InvalidPrompt, match="a part shows image 1 of the row, but its place is 0: put the column in that order"
    ):
        chat(1, 0)
