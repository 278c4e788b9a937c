"""Unmodified clients of OpenAI and Anthropic on the endpoint, whole and as events, with tools, pictures and errors."""

import asyncio
import base64
import io
import json
import time

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from helpers.agents import LOOK, ScriptedEngine, run, tool_renderer
from helpers.episodes import picture
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}]


def png(seed=0):
    file = io.BytesIO()
    picture(16, 16, seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def uri(seed=0):
    return f"data:image/png;base64,{png(seed)}"


@pytest.fixture(scope="module")
def renderer():
    return tool_renderer()


def openai_client(task, **options):
    return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, **options)


async def chat(task, client, messages, **options):
    options = {"tools": TOOLS} | options
    if not options.get("stream"):
        return (await client.chat.completions.create(model=task.model, messages=messages, **options)).choices[0].message
    async with client.chat.completions.stream(model=task.model, messages=messages, tools=options["tools"]) as events:
        return (await events.get_final_completion()).choices[0].message


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_of_openai_chat_with_a_tool_and_a_picture_are_one_row(renderer, stream, connected):
    said = []

    async def agent(task):
        in_process = DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(task.app))
        async with openai_client(task, **({} if connected else {"http_client": in_process})) as client:
            messages = list(task.messages)
            for turn in range(3):
                reply = await chat(task, client, messages, stream=stream)
                said.append((reply.content, [json.loads(call.function.arguments) for call in reply.tool_calls or []]))
                messages.append(reply.model_dump(exclude_none=True))
                if reply.tool_calls:
                    image = {"type": "image_url", "image_url": {"url": uri(turn)}}
                    content = [{"type": "text", "text": "saw"}, image]
                    messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": content})
        return 1.0

    engine = ScriptedEngine(renderer, LOOK, LOOK, "It is red.")
    (episode,) = run(renderer, engine, agent)
    assert (episode.ended, episode.message, episode.new_rows) == ("done", "", [""])
    assert said == [("Let me look.", [{"a": "x", "b": 1}])] * 2 + [("It is red.", [])]
    assert len(episode.rows[0].ends.multi_modal_data["image"]) == 2
    for turn, done in zip(episode.turns, engine.done, strict=True):
        assert turn.token_ids == done.token_ids
        assert turn.log_probs == done.log_probs
    assert [turn.reward for turn in episode.turns] == [0, 0, 1.0]


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_anthropic_messages_are_one_row(renderer, stream):
    seen = []

    async def agent(task):
        tools = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]
        async with AsyncAnthropic(base_url=task.server_url, api_key=task.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": "Which colour is it?"}]
            options = {"model": task.model, "max_tokens": 200, "system": "You look.", "tools": tools}
            for turn in range(3):
                if stream:
                    async with client.messages.stream(messages=messages, **options) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(messages=messages, **options)
                seen.append(([block.type for block in reply.content], reply.stop_reason))
                messages.append({"role": "assistant", "content": reply.content})
                source = {"type": "base64", "media_type": "image/png", "data": png(turn)}
                messages.append(
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": block.id,
                                "content": [{"type": "image", "source": source}],
                            }
                            for block in reply.content
                            if block.type == "tool_use"
                        ],
                    }
                )
        return {"score": 0.5, "acc": 1.0}

    (episode,) = run(renderer, ScriptedEngine(renderer, LOOK, LOOK, "It is red."), agent)
    assert (episode.ended, episode.message, episode.new_rows) == ("done", "", [""])
    assert seen == [(["thinking", "text", "tool_use"], "tool_use")] * 2 + [(["text"], "end_turn")]
    assert episode.info == {"acc": 1.0}
    assert episode.turns[-1].reward == 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_openai_responses_are_one_row(renderer, stream):
    seen = []

    async def agent(task):
        tools = [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False}]
        async with openai_client(task) as client:
            items = [{"role": "user", "content": "Which colour is it?"}]
            options = {"model": task.model, "tools": tools, "instructions": "You look."}
            for turn in range(3):
                if stream:
                    async with client.responses.stream(input=items, **options) as events:
                        reply = await events.get_final_response()
                else:
                    reply = await client.responses.create(input=items, **options)
                seen.append([item.type for item in reply.output])
                items += [item.model_dump(exclude_none=True) for item in reply.output]
                shown = [{"type": "input_text", "text": "saw"}, {"type": "input_image", "image_url": uri(turn)}]
                items += [
                    {"type": "function_call_output", "call_id": item.call_id, "output": shown}
                    for item in reply.output
                    if item.type == "function_call"
                ]

    (episode,) = run(renderer, ScriptedEngine(renderer, LOOK, LOOK, "It is red."), agent)
    assert (episode.ended, episode.message, episode.new_rows) == ("done", "", [""])
    assert seen == [["reasoning", "message", "function_call"]] * 2 + [["message"]]
    assert not episode.scored


def test_samples_log_probs_stops_and_lengths(renderer):
    found = {}

    async def agent(task):
        async with openai_client(task) as client:
            options = {"model": task.model, "messages": task.messages}
            several = await client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=1)
            found["choices"] = [choice.message.content for choice in several.choices]
            found["tokens"] = "".join(each.token for each in several.choices[0].logprobs.content)
            found["top"] = several.choices[0].logprobs.content[0].top_logprobs[0].logprob
            stopped = await client.chat.completions.create(**options, stop="END", seed=5)
            found["stopped"] = stopped.choices[0].message.content
            cut = await client.chat.completions.create(**options, max_tokens=3)
            found["cut"] = (cut.choices[0].finish_reason, cut.usage.completion_tokens)
            found["models"] = [model.id async for model in client.models.list()]
        return 0

    engine = ScriptedEngine(renderer, "one", "two", "three END", "four and more")
    (episode,) = run(renderer, engine, agent)
    assert episode.message == ""
    assert found["choices"] == ["one", "two"]
    assert found["tokens"] == "one<|im_end|>"
    assert found["top"] == -0.5
    assert found["stopped"] == "three"
    assert found["cut"] == ("length", 3)
    assert found["models"] == ["policy"]
    assert sorted(episode.new_rows) == ["", "branch", "branch", "samples"]


def test_parallel_calls_and_a_call_that_is_asked_for(renderer):
    two = '<tool_call>\n{"name": "look", "arguments": {"b": 1}}\n</tool_call>' * 2
    found = []

    async def agent(task):
        async with openai_client(task) as client:
            found.append(len((await chat(task, client, task.messages)).tool_calls))
            named = {"type": "function", "function": {"name": "look"}}
            reply = await chat(task, client, task.messages, tool_choice=named)
            found.append(reply.tool_calls[0].function.arguments)
            none = await chat(task, client, task.messages, tool_choice="none")
            found.append(none.tool_calls)
        return 0

    engine = ScriptedEngine(renderer, two, '{"b": 7}}\n</tool_call>', two)
    (episode,) = run(renderer, engine, agent)
    assert episode.message == ""
    assert found == [2, '{"b": 7}', None]
    begun = renderer.builder.tokenizer.decode(engine.requests[1].input_ids)
    assert begun.endswith('<tool_call>\n{"name": "look", "arguments": ')


def test_errors_have_the_shape_of_their_wire_and_name_the_field(renderer):
    found = {}

    async def agent(task):
        async with openai_client(task) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=task.messages, logit_bias={"5": 1})
            found["openai"] = error.value.param
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long " * 200}])
            found["context"] = error.value.code
            with pytest.raises(openai.AuthenticationError):
                await chat(task, client.with_options(api_key="sk-other"), task.messages)
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="text")
        async with AsyncAnthropic(base_url=task.server_url, api_key=task.api_key, max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role"):
                await client.messages.create(model="m", max_tokens=5, messages=[{"role": "critic", "content": "x"}])
            with pytest.raises(anthropic.BadRequestError, match=r"output_config.format: this field is not supported"):
                said, form = [{"role": "user", "content": "x"}], {"format": {"type": "json_schema", "schema": {}}}
                await client.messages.create(model="m", max_tokens=5, messages=said, output_config=form)
            with pytest.raises(anthropic.BadRequestError, match="output_config: must be an object, not str"):
                await client.messages.create(model="m", max_tokens=5, messages=said, extra_body={"output_config": "x"})
            with pytest.raises(anthropic.NotFoundError, match="count_tokens here, only /v1/chat/completions") as error:
                await client.messages.count_tokens(model="m", messages=said)
            assert error.value.body["type"] == "error"
            with pytest.raises(anthropic.BadRequestError, match="an answer cannot be continued"):
                begun = [*said, {"role": "assistant", "content": "{"}]
                await client.messages.create(model="m", max_tokens=5, messages=begun)
            known = {"anthropic-beta": "some-2030-01-01", "anthropic-version": "2030-01-01"}
            said = [{"role": "user", "content": "x"}]
            await client.messages.create(model="m", max_tokens=128000, messages=said, extra_headers=known, timeout=9)
        return 1

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok", most=300), agent)
    assert (episode.ended, episode.message) == ("done", "")
    assert found == {"openai": "logit_bias", "context": "context_length_exceeded"}


SAID = {"role": "user", "content": "x"}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": "look"}}
OF_TYPE = "type: parts of the type 'video' are not supported"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"tools": 5}, "tools: must be a list, not int"),
        (
            "chat/completions",
            {"messages": [{**SAID, "tool_calls": 5}]},
            "messages[0].tool_calls: must be a list, not int",
        ),
        ("chat/completions", {"messages": "x"}, "messages: must be a list, not str"),
        ("chat/completions", {"messages": []}, "messages: must be a list that is not empty"),
        ("chat/completions", {"stop": {"a": 1}}, "stop: must be a list, not dict"),
        ("chat/completions", NAMED, "tool_choice.function: must be an object, not str"),
        ("chat/completions", {"tool_choice": {"type": "other"}}, "tool_choice: {'type': 'other'} names no tool"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "ask for JSON in a message"),
        ("chat/completions", {"stream_options": 5}, "stream_options: must be an object, not int"),
        ("responses", {"include": 5}, "include: must be a list, not int"),
        ("responses", {"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary: must be a list, not int"),
        ("messages", {"messages": [{**SAID, "content": 5}]}, "messages[0].content: must be a list, not int"),
        ("messages", {"messages": [{**SAID, "content": [{"type": "video"}]}]}, f"messages[0].content[0].{OF_TYPE}"),
        ("messages", {"tool_choice": {"type": []}}, "tool_choice.type: [] is not one of auto"),
    ],
)
def test_a_field_of_another_type_is_an_error_of_the_client(renderer, path, body, message):
    def agent(task):
        told = {"messages": task.messages} if path != "responses" else {"input": "x"}
        headers = {"authorization": f"Bearer {task.api_key}"}
        reply = httpx.post(f"{task.base_url}/{path}", json={"model": "m", **told, **body}, headers=headers)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
        with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            client.chat.completions.create(model="m", messages=task.messages)
        return 1

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent)
    assert (episode.ended, episode.message) == ("done", "")


def test_half_of_a_character_in_a_call_is_refused(renderer):
    """As the policy may write it, and a client that shortens its history sends it back in a new row."""

    def agent(task):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": "\\ud83d"}'}}
        with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            with pytest.raises(openai.BadRequestError, match="half of a character"):
                said = [*task.messages, {"role": "assistant", "tool_calls": [call]}, *task.messages]
                client.chat.completions.create(model="m", messages=said)
            client.chat.completions.create(model="m", messages=task.messages)
        return 1

    (episode,) = run(renderer, ScriptedEngine(renderer, "ok"), agent)
    assert (episode.ended, episode.message) == ("done", "")


@pytest.mark.parametrize(
    ("arguments", "calls"), [('{"a": NaN}', 1), ('{"a": "\\ud83d"}', 1), ('{"INVALID_JSON": "{"}', 0)]
)
def test_any_call_of_the_policy_is_answered(renderer, arguments, calls):
    tools = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    said = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'

    def agent(task):
        body = {"model": "m", "max_tokens": 200, "messages": task.messages, "tools": tools}
        reply = httpx.post(f"{task.server_url}/v1/messages", json=body, headers={"x-api-key": task.api_key})
        assert reply.status_code == 200
        assert sum(block["type"] == "tool_use" for block in reply.json()["content"]) == calls
        return 1

    (episode,) = run(renderer, ScriptedEngine(renderer, said), agent, sampling=SamplingParams(max_tokens=200))
    assert (episode.ended, episode.message) == ("done", "")


def test_seeds_of_requests_decide_whichever_comes_first(renderer):
    found = []
    for order in ([1, 2, 1], [2, 1, 1]):

        def agent(task, order=order):
            with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
                for seed in order:
                    client.chat.completions.create(model="m", messages=task.messages, seed=seed)
            return 1

        engine = ScriptedEngine(renderer, "ok")
        run(renderer, engine, agent)
        found.append([request.seed for request in engine.requests])
    (one, two, again), other = found
    assert other == [two, one, again]
    assert len({one, two, again}) == 3


def test_a_repeated_body_gets_the_same_reply_only_if_it_is_a_retry(renderer):
    async def agent(task):
        body = {"model": "m", "messages": task.messages}
        headers = {"authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(base_url=task.base_url, headers=headers) as client:

            async def post(count):
                reply = await client.post(
                    "/chat/completions", json=body, headers={"x-stainless-retry-count": str(count)}
                )
                return reply.json()["id"]

            first, again = await asyncio.gather(post(0), post(0))
            assert first != again
            assert await post(1) == await post(2)
            assert await post(1) in (first, again)
            body["messages"] = [*task.messages, {"role": "user", "content": "Go."}]
            in_flight, repeated = await asyncio.gather(post(0), post(1))
            assert in_flight == repeated
        return 1

    class Slow(ScriptedEngine):
        def poll(self):
            time.sleep(0.05)  # in which both requests arrive
            return super().poll()

    engine = Slow(renderer, "one")
    (episode,) = run(renderer, engine, agent)
    assert (episode.ended, episode.message, len(engine.requests)) == ("done", "", 3)


def test_rows_of_episodes_have_the_tokens_of_their_own_keys(renderer):
    async def agent(task):
        async with openai_client(task) as client:
            messages = [*task.messages, {"role": "user", "content": task.api_key[:8]}]
            for _ in range(2):
                reply = await chat(task, client, messages, tools=openai.NOT_GIVEN)
                messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "on"}]
                await asyncio.sleep(0.01)
        return 1

    engine = ScriptedEngine(renderer, "a", "b", "c")
    episodes = run(renderer, engine, agent, count=6, limits=EpisodeLimits(turns=2, seconds=20))
    assert [episode.ended for episode in episodes] == ["done"] * 6
    assert all(episode.new_rows == [""] and len(episode.turns) == 2 for episode in episodes)
