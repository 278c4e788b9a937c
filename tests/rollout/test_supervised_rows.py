import copy
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, GenerationConfig

from dataproto.errors import InvalidConfig, InvalidPrompt, InvalidRow
from helpers.checkpoints import write_checkpoint
from helpers.tiny_prompts import tiny_builder, tiny_image_processor, tiny_prompt_config, tiny_tokenizer
from rollout.hf import HFEngine
from rollout.prompts import SupervisedBuilder

CPU = torch.device("cpu")

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TALK = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "first?"}]},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": "two and more"},
]


def builder(model_type="qwen2_5_vl", length=512, turns="all"):
    made = SupervisedBuilder(tiny_tokenizer(), tiny_image_processor(), tiny_prompt_config(model_type), length)
    return made.learning(turns)


def images():
    return [Image.new("RGB", size, (9 * size[0] % 256, 90, 10)) for size in ((16, 16), (24, 16), (40, 32))]


def learnt_text(batch, row=0):
    ids = batch["input_ids"][row, 1:][batch["response_mask"][row].bool()]
    return tiny_tokenizer().decode(ids)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_conversation_has_the_tokens_of_its_prompts_and_answers(model_type):
    batch = builder(model_type)([{"prompt": TALK, "images": images()}])
    prompts = tiny_builder(model_type)([{"prompt": TALK[:3], "images": images()}])
    width = prompts["input_ids"].shape[1]
    answer = tiny_tokenizer()("two and more<|im_end|>")["input_ids"]
    assert batch["input_ids"][0].tolist() == [*prompts["input_ids"][0].tolist(), *answer]
    assert batch["mm_token_type_ids"][0].tolist() == [*prompts["mm_token_type_ids"][0].tolist(), *[0] * len(answer)]
    assert torch.equal(batch["position_ids"][..., :width], prompts["position_ids"])
    assert batch["position_ids"][0, 0].tolist() == list(range(width + len(answer)))
    for name, value in prompts["multi_modal_inputs"][0].items():
        assert torch.equal(batch["multi_modal_inputs"][0][name], value)


@pytest.mark.parametrize(
    ("turns", "learnt"), [("all", "one<|im_end|>two and more<|im_end|>"), ("last", "two and more<|im_end|>")]
)
def test_the_assistants_turns_are_learnt_up_to_the_token_that_ends_them(turns, learnt):
    assert learnt_text(builder(turns=turns)([{"prompt": TALK, "images": images()}])) == learnt


def test_rows_with_and_without_images_share_a_batch():
    text = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    batch = builder()([{"prompt": text}, {"prompt": TALK, "images": images()}, {"prompt": text}])
    assert [len(row) for row in batch["multi_modal_inputs"]] == [0, 2, 0]
    assert learnt_text(batch, 0) == learnt_text(batch, 2) == "ho<|im_end|>"
    alone = builder()([{"prompt": text}])
    length = alone["input_ids"].shape[1]
    for name in ("input_ids", "position_ids", "attention_mask", "mm_token_type_ids"):
        assert torch.equal(batch[name][:1, ..., :length], alone[name]), name
    assert batch["attention_mask"][0].sum() == length
    assert batch["response_mask"].shape[1] == batch["input_ids"].shape[1] - 1


def test_the_template_may_write_what_it_likes_around_turns():
    whole = tiny_tokenizer().apply_chat_template(TALK, tokenize=False)
    row = builder().prepare({"prompt": TALK, "images": images()})
    assert tiny_tokenizer().decode(row.raw_ids) == whole[: whole.rindex("<|im_end|>") + len("<|im_end|>")]


def test_length_is_counted_from_headers_and_limited():
    buffer = io.BytesIO()
    Image.new("RGB", (40, 32)).save(buffer, format="PNG")
    row = {"prompt": [TALK[0], TALK[1]], "images": [buffer.getvalue()]}
    made = builder()
    assert made.prompt_length(row) == len(made.prepare(row).input_ids)
    with pytest.raises(InvalidPrompt, match="max_prompt_length=20"):
        builder(length=20).prepare(row)


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"loss": False}, {"train": False, "weight": 1}])
def test_an_answer_that_is_marked_as_not_to_be_learnt_is_context(left_out):
    whole, marked = (
        builder()([{"prompt": [TALK[0], {**TALK[1], **mark}, *TALK[2:]], "images": images()}])
        for mark in ({"weight": 1}, left_out)
    )
    assert torch.equal(whole["input_ids"], marked["input_ids"])
    assert (learnt_text(whole), learnt_text(marked)) == (
        "one<|im_end|>two and more<|im_end|>",
        "two and more<|im_end|>",
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("only a question", "contain an answer of the assistant"),
        ([{"role": "assistant", "content": "hello"}], "must begin with a prompt"),
        (
            [*TALK[:2], {"role": "user", "content": "<image>And now?"}],
            "media follow the last answer that is learned, message 1",
        ),
        ([TALK[0], {**TALK[1], "weight": 0}], "an answer of the assistant to learn"),
        ([TALK[0], {**TALK[1], "weight": 0.5}], "'weight' of a message must be 0 or 1, or true or false, not 0.5"),
        ([*TALK[:2], {"role": "user", "content": "<|image_pad|>"}, TALK[3]], "which only the chat template may write"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(messages, reason):
    with pytest.raises(InvalidRow, match=reason):
        builder()([{"prompt": messages, "images": images()[: len(re.findall("'image'|<image>", str(messages)))]}])


def test_a_template_that_rewrites_earlier_turns_is_refused_for_all_turns_only():
    made = builder()
    made.tokenizer = type(made.tokenizer)(tokenizer_object=made.tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    made.tokenizer.chat_template = (
        "{%- for m in messages -%}"
        "[{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}]<|im_end|>"
        "{%- endfor -%}"
    )
    text = [{"role": ("user", "assistant")[i % 2], "content": str(i)} for i in range(4)]
    with pytest.raises(InvalidPrompt, match="learn the last turn only"):
        made.prepare({"prompt": text})
    row = made.learning("last").prepare({"prompt": text})
    assert (
        made.tokenizer.decode(row.raw_ids[: int(np.argmax(row.loss_mask))])
        == "[0]<|im_end|>[...]<|im_end|>[2]<|im_end|>"
    )


def test_unknown_turns_are_refused():
    with pytest.raises(InvalidConfig, match="'first'"):
        builder(turns="first")


def test_prompts_are_not_training_rows():
    made = builder()
    row = {"prompt": TALK, "images": images()}
    with pytest.raises(InvalidRow, match="row 1: it is a Prompt, not a TrainingRow"):
        made.collate([made.prepare(row), tiny_builder().prepare({"prompt": "words"})])


SAID = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate("wxyz")]
GLM = (  # its marks of roles are <|user|> and <|assistant|>: no message has an end, and the model stops at <|user|>
    "{%- for m in messages -%}{{ ('<|im_start|>' if m.role == 'user' else '<|im_end|>') + '\\n' + m.content }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
)


def checkpoint_of(model_type, folder, eos, ends, template=None):
    """A checkpoint whose tokenizer has another end token than the model, as Gemma's, GLM's and Qwen's base checkpoints have."""
    path = write_checkpoint(model_type, folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token, tokenizer.chat_template = eos, template or tokenizer.chat_template
    tokenizer.save_pretrained(path)
    GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(ends)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "eos", "ends", "template", "end"),
    [
        ("gemma3", "<pad>", ["<pad>", "<end_of_turn>"], None, "<end_of_turn>"),  # <pad> stands for <eos>
        ("glm4v", "<|endoftext|>", ["<|endoftext|>", "<|im_start|>"], GLM, "<|im_start|>"),
        ("qwen2_5_vl", "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"], None, "<|im_end|>"),
    ],
)
def test_turns_are_learnt_up_to_the_token_at_which_rollouts_stop(tmp_path, model_type, eos, ends, template, end):
    made = SupervisedBuilder.from_pretrained(checkpoint_of(model_type, tmp_path, eos, ends, template), 200)
    for turns, learnt in (("all", f"x{end}z{end}"), ("last", f"z{end}")):
        row = made.learning(turns).prepare({"prompt": SAID})
        assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == learnt
        assert set(made.tokenizer.convert_tokens_to_ids(ends)) == set(HFEngine(str(tmp_path), device=CPU).end_ids)
        whole = made.render(SAID) + ("" if end in made.render(SAID)[-20:] else end)
        assert made.tokenizer.decode(row.raw_ids) == whole.removesuffix("\n")
        assert made.prompt_length({"prompt": SAID}) == len(row.input_ids)


def test_an_answer_that_calls_a_tool_ends_where_the_tool_answers(tmp_path):
    """GLM stops at <|observation|> there, which is <|endoftext|> here."""
    template = GLM.replace(
        "if m.role == 'user' else", "if m.role == 'user' else '<|endoftext|>' if m.role == 'tool' else"
    ).replace("{%- endfor -%}", "{{ 'calls' if m.tool_calls }}{%- endfor -%}")
    ends = ["<|im_start|>", "<|endoftext|>"]
    made = SupervisedBuilder.from_pretrained(
        checkpoint_of("qwen2_5_vl", tmp_path, "<|endoftext|>", ends, template), max_prompt_length=200
    )
    calling = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    for messages, learnt in (
        ([SAID[0], calling], "xcalls<|endoftext|>"),
        ([SAID[0], calling, {"role": "tool", "content": "7"}, SAID[3]], "xcalls<|endoftext|>z<|im_start|>"),
    ):
        row = made.prepare({"prompt": messages})
        assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == learnt


def thinker(reads, content="m.content"):
    """A template that writes thoughts before each answer, as those of Qwen3.5 and Qwen3.8."""
    return (
        "{%- for m in messages -%}{%- set content = " + content + " -%}{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' -%}{{ '<think>\n' + " + reads + " + '\n</think>\n\n' }}{%- endif -%}"
        "{{ content.split('</think>')[-1].lstrip('\n') if split else content }}{{ '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
    )


QWEN3_8 = thinker("m.reasoning_content | default('')")
QWEN3_5 = thinker("content.split('</think>')[0].split('<think>')[-1].strip('\n')").replace("if split", "if true")


@pytest.mark.parametrize("template", [QWEN3_8, QWEN3_5], ids=["apart", "in the content"])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("said", ["<think>\n3 + 4\n</think>\n\n7", "3 + 4\n</think>\n\n7"])
def test_an_answer_has_one_thought_whichever_way_the_template_reads_it(template, typed, said):
    made = builder()
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = (
        template.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
        if typed
        else template
    )
    content = [{"type": "text", "text": said}] if typed else said
    row = made.prepare({"prompt": [SAID[0], {"role": "assistant", "content": content}]})
    assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "3 + 4\n</think>\n\n7<|im_end|>"
    own = {"role": "assistant", "content": "7", "reasoning_content": "3 + 4"}
    assert "apart" not in template or made.prepare({"prompt": [SAID[0], own]}).raw_ids == row.raw_ids


def test_thoughts_that_a_template_does_not_read_are_refused():
    made = builder()
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = thinker("''")
    for said in ("<think>3 + 4</think>7", "3 + 4</think>7", "Hm. <think>3 + 4</think>7", "<think>3 + "):
        with pytest.raises(InvalidPrompt, match=r"so the answer in message 1 would have thoughts twice: leave"):
            made.prepare({"prompt": [SAID[0], {"role": "assistant", "content": said}]})
    assert made.prepare({"prompt": SAID[:2]}).loss_mask.any()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_beside_the_content_are_learned_or_refused(name):
    """They were dropped, and the answer without them was learned."""
    made = builder()
    thinking = [SAID[0], {"role": "assistant", "content": "7", name: "3 + 4\n"}]
    with pytest.raises(
        InvalidPrompt, match=rf"does not write '{name}' of message 1, .*: write it into the content, as <think>"
    ):
        made.prepare({"prompt": thinking})
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = thinker(f"m.{name}")
    row = made.prepare({"prompt": thinking})
    assert "3 + 4" in made.tokenizer.decode(row.input_ids[row.loss_mask == 1])


def test_thoughts_after_a_prompt_that_has_ended_them_are_refused_with_that_reason():
    made = builder()
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = QWEN3_8.replace(
        "<think>\n' }}{%- endif -%}",
        "<think>\n' + ('\n</think>\n\n' if enable_thinking is false else '') }}{%- endif -%}",
    )
    made.template_arguments = {"enable_thinking": False}
    thinking = {"role": "assistant", "content": "<think>\n3 + 4\n</think>\n\n7"}
    with pytest.raises(
        InvalidPrompt, match=r"answer in message 1 ends its thoughts .* already, .*enable_thinking false"
    ):
        made.prepare({"prompt": [SAID[0], thinking]})
    row = made.prepare({"prompt": SAID})
    assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "x<|im_end|>z<|im_end|>"
    made.template_arguments = {}
    row = made.prepare({"prompt": [SAID[0], thinking]})
    assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "3 + 4\n</think>\n\n7<|im_end|>"


def test_an_answer_without_an_end_is_refused(tmp_path):
    """The template of Qwen's base checkpoints ends a turn with <|im_end|>, and the model stops at <|endoftext|> only."""
    path = checkpoint_of("qwen2_5_vl", tmp_path, "<|endoftext|>", ["<|endoftext|>"])
    made = SupervisedBuilder.from_pretrained(path, 200)
    with pytest.raises(
        InvalidPrompt,
        match=r"message 1 has no end .* ends it with 'x<\|im_end\|>\\n', and the model stops at '<\|endoftext\|>': add the token",
    ):
        made.prompt_length({"prompt": SAID})


@pytest.mark.parametrize("nothing", ["", []])
def test_an_answer_that_says_nothing_is_refused(nothing):
    made = builder()
    empty = [SAID[0], {"role": "assistant", "content": nothing}]
    with pytest.raises(InvalidPrompt, match="the answer in message 1 is empty"):
        made.prompt_length({"prompt": empty})
    later = [*empty, *SAID[:2]]
    assert made.learning("last").prepare({"prompt": later}).loss_mask.any()  # it is not learnt from


def test_tools_and_calls_of_a_conversation_are_learnt_from():
    """OpenAI writes the arguments of a call as JSON; the template gets the object, and the tools of this row."""
    made = builder()
    made.tokenizer = copy.deepcopy(made.tokenizer)
    made.tokenizer.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.box | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for arguments in ({"box": [1, 2]}, '{"box": [1, 2]}'):
        call = {"type": "function", "function": {"name": "zoom", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "a dot"},
            {"role": "assistant", "content": "1"},
        ]
        row = made.prepare({"prompt": messages, "tools": [{"name": "zoom"}]})
        text = "<zoom>[user]?<|im_end|>[assistant][1, 2]<|im_end|>[tool]a dot<|im_end|>[assistant]1<|im_end|>"
        assert made.tokenizer.decode(row.raw_ids) == text
        assert made.tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "[1, 2]<|im_end|>1<|im_end|>"
        assert made.prompt_length({"prompt": messages, "tools": '[{"name": "zoom"}]'}) == len(row.raw_ids)
