"""GRPO or PPO over episodes in which the policy looks closer and then answers: ``dataproto zoom``.

With no arguments it draws pictures of 448 pixels that are shown at 56, makes a small Qwen2.5-VL, shows it looks at random places
and what is read there, and lets it find out by itself where to look, on the CPU within minutes. With a checkpoint it trains
any checkpoint of a known family, with ``--crop-tool`` by calls of a tool. With ``--environment FILE.py:NAME`` it trains in an
environment of your own, with the rows of ``--data-path``.

Each evaluation answers greedily about pictures of its own, and measures two controls: other pictures, and white crops.
"""

from dataclasses import replace
from functools import partial

from transformers.utils import get_json_schema

from recipes.configs.zoom_config import ZoomConfig, parse
from recipes.demo.digit_zoom import PLACES, TASK, TOOL_TASK, DigitZoom, DigitZoomByTool, RandomLooks, ZoomRows
from recipes.options import training_command
from recipes.ppo import episode_step
from recipes.run.policy_gradient import PolicyTask, run
from recipes.run.synthetic_environment import SyntheticEnvironment, episode_task

ZOOM = SyntheticEnvironment(
    make=DigitZoom,
    rows=ZoomRows,
    texts=[*(20 * [TASK]), *(50 * list(PLACES)), *(50 * list("0123456789"))],
    demonstrations=RandomLooks,
)


def zoom_task(config: ZoomConfig, trains: bool = True) -> PolicyTask:
    """Pictures with looks by words, or by calls of a tool. See `episode_task`."""
    return episode_task(config, environment_of(config), trains)


def environment_of(config: ZoomConfig) -> SyntheticEnvironment:
    """`ZOOM`, or the same pictures with a tool that shows parts of them."""
    if not config.crop_tool:
        return ZOOM
    return replace(
        ZOOM,
        make=DigitZoomByTool,
        rows=partial(ZoomRows, task=TOOL_TASK),
        template_arguments={"tools": [get_json_schema(DigitZoomByTool().crop)]},
    )


main = training_command(parse, run, episode_step, lambda _: zoom_task)
