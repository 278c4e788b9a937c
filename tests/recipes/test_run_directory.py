"""What a resumed run may change, and the learning-rate schedule that it may not change in silence."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dataproto.errors import CheckpointError, DataProtoError, FileNotWritten, InvalidConfig
from recipes import classify, geo3k_grpo, geo3k_ppo, grpo, sft
from recipes.algorithms.function_files import load_named_function
from recipes.data.loader import PromptLoader
from recipes.data.mixture import Mixture
from recipes.demo.tiny_model import make_tiny_model
from recipes.options.config_file import CONFIG_FILE
from recipes.options.names import CHANGEABLE
from recipes.run import RunConfig, recorded_run
from recipes.run.checkpoints import STATE_FILE, restore
from recipes.run.run_directory import RecordedRun, open_run_directory, over_epochs, with_function
from recipes.sft import SFTConfig
from workers.ranks.layout import Layout
from workers.training.checkpoint import read_state
from workers.training.optimizer import OptimizerConfig, learning_rate_factor


def config(directory: Path, steps: int, resume: bool = False, **optimizer) -> SFTConfig:
    run = RunConfig(steps=steps, resume=resume, output_dir=directory)
    return SFTConfig(run=run, optimizer=OptimizerConfig(**{"schedule": "linear", "warmup_steps": 2} | optimizer))


def opened(given):
    """The configuration that a run goes by, of two optimizer steps in each of its own."""
    return open_run_directory(given, {"optimizer": 2})


def rates(given: SFTConfig, begin: int, end: int) -> list[float]:
    return [learning_rate_factor(2 * step, given.optimizer) for step in range(begin, end)]


def test_a_directory_may_be_a_string(tmp_path):
    with recorded_run(RunConfig(output_dir=str(tmp_path / "run"))):
        assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("body", ["def own(step): return 1.0", "def own(step, total): return None"])
def test_a_schedule_of_another_form_is_refused_with_the_form(tmp_path, body):
    file = tmp_path / "rates.py"
    file.write_text(body)
    with pytest.raises(InvalidConfig, match=r"rates.py:own: must take \(step, total_steps\) and return a share"):
        with_function(OptimizerConfig(schedule=f"{file}:own", total_steps=2))
    with pytest.raises(InvalidConfig, match=r"which function of it\? .*rates.py:FUNCTION"):
        load_named_function(str(file), "schedule", InvalidConfig)


def test_schedules_are_as_long_as_the_run_that_began_however_often_it_is_resumed(tmp_path):
    whole = opened(config(tmp_path, steps=10))
    assert whole.optimizer.total_steps == 20
    for steps in (6, 10, 8):
        resumed = opened(config(tmp_path, steps=steps, resume=True))
        assert resumed.optimizer == whole.optimizer
        assert rates(resumed, 4, steps) == rates(whole, 4, steps)


def test_a_schedule_of_ones_own_is_loaded_where_the_run_opens_and_stays_as_it_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def halving(step, total_steps):\n    return 0.5 ** (step // 2)\n"
        "def failing(step, total_steps):\n    return 1 / (step - total_steps)\n"
        "def falling(step, total_steps):\n    return -step\n"
    )
    options = ["--output-dir", str(tmp_path / "run"), "--steps", "4", "--optimizer.lr", "0.1", "--optimizer.schedule"]
    named = opened(sft.parse([*options, f"{file}:halving"]))
    assert named.optimizer.schedule == f"{file}:halving"
    launched = with_function(named.optimizer)
    warm = launched.warmup_steps
    assert [learning_rate_factor(step, launched) for step in range(warm, warm + 3)] == [
        0.5 ** (step // 2) for step in range(warm, warm + 3)
    ]
    for function, message in (("failing", r"failing raised ZeroDivisionError.*mine.py:4"), ("falling", "gave -8.0")):
        with pytest.raises(DataProtoError, match=message):
            learning_rate_factor(8, with_function(replace(named.optimizer, schedule=f"{file}:{function}")))
    for wrong, message in (
        (f"{file}:rising", "no function 'rising'"),
        ("mine.py:halving", "no file"),
        ("cosin", "FILE.py"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            opened(sft.parse([*options, wrong]))
    moved = tmp_path / "moved"
    moved.mkdir()
    file.rename(moved / "mine.py")
    assert opened(sft.parse([*options, f"{moved}/mine.py:halving", "--resume"])).optimizer.total_steps == 8


def test_a_run_that_goes_on_past_its_schedule_is_told_what_to_give(tmp_path):
    opened(config(tmp_path, steps=10))
    message = r"--steps 12, but the linear schedule of optimizer ends with step 10: give --change steps=12 to "
    with pytest.raises(CheckpointError, match=message):
        opened(config(tmp_path, steps=12, resume=True))
    assert opened(config(tmp_path, steps=12, resume=True, total_steps=24)).optimizer.total_steps == 24
    assert opened(config(tmp_path, steps=12, resume=True)).optimizer.total_steps == 24


def changed(given: SFTConfig, *names: str) -> SFTConfig:
    return replace(given, run=replace(given.run, change=names))


def test_changed_steps_lengthen_the_schedule_and_are_recorded_once_with_their_step(tmp_path, capsys):
    opened(config(tmp_path, steps=10))
    (tmp_path / "global_step_7").mkdir()
    longer = changed(config(tmp_path, steps=12, resume=True, lr=1.0), "steps", "optimizer.lr")
    for _ in range(2):  # the same command after a crash changes nothing more
        assert opened(longer).optimizer.total_steps == 24
    first = {
        "step": 7,
        "optimizer.lr": {"before": 1e-6, "after": 1.0},
        "steps": {"before": 10, "after": 12},
    }
    assert capsys.readouterr().out.count("after step 7: optimizer.lr 1.0 (before 1e-06), steps 12 (before 10)\n") == 1
    opened(changed(config(tmp_path, steps=12, resume=True, lr=1.0, schedule="cosine"), "optimizer.schedule"))
    second = {"step": 7, "optimizer.schedule": {"before": "linear", "after": "cosine"}}
    opened(config(tmp_path, steps=12, resume=True, lr=1.0, schedule="cosine"))
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["changes"] == [first, second]


def test_changed_steps_leave_a_length_of_its_own_to_be_changed_too(tmp_path):
    opened(config(tmp_path, steps=10, total_steps=20))
    longer = changed(config(tmp_path, steps=12, resume=True, total_steps=20), "steps")
    with pytest.raises(CheckpointError, match=r"give --change steps=12 optimizer\.total-steps=24 to"):
        opened(longer)
    longer = replace(longer, optimizer=replace(longer.optimizer, total_steps=24))
    assert opened(changed(longer, "steps", "optimizer.total-steps")).optimizer.total_steps == 24


def test_a_run_whose_warm_up_was_shortened_goes_on_as_it_is_told_to(tmp_path):
    assert opened(config(tmp_path, steps=2, warmup_steps=9)).optimizer.warmup_steps == 3
    longer = opened(config(tmp_path, steps=12, resume=True, total_steps=24, warmup_steps=9)).optimizer
    assert (longer.total_steps, longer.warmup_steps) == (24, 3)


def test_a_run_whose_warm_up_was_shortened_is_resumed_after_its_steps_were_changed(tmp_path):
    opened(config(tmp_path, steps=2, warmup_steps=9))
    for steps in (8, 8, 20, 20):  # changed and then resumed, both twice
        resumed = opened(changed(config(tmp_path, steps=steps, resume=True, warmup_steps=9), "steps"))
        assert (resumed.optimizer.total_steps, resumed.optimizer.warmup_steps) == (2 * steps, 3)
        again = opened(config(tmp_path, steps=steps, resume=True, warmup_steps=9))
        assert again.optimizer == resumed.optimizer


def test_a_length_of_its_own_is_kept_even_if_it_is_shorter_than_the_run(tmp_path):
    opened(config(tmp_path, steps=10, total_steps=8))
    assert opened(config(tmp_path, steps=10, resume=True)).optimizer.total_steps == 8
    with pytest.raises(CheckpointError, match="ends with step 4"):
        opened(config(tmp_path, steps=11, resume=True))


def test_a_constant_rate_goes_on_for_as_long_as_one_likes_after_the_warm_up_that_it_had(tmp_path):
    began = opened(config(tmp_path, steps=2, schedule="constant", warmup_steps=9))
    assert began.optimizer.warmup_steps == 3  # one of the four updates is left
    assert (
        opened(config(tmp_path, steps=50, resume=True, schedule="constant", warmup_steps=9)).optimizer
        == began.optimizer
    )


def test_the_schedule_of_a_run_that_did_not_write_its_length_down_is_that_of_its_steps(tmp_path):
    opened(config(tmp_path, steps=10))
    settings = json.loads((tmp_path / CONFIG_FILE).read_text())
    settings["optimizer"]["total_steps"] = None
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    assert opened(config(tmp_path, steps=7, resume=True)).optimizer.total_steps == 20
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="ends with step 10"):
        opened(config(tmp_path, steps=11, resume=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize("recipe", [geo3k_grpo, geo3k_ppo, sft, classify])
def test_every_recipe_keeps_its_schedules(recipe, model, tmp_path, capsys):
    """Before it loads any weights."""
    given = ["--preset", "tiny", "--model-path", model, "--eval-rows", "2", "--output-dir", str(tmp_path)]
    began = recipe.parse([*given, "--steps", "40"])
    open_run_directory(began)
    arguments = [*given, "--resume", "--steps", "50"]
    assert recipe.main(arguments) == 2
    assert "schedule of optimizer ends with step 40: give --change steps=50 to" in capsys.readouterr().err
    if recipe in (geo3k_grpo, geo3k_ppo):
        asked = recipe.parse(["--resume", str(tmp_path), "--change", "steps=50"])
        longer = open_run_directory(asked, asked.updates)
        assert longer.optimizer.total_steps == (100 if recipe is geo3k_grpo else 50)  # two for each batch, or one
        assert longer.critic is None or longer.critic.total_steps == 50


def test_what_bears_on_the_steps_is_refused_by_name_and_the_rest_may_change(tmp_path):
    began = opened(config(tmp_path, steps=10))
    resumed = replace(began, run=replace(began.run, resume=True))
    refused = {
        "optimizer.lr=": replace(resumed, optimizer=replace(began.optimizer, lr=1.0)),
        "optimizer.warmup_steps=": replace(resumed, optimizer=replace(began.optimizer, warmup_steps=3)),
        "optimizer.total_steps=None": replace(resumed, optimizer=replace(began.optimizer, total_steps=None)),
        "optimizer.betas=": replace(resumed, optimizer=replace(began.optimizer, betas=(0.5, 0.9))),
        "compute.lora_rank=": replace(resumed, compute=replace(began.compute, lora_rank=2)),
        "data.batch_size=": replace(resumed, data=replace(began.data, batch_size=7)),
        "engine_options=": replace(resumed, engine_options={"max_num_seqs": 3}),
        "run.seed=": replace(resumed, run=replace(resumed.run, seed=3)),
    }
    for name, other in refused.items():
        option = name.partition("=")[0].removeprefix("run.").removeprefix("data.").replace("_", "-")
        way_out = (
            f"--change {option}=VALUE" if option in CHANGEABLE else "begin a new run .* --model-path .*/global_step_N/"
        )
        with pytest.raises(CheckpointError, match=f"--resume with {name}.*{way_out}"):
            open_run_directory(other)
    run = replace(resumed.run, steps=3, save_every=1, save_in_background=True, eval_every=2, keep_checkpoints=9)
    data = replace(began.data, num_workers=2)
    open_run_directory(replace(resumed, run=run, data=data, on="ray", layout=Layout(dp=2), max_restarts=4))


def test_files_may_lie_in_other_folders_under_the_same_names(tmp_path):
    began = opened(grpo.parse(f"--data-path /home/me/dots --reward mine.py:score --output-dir {tmp_path}".split()))
    moved = replace(began, run=replace(began.run, resume=True), reward="/srv/mine.py:score")
    opened(replace(moved, data=replace(began.data, data_path="/srv/dots")))
    other = replace(moved, data=replace(began.data, data_path="/srv/lines"))
    with pytest.raises(CheckpointError, match=r"data\.data_path='/srv/lines', .* with the same name in another folder"):
        opened(other)
    several = config(tmp_path / "sft", steps=10)
    several = opened(replace(several, data=replace(several.data, data_path=("a/one", "a/two"))))
    moved = replace(several, run=replace(several.run, resume=True))
    opened(replace(moved, data=replace(several.data, data_path=("b/one", "c/two"))))


def test_a_run_that_failed_before_it_measured_anything_is_begun_anew(tmp_path):
    opened(config(tmp_path, steps=10))
    (tmp_path / "metrics.jsonl").touch()
    opened(config(tmp_path, steps=20))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(InvalidConfig, match="holds an earlier run"):
        opened(config(tmp_path, steps=10))


def test_a_run_may_stand_above_others_but_not_above_a_phase_of_its_own(tmp_path):
    for name in ("other", "phase"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0}\n')
    opened(config(tmp_path, steps=10))  # no run's directory yet, so these are others
    with pytest.raises(InvalidConfig, match="holds an earlier run"):
        opened(config(tmp_path, steps=10))


def test_checkpoints_without_the_settings_they_were_made_with_are_not_gone_on_from(tmp_path):
    given = config(tmp_path, steps=10, resume=True)
    opened(given)  # there is nothing to go on from
    (tmp_path / "global_step_3").mkdir()
    for damage in (lambda: (tmp_path / CONFIG_FILE).write_text("{"), (tmp_path / CONFIG_FILE).unlink):
        opened(given)
        damage()
        with pytest.raises(CheckpointError, match=f"holds checkpoints, but no {CONFIG_FILE}"):
            opened(given)
        (tmp_path / CONFIG_FILE).write_text(json.dumps({"run": {"steps": 10}}))


def test_fewer_steps_than_are_done_are_named_before_what_follows_from_them(tmp_path):
    opened(config(tmp_path, steps=10, warmup_steps=15))
    (tmp_path / "global_step_4").mkdir()
    shorter = config(tmp_path, steps=3, resume=True, warmup_steps=15)  # whose schedule would shorten the warm-up
    with pytest.raises(CheckpointError, match=r"^all 4 steps of .* are done, .*: name more than 4$"):
        opened(replace(shorter, run=replace(shorter.run, change=("steps",))))


class Thirteen(list):
    """Rows that no test reads."""

    def __init__(self) -> None:
        super().__init__(range(13))


def test_epochs_are_as_many_steps_as_draw_every_row_so_often():
    loader = PromptLoader(Thirteen(), builder=None, batch_size=4)
    assert [loader.steps(epochs) for epochs in (1, 2, 4)] == [4, 7, 13]  # 13/4, 26/4, 52/4, rounded up
    assert over_epochs(RunConfig(steps=9, epochs=2), loader).steps == 7
    assert over_epochs(RunConfig(steps=9), loader).steps == 9
    mixture = PromptLoader(Mixture([Thirteen(), Thirteen()], [1, 3]), builder=None, batch_size=4)
    with pytest.raises(InvalidConfig, match="has no length: give --steps"):
        over_epochs(RunConfig(epochs=2), mixture)


def test_the_command_line_gives_epochs_or_steps():
    data = ["--preset", "any", "--model-path", "a", "--data-path", "b"]
    assert [recipe.parse([*data, "--epochs", "3"]).run.epochs for recipe in (geo3k_grpo, geo3k_ppo, sft)] == [3, 3, 3]
    assert not geo3k_grpo.parse([*data, "--no-eval-first"]).run.eval_first
    with pytest.raises(InvalidConfig, match="--steps and --epochs both"):
        geo3k_grpo.parse([*data, "--epochs=3", "--steps", "10"])
    with pytest.raises(InvalidConfig, match=r"^--epochs 0: must be"):
        geo3k_grpo.parse([*data, "--epochs", "0"])
    for recipe in (geo3k_grpo, sft):
        with pytest.raises(InvalidConfig, match="epochs without --data-path"):
            recipe.parse(["--epochs", "3"])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04"])
def test_a_damaged_state_of_a_run_is_named_with_the_way_out(tmp_path, content):
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / "global_step_4" / STATE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"trainer\.pt cannot be read: .*; delete .*global_step_4 to resume"):
        restore(RunConfig(output_dir=tmp_path), None, None, None)


def test_a_damaged_state_of_a_model_is_named_with_the_way_out(tmp_path):
    actor = tmp_path / "global_step_4" / "actor"
    (actor / "training").mkdir(parents=True)
    (actor / "training" / ".metadata").write_bytes(b"cut")
    torch.save({"step": 4}, tmp_path / "global_step_4" / STATE_FILE)
    roles = SimpleNamespace(actor=SimpleNamespace(load=lambda directory: read_state({}, directory / "training")))
    with pytest.raises(
        CheckpointError, match=r"actor/training .* damaged: .*; if it .*, delete .*global_step_4 to resume"
    ):
        restore(RunConfig(output_dir=tmp_path), roles, None, None)


@pytest.mark.parametrize("way", [{}, {"resume": True}, {"overwrite": True}])
def test_the_directory_of_a_model_is_no_directory_of_a_run(tmp_path, way):
    """Both have a config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(InvalidConfig, match=r"holds a model, whose files .*choose another --output-dir"):
        open_run_directory(RecordedRun(RunConfig(output_dir=tmp_path, **way)))
    assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen2_5_vl"}'


def test_a_directory_that_cannot_be_made_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotWritten, match=r"file/run could not be written: Not a directory.*"):
        open_run_directory(RecordedRun(RunConfig(output_dir=tmp_path / "file" / "run")))


@pytest.mark.parametrize("recipe", [grpo, sft, classify])
def test_a_directory_with_a_run_is_refused_before_data_are_read(recipe, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert recipe.main(["--output-dir", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "holds an earlier run: --resume it, --overwrite it" in told.err
    assert recipe.main(["--output-dir", str(tmp_path), "--overwrite"]) == 2
    told_also = capsys.readouterr()
    assert "does not hold a run, so it is not overwritten" in told_also.err
    assert told.out + told_also.out == ""
    assert (tmp_path / "metrics.jsonl").exists()
