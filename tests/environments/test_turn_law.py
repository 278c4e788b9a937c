"""The ids of a turn begin with those of the turn before and what was sampled, for chat templates of several families."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from dataproto.errors import InvalidConfig
from helpers.episodes import DrawnEnvironment, RandomEngine, drawn_content, play_episodes, renderer_of, starts_of
from helpers.tiny_prompts import tiny_builder
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits, Observation, TurnRenderer

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "gemma3")
EPISODES = 200


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.slow
def test_rows_only_grow_over_fuzzed_episodes(model_type):
    renderer = renderer_of(model_type)
    engine = RandomEngine(renderer, unended=0.05)
    limits = EpisodeLimits(turns=4, tokens=400)
    starts = starts_of(EPISODES)
    episodes = play_episodes(engine, renderer, starts, DrawnEnvironment, SamplingParams(max_tokens=6), limits)
    by_uid = {}
    for request in engine.requests:  # those of an episode are in order
        by_uid.setdefault(request.uid, []).append(request)
    turns = 0
    for episode in episodes:
        requests = by_uid[episode.start.uid]
        assert len(requests) == len(episode.turns)
        for turn, earlier, later in zip(episode.turns, requests, requests[1:]):
            begin = [*earlier.input_ids.tolist(), *turn.token_ids]
            assert later.input_ids[: len(begin)].tolist() == begin
            assert later.position_ids[..., : len(earlier.input_ids)].equal(earlier.position_ids)
            turns += 1
        assert episode.length <= 400
    assert turns > EPISODES
    assert {episode.ended for episode in episodes} >= {"done", "turns", "length"}
    assert not engine.kept
    assert not engine.waiting


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_are_what_the_template_makes_of_the_whole_conversation(model_type):
    """Where answers are text, the template's rendering of all messages is an independent reference, token by token."""
    renderer, rng = renderer_of(model_type), np.random.default_rng(0)
    builder = renderer.builder
    lead = (
        " " if model_type == "smolvlm" else ""
    )  # its template writes a space before an answer, which the model samples
    for _ in range(50):
        messages, ids = [{"role": "user", "content": "Go."}], None
        for _ in range(3):
            shown = Observation(drawn_content(rng))
            if ids is None:
                prompt = renderer.prompt({"raw_prompt": messages}, shown)
                ids, types = prompt.input_ids, prompt.token_types
                messages = [{"role": "user", "content": [{"type": "text", "text": "Go."}, *parts(shown)]}]
            else:
                answer = ["up", "to the left", "{}"][rng.integers(3)]
                turn = renderer.turn(shown)
                end = [builder.tokenizer.eos_token_id]
                ids = np.concatenate([ids, builder.encode_text(lead + answer), end, turn.ids])
                types = np.concatenate([types, np.zeros(len(ids) - len(types) - len(turn.ids), int), turn.token_types])
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": parts(shown)}]
            whole = builder.prepare({"prompt": messages})
            assert whole.input_ids.tolist() == ids.tolist()
            assert whole.token_types.tolist() == types.tolist()


def parts(observation):
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in observation.content
    ]


def test_an_answer_without_end_token_gets_the_templates():
    renderer = renderer_of("qwen2_5_vl")
    cut, ended = (renderer.turn(Observation(["go"]), last).ids.tolist() for last in (5, None))
    assert cut == [renderer.builder.tokenizer.eos_token_id, *ended]


@contextmanager
def renderer_with(change, ends=("<|im_end|>",)):
    """A renderer whose template is changed while it is used."""
    builder = tiny_builder("qwen2_5_vl")
    tokenizer = builder.tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, change(tokenizer.chat_template)
    try:
        builder.end_ids = tokenizer.convert_tokens_to_ids(list(ends))
        yield TurnRenderer(builder)
    finally:
        tokenizer.chat_template = kept


def with_template(change):
    with renderer_with(change) as renderer:
        return renderer


def test_the_newline_behind_the_end_token_is_named():
    (found,) = renderer_of("qwen2_5_vl").departures
    assert found.startswith(r"it writes '\n' after the end token")


CONTENT = "{{ message['content'] }}"
TEXTS = "{{ part['text'] }}"
STRIPS = "{{ part['text'].split('</think>')[-1] if message['role'] == 'assistant' else part['text'] }}"


def test_stripped_thinking_is_named():
    found = with_template(lambda template: template.replace(TEXTS, STRIPS)).departures
    assert any("strips thinking" in each for each in found)


def test_a_prompt_that_begins_the_thinking_is_named():
    ask = "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n"
    found = with_template(lambda template: template.replace(ask.removesuffix("<think>\n"), ask)).departures
    assert any(r"it begins an answer with '<think>\n'" in each for each in found)


def glm(template):
    """Thinking in each earlier answer, as in GLM's templates."""
    head = "<|im_start|>{{ message['role'] }}\n"
    return template.replace(head, f"{head}{{{{ '<think></think>\\n' if message['role'] == 'assistant' }}}}")


def test_what_is_written_before_earlier_answers_is_named_and_left_out():
    with renderer_with(glm) as renderer:
        assert any(r"it writes '<think></think>\n' before an answer" in each for each in renderer.departures)
        engine, limits = RandomEngine(renderer), EpisodeLimits(turns=3)
        (found,) = play_episodes(engine, renderer, starts_of(1), DrawnEnvironment, SamplingParams(max_tokens=6), limits)
        assert len(found.turns) > 1
        assert "think" not in renderer.builder.tokenizer.decode(engine.requests[-1].input_ids)


def test_an_end_that_begins_the_next_message_stays_behind_another_end():
    """As in GLM's templates: an answer ends with the beginning of the user's message, or with the end of the text."""

    def begun(template):
        return template.replace("<|im_end|>\n", "").replace("{{ message['role'] }}\n", "{{ message['role'][0] }}\n")

    with renderer_with(begun, ends=("<|im_start|>", "<|endoftext|>")) as renderer:
        tokenizer = renderer.builder.tokenizer
        start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
        shown = Observation(["go"])
        assert renderer.turn(shown, start).ids.tolist() == renderer.turn(shown).ids.tolist()
        assert renderer.turn(shown, end).ids.tolist() == [start, *renderer.turn(shown).ids.tolist()]


ONLY_USERS = "{%- for message in messages if message['role'] != 'tool' -%}"


def test_a_template_that_leaves_out_tools_ends_the_episode():
    """As Gemma 4's does where no message before it calls a tool: the policy would have been asked again without the answer."""

    class Tool:
        def reset(self, row, seed):
            return Observation(["go"])

        def step(self, action):
            return Observation(["found 7"], role="tool")

    with renderer_with(lambda template: template.replace("{%- for message in messages -%}", ONLY_USERS)) as renderer:
        sampling = SamplingParams(max_tokens=5)
        (found,) = play_episodes(RandomEngine(renderer), renderer, starts_of(1), Tool, sampling, EpisodeLimits(turns=3))
    assert found.ended == "invalid"
    assert "leaves out messages of the role 'tool' after an answer: show it in another role" in found.message


def test_the_text_of_a_tool_is_a_string_for_templates_that_write_parts_as_python_does():
    parts = "{%- for part in message['content'] -%}"
    as_python = f"{{%- if message['role'] == 'tool' -%}}{{{{ message['content'] }}}}{{%- else -%}}{parts}"

    def change(template):
        assert template.count(parts) == template.count("{%- endfor -%}\n{%- endif -%}") == 1
        closed = template.replace("{%- endfor -%}\n{%- endif -%}", "{%- endfor -%}{%- endif -%}\n{%- endif -%}")
        return closed.replace(parts, as_python)

    with renderer_with(change) as renderer:
        turn = renderer.turn(Observation(["found ", "7"], role="tool"))
        text = renderer.builder.tokenizer.decode(turn.ids)
    assert "tool\nfound 7<|im_end|>" in text


def test_a_template_without_history_is_refused():
    last = "{%- for message in messages[-1:] -%}"
    with pytest.raises(InvalidConfig, match="leaves out answers that an observation follows"):
        with_template(lambda template: template.replace("{%- for message in messages -%}", last))


def test_a_template_that_counts_turns_is_refused():
    counted = "<|im_start|>{{ message['role'] }} {{ loop.index }}"
    with pytest.raises(InvalidConfig, match="depends on the turns before"):
        with_template(lambda template: template.replace("<|im_start|>{{ message['role'] }}", counted))


def test_positions_of_a_row_are_those_of_hugging_face():
    from helpers.tiny_models import tiny_model

    for model_type in ("qwen2_5_vl", "qwen3_vl"):
        renderer = renderer_of(model_type)
        engine = RandomEngine(renderer)
        play_episodes(engine, renderer, starts_of(20), DrawnEnvironment, SamplingParams(max_tokens=6), EpisodeLimits(4))
        model = tiny_model(model_type, config=renderer.builder.config)
        for request in engine.requests:
            grids = [part["image_grid_thw"] for part in request.multi_modal_inputs]
            expected, _ = model.model.get_rope_index(
                request.input_ids[None],
                mm_token_type_ids=request.token_types[None].int(),
                image_grid_thw=torch.cat(grids) if grids else None,
                attention_mask=torch.ones(1, len(request.input_ids)),
            )
            assert request.position_ids[1:].equal(expected[:, 0])
