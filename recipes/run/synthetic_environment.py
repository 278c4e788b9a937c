"""Training in an environment that draws its own pictures, or in a user's: what such recipes have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from recipes.configs.episodes_config import EpisodeRunConfig, EpisodesConfig, WarmUpPhaseConfig
from recipes.configs.shared.policy_gradient_config import PolicyGradientConfig
from recipes.configs.shared.run_config import announce_small_model
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.data.splits import tell_data
from recipes.demo.tiny_model import TinyConfig, make_tiny_model, model_of_run, teach
from recipes.run.episode_roles import Played, load_environment
from recipes.run.evaluation import Evaluate, evaluate_samples
from recipes.run.policy_gradient import (
    PolicyTask,
    answered_at_a_time,
    evaluation_of_sets,
    open_data_set,
    prompt_builder,
    prompt_loader,
)
from recipes.run.run_directory import open_run_directory
from recipes.watch.console import start_phase
from rollout.environments import EpisodePlan, MakeEnvironment, TurnRenderer
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import Roles

MODEL = "model"  # folder of the run's directory
ONE_TOKEN = TinyConfig(vocabulary=400, layers=1, text_std=0.05, vision_std=0.2, min_pixels=28**2, max_pixels=28**2)
"""Sizes of a small model that sees each picture as one token."""


@dataclass(frozen=True)
class SmallModel:
    """A small Qwen2.5-VL that learns the form of an answer before it plays."""

    texts: Sequence[str]  # on which its tokenizer is trained
    demonstrations: Callable[[int], Any]  # of a seed, as conversations
    model: TinyConfig = ONE_TOKEN


@dataclass(frozen=True, kw_only=True)
class SyntheticEnvironment(SmallModel):
    """An environment that draws its pictures, and the small model for it.

    ``rows(seed, split, count, shown)`` are rows of prompts, of which ``shown`` is "own" or one of the ``controls``.
    """

    make: MakeEnvironment
    rows: Callable[..., Any]
    controls: Sequence[str] = ("other", "blank")
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, such as tools


def episode_task(config: EpisodeRunConfig, synthetic: SyntheticEnvironment, trains: bool = True) -> PolicyTask:
    """A run over episodes, from the checkpoint that is given or from the small model, which is made and warmed up first.

    Args:
        trains: see `recipes.run.policy_gradient.problems`.

    Raises:
        InvalidConfig, CheckpointError: the run directory, the environment or the data do not fit the options.
    """
    announce_small_model(config)
    if config.model_path is not None:  # what is unknown is refused before anything is written
        config.check_models(config.model_path)
    played = played_in(config.episodes, synthetic)
    model_path, run = config.model_path, config.run
    if model_path is None:
        config = open_run_directory(config, config.updates)
        model_path = str(demonstrated_model(run.output_dir / MODEL, run.seed, synthetic, config.warm_up, run.resume))
    builder = prompt_builder(config.data, model_path, None if config.data.data_path else synthetic.template_arguments)
    name_departures(builder)
    rows, held_out, controls = episode_rows(config, synthetic, builder, trains)
    if config.model_path is not None:
        config = open_run_directory(config, config.updates)
    loader = prompt_loader(config, builder, rows, shuffle=config.data.data_path is not None)
    if trains:
        tell_data(loader, *held_out.values())
    evaluate = evaluation_of_sets(config, builder, held_out)
    if controls:
        evaluate = controlled_evaluation(config, lambda step: held_out[""], controls, builder)
    return PolicyTask(config, model_path, builder, loader, None, evaluate, played)


def played_in(episodes: EpisodesConfig, synthetic: SyntheticEnvironment) -> Played:
    """The environment or agent that the options name, or the recipe's own. Raises `InvalidConfig`."""
    if episodes.agent is not None:
        return Played.by_agent(episodes.agent, episodes)
    make = synthetic.make if episodes.environment is None else load_environment(episodes.environment)
    return Played(EpisodePlan(make, episodes.limits()), episodes.drop_cut)


def name_departures(builder: PromptBuilder) -> None:
    """Tries the chat template out, and prints where the rows of episodes differ from what it makes of a whole conversation.

    Raises:
        InvalidConfig: it cannot show observations.
    """
    for departure in TurnRenderer(builder).departures:
        print(f"chat template: {departure}")


def episode_rows(
    config: EpisodeRunConfig, synthetic: SyntheticEnvironment, builder: PromptBuilder, trains: bool = True
) -> tuple[Any, dict[str, Any], list[Any]]:
    """Training rows, the held-out rows of each set by its name, and those of the controls."""
    data = config.data
    if data.data_path is not None:
        return *open_data_set(data, builder, trains=trains), []
    own, *controls = (synthetic.rows(0, "test", data.eval_rows, shown) for shown in ("own", *synthetic.controls))
    return synthetic.rows(config.run.seed, "train", 2**20, "own"), {"": own}, controls


def controlled_evaluation(
    config: PolicyGradientConfig, task: Callable[[int], Any], controls: Sequence[Any], builder: PromptBuilder
) -> Evaluate:
    """Answers to the rows that ``task`` gives for a step as ``val-core/*``, and to those of controls as ``val-aux/*``."""
    at_a_time = answered_at_a_time(config)
    sources = tuple(f"val-core/{rows.source}/" for rows in controls)

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        batches = chain.from_iterable(EvaluationLoader(rows, builder, at_a_time) for rows in (task(step), *controls))
        metrics, _ = evaluate_samples(roles, batches, config.eval_sampling(), config.run.output_dir, step)
        return {name.replace("core", "aux", 1) if name.startswith(sources) else name: metrics[name] for name in metrics}

    return evaluate


def demonstrated_model(
    path: Path, seed: int, small: SmallModel, config: WarmUpPhaseConfig, resumed: bool = False
) -> Path:
    """A small Qwen2.5-VL that knows the words of the environment and has learned from its demonstrations.

    It is made unless a resumed run has it.
    """

    def make(draft: Path) -> None:
        with start_phase("making the tiny model"):
            make_tiny_model(draft, seed, small.model, small.texts)
        with start_phase("warming up the tiny model"):
            builder = SupervisedBuilder.from_pretrained(draft, max_prompt_length=1024)
            shown = PromptLoader(small.demonstrations(seed), builder, config.batch_size, seed, shuffle=False)
            loss = teach(draft, shown, config.steps, config.lr)
        print(f"tiny model: {config.steps} updates on demonstrations; cross-entropy {loss:.3f} nats per token")

    return model_of_run(path, resumed, make)
