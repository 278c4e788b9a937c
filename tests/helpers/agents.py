"""Agents on an engine that says what a test tells it to, and a chat template with tools."""

import json
from dataclasses import replace
from pathlib import Path

from helpers.episodes import renderer_of
from rollout.agents.agent_loop import run_agents
from rollout.engine import Completion, SamplingParams
from rollout.environments import EpisodeLimits, EpisodeStart

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


def starts(count=1, messages=None):
    """The starts of episodes of one prompt."""
    row = {"raw_prompt": messages or [{"role": "user", "content": "Which colour is it?"}]}
    return [EpisodeStart(row, 2 * number + 1, 7, "u", f"u/{number}") for number in range(count)]


def run(renderer, engine, agent, count=1, limits=None, sampling=SAMPLING, **start):
    """Episodes of an agent; afterwards the engine holds nothing."""
    limits = limits or EpisodeLimits(turns=8, seconds=20)
    episodes = run_agents(engine, renderer, starts(count, **start), agent, replace(sampling), limits, 1)
    assert not engine.waiting
    assert not engine.kept
    return episodes


def recorded(name):
    """The requests of a recording: path, headers and body of each."""
    return json.loads((WIRES / f"{name}.json").read_text())["requests"]
