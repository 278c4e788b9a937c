"""What clients of seven frameworks really send continues the sampled ids, or begins a new row for a named reason."""

import json
import re
import warnings
from concurrent.futures import Future

import pytest

from helpers.agents import WIRES, recorded, starts, tool_renderer
from rollout.agents.conversations import REASONS, Conversations, Prompts
from rollout.agents.messages import Refused, read_reply
from rollout.agents.wire_replies import WIRES as PATHS
from rollout.continuation import Tokens
from rollout.environments import EpisodeLimits

NEW_ROWS = {
    "pydantic-ai.messages": "history",  # unsigned thoughts come back as words of the user
    "smolagents-code-agent.chat": "client_text",
    "smolagents-parallel.chat": "client_text",
    "smolagents-step-callback-picture.chat": "client_text",
    "smolagents-tool-calling.chat": "client_text",
}
NAMES = sorted(path.stem for path in WIRES.glob("*.json"))
CODE = 'Thought: I look at the picture first.\n<code>\nimg = look(a="x",  b=1)\nprint(img)\n'


@pytest.fixture(scope="module")
def renderer():
    return tool_renderer()


class Talk:
    """The conversations of one episode, answered with given texts."""

    def __init__(self, renderer):
        self.builder = renderer.builder
        self.conversations = Conversations(starts()[0], Prompts(renderer, EpisodeLimits(8)))

    def ask(self, request):
        ask = PATHS[request["path"]].read(request["body"])
        return self.conversations.open(ask, Future())[0]

    def answer(self, turn, text):
        ids = [*self.builder.encode_text(text), self.builder.tokenizer.eos_token_id]
        tokens = Tokens(ids, [-1.0] * len(ids), [1] * len(ids))
        self.conversations.answered(turn, tokens, read_reply(turn.id, text, turn.ask, "stop"))
        return turn.reply


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def first_answer(name):
    """The text of which turn 1's answer in the recording is made."""
    if "code-agent" in name:
        return CODE
    if "parallel" in name:
        calls = [call("look", a="slow"), call("look", a="fast")]
        return "Two." + "".join(reversed(calls) if "smolagents" in name else calls)
    content = "" if "empty" in name else "Let me look."
    return f"<think>hm</think>{content}" + call("look", b=1, a="x")


def with_our_ids(request, *replies):
    """The request as the client would have sent it to us: with our ids in the place of the recorder's."""
    text = json.dumps(request)
    for number, reply in enumerate(replies, 1):
        for mine, theirs in zip(reply.calls, ("call_A", "call_B") if "call_A" in text else (f"call_ours_{number}",)):
            text = text.replace(theirs, mine.id)
        text = re.sub(rf"\b(msg|rs|fc)_ours_{number - 1}\b", rf"\1_{reply.id}", text)
        text = text.replace('"signature": "ours"', f'"signature": "{reply.id}"')
    return json.loads(text)


@pytest.mark.parametrize("name", [name for name in NAMES if "tool-runner" not in name])
def test_a_second_turn_goes_on_from_the_sampled_ids_or_says_why_not(renderer, name):
    talk, (one, *others) = Talk(renderer), recorded(name)
    turns = [talk.ask(one)]
    replies = [talk.answer(turns[0], first_answer(name))]
    for request in others:
        turns.append(talk.ask(with_our_ids(request, *replies)))
        replies.append(talk.answer(turns[-1], "<think>hm2</think>Again." + call("look", a="y")))
    reasons = [row.reason for row in talk.conversations.rows]
    assert reasons == (["", NEW_ROWS[name]] if name in NEW_ROWS else [""])
    assert set(reasons) <= {"", *REASONS}
    if name not in NEW_ROWS:
        for earlier, later in zip(turns, turns[1:]):
            begin = [*earlier.request.input_ids.tolist(), *earlier.tokens.token_ids]
            assert later.request.input_ids[: len(begin)].tolist() == begin
            assert later.parent is earlier
    pictures = json.dumps(others[-1]).count("iVBORw0KGgo")
    assert len(turns[-1].request.multi_modal_data.get("image", [])) == pictures


def test_a_history_that_the_server_would_keep_is_refused_with_the_way_out(renderer):
    for request in recorded("anthropic-tool-runner.messages"):
        with pytest.raises(Refused, match="thread=False") as found:
            Talk(renderer).ask(request)
        assert found.value.field == "thread"


@pytest.fixture
def chat(renderer):
    """A talk after one reply of `look`, and a second request of it that can be changed."""
    talk, (one, two) = Talk(renderer), recorded("openai-sdk.chat")
    turn = talk.ask(one)
    reply = talk.answer(turn, first_answer("openai-sdk.chat"))
    return talk, turn, with_our_ids(two, reply)


def reason(talk, request):
    talk.ask(request)
    return talk.conversations.rows[-1].reason if len(talk.conversations.rows) > 1 else ""


def test_call_ids_are_unique_sortable_and_never_missing(renderer):
    ids = []
    for number in range(3):
        talk = Talk(renderer)
        talk.conversations._name = f"{number:08x}"
        for _ in range(2):
            ids += [
                call.id
                for call in talk.answer(talk.ask(recorded("openai-sdk.chat")[0]), first_answer("parallel")).calls
            ]
    assert ids == sorted(set(ids))
    assert len({len(each) for each in ids}) == 1


@pytest.mark.parametrize("arguments", ['{"a":"x","b":1}', '{"b": 1.0, "a": "\\u0078"}', '{"a": "y", "b": 1, "a": "x"}'])
def test_arguments_that_parse_alike_are_ours(chat, arguments):
    talk, _, request = chat
    request["body"]["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
    assert reason(talk, request) == ""


@pytest.mark.parametrize("arguments", ['{"a":"x","b":2}', '{"a":"x"}', "{", ""])
def test_other_arguments_are_an_edited_reply(chat, arguments):
    talk, _, request = chat
    request["body"]["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
    assert reason(talk, request) == "reply"


def test_a_call_of_another_tool_by_our_id_is_an_edited_reply(chat):
    talk, _, request = chat
    request["body"]["messages"][2]["tool_calls"][0]["function"]["name"] = "peek"
    assert reason(talk, request) == "reply"


@pytest.mark.parametrize("content", [None, "", " Let me think. ", [{"type": "text", "text": "Hm."}], []])
@pytest.mark.parametrize("thoughts", [None, "", "other"])
def test_content_and_thoughts_do_not_count_where_a_call_id_is_ours(chat, content, thoughts):
    talk, _, request = chat
    said = request["body"]["messages"][2]
    said |= {"content": content, "reasoning_content": thoughts}
    request["body"]["messages"][2] = {name: value for name, value in said.items() if value is not None}
    assert reason(talk, request) == ""


@pytest.mark.parametrize("signature", [{}, {"signature": None}, {"signature": ""}])
def test_thoughts_may_come_back_unsigned_and_messages_of_a_user_may_follow_each_other(renderer, signature):
    talk, (one, two) = Talk(renderer), recorded("anthropic-sdk-signed-thinking.messages")
    request = with_our_ids(two, talk.answer(talk.ask(one), first_answer("anthropic")))
    for message in request["body"]["messages"]:
        for block in message["content"] if message["role"] == "assistant" else ():
            if block["type"] == "thinking":
                del block["signature"]
                block |= signature
    request["body"]["messages"].append({"role": "user", "content": "And?"})
    assert reason(talk, request) == ""


@pytest.mark.parametrize("wire", ["responses", "messages"])
def test_equal_replies_are_told_apart_by_the_ids_that_come_back(renderer, wire):
    for chosen in (0, 1):
        talk, request = (
            Talk(renderer),
            recorded(f"anthropic-sdk.{wire}" if wire == "messages" else f"openai-sdk.{wire}")[0],
        )
        turns = [talk.ask(request) for _ in range(2)]
        replies = [talk.answer(turn, "<think>hm</think>It is red.") for turn in turns]
        ours = replies[chosen].id
        if wire == "messages":
            said = [{"type": "thinking", "thinking": "hm", "signature": ours}, {"type": "text", "text": "It is red."}]
            request["body"]["messages"] += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Sure?"},
            ]
        else:
            text = [{"type": "output_text", "text": "It is red."}]
            said = {"type": "message", "role": "assistant", "id": f"msg_{ours}", "content": text}
            request["body"]["input"] += [said, {"role": "user", "content": "Sure?"}]
        assert talk.ask(request).parent is turns[chosen]


def test_a_reply_without_calls_is_ours_by_its_place_and_text(renderer):
    for said, found in [
        ("  It is red.\n", ""),
        ([{"type": "text", "text": "It is red."}], ""),
        ("It is blue.", "reply"),
    ]:
        talk, request = Talk(renderer), recorded("openai-sdk.chat")[0]
        talk.answer(talk.ask(request), "It is red.")
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
        request["body"]["messages"] += more
        assert reason(talk, request) == found


def test_calls_that_a_client_writes_after_an_empty_text_are_the_clients(renderer):
    """smolagents asks for a call, so that the answer has no text of its own before it."""
    talk, request = Talk(renderer), recorded("smolagents-tool-calling.chat")[0]
    talk.answer(talk.ask(request), call("look", a="x"))
    said = "\nCalling tools:\n[{'id': 'call_1', 'function': {'name': 'look', 'arguments': {'a': 'x'}}}]"
    request["body"]["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": "Observation:"}]
    assert reason(talk, request) == "client_text"


def test_an_empty_reply_is_a_leaf_of_its_own(renderer):
    talk, request = Talk(renderer), recorded("openai-sdk.chat")[0]
    talk.answer(talk.ask(request), "")
    request["body"]["messages"].append({"role": "system", "content": "Answer, please."})
    assert reason(talk, request) == "branch"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda body: body["tools"][0]["function"].update(description="Look hard."), "tools"),
        (lambda body: body["messages"][0].update(content="Look well."), "system"),
        (lambda body: body["messages"].insert(0, {"role": "system", "content": "From now on."}), "system"),
        (lambda body: body["messages"][1].update(content="Which one?"), "history"),
        (lambda body: body["messages"].pop(1), "history"),
        (lambda body: body["messages"].append({"role": "assistant", "content": "Hm."}), "assistant"),
        (lambda body: body.update(messages=[{"role": "user", "content": "Sum up."}]), "conversation"),
    ],
)
def test_a_new_row_has_the_name_of_its_reason(chat, change, found):
    talk, _, request = chat
    change(request["body"])
    assert reason(talk, request) == found


def test_a_second_continuation_of_a_turn_is_a_branch_with_the_same_ids(chat):
    talk, turn, request = chat
    first, second = talk.ask(request), talk.ask(request)
    assert [row.reason for row in talk.conversations.rows] == ["", "branch"]
    assert second.parent is turn
    assert second.request.input_ids.equal(first.request.input_ids)
    assert second.request.seed != first.request.seed


def test_pictures_are_compared_by_their_pixels(renderer):
    """smolagents writes a picture again, with other bytes."""
    one = recorded("openai-sdk.chat")[1]["body"]["messages"][3]["content"][1]["image_url"]["url"]
    other = recorded("smolagents-step-callback-picture.chat")[1]["body"]["messages"][3]["content"][0]["image_url"][
        "url"
    ]
    assert one != other
    talk, request = Talk(renderer), recorded("openai-sdk.chat")[0]
    messages = request["body"]["messages"]
    messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": one}}]})
    talk.answer(talk.ask(request), "Red.")
    messages[-1]["content"][0]["image_url"] = one  # a plain text, in place of an object
    messages += [{"role": "assistant", "content": "Red."}, {"role": "user", "content": "Sure?"}]
    assert reason(talk, request) == ""


PICTURE = recorded("openai-sdk.chat")[1]["body"]["messages"][3]["content"][1]["image_url"]["url"]
SHOWN = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}}
SAW = {"type": "text", "text": "saw"}


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("parts", [[SHOWN, SAW], [SAW, SHOWN], [{"type": "image_url", "image_url": PICTURE}]])
def test_a_tools_picture_may_stand_before_or_after_text_or_in_a_later_message(chat, role, parts):
    talk, _, request = chat
    messages = request["body"]["messages"]
    if role == "tool":
        messages[3]["content"] = parts
    else:
        messages[3]["content"] = "see file a1b2"
        messages += [{"role": "system", "content": "This is a1b2:"}, {"role": "user", "content": parts}]
    turn = talk.ask(request)
    assert [row.reason for row in talk.conversations.rows] == [""]
    kinds = [part if isinstance(part, str) else "picture" for part in turn.new[-1].content]
    assert kinds == ["saw" if part is SAW else "picture" for part in parts]
    assert len(turn.request.multi_modal_data["image"]) == 1


def in_parts(body):
    """The contents of all messages as lists of parts, with what some clients add to them."""
    for message in body["messages"]:
        if isinstance(message.get("content"), str):
            text = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
            message["content"] = [text]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("openai-sdk.chat", {"stream": False, "stream_options": {"include_usage": True}, "tool_choice": "auto"}),
        ("openai-sdk.chat", {"user": "me", "store": False, "service_tier": "auto", "max_completion_tokens": 128000}),
        ("openai-sdk.chat", lambda body: body["tools"][0]["function"].update(strict=True)),
        ("openai-sdk.chat", in_parts),
        ("openai-sdk.responses", {"include": [], "stream": False, "truncation": "disabled", "store": False}),
        ("openai-sdk.responses", {"text": {"format": {"type": "text"}}, "tool_choice": "auto"}),
        (
            "openai-sdk.responses",
            lambda body: [
                item.update(status="completed", encrypted_content=None) or item.pop("type")
                for item in body["input"]
                if item.get("type") == "message"
            ],
        ),
        ("anthropic-sdk.messages", {"stream": False, "tool_choice": {"type": "auto"}, "betas": ["some"]}),
        (
            "anthropic-sdk.messages",
            lambda body: [
                block.update(is_error=False, cache_control={"type": "ephemeral"})
                for message in body["messages"][2:]
                for block in message["content"]
            ],
        ),
    ],
)
def test_what_changes_nothing_is_ignored(renderer, name, change):
    talk, (one, two) = Talk(renderer), recorded(name)
    request = with_our_ids(two, talk.answer(talk.ask(one), first_answer(name)))
    before = json.dumps(request)
    change(request["body"]) if callable(change) else request["body"].update(change)
    assert json.dumps(request) != before
    assert reason(talk, request) == ""


def test_results_are_paired_with_calls_by_their_ids(renderer):
    talk, (one, two) = Talk(renderer), recorded("openai-agents-parallel.chat")
    reply = talk.answer(talk.ask(one), first_answer("parallel"))
    request = with_our_ids(two, reply)
    request["body"]["messages"].append(request["body"]["messages"].pop(-2))
    assert [message.text for message in talk.ask(request).new] == ["saw slow", "saw fast"]


@pytest.mark.parametrize("text", ["<tool_call>\n{broken\n</tool_call>", "<tool_call>{}</tool_call>", "<tool_call>"])
def test_calls_that_cannot_be_read_are_text(renderer, text):
    talk = Talk(renderer)
    reply = talk.answer(talk.ask(recorded("openai-sdk.chat")[0]), text)
    assert (reply.calls, reply.finish, reply.text) == ((), "stop", text)


def test_a_call_without_arguments_has_an_empty_object(renderer):
    talk = Talk(renderer)
    reply = talk.answer(talk.ask(recorded("openai-sdk.chat")[0]), '<tool_call>{"name": "look"}</tool_call>')
    assert reply.calls[0].arguments == "{}"


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("openai-sdk.chat", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("openai-sdk.chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("openai-sdk.chat", {"n": 0}, "n"),
        ("openai-sdk.chat", {"stop": [""]}, "stop"),
        ("openai-sdk.chat", {"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (
            "openai-sdk.chat",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].input_audio",
        ),
        ("openai-sdk.chat", {"messages": [{"role": "critic"}]}, "messages[0].role"),
        ("openai-sdk.responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("openai-sdk.responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("anthropic-sdk.messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(renderer, path, change, field):
    request = recorded(path)[0]
    request["body"] |= change
    with pytest.raises(Refused, match=re.escape(field)) as found:
        Talk(renderer).ask(request)
    assert found.value.field == field


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("openai-agents.chat", "'[tool output omitted]'"),
        ("openai-agents-parallel.chat", ""),
        ("openai-agents.responses", ""),
        ("smolagents-tool-calling.chat", "\"Stored 'image.png' in memory\""),
        ("smolagents-step-callback-picture.chat", ""),
    ],
)
def test_a_picture_that_the_client_left_out_is_told(renderer, name, placeholder):
    talk, (one, two) = Talk(renderer), recorded(name)
    reply = talk.answer(talk.ask(one), first_answer(name))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        talk.ask(with_our_ids(two, reply))
    told = [str(each.message) for each in found]
    assert [placeholder in each for each in told] == ([True] if placeholder else []), told


def test_a_picture_is_never_fetched(renderer):
    for uri in ("https://example.org/a.png", "file:///etc/passwd", "/etc/passwd"):
        request = recorded("openai-sdk.chat")[0]
        request["body"]["messages"] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
        with pytest.raises(Refused, match="data URIs"):
            Talk(renderer).ask(request)
