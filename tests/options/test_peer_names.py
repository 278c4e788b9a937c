"""Options of verl, EasyR1 and TRL are answered with the names that they have here, those of docs/moving.md."""

import re
from pathlib import Path

import pytest

from dataproto.errors import InvalidConfig
from recipes.configs import grpo_config, sft_config
from recipes.options.option_table import options_of
from recipes.options.peer_names import PEER_NAMES, own_name

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"


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
        (sft_config.parse, "--learning-rate 1e-6", "here it is --optimizer.lr$"),
        (sft_config.parse, "--num-generations 8", "^there is no option --num-generations: --help-all shows all$"),
    ],
)
def test_a_peers_option_is_answered_with_its_name_here(parse, arguments, message):
    with pytest.raises(InvalidConfig, match=message):
        parse(arguments.split())


def test_every_name_of_ours_is_an_option_and_none_of_theirs_is():
    config = grpo_config.parse([])
    options = options_of(config)
    known = {f"--{option.name}" for option in options} | {option.no_flag for option in options if option.kind is bool}
    ours = {word for name in PEER_NAMES for word in name.split() if word.startswith("--")}
    assert ours <= known | {"--preset", "--resume"}
    theirs = [name for names in PEER_NAMES.values() for name in names.split()]
    assert len(theirs) == len(set(theirs))
    assert not {f"--{name.replace('_', '-')}" for name in theirs} & known


def test_the_page_says_the_same():
    """A row of its table that has one of these keys names the option, if it names any."""
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ") and "--" in row]
    compared = 0
    for row in rows:
        *theirs, here = row.strip("| ").split(" | ")
        for key in re.findall(r"`([\w.]+)`", " ".join(theirs)):
            if (ours := own_name(key)) is not None and "." in key:
                compared += 1
                assert any(word in here for word in ours.split() if word.startswith("--")), (key, ours, here)
    assert compared > 40
