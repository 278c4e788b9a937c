"""Sounds in requests of agents, and of rows in what agents get."""

import base64
import io
import re
from concurrent.futures import Future

import numpy as np
import pytest
import soundfile
import torch

from helpers.agents import starts, tool_renderer
from helpers.tiny_prompts import tiny_builder
from rollout.agents.agent import task_messages
from rollout.agents.conversations import Conversations, Prompts
from rollout.agents.messages import Refused
from rollout.agents.wire_requests import read_chat
from rollout.environments.episode import EpisodeLimits
from rollout.environments.turn_renderer import TurnRenderer

SOUND = (0.5 * np.sin(np.arange(8000) / 7)).astype(np.float32)


def flac(samples):
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="FLAC")
    return base64.b64encode(file.getvalue()).decode()


def request(data, *more):
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Which"}, audio, *more]}]}


def talk(renderer):
    return Conversations(starts()[0], Prompts(renderer, EpisodeLimits(8)))


def test_a_sound_of_a_request_is_heard_as_that_of_a_row():
    builder = tiny_builder("qwen2_5_omni_thinker")
    conversations = talk(TurnRenderer(builder))
    (turn,) = conversations.open(read_chat(request(flac(SOUND), {"type": "text", "text": "?"})), Future())
    (heard,) = turn.request.multi_modal_data["audio"]
    assert np.abs(heard - SOUND).max() < 1e-4  # 16 bits
    row = builder.prepare({"prompt": "Which<audio>?", "audios": [heard]})
    assert turn.request.input_ids.tolist() == row.input_ids.tolist()
    assert turn.request.token_types.tolist() == row.token_types.tolist()
    (inputs,) = turn.request.multi_modal_inputs
    assert all(torch.equal(inputs[name], row.media[0].inputs[name]) for name in row.media[0].inputs)
    same, other = (read_chat(request(flac(sound))).messages[0] for sound in (SOUND, SOUND / 2))
    assert same == read_chat(request(flac(SOUND))).messages[0]
    assert same != other


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("%%%", "base64 content is broken"),
        (base64.b64encode(b"no sound").decode(), "cannot be read"),
        (None, "sounds come as base64, nothing is fetched"),
    ],
)
def test_a_sound_that_cannot_be_read_is_refused_by_its_field(data, says):
    with pytest.raises(Refused, match=says) as found:
        read_chat(request(data))
    assert (found.value.field, found.value.status) == ("messages[0].content[1].input_audio.data", 400)


def test_a_model_without_ears_refuses_the_field():
    conversations = talk(tool_renderer())
    field = "messages[0].content[1].input_audio.data"
    with pytest.raises(Refused, match=rf"{re.escape(field)}: models of type qwen2_5_vl take no audios") as found:
        conversations.open(read_chat(request(flac(SOUND))), Future())
    assert (found.value.field, found.value.status) == (field, 400)


def test_an_agent_gets_the_sound_of_its_row_as_a_file():
    ((part,),) = (
        message["content"]
        for message in task_messages([{"role": "user", "content": [{"type": "audio", "audio": SOUND}]}])
    )
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])))
    assert rate == 16_000
    assert np.abs(samples - SOUND).max() < 1e-4
