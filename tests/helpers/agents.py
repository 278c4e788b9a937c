"""Agents on an engine that says what a test tells it to, and a chat template with tools."""

import base64
import io
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from helpers.episodes import picture, renderer_of
from rollout.agents.agent_loop import AgentPlan
from rollout.engine import Completion, SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart
from rollout.hf import engine as hf_engine
from rollout.sampling import policy_log_probs, uniforms

WIRES = Path(__file__).parent.parent / "agents" / "recorded_requests"
"""What clients of seven frameworks have sent, see its README.md."""

TOOL_TEMPLATE = """\
{%- if tools -%}<|im_start|>system
{% for tool in tools -%}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""In the manner of Qwen's: it describes tools, and writes calls as JSON."""

SAMPLING = SamplingParams(max_tokens=256, seed=3)
LOOK = '<think>hm</think>Let me look.\n<tool_call>\n{"name": "look", "arguments": {"b": 1,  "a": "x"}}\n</tool_call>'


def tool_renderer(model_type="qwen2_5_vl"):
    """A renderer of the family's tiny tokenizer, whose template takes tools."""
    renderer = renderer_of(model_type)
    renderer.builder.tokenizer = _with_template(renderer.builder.tokenizer)
    return type(renderer)(renderer.builder)


def _with_template(tokenizer):
    from copy import deepcopy

    own = deepcopy(tokenizer)
    own.chat_template = TOOL_TEMPLATE
    return own


class ScriptedEngine:
    """A `RequestEngine` that answers with given texts in turn, or with those of a function of the request's number."""

    def __init__(self, renderer, *texts, most=1 << 30):
        self.builder, self.texts, self.most = renderer.builder, texts, most
        self.end = self.builder.tokenizer.eos_token_id
        self.requests, self.waiting, self.done, self.kept = [], {}, [], set()

    def submit(self, request, sampling, keep=False):
        from dataproto.errors import InvalidPrompt

        if len(request.input_ids) > self.most:
            raise InvalidPrompt(f"{len(request.input_ids)} tokens, more than {self.most}")
        number = len(self.requests)
        self.requests.append(request)
        self.waiting[number] = (request, sampling)
        self.kept.add(number)
        return number

    def fork(self, number, request, sampling, keep=False):
        assert number in self.kept
        done = next(each for each in self.done if each.request == number)
        before = [*self.requests[number].input_ids.tolist(), *done.token_ids]
        assert request.input_ids[: len(before)].tolist() == before
        return self.submit(request, sampling, keep)

    def abort(self, number):
        self.waiting.pop(number, None), self.kept.discard(number)

    @property
    def unfinished(self):
        return len(self.waiting)

    def poll(self):
        found = []
        for number, (_, sampling) in list(self.waiting.items()):
            text = self.texts[number % len(self.texts)]
            ids = [*self.builder.encode_text(text), self.end]
            cut = len(ids) > sampling.max_tokens
            ids = ids[: sampling.max_tokens]
            top = [[(token, -0.5)] for token in ids] if sampling.top_log_probs else None
            found.append(Completion(number, ids, [-0.5] * len(ids), "length" if cut else "stop", top_log_probs=top))
            del self.waiting[number]
        self.done += found
        return found


class Recorder:
    """An engine that remembers each request with its completion, for the law: what is in rows was sampled."""

    def __init__(self, engine):
        self.engine, self.requests, self.done = engine, {}, {}

    def submit(self, request, sampling, keep=False):
        number = self.engine.submit(request, sampling, keep)
        self.requests[number] = request
        return number

    def fork(self, number, request, sampling, keep=False):
        later = self.engine.fork(number, request, sampling, keep)
        self.requests[later] = request
        return later

    def poll(self):
        found = self.engine.poll()
        self.done |= {each.request: each for each in found}
        return found

    def __getattr__(self, name):
        return getattr(self.engine, name)


def checked_rows(actor, rollout, prompts, agent, sampling, **limits):
    """The rows of an agent, and the engine's own record, with which they agree; the actor scores them alike."""
    inner, rollout.engine = rollout.engine, Recorder(rollout.engine)
    recorder = rollout.engine
    try:
        data = rollout.run(prompts, agent, sampling, EpisodeLimits(**limits))
    finally:
        rollout.engine = inner
    check_law(data, recorder)
    mask = data["response_mask"].bool()
    assert mask.any()
    if actor is not None:
        difference = actor.log_probs(data)["old_log_probs"] - data["rollout_log_probs"]
        assert float(difference[mask].abs().max()) < 1e-4
    return data, recorder


def check_law(data, recorder):
    """Each turn of each row stands after the very ids of its request, with its ids and log-probs as sampled; each once."""
    left = {}  # pictures of one size have the same ids, and other log-probs
    for number, done in recorder.done.items():
        key = tuple(recorder.requests[number].input_ids.tolist()), tuple(done.token_ids)
        left.setdefault(key, []).append(done.log_probs)
    assert len(data["new_row"]) == len(data)
    used = 0
    for row in range(len(data)):
        kept = data["attention_mask"][row].bool()
        ids = data["input_ids"][row][kept].tolist()
        mask = torch.cat([torch.zeros(data["prompts"].shape[1], dtype=torch.int64), data["response_mask"][row]])[kept]
        turn = torch.cat([torch.zeros(data["prompts"].shape[1], dtype=torch.int64), data["turn"][row]])[kept]
        values = torch.cat([torch.zeros(data["prompts"].shape[1]), data["rollout_log_probs"][row]])[kept]
        for number in sorted(set(turn[mask.bool()].tolist())):
            places = ((turn == number) & mask.bool()).nonzero().flatten().tolist()
            begin, end = places[0], places[-1] + 1
            assert places == list(range(begin, end))
            sampled, found = left[tuple(ids[:begin]), tuple(ids[begin:end])], values[begin:end].tolist()
            same = [log_probs for log_probs in sampled if found == pytest.approx(log_probs, abs=1e-6)]
            sampled.remove(same[0])
            used += 1
    assert used == len(recorder.done)


@contextmanager
def sampled_as_told(builder, text_of, sampler=hf_engine):
    """The engine of the module ``sampler`` samples the tokens of ``text_of(request)`` and an end, unless it is None; their
    log-probs are those that the model gives them.
    """
    told, submit, fork, true_sample = {}, Recorder.submit, Recorder.fork, sampler.sample

    def note(request):
        if (text := text_of(request)) is not None:
            ids = [*builder.encode_text(text), builder.tokenizer.eos_token_id]
            numbers = uniforms(np.full(len(ids), request.seed, dtype=np.uint64), np.arange(len(ids)))
            told.update(zip(numbers.tolist(), ids, strict=True))

    def sample(logits, sampling, numbers, banned_ids, undrawn_ids=()):
        chosen, _ = true_sample(logits, sampling, numbers, banned_ids, undrawn_ids)
        chosen = torch.tensor([told.get(number, token) for number, token in zip(numbers.tolist(), chosen.tolist())])
        return chosen, policy_log_probs(logits, sampling.temperature, banned_ids).gather(1, chosen[:, None]).squeeze(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample", sample)
        patch.setattr(Recorder, "submit", lambda self, request, *rest: (note(request), submit(self, request, *rest))[1])
        patch.setattr(
            Recorder, "fork", lambda self, n, request, *rest: (note(request), fork(self, n, request, *rest))[1]
        )
        yield


def uri(seed):
    file = io.BytesIO()
    picture(16, 24, seed).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Client:
    """A small client of chat/completions."""

    def __init__(self, task):
        self.task = task
        self.http = httpx.AsyncClient(
            base_url=task.base_url, headers={"authorization": f"Bearer {task.api_key}"}, timeout=60
        )

    async def say(self, messages, retry=0, **options):
        body = {"model": "m", "messages": messages, **options}
        reply = await self.http.post("/chat/completions", json=body, headers={"x-stainless-retry-count": str(retry)})
        assert reply.status_code == 200, reply.text
        return [choice["message"] for choice in reply.json()["choices"]]


def shown(seed):
    return {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": uri(seed)}}],
    }


async def looker(task):
    """Two looks, and a compaction: an episode of two rows. It has a sum of 1 over its turns, and 1 at the end."""
    client, messages = Client(task), list(task.messages)
    for turn in range(2):
        messages += [*await client.say(messages), shown(turn)]
        task.reward(0.5)
    await client.say([shown(3), *messages[-2:]])
    await client.http.aclose()
    return 1.0


def starts(count=1, messages=None):
    """The starts of episodes of one prompt."""
    row = {"raw_prompt": messages or [{"role": "user", "content": "Which colour is it?"}]}
    return [EpisodeStart(row, 2 * number + 1, 7, "u", f"u/{number}") for number in range(count)]


def run(renderer, engine, agent, count=1, limits=None, sampling=SAMPLING, **start):
    """Episodes of an agent; afterwards the engine holds nothing."""
    limits = limits or EpisodeLimits(turns=8, seconds=20)
    episodes = AgentPlan(agent, limits).play(engine, renderer, starts(count, **start), replace(sampling), 1)
    assert not engine.waiting
    assert not engine.kept
    return episodes


def recorded(name):
    """The requests of a recording: path, headers and body of each."""
    return json.loads((WIRES / f"{name}.json").read_text())["requests"]
