"""The command ``dataproto NAME``: each command is the ``main`` of a module, which is imported when it is chosen.

The options are read first, by a module that imports no torch, so that help and mistakes appear at once.

``python -m recipes.NAME`` does the same, but looks for ``recipes`` in the working directory first; the command does not.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from recipes.commands.import_warnings import silence

__all__ = ["COMMANDS", "Command", "main", "usage"]


@dataclass(frozen=True)
class Command:
    """A command by the names, as ``module:function``, of its functions.

    Attributes:
        target: ``main(arguments, config) -> exit status``.
        text: what it is for.
        parse: makes the configuration of the arguments, and ends the program after ``--help``.
    """

    target: str
    text: str
    parse: str | None = None


COMMANDS = {
    "grpo": Command(
        "recipes.grpo:main",
        "train a policy by GRPO and its relatives, without a critic",
        "recipes.configs.grpo_config:parse",
    ),
    "ppo": Command("recipes.ppo:main", "train a policy by PPO, with a critic", "recipes.configs.ppo_config:parse"),
    "distil": Command(
        "recipes.distil:main",
        "train a student on its own samples by the log-probs of a teacher",
        "recipes.configs.distil_config:parse",
    ),
    "sft": Command(
        "recipes.sft:main", "supervised training on conversations with images", "recipes.configs.sft_config:parse"
    ),
    "classify": Command(
        "recipes.classify:main", "supervised training on labelled pictures", "recipes.configs.classify_config:parse"
    ),
    "easy-vqa": Command(
        "recipes.easy_vqa:main",
        "train by SFT, then GRPO, on real questions about pictures",
        "recipes.configs.easy_vqa_config:parse",
    ),
    "walk": Command(
        "recipes.walk:main",
        "train by GRPO or PPO over episodes with a new picture each turn",
        "recipes.configs.walk_config:parse",
    ),
    "zoom": Command(
        "recipes.zoom:main",
        "train by GRPO or PPO over episodes that look closer at a picture and then answer",
        "recipes.configs.zoom_config:parse",
    ),
    "parity": Command(
        "recipes.parity:main",
        "compare log-probs of the rollout engine with the actor's",
        "recipes.configs.parity_config:parse",
    ),
    "make-vlm": Command(
        "recipes.demo.make_vlm:main",
        "make a small VLM with the real words of SmolLM2",
        "recipes.configs.make_vlm_config:parse",
    ),
    "export": Command(
        "recipes.export:main",
        "make a checkpoint of a run an ordinary Hugging Face model",
        "recipes.configs.export_config:parse",
    ),
    "plan": Command(
        "recipes.plan:main",
        "forecast memory, time and disk of a run before anything is loaded",
        "recipes.configs.plan_config:parse",
    ),
    "show": Command(
        "recipes.show:main",
        "show the first rows of a data set as the model sees them, and what the reward gives their truths",
        "recipes.configs.show_config:parse",
    ),
    "view": Command(
        "recipes.watch.viewer:main", "show a run in the browser, while it trains", "recipes.watch.viewer:parse"
    ),
    "serve": Command(
        "dataproto_server.command:main",
        "train and sample for clients of the Tinker SDK",
        "dataproto_server.config:parse",
    ),
    "report": Command("recipes.watch.report:main", "write the page that shows a run"),
}
"""The commands by name. A further one is one line here."""


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
        return _show_version()
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}: {hint}", file=sys.stderr)
        return 2
    silence()
    command = COMMANDS[name]
    if command.parse is None:
        return int(_named(command.target)(rest))
    from recipes.options import exit_status  # which takes longer than the table above

    with exit_status(rest, resumes=False) as status:
        config = _named(command.parse)(rest)
    return status.code or int(_named(command.target)(rest, config))


def _show_version() -> int:
    try:
        print(f"dataproto {version('dataproto-vlm')}")
    except PackageNotFoundError:
        print("error: the package dataproto-vlm is not installed, so its version is unknown", file=sys.stderr)
        return 2
    return 0


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def usage() -> str:
    """The text of ``dataproto --help``."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.text}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dataproto COMMAND [OPTIONS]",
            "",
            "Post-training of vision-language models with reinforcement learning.",
            "",
            "commands:",
            *lines,
            "",
            "dataproto COMMAND --help shows the common options of a command, --help-all shows all.",
            "python -m recipes.COMMAND does the same unless the working directory has its own recipes; this command ignores it.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
