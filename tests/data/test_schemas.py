"""Public schemas of data sets: what the model is shown, the truth, and what is learnt. ``docs/data.md`` has a row for each."""

import base64
import copy
import json
import re
from pathlib import Path

import pytest
from pyarrow import Table
from pyarrow.parquet import write_table

from helpers.geo3k_files import drawing, png
from helpers.tiny_prompts import tiny_image_processor, tiny_prompt_config, tiny_tokenizer
from recipes import show
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import conversation_rows
from recipes.data.problem_rows import load_rows
from rollout.prompts import PromptBuilder, SupervisedBuilder

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ (tool.function or tool).name }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PICTURE = png(drawing(1))
STORED = {"bytes": PICTURE, "path": "a.png"}  # as `datasets` writes an image to parquet
URI = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
ZOOM = {
    "type": "function",
    "function": {"name": "zoom", "parameters": {"type": "object", "properties": {"box": {"type": "array"}}}},
}
CALL = {"name": "zoom", "arguments": {"box": [1, 2]}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def talk(*turns):
    return [{"from": who, "value": text} for who, text in zip(("human", "gpt") * len(turns), turns, strict=False)]


class Case:
    """A row, and the prompt and truth in ``grpo`` and what is learnt in ``sft``; `None` where the schema does not serve it."""

    def __init__(self, row, shown=None, truth=None, learnt=None, kind="jsonl", **keys):
        self.row, self.shown, self.truth, self.learnt = row, shown, truth, learnt
        self.kind, self.keys = kind, ColumnKeys(**keys)


COUNT = [user("<image>How many?"), assistant("3")]
CASES = {
    "verl, Geometry3K": Case(
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [user("<image>Find x. Think first.")],
            "images": [STORED],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "9"},
            "extra_info": {"split": "train", "index": 0, "answer": "9", "question": "<image>Find x."},
        },
        "[user]<image>Find x. Think first.",
        "9",
        kind="parquet",
    ),
    "verl with tools": Case(
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "system", "content": "Use the tool."}, user("<image>Find x.")],
            "images": [STORED],
            "reward_model": {"style": "rule", "ground_truth": "9"},
            "extra_info": {
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "9"}}},
            },
        },
        "[system]Use the tool.[user]<image>Find x.",
        "9",
        kind="parquet",
    ),
    "EasyR1": Case({"problem": "What is 4 + 5?", "answer": "9"}, "[user]What is 4 + 5? Be brief.", "9"),
    "EasyR1, Geometry3K": Case(
        {"images": [STORED], "problem": "<image>Find x.", "answer": "9"},
        "[user]<image>Find x. Be brief.",
        "9",
        kind="parquet",
    ),
    "chat, Geometry3K": Case(
        {
            "messages": [user([{"type": "image"}, {"type": "text", "text": "Find x."}]), assistant("9")],
            "images": [URI],
        },
        "[user]<image>Find x.",
        "9",
        ["9"],
    ),
    "TRL prompt-only": Case(
        {"prompt": [user("How many?")], "image": STORED, "solution": "3"},
        "[user]<image>How many?",
        "3",
        kind="parquet",
    ),
    "TRL prompt-only, standard": Case({"prompt": "The sky is"}, "[user]The sky is"),
    "TRL prompt-completion": Case(
        {
            "prompt": [user([{"type": "image", "text": None}, {"type": "text", "text": "How many?"}])],
            "completion": [assistant([{"type": "text", "text": "Three."}])],
            "images": [STORED],
        },
        learnt=["Three."],
        kind="parquet",
    ),
    "TRL prompt-completion, standard": Case({"prompt": "The sky is", "completion": " blue."}, learnt=[" blue."]),
    "TRL messages": Case({"messages": COUNT, "images": [URI]}, "[user]<image>How many?", "3", ["3"]),
    "TRL messages with tools": Case(
        {
            "messages": [
                user("Look."),
                assistant(None, tool_calls=[{"type": "function", "function": CALL}]),
                {"role": "tool", "name": "zoom", "content": "a dot"},
                assistant("It is a dot."),
            ],
            "tools": [ZOOM],
        },
        '[tool zoom][user]Look.[assistant]zoom{"box": [1, 2]}[tool]a dot',
        "It is a dot.",
        ['zoom{"box": [1, 2]}', "It is a dot."],
        kind="parquet",
    ),
    "ms-swift messages": Case(
        {"messages": [{"role": "system", "content": "Count."}, *COUNT], "images": ["a.png"]},
        "[system]Count.[user]<image>How many?",
        "3",
        ["3"],
    ),
    "ms-swift query and response": Case(
        {"system": "Count.", "query": "And lines?", "response": "2", "history": [["How many dots?", "3"]]},
        "[system]Count.[user]How many dots?[assistant]3[user]And lines? Be brief.",
        "2",
        ["3", "2"],
    ),
    "ms-swift GRPO": Case(
        {"messages": [user("<image>How many?")], "images": ["a.png"], "solution": "<answer> 3 </answer>"},
        "[user]<image>How many?",
        "<answer> 3 </answer>",
    ),
    "ms-swift agent": Case(
        {
            "tools": json.dumps([ZOOM]),
            "messages": [
                user("Look."),
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_response", "content": "a dot"},
                assistant("It is a dot."),
            ],
        },
        '[tool zoom][user]Look.[assistant]zoom{"box": [1, 2]}[tool]a dot',
        "It is a dot.",
        ['zoom{"box": [1, 2]}', "It is a dot."],
    ),
    "LLaMA-Factory alpaca": Case(
        {
            "instruction": "Add.",
            "input": "2 + 2",
            "output": "4",
            "system": "Be exact.",
            "history": [["1 + 1?", "2"]],
        },
        "[system]Be exact.[user]1 + 1?[assistant]2[user]Add.\n2 + 2 Be brief.",
        "4",
        ["2", "4"],
        kind="json",
    ),
    "LLaMA-Factory sharegpt": Case(
        {"conversations": talk("What is it?", "A dot."), "system": "Be exact.", "tools": ""},
        "[system]Be exact.[user]What is it?",
        "A dot.",
        ["A dot."],
        kind="json",
    ),
    "LLaMA-Factory sharegpt with tools": Case(
        {
            "conversations": [
                {"from": "human", "value": "Look."},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "a dot"},
                {"from": "gpt", "value": "It is a dot."},
            ],
            "system": "Be exact.",
            "tools": json.dumps([ZOOM["function"]]),
        },
        '[tool zoom][system]Be exact.[user]Look.[assistant]zoom{"box": [1, 2]}[tool]a dot',
        "It is a dot.",
        ['zoom{"box": [1, 2]}', "It is a dot."],
        kind="json",
    ),
    "LLaMA-Factory multimodal": Case(
        {"messages": [*COUNT, user("Why?"), assistant("I see them.")], "images": ["a.png"]},
        "[user]<image>How many?[assistant]3[user]Why?",
        "I see them.",
        ["3", "I see them."],
        kind="json",
    ),
    "LLaVA": Case(
        {"id": "000000033471", "image": "a.png", "conversations": talk("<image>\nHow many?", "Three.")},
        "[user]<image>\nHow many?",
        "Three.",
        ["Three."],
        kind="json",
    ),
    "VLM-R1": Case(
        {"id": 1, "image": ["a.png", "a.png"], "conversations": talk("<image><image>How many in both?", "6")},
        "[user]<image><image>How many in both?",
        "6",
        ["6"],
    ),
    "R1-V, CLEVR counts": Case(
        {"image": STORED, "problem": "How many items are there in the image?", "solution": "<answer> 3 </answer>"},
        "[user]<image>How many items are there in the image? Be brief.",
        "<answer> 3 </answer>",
        kind="parquet",
    ),
    "open-r1-multimodal": Case(
        {
            "image": STORED,
            "problem": "Find x.\nChoices: (A) 8 (B) 9",
            "solution": "<think>4 + 5</think><answer>B</answer>",
            "original_question": "Find x.",
            "original_answer": "The answer is B",
        },
        "[user]<image>Find x.\nChoices: (A) 8 (B) 9 Be brief.",
        "<think>4 + 5</think><answer>B</answer>",
        kind="parquet",
    ),
    "the_cauldron": Case(
        {
            "images": [STORED],
            "texts": [
                {"user": "How many?", "assistant": "3", "source": "clevr"},
                {"user": "Why?", "assistant": "I see them.", "source": "clevr"},
            ],
        },
        learnt=["3", "I see them."],
        kind="parquet",
    ),
    "OpenAI chat": Case(
        {
            "messages": [
                {"role": "system", "content": "Count."},
                user([{"type": "text", "text": "How many?"}, {"type": "image_url", "image_url": {"url": URI}}]),
                assistant("3"),
            ]
        },
        "[system]Count.[user]How many?<image>",
        "3",
        ["3"],
    ),
    "OpenAI tool calls": Case(
        {
            "messages": [
                user("Look."),
                assistant(
                    None,
                    tool_calls=[
                        {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": '{"box": [1, 2]}'}}
                    ],
                ),
                {"role": "tool", "tool_call_id": "1", "content": "a dot"},
                assistant("It is a dot."),
            ],
            "parallel_tool_calls": False,
            "tools": [ZOOM],
        },
        '[tool zoom][user]Look.[assistant]zoom{"box": [1, 2]}[tool]a dot',
        "It is a dot.",
        ['zoom{"box": [1, 2]}', "It is a dot."],
    ),
    "Qwen-VL fine-tuning": Case(
        {"image": "a.png", "conversations": talk("<image>\nWhat is it?", "A dot.", "Its colour?", "Red.")},
        "[user]<image>\nWhat is it?[assistant]A dot.[user]Its colour?",
        "Red.",
        ["A dot.", "Red."],
        kind="json",
    ),
    "MathVista, multiple choice": Case(
        {
            "pid": "1",
            "question": "Which?",
            "image": "images/1.jpg",
            "decoded_image": STORED,
            "choices": ["8", "9"],
            "answer": "9",
            "query": "Question: Which?\nChoices:\n(A) 8\n(B) 9",
        },
        "[user]<image>Question: Which?\nChoices:\n(A) 8\n(B) 9 Be brief.",
        "9",
        kind="parquet",
        prompt_key="query",
        answer_key="answer",
        image_key="decoded_image",
    ),
    "boxes as lists of numbers": Case(
        {"image": "a.png", "problem": "Where is the dot?", "solution": [138, 136, 235, 359]},
        "[user]<image>Where is the dot? Be brief.",
        [138, 136, 235, 359],
    ),
    "points under other names": Case(
        {"image": STORED, "gt_bbox": [0.5, 0.25], "instruction": "Click on the dot.", "gt_action": "click"},
        "[user]<image>Click on the dot. Be brief.",
        [0.5, 0.25],
        kind="parquet",
        prompt_key="instruction",
        answer_key="gt_bbox",
    ),
}


def written(case, folder):
    (folder / "a.png").write_bytes(PICTURE)
    path = folder / f"train.{case.kind}"
    if case.kind == "parquet":
        write_table(Table.from_pylist([case.row]), path)
    else:
        path.write_text(json.dumps([case.row] if case.kind == "json" else case.row) + "\n", encoding="utf-8")
    return path


def made(Builder):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return Builder(tokenizer, tiny_image_processor(), tiny_prompt_config(), 512)


def text(tokenizer, ids):
    return tokenizer.decode(ids).replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shown])
def test_problems_of_a_public_schema_are_shown_whole(name, tmp_path):
    case, builder = CASES[name], made(PromptBuilder)
    row = load_rows(written(case, tmp_path), instruction="Be brief.", keys=case.keys)[0]
    prompt = builder.prepare(row)
    assert text(builder.tokenizer, prompt.raw_ids).replace("<|im_end|>", "") == f"{case.shown}[assistant]"
    assert row["reward_model"]["ground_truth"] == case.truth
    assert len(prompt.media) == case.shown.count("<image>")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.learnt])
def test_answers_of_a_public_schema_are_learnt(name, tmp_path):
    case, builder = CASES[name], made(SupervisedBuilder)
    row = builder.prepare(conversation_rows(written(case, tmp_path), keys=case.keys)[0])
    learnt = builder.tokenizer.decode(row.input_ids[row.loss_mask == 1])
    assert learnt.removesuffix("<|im_end|>").split("<|im_end|>") == case.learnt
    whole = text(builder.tokenizer, row.raw_ids).replace("<|im_end|>", "")
    if case.shown:  # the same conversation as in `grpo`, but for the instruction
        assert whole == f"{case.shown.removesuffix(' Be brief.')}[assistant]{case.learnt[-1]}"


@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, each) for name, case in CASES.items() for each, has in (("grpo", case.shown), ("sft", case.learnt)) if has],
)
def test_the_command_shows_a_file_of_each_schema(name, recipe, tmp_path, capsys):
    case = CASES[name]
    keys = [word for option, key in case.keys.given().items() for word in (f"--{option.replace('_', '-')}", key)]
    status = show.main([recipe, str(written(case, tmp_path)), *keys])
    told = capsys.readouterr().out
    if recipe == "sft" or isinstance(case.truth, str):
        assert (status, "cannot be used" in told) == (0, False)
    else:  # the reward of geometry problems compares text, and says the way out
        assert status == 1
        assert re.search("give a --reward that needs none|write a reward function of your own", told)


def test_the_document_has_each_schema_and_the_recipes_that_it_serves():
    document = Path(__file__).parents[2].joinpath("docs", "data.md").read_text(encoding="utf-8")
    section = document.partition("## Public schemas\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| .*\| ([^|]*?) \|$", section, flags=re.MULTILINE)[1:]
    serves = {
        name: ", ".join(recipe for recipe, has in (("`grpo`", case.shown), ("`sft`", case.learnt)) if has)
        for name, case in CASES.items()
    }
    rows = [row for row in rows if not row[0].endswith("preference")]  # tests/data/test_preferences.py reads those
    assert dict(rows) == serves
    assert len(rows) == len(serves) >= 25
