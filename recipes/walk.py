"""GRPO or PPO over episodes of several turns, each with a new picture: ``dataproto walk``.

With no arguments it draws grids, makes a small Qwen2.5-VL, shows it the form of an answer, and lets it find out by itself how to
walk to the goal, on the CPU within minutes. With ``--environment FILE.py:NAME`` and ``--model-path`` the same loop trains any
checkpoint of a known family in an environment of your own, with the rows of ``--data-path``.

Each evaluation walks greedily in grids of its own, and measures two controls: pictures of other grids, and white ones.
"""

from recipes.configs.walk_config import WalkConfig, parse
from recipes.demo.grid_walk import MOVES, TASK, GridWalk, RandomWalks, WalkRows
from recipes.options import training_command
from recipes.ppo import episode_step
from recipes.run.policy_gradient import PolicyTask, run
from recipes.run.synthetic_environment import SyntheticEnvironment, episode_task

WALK = SyntheticEnvironment(
    make=GridWalk, rows=WalkRows, texts=[*(20 * [TASK]), *(50 * list(MOVES))], demonstrations=RandomWalks
)


def walk_task(config: WalkConfig, trains: bool = True) -> PolicyTask:
    """Walks in synthetic grids, or in an environment of one's own; see `episode_task`."""
    return episode_task(config, WALK, trains)


main = training_command(parse, run, episode_step, lambda _: walk_task)
