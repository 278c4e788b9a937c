"""The command ``dataproto NAME``: each command is the ``main`` of a module, which is imported when it is chosen.

``python -m recipes.NAME`` does the same, but looks for ``recipes`` in the working directory first; the command does not.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version

__all__ = ["COMMANDS", "Command", "main", "usage"]


@dataclass(frozen=True)
class Command:
    """A function ``main(arguments) -> exit status``, named as ``module:function``, and what it is for."""

    target: str
    text: str


COMMANDS = {
    "grpo": Command("recipes.grpo:main", "train a policy by GRPO and its relatives, without a critic"),
    "ppo": Command("recipes.ppo:main", "train a policy by PPO, with a critic"),
    "sft": Command("recipes.sft:main", "supervised training on conversations with images"),
    "classify": Command("recipes.classify:main", "supervised training on labelled pictures"),
    "parity": Command("recipes.parity.__main__:main", "compare log-probs of the rollout engine with the actor's"),
    "make-vlm": Command("recipes.make_vlm.__main__:main", "make a small VLM with the real words of SmolLM2"),
    "export": Command("recipes.export.__main__:main", "make a checkpoint of a run an ordinary Hugging Face model"),
    "plan": Command("recipes.plan:main", "forecast memory, time and disk of a run before anything is loaded"),
    "view": Command("recipes.view:main", "show a run in the browser, while it goes on"),
    "report": Command("recipes.report.__main__:main", "write the page that shows a run"),
}
"""The commands by name. A further one is one line here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit status; an unknown name is one line on stderr."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"dataproto {version('dataproto-vlm')}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}: {hint}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name].target.partition(":")
    status: int = getattr(importlib.import_module(module), function)(rest)
    return status


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
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
