"""GRPO on geometry problems: ``python -m recipes.geo3k_grpo``.

With no arguments it draws problems, makes a small Qwen2.5-VL and trains it on the CPU within minutes. With ``--preset``,
``--model-path`` and ``--data-path`` the same loop runs any checkpoint of a known family on Geometry3K or data of its kind.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipes import grpo
from recipes.configs.shared.policy_gradient_config import parse_with_defaults
from recipes.grpo import step_for
from recipes.options import training_command
from recipes.run.policy_gradient import run

OUTPUT_DIR = Path("outputs/geo3k_grpo")
PRESETS = {name: replace(each, run=replace(each.run, output_dir=OUTPUT_DIR)) for name, each in grpo.PRESETS.items()}
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="python -m recipes.geo3k_grpo")

main = training_command(parse, run, step_for)


if __name__ == "__main__":
    sys.exit(main())
