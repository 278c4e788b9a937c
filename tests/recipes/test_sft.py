"""Supervised training as users run it, and against plain Hugging Face."""

import base64
import io
import json
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from PIL import Image

from dataproto.errors import InvalidPrompt, InvalidRow
from dataproto.planning import first_fit_decreasing
from helpers.checkpoints import write_checkpoint
from helpers.option_files import in_files
from recipes.data.conversations import last_questions
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.demo.tiny_model import make_tiny_processors
from recipes.run.supervised import exact_match, held_out_loss, launch_supervised, measure_rows, sft_step
from recipes.sft import SFTConfig, SFTDataConfig, main, open_data, parse
from recipes.watch.metrics_file import read_metrics
from rollout.prompts import SupervisedBuilder
from workers.model.model_config import ModelConfig
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.reward import RewardRow
from workers.training.checkpoint import checkpoint_steps
from workers.training.micro_batches import micro_batches

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def picture(size, colour):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def talks(count):
    """Mixed rows: no image, one, or two of unequal sizes; one turn or two."""
    rows = []
    for i in range(count):
        sizes = [(16, 16), (24 + 8 * (i % 3), 16)][: i % 3]
        images = [picture(size, (40 * i % 256, 90, 20)) for size in sizes]
        turns = [{"role": "user", "content": "<image>" * len(images) + f"question {i}?"}]
        turns.append({"role": "assistant", "content": f"answer {'x' * (i % 5)}"})
        if i % 2:
            turns += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": str(i)}]
        rows.append({"messages": turns, "images": images})
    return rows


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in talks(24)))
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: write_checkpoint(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def arguments(model_path, data_path, output_dir, *more):
    settings = "--batch-size 6 --eval-rows 4 --max-response-length 5 --optimizer.lr 1e-3 --token-budget 200 --steps 4"
    paths = ["--preset", "any", "--model-path", model_path, "--data-path", data_path, "--output-dir", str(output_dir)]
    return [*paths, *settings.split(), "--save-every", "2", *more]


def without_times(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(("timing", "perf/"))} for row in rows]


@pytest.fixture(scope="module")
def finished_run(checkpoints, data_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    assert main(arguments(checkpoints["qwen2_5_vl"], data_path, directory)) == 0
    return directory


@pytest.mark.slow
def test_a_run_leaves_metrics_report_and_a_checkpoint_to_start_from(finished_run, data_path, tmp_path):
    rows = read_metrics(finished_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 4]
    assert {"val-core/talks/acc/mean@1", "data/skipped_eval_rows"} <= rows[0].keys()
    for row in rows[1:]:
        assert row["train/loss"] > 0
        assert row["actor/grad_norm"] > 0
        assert {"data/learnt_tokens", "row_length/mean", "perf/throughput", "actor/lr"} <= row.keys()
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    page = (finished_run / "report.html").read_text()
    assert "<html" in page
    assert "Loss" in page
    exported = finished_run / "global_step_4" / "actor" / "huggingface"
    assert main(arguments(str(exported), data_path, tmp_path / "next", "--steps", "1")) == 0
    assert read_metrics(tmp_path / "next" / "metrics.jsonl")[0]["val/loss"] == rows[-1]["val/loss"]


def test_a_held_out_row_that_cannot_be_read_is_skipped(checkpoints, tmp_path):
    """The held-out rows were read as the run began, so that a bad one ended it in spite of ``--on-bad-row skip``."""
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in talks(10)) + '{"messages"\n')
    builder = SupervisedBuilder.from_pretrained(checkpoints["qwen2_5_vl"], 500)
    data = SFTDataConfig(data_path=(str(path),), eval_rows=4, on_bad_row="skip")
    train_rows, held_out = open_data(data, builder, seed=0)
    assert (len(train_rows), len(held_out[""])) == (9, 2)
    loader = EvaluationLoader(held_out[""], builder, 2, "skip")
    assert [len(batch) for batch in loader] == [1]
    assert list(loader.skipped) == [10]
    with pytest.raises(InvalidRow, match="row 10: line 11"):
        open_data(replace(data, on_bad_row="stop"), builder, seed=0)


@pytest.mark.slow
def test_each_held_out_set_has_its_loss_and_its_answers(checkpoints, data_path, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps(row) + "\n" for row in talks(2)))
    sets = ["--eval-data-path", f"all={data_path}", str(short)]
    assert main([*arguments(checkpoints["qwen2_5_vl"], data_path, tmp_path / "run", *sets), "--steps", "1"]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [rows[0][f"val/loss/{name}"] for name in ("all", "short")]
    assert losses[0] != losses[1]
    assert rows[0]["val/loss"] == pytest.approx(sum(losses) / 2)
    assert {"val-core/all/acc/mean@1", "val-core/short/acc/mean@1"} <= rows[-1].keys()
    assert "val-core/talks/acc/mean@1" not in rows[-1]


@pytest.mark.slow
def test_epochs_the_best_checkpoint_and_the_first_evaluation_are_options(data_path, tmp_path):
    """Of 24 rows 4 are held out; two passes over 20 rows in batches of 6 take 7 steps. The model is made on the spot."""
    given = (
        "--epochs 2 --batch-size 6 --eval-rows 4 --eval-every 3 --keep-best loss --keep-checkpoints 1 --no-eval-first"
    )
    own = ["--data-path", data_path, "--output-dir", str(tmp_path), "--max-response-length", "0", *given.split()]
    own = in_files(own, tmp_path)
    assert main(own) == 0
    losses = {row["step"]: row["val/loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "val/loss" in row}
    assert sorted(losses) == [3, 6, 7]
    best = min(losses, key=losses.get)
    assert json.loads((tmp_path / "best.json").read_text()) == {"measure": "loss", "step": best, "value": losses[best]}
    assert checkpoint_steps(tmp_path) == sorted({best, 7})
    assert main([*own, "--resume"]) == 0  # there is nothing left to do
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["run"]["epochs"], config["run"]["steps"], config["optimizer"]["total_steps"]) == (2, 7, 7)


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run_to_the_bit(finished_run, checkpoints, data_path, tmp_path):
    directory = tmp_path / "parts"
    own = arguments(checkpoints["qwen2_5_vl"], data_path, directory)
    assert main(in_files([*own, "--steps", "2", "--optimizer.total-steps", "4"], tmp_path)) == 0
    assert main([*own, "--resume"]) == 0
    again, expected = without_times(directory), without_times(finished_run)
    assert again[3:] == expected[3:]
    one, other = (path / "global_step_4" / "actor" / "huggingface" for path in (directory, finished_run))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_that_is_resumed_for_fewer_steps_is_the_whole_run_until_there(
    finished_run, checkpoints, data_path, tmp_path
):
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step_4")
    assert main(arguments(checkpoints["qwen2_5_vl"], data_path, tmp_path / "run", "--steps", "3", "--resume")) == 0
    last, expected = without_times(tmp_path / "run")[-1], without_times(finished_run)[3]
    assert {name: last[name] for name in expected} == expected  # and the evaluation after the last step
    assert 0 < expected["actor/lr"] < 1e-3


@pytest.mark.parametrize("model_type", FAMILIES)
def test_packed_and_mixed_rows_give_plain_hugging_faces_loss(model_type, checkpoints, data_path):
    """Rows one by one through Hugging Face's own model, processor positions and loss."""
    import transformers

    path = checkpoints[model_type]
    builder = SupervisedBuilder.from_pretrained(path, 512)
    data = SFTDataConfig(data_path=(data_path,), eval_rows=4)
    rows, _ = open_data(data, builder, seed=0)
    batch = next(PromptLoader(rows, builder, 8))
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in range(len(batch)):
            kept = batch["attention_mask"][row].bool()
            labels = torch.full_like(batch["input_ids"][row], -100)
            labels[1:] = torch.where(batch["response_mask"][row].bool(), batch["input_ids"][row, 1:], -100)
            logits = model(
                input_ids=batch["input_ids"][row, kept][None],
                mm_token_type_ids=batch["mm_token_type_ids"][row, kept][None].long(),
                **batch["multi_modal_inputs"][row],
            ).logits
            logits[..., list(builder.family.banned_ids(builder.config))] = -1e30
            total += float(
                torch.nn.functional.cross_entropy(logits[0, :-1], labels[kept][1:], ignore_index=-100, reduction="sum")
            )
            tokens += int(batch["response_mask"][row].sum())
    config = SFTConfig(model_path=path, compute=ModelConfig(token_budget=150))
    with launch_supervised(config, path) as roles:
        held_out = held_out_loss(roles, [batch])["val/loss"]
        _, metrics = sft_step(roles, batch)
        assert held_out_loss(roles, [batch])["val/loss"] < held_out
    assert held_out == pytest.approx(total / tokens, abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(total / tokens, abs=1e-5)


def test_rows_fill_as_few_micro_batches_as_first_fit_decreasing_needs(checkpoints, data_path):
    path = str(checkpoints["qwen2_5_vl"])
    builder = SupervisedBuilder.from_pretrained(path, 512)
    rows, _ = open_data(SFTDataConfig(data_path=(data_path,), eval_rows=4), builder, seed=0)
    batch, budget = next(PromptLoader(rows, builder, 18)), 170
    lengths = batch["attention_mask"].sum(1)
    parts = micro_batches(batch, ActorWorker(ActorConfig(path), torch.device("cpu")).module, budget)
    assert sorted(row for part in parts for row in part.index.tolist()) == list(range(18))
    assert len(parts) <= len(first_fit_decreasing(lengths, budget))
    assert all(int(lengths[part.index].sum()) <= budget for part in parts)
    assert measure_rows(batch, {}, devices=1)["data/learnt_tokens"] == int(batch["response_mask"].sum())


@pytest.mark.slow
def test_workers_prepare_the_same_batches(checkpoints, data_path):
    builder = SupervisedBuilder.from_pretrained(checkpoints["qwen2_5_vl"], 512)
    for streaming in (False, True):
        data = SFTDataConfig(data_path=(data_path, data_path), weights=(1, 2), streaming=streaming, shuffle_buffer=5)
        loaders = [
            PromptLoader(open_data(data, builder, 0)[0], builder, 5, seed=1, num_workers=workers) for workers in (0, 2)
        ]
        for one, other in islice(zip(*loaders), 3):
            assert list(one["uid"]) == list(other["uid"])
            assert torch.equal(one["input_ids"], other["input_ids"])
            for mine, theirs in zip(one["multi_modal_inputs"], other["multi_modal_inputs"]):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        resumed = PromptLoader(open_data(data, builder, 0)[0], builder, 5, seed=1)
        resumed.load_state_dict(json.loads(json.dumps(loaders[0].state_dict())))
        assert list(next(resumed)["uid"]) == list(next(loaders[0])["uid"])


def test_the_last_turn_alone_can_be_learnt(checkpoints, data_path):
    builder = SupervisedBuilder.from_pretrained(checkpoints["qwen2_5_vl"], 512)
    rows, _ = open_data(SFTDataConfig(data_path=(data_path,), eval_rows=4), builder, 0)
    everything, last = (builder.learning(turns)([rows[1]])["response_mask"].sum() for turns in ("all", "last"))
    assert 0 < last < everything


def test_drawn_conversations_come_with_and_without_pictures_and_held_out_ones_apart(checkpoints):
    builder = SupervisedBuilder.from_pretrained(checkpoints["qwen2_5_vl"], 512)
    rows, held_out = open_data(SFTDataConfig(eval_rows=8), builder, seed=0)
    batch = next(PromptLoader(rows, builder, 40, shuffle=False))
    shown = sum(bool(media) for media in batch["multi_modal_inputs"])
    assert 20 < shown < 40
    assert len(held_out[""]) == 8
    trained = {row["images"][0].tobytes() for row in (rows[i] for i in range(50))}
    assert not trained & {row["images"][0].tobytes() for row in held_out[""] if row["images"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "1"], "1 weights for 0 data sets"),
        (["--streaming"], "streaming without --data-path"),
        (["--data-path", "a", "b", "--streaming"], "give --weights"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--turns", "first"], "first"),
        (["--engine", "none"], "'none' is unknown"),
        (["--layout.dp", "2"], "--on ray"),
        (["--data-path", "no/such.jsonl"], "no such file or folder"),
        (["--preset", "any", "--model-path", "no/such/model"], "holds no checkpoint: there is no such directory"),
        (["--preset", "any", "--model-path", "/no/model"], "holds no checkpoint: there is no such directory"),
        (["--preset", "any", "--model-path", "."], "holds no checkpoint: the directory has no config.json"),
        (["--stepz", "1"], "stepz"),
    ],
)
def test_a_wrong_command_line_is_one_line(options, message, tmp_path, capsys):
    assert main([*options, "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_folder_of_an_adapter_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert main(["--preset", "any", "--model-path", str(tmp_path), "--output-dir", str(tmp_path / "run")]) == 2
    assert "holds no checkpoint: it is an adapter; merge it into its base model" in capsys.readouterr().err


def test_defaults_are_the_small_models_until_a_model_is_named():
    assert parse([]).optimizer.lr > 100 * parse(["--preset", "any", "--model-path", "x"]).optimizer.lr / 2
    assert parse([]).data.data_path == ()


def test_an_answer_is_right_when_it_is_the_truth():
    assert [row["acc"] for row in exact_match([RewardRow(" 7\n", 7), RewardRow("8", "7")])] == [1.0, 0.0]


def test_a_held_out_answer_that_calls_a_tool_is_right_with_its_call(tmp_path):
    """Its content is empty, so an empty answer was right."""
    builder = SupervisedBuilder.from_pretrained(make_tiny_processors(tmp_path), 512)
    calls = [{"type": "function", "function": {"name": "zoom", "arguments": {"box": [1, 2]}}}]
    called = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call>'
    for content, written in ((None, called), ("Closer.", f"Closer.{called}")):
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        row = {"prompt": [{"role": "user", "content": "Look."}, answer], "tools": [{"name": "zoom"}]}
        truth = last_questions([row], builder.last_answer)[0]["reward_model"]["ground_truth"]
        answers = [RewardRow(text, truth) for text in ("", "Closer.", written)]
        assert [scores["acc"] for scores in exact_match(answers)] == [0.0, 0.0, 1.0]
        learnt = builder([row])
        ids = learnt["input_ids"][0, 1:][learnt["response_mask"][0].bool()]
        assert builder.tokenizer.decode(ids, skip_special_tokens=True).strip() == truth  # what the model learns


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_held_out_answer_with_an_empty_list_of_calls_is_its_content(tmp_path):
    """Tables have one in each row if any row calls a tool. The truth had the thoughts that a template writes."""
    builder = SupervisedBuilder.from_pretrained(make_tiny_processors(tmp_path), 512)
    builder.tokenizer.chat_template = THINKING
    for calls in ([], None):
        answer = {"role": "assistant", "content": "4", "tool_calls": calls}
        row = {"prompt": [{"role": "user", "content": "2 + 2?"}, answer]}
        assert last_questions([row], builder.last_answer)[0]["reward_model"]["ground_truth"] == "4"


def test_a_held_out_call_that_cannot_be_told_from_its_prompt_is_refused_as_in_training(tmp_path):
    """The truth was the whole conversation, so no answer was right."""
    builder = SupervisedBuilder.from_pretrained(make_tiny_processors(tmp_path), 512)
    last = "{% if loop.last and m.role == 'user' %}Now {% endif %}{{ m.role }}"
    builder.tokenizer.chat_template = THINKING.replace("{{ m.role }}", last)
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "zoom"}}], "weight": 0}
    rows = last_questions([{"prompt": [{"role": "user", "content": "Look."}, answer]}], builder.last_answer)
    with pytest.raises(InvalidPrompt, match="renders the turns before message 1 differently"):
        rows[0]
    builder.tokenizer.chat_template = THINKING
    assert rows[0]["reward_model"]["ground_truth"].endswith("<tool_call>zoom</tool_call>")


TALKS, SUMS = (f"val-core/synthetic/{name}/acc/mean@1" for name in ("talks", "sums"))


@pytest.mark.slow
def test_the_default_run_needs_no_arguments(tmp_path, monkeypatch):
    """As a user starts it, but for the number of steps."""
    monkeypatch.chdir(tmp_path)
    assert main(["--steps", "10"]) == 0
    rows = read_metrics(tmp_path / "outputs" / "sft" / "metrics.jsonl")
    assert [row["step"] for row in rows if {"val/loss", TALKS, SUMS} <= row.keys()] == [0, 10]
    assert rows[-1]["val/loss"] < 0.7 * rows[0]["val/loss"]
    assert all(0 < row["data/rows_with_media"] < 64 for row in rows[1:])
    assert (tmp_path / "outputs" / "sft" / "report.html").is_file()
    assert (tmp_path / "outputs" / "sft" / "global_step_10" / "actor" / "huggingface" / "config.json").is_file()


@pytest.mark.long
def test_the_default_run_learns_its_conversations(tmp_path):
    assert main(["--output-dir", str(tmp_path / "run")]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[0][TALKS] == rows[0][SUMS] == 0
    assert rows[-1][TALKS] > 0.7
    assert rows[-1][SUMS] > 0.9
