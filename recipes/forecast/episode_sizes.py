"""The sizes of an episode: what an environment shows, measured by playing one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.data.loader import PromptLoader
from recipes.forecast.batch_sizes import PromptSizes, grids_of
from rollout.engine import SamplingParams
from rollout.environments import EnvironmentFailed, EpisodeLimits, MakeEnvironment, Observation, TurnRenderer
from rollout.environments.environment_host import EnvironmentHost
from rollout.environments.episode_rows import episode_starts
from rollout.environments.turn_renderer import RenderedTurn
from rollout.prompts import PromptBuilder


@dataclass(frozen=True)
class EpisodeSizes:
    """One episode."""

    prompts: PromptSizes  # of its prompt, the first observation included
    shown: PromptSizes  # of all observations behind it
    sampled: int | None = None  # tokens of the actions, end tokens included; None: not known


def measure_episode(
    loader: PromptLoader,
    make_environment: MakeEnvironment,
    limits: EpisodeLimits,
    actions: Sequence[str] = (),
) -> EpisodeSizes:
    """Plays an episode from the first prompt of a loader, which stays where it is.

    Args:
        actions: of the episode. Without them the environment is only reset, and each further turn counts as if it showed the same
            again.

    Raises:
        EnvironmentFailed: the environment raised, took too long, or returned something that is no observation.
    """
    builder = loader.builder
    alone = PromptLoader(loader.rows, builder, 1, loader.seed, loader.shuffle, loader.on_bad_row)
    start = episode_starts(next(alone), SamplingParams())[0]
    renderer = TurnRenderer(builder, [builder.tokenizer.eos_token_id])
    name = "forecast"
    with EnvironmentHost(make_environment, limits.seconds, limits.memory_gib) as host:
        host.reset(name, start.row, start.environment_seed)
        first = _answer(host)
        prompt = renderer.prompt(start.row, first)
        turns: list[RenderedTurn] = []
        if not actions:
            turns = [renderer.turn(first, ended=True)] * (limits.turns - 1)
        for number, action in enumerate(actions[: limits.turns], 1):
            host.step(name, action)
            shown = _answer(host)
            if shown.done or number == limits.turns:
                break
            turns.append(renderer.turn(shown, ended=True))
    played = actions[: len(turns) + 1]
    return EpisodeSizes(
        PromptSizes((len(prompt.input_ids),), (_grids(builder, prompt.images),)),
        PromptSizes(
            (sum(len(turn.ids) for turn in turns),),
            (tuple(grid for turn in turns for grid in _grids(builder, turn.images)),),
        ),
        sum(len(builder.encode_text(action)) + 1 for action in played) if actions else None,
    )


def _answer(host: EnvironmentHost) -> Observation:
    """The observation that answers the last call."""
    ((_, outcome),) = host.poll(None)
    if isinstance(outcome, EnvironmentFailed):
        raise outcome
    return outcome


def _grids(builder: PromptBuilder, images: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    return tuple(grid for image in images for grid in grids_of(builder, image.inputs))
