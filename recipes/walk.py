"""GRPO or PPO over episodes of several turns, each with a new picture: ``dataproto walk``.

With no arguments it draws grids, makes a small Qwen2.5-VL, shows it the form of an answer, and lets it find out by itself how to
walk to the goal, on the CPU within minutes. With ``--environment FILE.py:NAME`` and ``--model-path`` the same loop trains any
checkpoint of a known family in an environment of your own, with the rows of ``--data-path``.

Each evaluation walks greedily in grids that are drawn for it, and measures two controls: pictures of other grids, and white ones.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from recipes.algorithms.options import spelled_out
from recipes.configs.shared.run_config import announce_small_model
from recipes.configs.walk_config import WalkConfig, WarmUpPhaseConfig, parse
from recipes.console import start_phase
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.grpo import step_for
from recipes.options import exit_status
from recipes.ppo import ppo_step
from recipes.report.kept_rollouts import KeptRollouts
from recipes.report.page import REPORT_FILE
from recipes.run.carried_rollouts import LookAhead, carry_samples
from recipes.run.environment_roles import load_environment, with_environment
from recipes.run.evaluation import Evaluate, evaluate_samples
from recipes.run.loop import attempts, train
from recipes.run.phases import Progression
from recipes.run.policy_gradient import answered_at_a_time, launch_roles, open_data_set, prompt_loader
from recipes.run.run_directory import open_run_directory, reported, with_schedules
from recipes.synthetic.grid_walk import MOVES, TASK, GridWalk, RandomWalks, Shown, WalkRows
from recipes.tiny import TinyConfig, make_tiny_model
from recipes.tiny.warm_up import negative_log_probs
from rollout.environments import MakeEnvironment
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import Roles
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.loading import checkpoint_family
from workers.training.optimizer import OptimizerConfig

SIDE = 28  # pixels at which the small model sees a grid: one visual token
TINY_MODEL = TinyConfig(vocabulary=400, layers=1, text_std=0.05, vision_std=0.2, min_pixels=SIDE**2, max_pixels=SIDE**2)
MODEL = "model"  # folder of the run's directory
CONTROLS: tuple[Shown, ...] = ("other", "blank")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit status; a user's mistake is one line on stderr."""
    with exit_status(arguments) as status:
        print(f"report: {run_walk(parse(status.arguments))}")
    return status.code


def run_walk(config: WalkConfig) -> Path:
    """Makes and warms up the small model, if none is given, and trains over episodes.

    Returns:
        The path of the report, which an interrupted run leaves too.

    Raises:
        InvalidConfig, CheckpointError: the run directory, the environment or the data do not fit the options.
    """
    asked, started = config, time.monotonic()
    disable_progress_bar()  # of transformers; a run shows its own
    announce_small_model(config.model_path, config.data.data_path)
    if config.model_path is not None:
        checkpoint_family(config.model_path)  # refuses an unknown model before anything is written
    named = config.episodes.environment
    environment: MakeEnvironment = GridWalk if named is None else load_environment(named)
    config = with_schedules(config.run, config, **config.updates)
    recorded = replace(config, algorithm=spelled_out(config.algorithm))
    with reported(open_run_directory(config.run, recorded, asked), started) as directory:
        model_path = config.model_path or str(tiny_walker(directory / MODEL, config.run.seed, config.warm_up))
        train_in(environment, config, model_path)
    return directory / REPORT_FILE


def train_in(environment: MakeEnvironment, config: WalkConfig, model_path: str) -> None:
    """Trains in an environment, in the run's directory, from the checkpoint at ``model_path``."""
    data, limits = config.data, config.episodes.limits()
    builder = PromptBuilder.from_pretrained(model_path, data.max_prompt_length, data.min_pixels, data.max_pixels)
    rows, held_out = load_rows(config, builder)
    loader = LookAhead(prompt_loader(config, builder, rows, shuffle=data.data_path is not None))
    kept = KeptRollouts(config.run.output_dir, config.keep_rollouts, builder.tokenizer)
    evaluate = controlled_evaluation(config, held_out, builder)
    for attempt in attempts(config.run, loader, config.max_restarts):
        progression = Progression(config.algorithm.kl_controller())
        step = partial(
            ppo_step if config.algorithm.needs_critic else step_for(config),
            config=config.algorithm,
            sampling=config.sampling(),
            progression=progression,
        )
        with attempt, launch_roles(config, model_path, builder) as launched:
            corrected, steps = config.algorithm.compares_engine, attempt.run.steps
            batches, measure = carry_samples(launched, loader, config.rollout, progression, steps, corrected)
            roles = with_environment(launched, environment, limits, config.episodes.drop_cut)
            train(attempt.run, roles, batches, step, evaluate, builder, progression, measure, kept)


def load_rows(config: WalkConfig, builder: PromptBuilder) -> tuple[Any, list[Any]]:
    """Training rows, and the held-out rows of each evaluation: the task, and the controls of the drawn one."""
    data = config.data
    if data.data_path is not None:
        rows, held_out = open_data_set(data, builder)
        return rows, [held_out]
    own = WalkRows(config.run.seed, "train")
    return own, [WalkRows(0, "test", data.eval_rows, shown) for shown in ("own", *CONTROLS)]


def controlled_evaluation(config: WalkConfig, held_out: Sequence[Any], builder: PromptBuilder) -> Evaluate:
    """Greedy episodes as ``val-core/walk/*``, and those of controls as ``val-aux/*``."""
    at_a_time = answered_at_a_time(config)
    controls = tuple(f"val-core/{WalkRows(shown=shown).source}/" for shown in CONTROLS)

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        batches = chain.from_iterable(EvaluationLoader(rows, builder, at_a_time) for rows in held_out)
        metrics, _ = evaluate_samples(roles, batches, config.eval_sampling(), config.run.output_dir, step)
        return {
            name.replace("core", "aux", 1) if name.startswith(controls) else name: metrics[name] for name in metrics
        }

    return evaluate


def tiny_walker(path: Path, seed: int, config: WarmUpPhaseConfig) -> Path:
    """A small Qwen2.5-VL that knows the words of the grid and answers with one of them; made if it does not exist yet."""
    if (path / "config.json").is_file():
        return path
    draft = path.with_name(f".{path.name}")
    with start_phase("making the tiny model"):
        make_tiny_model(draft, seed, TINY_MODEL, [*(20 * [TASK]), *(50 * list(MOVES))])
    with start_phase("warming up the tiny model"):
        builder = SupervisedBuilder.from_pretrained(draft, max_prompt_length=1024)
        walks = PromptLoader(RandomWalks(seed), builder, config.batch_size, seed, shuffle=False)
        schedule = OptimizerConfig(
            lr=config.lr, schedule="linear", warmup_steps=min(5, config.steps - 1), total_steps=config.steps
        )
        actor = ActorWorker(ActorConfig(str(draft), optimizer=schedule))
        for _ in range(config.steps):
            loss = actor.update(next(walks), negative_log_probs)["actor/loss"]
        actor.module.model.save_pretrained(draft)
    draft.rename(path)
    print(f"tiny model: {config.steps} updates on walks in random directions; cross-entropy {loss:.3f} nats per token")
    return path


if __name__ == "__main__":
    sys.exit(main())
