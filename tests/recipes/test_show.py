"""``dataproto show``: rows as the model sees them, by the command itself."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.checkpoints import write_checkpoint
from helpers.geo3k_files import drawing
from helpers.tiny_models import VLM_TYPES
from helpers.tiny_prompts import tiny_builder, tiny_tokenizer
from recipes.commands import main
from recipes.demo.tiny_model import make_tiny_processors
from recipes.show import Span, shown_row, token_spans

STRICT = """
def never(solution_str, ground_truth):
    return float(solution_str == f"the answer is {ground_truth}")

def wants_size(completions, size, **kwargs):
    return [0.0] * len(completions)

async def asks_a_server(solution_str, ground_truth):
    raise AssertionError("it is not called")
"""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    for n in range(4):
        drawing(n, (28 + 28 * n, 28)).save(folder / f"{n}.png")
    problems = [{"problem": "<image>How many?", "answer": n, "image": f"{n}.png", "level": n} for n in range(4)]
    problems[0]["problem"] += "\x1b[31m<script>alert(1)</script>"
    write_rows(folder / "problems.jsonl", problems)
    write_rows(folder / "bad.jsonl", [problems[1], {**problems[2], "image": "gone.png"}, {"level": 3}])
    turns = [("user", "<image>How many?"), ("assistant", "2"), ("user", "Sure?"), ("assistant", "Yes.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    write_rows(folder / "talks.jsonl", [{"messages": messages, "images": ["2.png"], "quality": 3}] * 2)
    (folder / "mine.py").write_text(STRICT)
    return folder


def shown(capsys, *arguments):
    status = main(["show", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_the_first_rows_as_the_model_sees_them(folder, capsys):
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--rows", 2)
    assert status == 0
    lines = told.splitlines()
    assert "no --model-path: the tokenizer and the image processor are those of the small Qwen2.5-VL" in lines
    assert (
        "<|vision_start|><|image_pad|> × 4<|vision_end|>How many?\ufffd[31m<script>alert(1)</script><|im_end|>" in lines
    )
    assert "<|vision_start|><|image_pad|> × 6<|vision_end|>How many?<|im_end|>" in lines
    assert "pictures: 28 x 28, seen as 56 x 56" in lines
    assert "truth: 1" in lines
    assert "reward of the truth: 1 (acc 1, format 1) for '<think>So it is.</think>\\n\\\\boxed{1}'" in lines
    assert lines.count("reward of a wrong answer: 0.1 (acc 0, format 1)") == 2
    assert lines.count("reward of an empty answer: 0 (acc 0, format 0)") == 2
    assert "row 2" not in told
    assert "columns that are read: problem, answer, image" in lines
    assert "columns that only the reward gets: level" in lines


def test_the_page_holds_the_pictures_and_runs_nothing(folder, tmp_path, capsys):
    status, told, _ = shown(capsys, "grpo", folder / "problems.jsonl", "--page", tmp_path / "show.html")
    page = (tmp_path / "show.html").read_text(encoding="utf-8")
    assert (status, told.splitlines()[-1]) == (0, f"page: {tmp_path / 'show.html'}")
    assert page.count('src="data:image/png;base64,') == 3
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert '<span class="media">&lt;|image_pad|&gt; × 4</span>' in page
    status, _, told = shown(capsys, folder / "problems.jsonl", "--page", tmp_path / "no folder" / "show.html")
    assert status == 2
    assert "could not be written: No such file or directory: give another --page" in told
    assert "--resume" not in told


@pytest.mark.parametrize("more", [[], ["--streaming", "--steps", "1"]])
def test_what_is_learnt_is_marked(more, folder, tmp_path, capsys):
    page = tmp_path / "show.html"
    status, told, _ = shown(capsys, "sft", folder / "talks.jsonl", "--page", page, *more)
    lines = told.splitlines()
    assert status == 0
    assert lines.count("⟦2<|im_end|>⟧") == lines.count("⟦Yes.<|im_end|>⟧") == 2
    assert "reward" not in told
    assert "columns that are not read: quality" in lines
    assert '<span class="text learnt">2</span><span class="special learnt">&lt;|im_end|&gt;</span>' in page.read_text()
    _, told, _ = shown(capsys, "sft", folder / "talks.jsonl", "--turns", "last", *more)
    assert "⟦2" not in told
    assert "⟦Yes.<|im_end|>⟧" in told


def test_rows_that_cannot_be_used_are_told_next_to_the_others(folder, capsys):
    status, told, _ = shown(capsys, folder / "bad.jsonl")
    assert status == 1
    assert "<|image_pad|> × 6" in told
    assert "row 1 cannot be used: " in told
    assert "gone.png" in told
    assert "row 2 cannot be used: " in told
    assert "used: row" not in told


def test_a_reward_that_does_not_know_the_truth_has_status_1(folder, capsys):
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--reward", f"{folder}/mine.py:never", "--rows", 1)
    assert status == 1
    assert "warning: the reward does not give its best to the truth" in told
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--reward", f"{folder}/mine.py:wants_size")
    assert status == 1
    assert "the reward refuses these rows: the reward wants_size needs size" in told


def test_a_reward_that_costs_is_not_asked(folder, capsys):
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--reward", f"{folder}/mine.py:asks_a_server")
    assert status == 0
    assert "the reward is not asked what it gives the truth: it is async" in told
    assert "reward of the truth" not in told


def test_no_weights_are_read(folder, tmp_path, capsys):
    model = write_checkpoint("qwen3_vl", tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.write_bytes(b"no weights")
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--model-path", model, "--max-prompt-length", 600)
    assert status == 0
    assert "The final answer MUST BE put in" in told  # the defaults of --preset any
    status, told, _ = shown(capsys, folder / "problems.jsonl", "--model-path", model, "--max-prompt-length", 20)
    assert status == 1
    assert "more than max_prompt_length=20" in told


def test_without_data_the_synthetic_rows_are_shown(capsys):
    assert shown(capsys, "--rows", 1)[0] == 0
    assert shown(capsys, "sft", "--rows", 1)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["--rows", "0"], "--rows 0: must be at least 1"),
        (["--rwos", "2"], "--rwos"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    status, _, told = shown(capsys, *arguments)
    assert status == 2
    assert says in told
    assert told.count("\n") == 1


def test_the_spans_are_the_tokens_with_each_run_of_places_once():
    tokenizer = tiny_tokenizer()
    text = "<|im_start|>user\nHow many?<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    types, learnt = np.zeros(len(ids), dtype=int), np.arange(len(ids)) == len(ids) - 1
    spans = token_spans(tokenizer, ids, types, learnt)
    assert "".join(span.text for span in spans) == text
    assert spans[0] == Span("<|im_start|>", "special")
    assert spans[-1] == Span("<|im_end|>", "special", learnt=True)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert token_spans(tokenizer, [pad] * 3, [1] * 3) == (Span("<|image_pad|> × 3", "media"),)


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_each_family_is_shown(model_type):
    builder = tiny_builder(model_type, max_prompt_length=2048)
    row = {"prompt": "<image>How many dots?", "images": [drawing(1, (60, 40))]}
    shown, prompt = shown_row(0, row, builder), builder.prepare(row)
    places = sum(int(span.text.rpartition("× ")[2]) for span in shown.spans if span.kind == "media")
    assert places == (prompt.token_types != 0).sum() > 0
    assert "How many dots?" in "".join(span.text for span in shown.spans if span.kind == "text")
    assert shown.facts["pictures"].startswith("60 x 40")


def test_columns_of_alpaca_are_read(tmp_path, capsys):
    (tmp_path / "alpaca.jsonl").write_text('{"instruction": "Add.", "input": "2 + 2", "output": "4", "level": 1}\n')
    for recipe in ("sft", "grpo"):
        _, told, _ = shown(capsys, recipe, tmp_path / "alpaca.jsonl")
        assert "columns that are read: instruction, input, output" in told.splitlines()


def test_the_small_models_template_writes_tools_and_calls(tmp_path, capsys):
    call = {"function": {"name": "zoom", "arguments": {"box": [1, 2]}}}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    row = {"messages": messages, "tools": [{"name": "zoom"}]}
    (tmp_path / "calls.jsonl").write_text(json.dumps(row) + "\n")
    status, told, _ = shown(capsys, "sft", tmp_path / "calls.jsonl")
    assert status == 0
    assert '# Tools\n{"name": "zoom"}\n' in told
    assert '⟦<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call><|im_end|>⟧' in told


def test_both_answers_of_a_pair_and_what_is_trained_on(folder, capsys):
    pair = {"prompt": "How many?", "image": "2.png", "chosen": "Two.", "rejected": "Nine of them.", "note": "x"}
    pairs = write_rows(folder / "pairs.jsonl", [pair])
    status, told, _ = shown(capsys, "--data-path", pairs)
    assert status == 0
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_processors(folder / "small"))
    counts = [len(tokenizer(text)["input_ids"]) for text in ("Two.<|im_end|>", "Nine of them.<|im_end|>")]
    wanted = ["chosen: ⟦Two.<|im_end|>⟧", "rejected: ⟦Nine of them.<|im_end|>⟧", "columns that are not read: note"]
    assert {*wanted} <= {*told.splitlines()}
    assert f"trained on: all of the {counts[0]} and {counts[1]} tokens of the two answers" in told
    assert "the scores at the ends of" in shown(capsys, "reward-model", pairs)[1]
    labelled = write_rows(folder / "labelled.jsonl", [{"prompt": "2 + 2?", "completion": "4", "label": True}])
    assert "desirable: ⟦4<|im_end|>⟧" in shown(capsys, "dpo", labelled, "--algorithm.loss", "kto")[1]
    assert "cannot be used: line 1 of" in shown(capsys, "dpo", labelled)[1]
