"""PPO with a critic on geometry problems: ``python -m recipes.geo3k_ppo``.

Data, model, reward and report are those of `recipes.geo3k_grpo`; beside the policy, a critic of the same kind learns the value
of each token.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from recipes import ppo
from recipes.configs.shared.policy_gradient_config import parse_with_defaults
from recipes.options import training_command
from recipes.ppo import ppo_step
from recipes.run.policy_gradient import run

OUTPUT_DIR = Path("outputs/geo3k_ppo")
PRESETS = {name: replace(each, run=replace(each.run, output_dir=OUTPUT_DIR)) for name, each in ppo.PRESETS.items()}
parse = partial(parse_with_defaults, presets=PRESETS, description=__doc__, prog="python -m recipes.geo3k_ppo")

main = training_command(parse, run, lambda _: ppo_step)


if __name__ == "__main__":
    sys.exit(main())
