"""Min-p, stop texts and arguments of the chat template from the command line: in training and in the evaluation."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dataproto.errors import InvalidConfig
from helpers.checkpoints import write_checkpoint
from helpers.geo3k_runs import REWARD, rows_of
from helpers.option_files import in_files
from recipes import grpo, sft
from recipes.commands import main
from recipes.configs import walk_config
from recipes.options.config_file import config_as_yaml
from rollout.hf import HFEngine

THINKING = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{%- endif -%}"
SHORT = (
    "--batch-size 2 --algorithm.n 2 --max-prompt-length 300 --max-response-length 6 --eval-rows 2 --steps 1"
    " --eval-every 1 --save-every 0"
)


def test_training_samples_by_min_p_and_both_end_at_stop_texts(tmp_path):
    stop = ("</answer>", "\n\n", "---")
    options = in_files(["--rollout.min-p", "0.1", "--rollout.stop", *stop], tmp_path)
    for recipe in (grpo, walk_config):
        config = recipe.parse(options)
        assert (config.sampling().min_p, config.sampling().stop) == (0.1, stop)
        assert (config.eval_sampling().min_p, config.eval_sampling().stop) == (0.0, stop)
    several = grpo.parse([*options, "--eval-samples", "3"]).eval_sampling()
    assert (several.n, several.min_p, several.stop) == (3, 0.1, stop)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rollout.min-p", "1.5"], "min_p=1.5: must be between 0"),
        (["--rollout.stop", ""], "--rollout.stop .* is empty"),
        (["--engine", "vllm", "--engine-options", "quantization", "fp8"], "add --algorithm.correction token"),
    ],
)
def test_impossible_sampling_is_refused(given, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message):
        grpo.parse(in_files(given, tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--engine-options tensor_parallel 0", "tensor_parallel=0: must be an integer of at least 1"),
        ("--engine-options tensor_parallel two", "tensor_parallel='two': must be an integer"),
        ("--engine-options tensor_parallel 2", "tensor_parallel=2 must divide the 1 processes"),
        ("--on ray --layout.dp 6 --engine-options tensor_parallel 4", "tensor_parallel=4 must divide the 6 processes"),
        (
            "--on ray --layout.dp 4 --layout.rollout 3 --engine-options tensor_parallel 2",
            "divide the 3 processes",
        ),
    ],
)
def test_engines_of_a_size_that_does_not_fit_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        grpo.parse(["--engine", "vllm", *options.split()])


def test_engines_apart_may_be_larger_than_the_layout():
    options = "--on ray --layout.dp 2 --layout.rollout 4 --engine-options tensor_parallel 4 --batch-size 8"
    assert grpo.parse(["--engine", "vllm", *options.split(), "--algorithm.n", "4"]).engine_slots() == 32


def test_vllm_decodes_all_samples_of_an_engine_at_a_time_by_default():
    given = ["--engine", "vllm", "--batch-size", "8", "--algorithm.n", "4"]
    assert grpo.parse(given).engine_slots() == 32
    assert grpo.parse([*given, "--rollout.staleness", "1"]).engine_slots() == 48  # of 12 groups
    on_ray = [*given, "--on", "ray", "--layout.dp", "4"]
    assert grpo.parse(on_ray).engine_slots() == 8
    assert grpo.parse([*on_ray, "--engine-options", "tensor_parallel", "2"]).engine_slots() == 16
    assert grpo.parse([*on_ray, "--layout.rollout", "1"]).engine_slots() == 32
    assert grpo.parse(["--engine", "vllm", "--batch-size", "1024", "--algorithm.n", "4"]).engine_slots() == 1024


def test_a_file_gives_the_same_options_again(tmp_path):
    given = "--rollout.min-p 0.05 --rollout.stop --- 1 --template-arguments enable_thinking false depth 2 style short"
    file = tmp_path / "config.yaml"
    for recipe in (grpo, sft):
        options = in_files(given.split(), tmp_path) if recipe is grpo else given.split()[5:]
        config = recipe.parse(options)
        assert config.data.template_arguments == {"enable_thinking": False, "depth": 2, "style": "short"}
        file.write_text(config_as_yaml(config))
        assert recipe.parse(["--config", str(file)]) == config
    file.write_text("template-arguments: {tools: [{name: zoom}]}")
    with pytest.raises(
        InvalidConfig, match=r"template-arguments: tools=\[.*\] must be a number, a text, true or false"
    ):
        grpo.parse(["--config", str(file)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose template can be told not to think."""
    path = write_checkpoint("qwen3", tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    start = "{{ '<|im_start|>assistant\n' }}"
    assert start in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(start, start + THINKING)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def requests(model, monkeypatch):
    """Of what a run asks its engine: whether it is greedy, the prompt's text, and the settings."""
    asked, generate, tokenizer = [], HFEngine.generate, AutoTokenizer.from_pretrained(model)

    def noted(self, given, sampling):
        asked.extend((sampling.temperature == 0, tokenizer.decode(each.input_ids), sampling) for each in given)
        return generate(self, given, sampling)

    monkeypatch.setattr(HFEngine, "generate", noted)
    return asked


def run(model, tmp_path, *more):
    tmp_path.mkdir(exist_ok=True)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(f'{{"problem": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(10)))
    paths = ["--preset", "any", "--model-path", model, "--data-path", str(rows), "--reward", f"{reward}:score"]
    return main(["grpo", *paths, "--output-dir", str(tmp_path / "run"), *in_files([*SHORT.split(), *more], tmp_path)])


@pytest.mark.slow
def test_a_run_asks_its_engine_so_in_training_and_evaluation(model, requests, tmp_path):
    options = "--template-arguments enable_thinking false --rollout.min-p 0.2 --rollout.stop e"
    assert run(model, tmp_path, *options.split()) == 0
    assert {greedy for greedy, _, _ in requests} == {True, False}
    assert all(text.endswith("assistant\n<think></think>") for _, text, _ in requests)
    assert all(sampling.stop == ("e",) for _, _, sampling in requests)
    assert {sampling.min_p for greedy, _, sampling in requests if not greedy} == {0.2}
    assert rows_of(tmp_path / "run")[-1]["training/rollout_probs_diff_max"] < 1e-4  # log-probs are the policy's


@pytest.mark.slow
def test_a_run_with_drafts_gives_the_same_responses_and_says_how_many_counted(model, tmp_path):
    assert (
        run(model, tmp_path / "plain") == run(model, tmp_path / "drafting", "--engine-options", "speculate", "2") == 0
    )
    plain, drafting = (rows_of(tmp_path / name / "run")[-1] for name in ("plain", "drafting"))
    assert 0 <= drafting["speculation/accepted_per_pass"] <= 2
    assert not any(name.startswith("speculation/") for name in plain)
    for name in ("actor/pg_loss", "actor/entropy", "critic/score/mean", "response_length/mean"):
        assert drafting[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_name_that_the_template_does_not_use_ends_the_run_before_it_begins(model, tmp_path, capsys):
    assert run(model, tmp_path, "--template-arguments", "enable_thinkin", "false") == 2
    assert (
        "error: template_arguments: the chat template does not use 'enable_thinkin'; it reads enable_thinking"
        in capsys.readouterr().err
    )
    assert not Path(tmp_path, "run").exists()
