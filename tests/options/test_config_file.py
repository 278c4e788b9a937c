"""Options from a YAML file, from a preset and from a run's directory, and those that would do nothing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dataproto.errors import CheckpointError, InvalidConfig
from dataproto_server import config as serve_config
from helpers.option_files import in_files
from recipes import classify, geo3k_grpo, grpo, ppo, sft
from recipes.configs import distil_config, easy_vqa_config, walk_config, zoom_config
from recipes.options import write_options
from recipes.run.run_directory import open_run_directory
from workers.ranks.layout import Layout

RECIPES = (grpo, ppo, sft, classify, geo3k_grpo, easy_vqa_config, distil_config, walk_config, zoom_config)


def written(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


def test_a_file_gives_options_and_the_command_line_overrides_them(tmp_path):
    text = """
steps: 7
batch_size: 8                       # or batch-size
compile: true
engine-options: {max_num_seqs: 4}
algorithm: {n: 3, clip: [0.1, 0.3], kl_coef: null}
optimizer.lr: 1e-3
run: {seed: 5}                      # as in config.json
model-path: null
instruction: "--think,
 then answer"
"""
    given = written(tmp_path / "mine.yaml", text)
    config = grpo.parse([*given, "--steps", "9", "--algorithm.n", "4"])
    assert (config.run.steps, config.data.batch_size, config.compute.compile, config.run.seed) == (9, 8, True, 5)
    assert (config.algorithm.n, config.algorithm.clip, config.algorithm.kl_coef) == (4, (0.1, 0.3), 0.0)
    assert (config.optimizer.lr, config.engine_options, config.model_path) == (1e-3, {"max_num_seqs": 4}, None)
    assert config.data.instruction == "--think, then answer"
    assert config.run.eval_every == grpo.TINY.run.eval_every


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", r"mine.yaml: there is no option 'stepz'; the nearest is 'steps'"),
        ("algorithm: {clipp: 3}", r"there is no option 'algorithm.clipp'; the nearest is 'algorithm.clip'"),
        ("lr: 3", "there is no option 'lr'; the nearest is 'optimizer.lr'"),
        ("learning_rate: 3", "there is no option 'learning-rate'; here it is 'optimizer.lr'"),
        ("data: {train_files: a.parquet}", "there is no option 'data.train-files'; here it is 'data-path'"),
        ("steps: many", "many"),
        ("compile: 3", "compile 3: must be true or false"),
        ("[1, 2]", "not a list of options"),
        ("a: [", "is not YAML"),
        ("algorithm: {n: 3}\nsteps: 7\nalgorithm: {kl-coef: 0.5}", "'algorithm' stands in line 1 and again in line 3"),
        ("{steps: 3, steps: 4}", "'steps' stands in line 1 and again in line 1"),
        ("steps: 3\nrun: {steps: 4}", "steps stands twice, under several of its names"),
        ("algorithm: {kl-coef: 0.1, kl_coef: 0.2}", "algorithm.kl-coef stands twice"),
        ("engine-options: {max_num_seqs: 4, max_num_seqs: 5}", "'max_num_seqs' stands in line 1"),
        ("compile: yes", "compile yes: must be true or false"),
        ("template-arguments: {thinking: no}", "template-arguments: thinking=no: write true or false, or, .* quotes"),
        ("template-arguments: {thinking: null}", "template-arguments: thinking=None must be a number, a text"),
        ("rollout: {stop: [[a]]}", r"rollout.stop: \['a'\] must be a number, a text"),
        ("steps: [3, 4]", "mine.yaml: steps"),
        ("seed: 12:30", "seed 12:30: must be a whole number"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(text, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message):
        grpo.parse(written(tmp_path / "mine.yaml", text))
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml cannot be read"):
        grpo.parse(["--config", "nowhere.yaml"])


def test_a_value_is_read_as_the_command_line_reads_it(tmp_path):
    """Not as YAML 1.1, which makes True of yes and on, 750 of 12:30, and 8 of 010."""
    text = """
on: ray
ray: {env-vars: {SEEN: true, DEPTH: 010, yes: no}}
rollout: {stop: [yes, 12:30, 010, 2024-01-01, true, .inf, 'null']}
prompt-key: no
seed: 010
steps: 1_000
data-path: x.jsonl
template-arguments: {thinking: false, reasoning: "on", at: 12:30}
algorithm: {correction: token, correction-limit: .inf}
"""
    config = grpo.parse(written(tmp_path / "mine.yaml", text))
    assert config.on == "ray"
    assert config.ray.env_vars == {"SEEN": "true", "DEPTH": "010", "yes": "no"}
    assert config.rollout.stop == ("yes", "12:30", "010", "2024-01-01", "true", ".inf", "null")
    assert (config.data.keys.prompt_key, config.run.seed, config.run.steps) == ("no", 10, 1000)
    assert config.data.template_arguments == {"thinking": False, "reasoning": "on", "at": "12:30"}
    assert config.algorithm.correction_limit == math.inf


def test_texts_that_look_like_other_values_come_back_from_the_file_of_a_run(tmp_path):
    texts = ("yes", "12:30", "010", "1e3", "true", ".inf", "null", " ")
    began = replace(grpo.TINY, rollout=replace(grpo.TINY.rollout, stop=texts))
    assert grpo.parse(["--config", str(write_options(tmp_path, began))]) == began


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_the_file_of_a_run_gives_its_options_again(recipe, tmp_path):
    began = recipe.parse(
        ["--steps", "40", "--output-dir", str(tmp_path / "run"), "--engine-options", "max_num_seqs", "8"]
    )
    open_run_directory(began)
    assert recipe.parse(["--config", str(tmp_path / "run" / "config.yaml")]) == began
    assert recipe.parse(["--config", str(tmp_path / "run" / "config.json")]) == began
    resumed = recipe.parse(["--resume", str(tmp_path / "run"), "--steps", "50"])
    assert resumed == replace(began, run=replace(began.run, steps=50, resume=True))
    open_run_directory(recipe.parse([f"--resume={tmp_path / 'run'}"]), {"optimizer": 1})  # the same settings
    assert "resume" not in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


def test_change_takes_what_a_resumed_run_may_have_otherwise_without_it(tmp_path):
    (tmp_path / "config.yaml").write_text("preset: tiny\n")
    changes = ["layout.dp=2", "on=ray", "max-restarts=3", "keep-rollouts=5"]
    resumed = grpo.parse(["--resume", str(tmp_path), "--change", *changes])
    assert (resumed.on, resumed.layout.dp, resumed.max_restarts, resumed.keep_rollouts) == ("ray", 2, 3, 5)
    assert sft.parse(["--resume", str(tmp_path), "--change", "keep-rows=3"]).keep_rows == 3
    with pytest.raises(InvalidConfig, match="--change batch-size: a run that is resumed keeps it"):
        grpo.parse(["--resume", str(tmp_path), "--change", "batch-size=4"])


def test_resuming_names_what_it_lacks(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run"):
        grpo.parse(["--resume", str(tmp_path)])
    for others in (["--preset", "tiny"], ["--output-dir", str(tmp_path / "other")]):
        with pytest.raises(InvalidConfig, match="leave out --preset, --config and --output-dir"):
            grpo.parse(["--resume", str(tmp_path), *others])
    (tmp_path / "config.yaml").write_text("critic-optimizer: {lr: 1}")
    with pytest.raises(InvalidConfig, match=r"there is no option 'critic-optimizer.lr'.* begins anew, .*huggingface"):
        grpo.parse(["--resume", str(tmp_path)])
    assert grpo.parse(["--resume", "--steps", "3"]).run.resume
    assert not grpo.parse(["--resume", "false"]).run.resume


@pytest.mark.slow
def test_presets_are_defaults_by_name():
    assert grpo.parse(["--preset", "tiny"]) == grpo.parse([]) == grpo.TINY
    assert sft.parse(["--preset=tiny", "--model-path", "mine"]) == replace(sft.TINY, model_path="mine")
    large = grpo.parse(["--preset", "7b", "--data-path", "mine", "--steps", "3"])
    assert (large.model_path, large.layout, large.on) == ("Qwen/Qwen2.5-VL-7B-Instruct", Layout(dp=4), "ray")
    assert (large.engine, large.data.batch_size, large.algorithm.minibatch) == ("vllm", 512, 128)
    assert grpo.parse(["--preset", "7b", "--algorithm.loss", "dapo"]).algorithm.kl_coef == 0.0
    assert ppo.parse(["--preset", "3b"]).layout == Layout(dp=2)
    assert geo3k_grpo.parse(["--preset", "3b"]).run.output_dir == Path("outputs/geo3k_grpo")
    with pytest.raises(InvalidConfig, match="--preset 30b: must be one of tiny, any, 3b, 7b"):
        grpo.parse(["--preset", "30b"])


@pytest.mark.slow
def test_values_by_name_are_added_to_those_of_the_preset(tmp_path):
    preset = grpo.PRESETS["7b"].engine_options
    assert preset == {"max_num_seqs": 512, "memory_share": 0.4}
    began = grpo.parse(
        [
            "--preset",
            "7b",
            "--engine-options",
            "memory_share",
            "0.3",
            "enforce_eager",
            "true",
            "--output-dir",
            str(tmp_path),
        ]
    )
    assert began.engine_options == {"max_num_seqs": 512, "memory_share": 0.3, "enforce_eager": True}
    assert preset["memory_share"] == 0.4  # left as it was
    open_run_directory(began)
    resumed = grpo.parse(["--resume", str(tmp_path), "--steps", "3"])
    assert resumed == replace(began, run=replace(began.run, steps=3, resume=True))
    (tmp_path / "mine.yaml").write_text("preset: 7b\nengine_options: {memory_share: 0.2, max_num_seqs: 32}\n")
    both = grpo.parse(["--config", str(tmp_path / "mine.yaml"), "--engine-options", "max_num_seqs", "64"])
    assert both.engine_options == {"max_num_seqs": 64, "memory_share": 0.2}
    assert ppo.parse(["--preset", "7b", "--engine-options", "max_num_seqs", "64"]).engine_options["max_num_seqs"] == 64


@pytest.mark.slow
def test_another_engine_has_no_options_of_the_presets_engine():
    assert grpo.parse(["--preset", "3b", "--engine", "vllm"]).engine_options == {"memory_share": 0.3}
    assert grpo.parse(["--preset", "3b", "--engine", "hf"]).engine_options == {}
    given = ["--preset", "3b", "--engine=hf", "--engine-options", "token_budget", "4096"]
    assert grpo.parse(given).engine_options == {"token_budget": 4096}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_defaults_depend_on_the_preset_and_not_on_the_model(recipe):
    without = recipe.parse([])
    assert without == recipe.parse(["--preset", "tiny"]) == recipe.PRESETS["tiny"]
    assert recipe.parse(["--preset", "tiny", "--model-path", "mine"]) == replace(without, model_path="mine")
    ours = recipe.parse(["--model-path", "mine", "--preset", "any"])
    assert ours == replace(recipe.PRESETS["any"], model_path="mine")
    assert ours.optimizer.lr < without.optimizer.lr
    assert all(each.preset == name for name, each in recipe.PRESETS.items())
    with pytest.raises(InvalidConfig, match=r"^--model-path needs --preset, .*: any .*, or tiny"):
        recipe.parse(["--model-path", "mine"])
    with pytest.raises(InvalidConfig, match="--preset any is for a checkpoint: add --model-path"):
        recipe.parse(["--preset", "any"])


def test_a_file_names_a_preset_that_the_command_line_overrides(tmp_path):
    given = written(tmp_path / "mine.yaml", "preset: any\nmodel-path: mine\nsteps: 3")
    assert grpo.parse(given) == grpo.parse(["--preset", "any", "--model-path", "mine", "--steps", "3"])
    assert grpo.parse([*given, "--preset", "3b"]).compute == grpo.PRESETS["3b"].compute
    with pytest.raises(InvalidConfig, match="--model-path needs --preset"):
        grpo.parse(written(tmp_path / "mine.yaml", "model-path: mine"))


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        (grpo, "--ray.cpus 2", "ray.cpus would do nothing: .* add --on ray"),
        (sft, "--max-restarts 1", "add --on ray"),
        (grpo, "--on ray --ray.address auto --ray.object-store-gib 1", "leave out --ray.address"),
        (grpo, "--lora-alpha 3", "add --lora-rank"),
        (grpo, "--pipeline-layers 3", "add --layout.pp"),
        (grpo, "--unsharded scoring", "add --layout.dp"),
        (grpo, "--offload", "--offload would do nothing: .* add --layout.dp"),
        (grpo, "--on-bad-row skip", "all synthetic rows can be used: add --data-path"),
        (grpo, "--optimizer.schedule constant --optimizer.min-lr-ratio 0.1", "add --optimizer.schedule"),
        (
            ppo,
            "--critic-optimizer.schedule constant --critic-optimizer.total-steps 9",
            "add --critic-optimizer.schedule",
        ),
        (grpo, "--data-path mine --level notes", "leave out --data-path"),
        (walk_config, "--level notes", "--level would do nothing: environments make no problems"),
        (walk_config, "--instruction hello", "add --data-path"),
        (walk_config, "--preset any --model-path mine --warm-up.steps 3", "leave out --model-path"),
        (grpo, "--rollout.staleness 1 --algorithm.skip-old-log-probs", "have the engine's log-probs anyway"),
        (
            grpo,
            "--algorithm.skip-old-log-probs --algorithm.kl-coef 0 --scoring-token-budget 100",
            "no pass of this run is without gradients",
        ),
        (classify, "--image-column img", "add --data-path"),
        (zoom_config, "--on ray --ray.reward-processes 2", "environments give the rewards"),
        (grpo, "--data-path mine --messages-key talk --instruction hello", "messages stay as they are"),
        (grpo, "--rollout.no-replay-routing", "the small model has no experts"),
        (grpo, "--keep-best loss --eval-every 5", "keep-best: accuracy"),
        (easy_vqa_config, "--level notes", "--level would do nothing: the questions of easy-VQA have none"),
        (easy_vqa_config, "--preset any --model-path mine --sft.steps 0 --sft.batch-size 3", "leave out --sft.steps 0"),
        (easy_vqa_config, "--sft.optimizer.schedule constant --sft.optimizer.total-steps 9", "rate is constant"),
        (distil_config, "--algorithm.overlong-buffer 4", "learns from no rewards"),
        (sft, "--max-response-length 0 --engine-options max_num_seqs 3", "no question is asked"),
        (sft, "--max-response-length 0 --keep-best accuracy", "needs answers"),
        (sft, "--data-path mine --streaming --eval-every 5", "add --eval-data-path"),
        (serve_config, "--vllm-adapters 3", "add --sampler vllm"),
        (sft, "--shuffle-buffer 3", "add --streaming"),
        (sft, "--data-path mine --weights 1", "name several"),
        (grpo, "--algorithm.kl-coef 0 --algorithm.kl k2", "add --algorithm.kl-coef"),
        (grpo, "--algorithm.correction-limit 3", "add --algorithm.correction"),
        (grpo, "--algorithm.rejection-bounds 0.1 3", "add --algorithm.rejection"),
        (grpo, "--engine-options memory_share 0.3", "engine 'hf' has no option 'memory_share': .* max_num_seqs, dtype"),
        (grpo, "--critic-optimizer.lr 1", "critic-optimizer"),
    ],
)
def test_options_that_would_do_nothing_are_refused_with_the_way_out(recipe, given, message, tmp_path):
    with pytest.raises(InvalidConfig, match=message):
        recipe.parse(in_files(given.split(), tmp_path))


def test_idle_options_of_a_file_are_refused_too_and_its_defaults_are_not(tmp_path):
    with pytest.raises(InvalidConfig, match=r"ray\.cpus would do nothing"):
        grpo.parse(written(tmp_path / "mine.yaml", "ray: {cpus: 2}"))
    assert grpo.parse(written(tmp_path / "mine.yaml", "ray: {cpus: 1.0}")) == grpo.TINY
