"""Options of verl, EasyR1 and TRL are answered with the names that they have here, those of docs/moving.md."""

import re

import pytest

from dataproto.errors import InvalidConfig
from helpers.moving_page import option_rows
from recipes.configs import grpo_config, sft_config
from recipes.options.names import PEER_NAMES, own_name
from recipes.options.option_table import options_of, spellings


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (grpo_config.parse, "--learning_rate 1e-6", "^there is no option --learning-rate: here it is --optimizer.lr$"),
        (grpo_config.parse, "--num_generations=8", "^there is no option --num-generations: here it is --algorithm.n$"),
        (grpo_config.parse, "--model Qwen/Qwen2.5-VL-3B-Instruct", "here it is --preset any --model-path$"),
        (grpo_config.parse, "--actor_rollout_ref.rollout.n 8", "here it is --algorithm.n$"),
        (grpo_config.parse, "--worker.actor.optim.lr 1e-6", "here it is --optimizer.lr$"),
        (
            grpo_config.parse,
            "trainer.n_gpus_per_node=8 data.train_batch_size=256 data.shuffle=True",
            r"belongs to no option: options are --NAME VALUE; trainer.n_gpus_per_node=8 is --on ray --layout.dp N here; "
            r"data.train_batch_size=256 is --batch-size here \(docs/moving.md\)$",
        ),
        (
            grpo_config.parse,
            "nonsense=3",
            r"nonsense=3: belongs to no option: options are --NAME VALUE \(docs/moving.md\)$",
        ),
        (
            grpo_config.parse,
            "trainer.val_before_train=False",
            r"trainer.val_before_train=False is --eval-first true\|false here",
        ),
        (grpo_config.parse, "--vllm_mode colocate", r"here it is --engine hf\|vllm$"),
        (grpo_config.parse, "--num-epochs 3", "here it is --epochs$"),
        (grpo_config.parse, "--fp16", r"here it is --dtype float32\|bfloat16$"),
        (grpo_config.parse, "--device cuda", "here it is --on ray --layout.dp N$"),
        (grpo_config.parse, "--gpus 2", "here it is --on ray --layout.dp N$"),
        (grpo_config.parse, "--use-bias-correction-kl", r"here it is --algorithm.kl k3\+$"),
        (grpo_config.parse, "algorithm.rollout_correction.rollout_rs=token", "is --algorithm.rejection here"),
        (grpo_config.parse, "--rollout_rs token_k1", "here it is --algorithm.rejection$"),
        (grpo_config.parse, "--rollout_rs_threshold 0.5_5", "here it is --algorithm.rejection-bounds 1/HIGH 1/LOW$"),
        (grpo_config.parse, "--vllm_importance_sampling_clip_max 3", "here it is --algorithm.correction-limit$"),
        (grpo_config.parse, "algorithm.rollout_correction.any=1", "is --algorithm.correction here"),
        (grpo_config.parse, "data.image_dir=photos", "data.image_dir=photos is --media-root here"),
        (grpo_config.parse, "algorithm.kl_coef=0.01", "algorithm.kl_coef=0.01 is --algorithm.kl-coef here"),
        (sft_config.parse, "--learning-rate 1e-6", "here it is --optimizer.lr$"),
        (sft_config.parse, "--num-generations 8", "^there is no option --num-generations: --help-all shows all$"),
    ],
)
def test_a_peers_option_is_answered_with_its_name_here(parse, arguments, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(arguments.split())


@pytest.mark.parametrize(
    ("theirs", "read"),
    [
        ("--val_before_train", lambda config: config.run.eval_first),
        ("--gradient_checkpointing", lambda config: config.compute.activation_checkpointing == "full"),
        ("--torch_compile", lambda config: config.compute.compile),
        ("--use_vllm", lambda config: config.engine == "vllm"),
    ],
)
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_keeps_its_meaning(theirs, read, value):
    """Of the two values that the answer names, the one for true switches on what theirs switches on."""
    with pytest.raises(InvalidConfig, match=r"here it is --[\w.-]+ \w+\|\w+$") as told:
        grpo_config.parse([theirs, str(value).lower()])
    ours, values = str(told.value).rsplit("here it is ")[-1].split()
    on = {"true|false": "true", "none|full": "full", "hf|vllm": "vllm"}[values]
    off = values.replace(on, "").strip("|")
    assert read(grpo_config.parse([ours, on if value else off])) is value


def test_every_name_of_ours_is_an_option_and_none_of_theirs_is():
    config = grpo_config.parse([])
    options = options_of(config)
    known = {*spellings(options)}
    ours = {word for name in PEER_NAMES.values() for word in name.split() if word.startswith("--")}
    assert ours <= known | {"--preset", "--resume"}
    theirs = list(PEER_NAMES)
    assert not {f"--{name.replace('_', '-')}" for name in theirs} & {f"--{option.name}" for option in options} - {
        "--algorithm.kl-coef"
    }


def test_the_page_says_the_same():
    """Every key of its table of options, of each framework, is answered with an option of a row that has the key."""
    here: dict[str, str] = {}
    for verl, easy_r1, trl, ours in option_rows():
        if "--" not in ours:
            continue
        keys = [key for key in re.findall(r"`([\w.]+)(?:=\w+)?`", f"{verl} {easy_r1}") if "." in key]
        keys += [key for key in re.findall(r"`(\w+)(?:=\w+)?`", trl) if own_name(key) is not None]
        here |= {key: here.get(key, "") + ours for key in keys}
    for key in here:
        answer = own_name(key)
        assert answer is not None, key
        assert any(f"`{word}" in here[key] for word in answer.split() if word.startswith("--")), (
            key,
            answer,
            here[key],
        )
    assert len(here) > 90
