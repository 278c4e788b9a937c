"""The command ``dataproto NAME``: each command is the ``main`` of a module, which is imported when it is chosen.

The options are read first, by a module that imports no torch, so that help and mistakes appear at once.

``python -m recipes NAME`` does the same, but looks for ``recipes`` in the working directory first; the command does not.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from recipes.commands.import_warnings import silence

__all__ = ["COMMANDS", "main", "usage"]


COMMANDS = {
    "grpo": "train a policy by GRPO and its relatives, without a critic",
    "ppo": "train a policy by PPO, with a critic",
    "distil": "train a student on its own samples by the log-probs of a teacher",
    "sft": "supervised training on conversations with images",
    "dpo": "train on preferred answers by DPO and its relatives, or by KTO",
    "reward-model": "train a reward model on preferred answers, which --reward classifier: loads",
    "classify": "supervised training on labelled pictures",
    "easy-vqa": "train by SFT, then GRPO, on real questions about pictures",
    "walk": "train by GRPO or PPO over episodes with a new picture each turn",
    "zoom": "train by GRPO or PPO over episodes that look closer at a picture and then answer",
    "browse": "train an agent by GRPO that presses the button of a page in Chromium",
    "export": "make a checkpoint of a run an ordinary Hugging Face model",
    "plan": "forecast memory and time of a run before anything is loaded",
    "show": "show the first rows of a data set as the model sees them, and what the reward gives their truths",
    "view": "show a run in the browser, while it trains, or compare several",
    "serve": "train and sample for clients of the Tinker SDK",
}
"""What each command is for, by its name."""

INSTEAD = {
    "kto": "it is a loss of dpo, dataproto dpo --algorithm.loss kto",
    **dict.fromkeys(("orpo", "cpo", "simpo"), "dpo learns from preferred answers"),
    "make-vlm": "train a small published model, such as --model-path HuggingFaceTB/SmolVLM-256M-Instruct",
    "parity": "each step of a run measures it: training/rollout_probs_diff_log_mean and its neighbours",
    "report": "a run writes report.html at its end, and dataproto view shows one that has not ended",
}
"""What does the work of trainers of other libraries, and of commands of earlier versions."""

USAGE = """\
usage: dataproto COMMAND [OPTIONS]

Post-training of vision-language models with reinforcement learning.

commands:
{commands}

dataproto COMMAND --help shows the common options of a command, --help-all shows all."""

PLACES: dict[str, tuple[str, str]] = {
    "plan": ("recipes.plan.command", "recipes.configs.plan_config"),
    "view": ("recipes.watch.viewer", "recipes.watch.viewer"),
    "serve": ("dataproto_server.command", "dataproto_server.config"),
}
"""The modules of commands that are not `recipes.NAME` and `recipes.configs.NAME_config`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit status; an unknown name is one line on stderr."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # while modules are imported; later a command says more
        print("\ninterrupted", file=sys.stderr)
        return 130


def _main(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        from recipes.options import show_help

        show_help(usage())
        return 0
    if name == "--version":
        try:
            print(f"dataproto {version('dataproto-vlm')}")
        except PackageNotFoundError:
            print("error: the package dataproto-vlm is not installed, so its version is unknown", file=sys.stderr)
            return 2
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}: {INSTEAD.get(name, hint)}", file=sys.stderr)
        return 2
    silence()
    module, options = places(name)
    from recipes.options import exit_status  # which takes longer than the table above

    with exit_status(rest, resumes=False) as status:
        config = _function(options, "parse")(rest)
    return status.code or int(_function(module, "main")(rest, config))


def places(name: str) -> tuple[str, str]:
    """The modules of a command: of ``main(arguments, config)``, and of ``parse(arguments)``, which makes its configuration."""
    usual = name.replace("-", "_")
    return PLACES.get(name, (f"recipes.{usual}", f"recipes.configs.{usual}_config"))


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


def usage() -> str:
    """The text of ``dataproto --help``."""
    width = max(map(len, COMMANDS)) + 2
    return USAGE.format(commands="\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items()))
