"""Files of options, flags and idle options for the commands that are no recipes."""

from pathlib import Path

import pytest

from dataproto.errors import CheckpointError, InvalidConfig
from recipes.configs import (
    export_config,
    grpo_config,
    plan_config,
    ppo_config,
    sft_config,
    zoom_config,
)
from recipes.configs.grpo_config import TINY
from recipes.options import write_options
from recipes.watch import viewer


def written(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


def test_a_file_gives_options_of_every_command_and_the_command_line_overrides_them(tmp_path):
    file = written(tmp_path / "mine.yaml", "steps: 3\nengine: hf\nseed: 3\nengine-options: {max_num_seqs: 7}")
    config = sft_config.parse([*file, "--steps", "5"])
    assert (config.run.steps, config.engine, config.run.seed) == (5, "hf", 3)
    assert config.engine_options == {"max_num_seqs": 7}
    export = export_config.parse(["run/global_step_1", "out", *written(tmp_path / "mine.yaml", "dtype: float32")])
    assert (export.checkpoint, export.output, export.dtype) == (Path("run/global_step_1"), Path("out"), "float32")
    view = viewer.parse([*written(tmp_path / "mine.yaml", "port: 9"), "run"])
    assert (view.run_dir, view.port) == (Path("run"), 9)
    with pytest.raises(InvalidConfig, match="there is no option 'stesp'; the nearest is 'steps'"):
        sft_config.parse(written(tmp_path / "mine.yaml", "stesp: 3"))


def test_flags_of_every_command_take_true_and_false():
    assert plan_config.parse(["grpo", "--compile", "true", "--data.curriculum", "false"]).config.compute.compile
    assert not plan_config.parse(["grpo", "--compile=false"]).config.compute.compile


def test_a_plan_divides_its_options_from_those_of_the_recipe(tmp_path):
    file = written(tmp_path / "mine.yaml", "batch-size: 4")
    asked = plan_config.parse(["grpo", "--device", "h200", "--steps", "7", "--mean-response=9", *file])
    assert (asked.recipe, asked.options) == ("grpo", plan_config.PlanOptions("h200", 9))
    assert (asked.config.run.steps, asked.config.data.batch_size) == (7, 4)
    assert asked.config.algorithm == TINY.algorithm


@pytest.mark.parametrize(
    ("parse", "given", "message"),
    [
        (plan_config.parse, "grpo --fit", "--fit has ended: .* plan names options that fit"),
        (plan_config.parse, "sft --mean-response 5", "--mean-response would do nothing"),
        (plan_config.parse, "grpo --mean-response 0", "--mean-response 0: must be at least 1"),
        (plan_config.parse, "grpo --max_restarts=2", "--max-restarts would do nothing"),
        (
            grpo_config.parse,
            "--ray.cpus 2",
            "^--ray.cpus is read from files only: --config FILE with the line 'ray.cpus: VALUE'$",
        ),
        (
            grpo_config.parse,
            "--rollout.quantization fp8",
            "^--rollout.quantization has ended: give it to the engine, --engine-opt",
        ),
        (grpo_config.parse, "--save-behind", "^--save-behind has ended: save-in-background takes its place"),
        (grpo_config.parse, "--optimizer.total-steps 5", "files only: .* the line 'optimizer.total-steps: VALUE'$"),
        (grpo_config.parse, "--algorithm.gamma 0.9", "the line 'algorithm.gamma: VALUE'$"),
        (sft_config.parse, "--num-workers 2", "^--num-workers is read from files only"),
        (plan_config.parse, "walk --device h200", "^walk is not planned: its run says after the first steps"),
        (plan_config.parse, "parity", "one of grpo, ppo, sft, classify"),
        (grpo_config.parse, "--engine hf --engine-options memory_share 0.3", "no option 'memory_share'"),
        (grpo_config.parse, "--engine abacus", "^engine 'abacus' is unknown"),
        (
            ppo_config.parse,
            "--critic-optimizer.total-steps 5",
            "^--critic-optimizer.total-steps 5 must be above warmup_steps=10",
        ),
        (viewer.parse, "", "^dataproto view needs RUN-DIR$"),
        (grpo_config.parse, "--step 3", "^there is no option --step: the nearest is --steps$"),
        (grpo_config.parse, "--kl_coef=0.1", "^there is no option --kl-coef: the nearest is --algorithm.kl-coef$"),
        (
            grpo_config.parse,
            "--critic-optimizer.lr 3",
            "^there is no option --critic-optimizer.lr: --help-all shows all$",
        ),
        (grpo_config.parse, "--xyz", "^there is no option --xyz: --help-all shows all$"),
        (grpo_config.parse, "--steps three", "^--steps three: must be a whole number$"),
        (grpo_config.parse, "--steps 1.5", "^--steps 1.5: must be a whole number$"),
        (grpo_config.parse, "--optimizer.lr small", "^--optimizer.lr small: must be a number$"),
        (grpo_config.parse, "--optimizer.lr nan", "^--optimizer.lr nan: must be a number$"),
        (grpo_config.parse, "--algorithm.kl-coef nan", "^--algorithm.kl-coef nan: must be a number or None$"),
        (grpo_config.parse, "--keep-rollouts inf", "^--keep-rollouts inf: must be a number of rows"),
        (sft_config.parse, "--keep-rows inf", "^--keep-rows inf: must be a number of rows"),
        (grpo_config.parse, "--algorithm.overlong-buffer inf", "^--algorithm.overlong-buffer inf: must be a whole"),
        (grpo_config.parse, "--optimizer.weight-decay -1", "^--optimizer.weight-decay -1.0: must be at least 0$"),
        (grpo_config.parse, "--optimizer.warmup-steps -1", "^--optimizer.warmup-steps -1: must be at least 0$"),
        (zoom_config.parse, "--warm-up.lr -1", "^--warm-up.lr -1.0: must be at least 0$"),
        (
            grpo_config.parse,
            "--on ray --layout.tp 2 --lora-rank 4",
            "adapters are not split; use dp or sp instead of tp$",
        ),
        (grpo_config.parse, "--compile maybe", "^maybe: belongs to no option$"),
    ],
)
def test_what_would_do_nothing_or_is_unknown_is_refused(parse, given, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(given.split())


@pytest.mark.parametrize("name", ["output-dir", "data-path", "eval-data-path", "model-path", "reward", "resume"])
def test_an_empty_value_is_refused(name):
    """Which a variable of a shell that is not set leaves: the run would be in the working directory, or of synthetic rows."""
    with pytest.raises(InvalidConfig, match=f"^--{name} '' is empty: give it a value, or leave it out$"):
        grpo_config.parse([f"--{name}", ""])
    assert grpo_config.parse(["--instruction", "", "--template-arguments", "a", ""]).data.instruction == ""


def test_an_option_may_be_written_with_its_group() -> None:
    config = grpo_config.parse(["--data.max-pixels", "9", "--data.batch_size=4", "--run.steps=3"])
    assert (config.data.max_pixels, config.data.batch_size, config.run.steps) == (9, 4, 3)


def test_a_column_may_be_named_with_the_group_of_the_data() -> None:
    given = "--data.prompt-key question --data.image-key pictures --data.answer-key truth --data.data-path rows.parquet"
    data = grpo_config.parse(given.split()).data
    assert (data.keys.prompt_key, data.keys.image_key, data.keys.answer_key) == ("question", "pictures", "truth")
    assert data.data_path == "rows.parquet"


@pytest.mark.parametrize("parse", [grpo_config.parse, sft_config.parse])
@pytest.mark.parametrize("seed", ["-1", str(2**63)])
def test_a_seed_that_no_generator_takes_is_refused(parse, seed):
    with pytest.raises(InvalidConfig, match=f"--seed {seed}: must be at least 0"):
        parse([f"--seed={seed}"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--algorithm.clip 0.2", "--algorithm.clip 0.2: must be FLOAT FLOAT or None"),
        ("--algorithm.clip 0.2 x", "--algorithm.clip 0.2 x: must be FLOAT FLOAT or None"),
        ("--epochs many", "--epochs many: must be a whole number or None"),
    ],
)
def test_a_value_of_no_form_is_named_with_the_forms(given, says):
    with pytest.raises(InvalidConfig) as caught:
        grpo_config.parse(given.split())
    assert str(caught.value) == says


def test_a_path_in_the_home_directory_is_one_however_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("data-path: ~/rows.jsonl\nreward: ~/mine.py:score")
    config = grpo_config.parse(["--config", "~/mine.yaml", "--output-dir=~/out", "--instruction", "about ~/ you"])
    assert config.data.data_path == f"{tmp_path}/rows.jsonl"
    assert config.reward == f"{tmp_path}/mine.py:score"
    assert config.run.output_dir == tmp_path / "out"
    assert config.data.instruction == "about ~/ you"
    assert viewer.parse(["~/out"]).run_dir == tmp_path / "out"
    with pytest.raises(CheckpointError, match=f"--resume {tmp_path}/out: there is no run"):
        grpo_config.parse(["--resume", "~/out"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--algorithm.kl-coef -1", "^--algorithm.kl-coef -1.0: must be at least 0$"),
        ("--algorithm.overlong-buffer 99", "^--algorithm.overlong-buffer 99 is more than --max-response-length 24$"),
        ("--algorithm.epochs 0", "^--algorithm.epochs 0: must be at least 1$"),
        ("--algorithm.advantage gae", "^--algorithm.advantage gae needs the values of a critic: run dataproto ppo$"),
        ("--algorithm.kl k1 --algorithm.kl-in loss", "choose k2, k3 or k3[+], or set --algorithm.kl-in reward$"),
    ],
)
def test_messages_speak_of_what_was_typed(given, message):
    with pytest.raises(InvalidConfig, match=message):
        grpo_config.parse(given.split())


def test_only_the_number_that_is_too_small_is_named():
    for given, message in {"--steps -3": "--steps -3: must be", "--save-every -1": "--save-every -1: must be"}.items():
        with pytest.raises(InvalidConfig, match=f"^{message} at least (1|0)$"):
            grpo_config.parse(given.split())


def test_what_a_resumed_run_may_change_is_given_by_name(tmp_path):
    began = grpo_config.parse(["--epochs", "2", "--data-path", "x.jsonl", "--output-dir", str(tmp_path)])
    write_options(tmp_path, began)
    words = ["optimizer.lr=1e-4", "steps=28", "algorithm.clip=0.1", "0.3", "algorithm.kl_coef=0", "eval-first=false"]
    changed = grpo_config.parse(["--resume", str(tmp_path), "--change", *words, "--save-every", "4"])
    assert (changed.optimizer.lr, changed.algorithm.clip, changed.algorithm.kl_coef) == (1e-4, (0.1, 0.3), 0)
    assert (changed.run.steps, changed.run.epochs, changed.run.save_every, changed.run.eval_first) == (
        28,
        None,
        4,
        False,
    )
    assert {*changed.run.change} == {"optimizer.lr", "steps", "algorithm.clip", "algorithm.kl-coef", "eval-first"}
    again = ["--data-path", "x.jsonl", "--output-dir", str(tmp_path), "--resume"]
    assert grpo_config.parse([*again, "--change", "optimizer.total-steps=90"]).run.change == ("optimizer.total-steps",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--change steps=3", "^--change is for a run that continues: add --resume RUN_DIR$"),
        ("--resume RUN --change steps", "^--change steps: write NAME=VALUE$"),
        (
            "--resume RUN --change optimizer.lrr=1",
            "^there is no option --optimizer.lrr: the nearest is --optimizer.lr$",
        ),
        ("--resume RUN --change steps=many", "^--steps many: must be a whole number$"),
        (
            "--resume RUN --change batch-size=3",
            "^--change batch-size: .* begin a new run .* --model-path RUN/global_step_N/actor/huggingface$",
        ),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused_with_the_way_out(given, message):
    with pytest.raises(InvalidConfig, match=message):
        grpo_config.parse(given.split())
