"""Policy-gradient training of a vision-language model on problems with images, for any algorithm.

`run` is all of a recipe but its step function; `recipes.configs` holds the options.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from dataproto import DataProto
from dataproto.errors import InvalidConfig, raised_as
from dataproto.vlm import VLMFamily
from recipes.configs.episodes_config import EpisodeRunConfig
from recipes.configs.shared.policy_gradient_config import DataConfig, PolicyGradientConfig
from recipes.configs.shared.run_config import RecipeConfig, announce_small_model
from recipes.data.curriculum import Curriculum
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.data.problem_rows import PROBLEM_COLUMNS, CheckTruth, load_rows
from recipes.data.splits import open_sets, tell_data
from recipes.demo.rows import ProblemRows
from recipes.demo.tiny_model import tiny_checkpoint
from recipes.rewards import RewardFunction, load_reward
from recipes.rewards.reward_check import check_reward, truth_check
from recipes.run.carrying import carry_samples
from recipes.run.episode_roles import Played, with_episodes
from recipes.run.evaluation import Evaluate, held_out_evaluation, held_out_means
from recipes.run.look_ahead import LookAhead
from recipes.run.loop import StepFunction, attempts, next_batch, train
from recipes.run.out_of_memory import naming_options
from recipes.run.phases import StepState
from recipes.run.run_directory import held_directory, open_run_directory, over_the_run, reported, with_function
from recipes.run.tested_versions import tell_untested_versions
from recipes.watch.console import LIBRARIES_FILE, start_phase
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.loggers import LoggedRun, open_loggers
from recipes.watch.report import REPORT_FILE
from rollout.engine import has_option
from rollout.prompts import PromptBuilder
from workers import Roles, launch
from workers.cluster.launcher import check_extras
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.rollout_worker import RolloutConfig, replays_routing

AlgorithmStep = Callable[..., tuple[DataProto, dict[str, float]]]
"""``step(roles, prompts, config, sampling, state)`` -> rollouts, metrics; as `recipes.grpo.grpo_step`."""


WAYS = {
    "reference": "add a KL term, --algorithm.kl-coef 0.01",
    "critic": "take the options of dataproto ppo, recipes.ppo.parse(...)",
}
"""How a step of one's own gets the roles that not every run has."""


@dataclass(frozen=True)
class PolicyTask:
    """A run whose directory is open: its options with what was filled in, the model, the data and the evaluation."""

    config: PolicyGradientConfig
    model_path: str  # the checkpoint that training starts from
    builder: PromptBuilder
    loader: PromptLoader
    reward: RewardFunction | None  # None: the rewards are those of an environment, or of an agent
    evaluate: Evaluate
    played: Played | None = None  # its episodes are the rollouts

    def roles(self, launched: Roles) -> Roles:
        """The roles of a step: those that were launched, or roles that play."""
        return launched if self.played is None else with_episodes(launched, self.played)


def run(config: PolicyGradientConfig, step: AlgorithmStep, prepare: Callable[[Any], PolicyTask] | None = None) -> Path:
    """Trains by an algorithm's step function, with data, reward, evaluation, checkpoints, resume and report by the options.

    Your own algorithm needs only a step function::

        def my_step(roles, prompts, config, sampling, state):
            data = roles.rollout.generate(prompts, sampling)
            data |= roles.reward.score(data)
            data |= roles.reference.log_probs(data)  # for a KL term
            data["advantages"] = my_advantage(data["token_level_rewards"], data["response_mask"])
            metrics = roles.actor.update(data, policy_loss(config), config.minibatch, entropy=True)
            roles.sync_weights()
            return data, metrics

        run(recipes.grpo.parse(["--steps", "10", "--output-dir", "outputs/mine"]), my_step)

    Args:
        config: e.g. from `recipes.grpo.parse`, or `recipes.ppo.parse` for a step that has a critic.
        step: see `AlgorithmStep`; ``config`` is ``config.algorithm``, ``sampling`` has its ``n`` and temperature, and ``state``
            (`recipes.run.StepState`) counts the steps and loads further prompts.
        prepare: opens the run's directory and the data; by default `problems`, those that the options name.

    Returns:
        The path of the report, which an interrupted run leaves too.

    Raises:
        InvalidConfig, CheckpointError: the run directory or the data do not fit the options, or ``step`` has other arguments.
    """
    with raised_as(InvalidConfig, f"{step} is no step(roles, prompts, config, sampling, state)", TypeError):
        inspect.signature(step).bind(None, None, config=None, sampling=None, state=None)
    check_trains(config.data)
    with begun(config) as started:
        task = (prepare or problems)(config)
        config, builder = task.config, task.builder
        curriculum = task.loader.rows if isinstance(task.loader.rows, Curriculum) else None
        # where models do not wait for threads of this process, and the next prompts do not depend on this step
        ahead = LookAhead(task.loader, background=config.on == "ray" and curriculum is None)
        kept = KeptRollouts(config.run.output_dir, config.keep_rollouts, builder.tokenizer)
        longest = config.data.max_prompt_length + config.longest_response
        with naming_options(config, longest), reported(config.run.output_dir, started) as directory:
            for attempt in attempts(config.run, ahead, config.max_restarts):
                state = StepState(0, partial(next_batch, ahead), curriculum)
                bound = partial(step, config=config.algorithm, sampling=config.sampling(), state=state)
                if curriculum is not None:
                    curriculum.forget()  # what an attempt that failed has observed
                    bound = partial(observed_step, bound, curriculum)
                # its thread sends to the roles, so it ends before them
                with attempt, launch_roles(config, task.model_path, builder, task.reward) as launched, closing(ahead):
                    ahead.send = launched.send_ahead
                    apart, corrected = bool(config.layout.rollout), config.algorithm.compares_engine
                    oldest, steps = config.rollout.staleness, attempt.run.steps
                    batches, measure = carry_samples(
                        launched, ahead, oldest, state, steps, apart=apart, corrected=corrected
                    )
                    roles = task.roles(launched)
                    train(attempt.run, roles, batches, bound, task.evaluate, builder, state, measure, kept)
        return directory / REPORT_FILE


@contextmanager
def begun(config: RecipeConfig) -> Iterator[float]:
    """Checks what a run needs before anything is written or loaded, and keeps others out of its directory for the time of a
    block, which gets the time at which the run began.

    Raises:
        InvalidConfig, MissingPackage: see `held_directory` and `check_extras`.
    """
    started = time.monotonic()
    disable_progress_bar()  # of transformers; a run shows its own
    check_extras(config.engine, config.on, config.ray.address)
    tell_untested_versions(config.engine)
    with held_directory(config):
        yield started


def observed_step(
    step: StepFunction, curriculum: Curriculum, roles: Roles, prompts: DataProto
) -> tuple[DataProto, dict[str, float]]:
    """A step, after which the curriculum knows how often each problem was solved."""
    data, metrics = step(roles, prompts)
    return data, {**metrics, **curriculum.observe(data)}


def check_trains(data: DataConfig) -> None:
    """Raises `InvalidConfig` for held-out sets of one's own without rows to train on, which only `evaluate` takes."""
    if data.eval_data_path and not data.data_path:
        raise InvalidConfig(
            "--eval-data-path without --data-path: synthetic problems have their own held-out rows; recipes.run.evaluate answers "
            "sets without training"
        )


def problems(config: PolicyGradientConfig, trains: bool = True) -> PolicyTask:
    """The run that the options name: model, reward, training prompts without end, and the held-out ones.

    Args:
        trains: without, the loader, which nobody reads, is of the held-out prompts.

    Raises:
        InvalidConfig, CheckpointError: see `run`.
    """
    if trains:
        announce_small_model(config)
    played = None if config.played_agent is None else Played.by_agent(*config.played_agent)
    reward = None
    if config.reward is not None or played is None:
        reward = load_reward(config.rewards, config.on == "local", config.reward_weights)
    model_path = config.model_path or str(tiny_checkpoint(config.run.seed, phase=start_phase, level=config.data.level))
    config.check_models(model_path)  # before anything is written
    data = config.data
    with start_phase("loading the tokenizer and the image processor"):
        builder = prompt_builder(data, model_path)
    with start_phase("reading data"):
        train_rows, test_rows = open_problems(config, builder, reward, trains)
        if reward is not None:
            check_reward(reward, train_rows, builder, here=config.on == "local")
        loader = prompt_loader(config, builder, train_rows, shuffle=data.data_path is not None)
    if trains:
        tell_data(loader, *test_rows.values())
    config = open_run_directory(config, config.updates, loader if trains else None)
    evaluate = evaluation_of_sets(config, builder, test_rows)
    return PolicyTask(config, model_path, builder, loader, reward, evaluate, played)


def evaluate(config: PolicyGradientConfig, prepare: Callable[..., PolicyTask] | None = None) -> dict[str, float]:
    """Answers the held-out problems that the options name, without training; the metrics. No ``--data-path`` is needed.

    It prints a line of each set. Metrics, answers and report are in the directory of the options, as those of step 0 of a run::

        sets = ["--eval-data-path", "easy=a.jsonl", "hard=b.jsonl"]
        evaluate(recipes.grpo.parse([*options, *sets, "--output-dir", "outputs/eval"]))

    Args:
        prepare: opens the directory and the problems, called with ``trains=False``; by default `problems`. Episodes are played
            by `recipes.walk.walk_task` and `recipes.zoom.zoom_task`.

    Raises:
        InvalidConfig, CheckpointError: there are no weights or no problems to evaluate; or see `run`.
    """
    if config.model_path is None:
        raise InvalidConfig("evaluate has no weights: give --model-path RUN/global_step_N/actor/huggingface")
    if prepare is None and isinstance(config, EpisodeRunConfig):
        raise InvalidConfig(
            "evaluate answers problems, and these options play an environment: evaluate(config, recipes.walk.walk_task), or "
            "recipes.zoom.zoom_task"
        )
    if prepare is None and not (config.data.eval_data_path or config.data.data_path):
        raise InvalidConfig("evaluate has no problems: give --eval-data-path, a set or several")
    with begun(config):
        task = (prepare or problems)(config, trains=False)
        with (
            reported(config.run.output_dir) as directory,
            launch_roles(task.config, task.model_path, task.builder, task.reward) as launched,
            open_loggers(config.run.loggers, LoggedRun(directory)) as loggers,
        ):
            metrics = task.evaluate(task.roles(launched), 0)
            loggers.log(0, metrics)
            loggers.log_saved_rollouts(0)
    for name, means in held_out_means(metrics).items():
        print(f"{name}: {', '.join(f'{part} {value:.4g}' for part, value in means.items())}")
    return metrics


def evaluation_of_sets(config: PolicyGradientConfig, builder: PromptBuilder, sets: Mapping[str, Any]) -> Evaluate:
    """Answers to the rows of held-out sets, by their names."""
    at_a_time, on_bad_row = answered_at_a_time(config), config.data.on_bad_row
    loaders = {name: EvaluationLoader(rows, builder, at_a_time, on_bad_row) for name, rows in sets.items()}
    return held_out_evaluation(loaders, config.eval_sampling(), config.run.output_dir)


def launch_roles(
    config: PolicyGradientConfig, model_path: str, builder: PromptBuilder, reward: RewardFunction | None = None
) -> Roles:
    """The roles of a run: actor, engine and, if one is given, reward; a reference and a critic if the options have them."""
    actor = ActorConfig(
        model_path,
        temperature=config.algorithm.temperature,
        optimizer=with_function(over_the_run(config.optimizer, config.run.steps * config.updates["optimizer"])),
        **vars(config.compute),
    )
    options: dict[str, Any] = {}
    prompts = {name: getattr(config.data, name) for name in ("max_prompt_length", "min_pixels", "max_pixels")}
    prompts["template_arguments"] = builder.template_arguments
    if config.engine == "vllm":  # it processes images itself
        options["max_num_seqs"] = config.engine_slots()
        options["max_model_len"] = config.data.max_prompt_length + config.longest_response
        options["image_options"] = builder.image_options
    rollout = RolloutConfig(
        model_path,
        config.engine,
        options | dict(config.engine_options),
        prompts,
        replay_routing=config.rollout.replay_routing,
    )
    announce_replay(rollout, builder.family)
    critic = None
    if config.critic:
        compute = vars(config.compute) | {"mtp_coef": 0.0}  # a head of the policy
        critic = CriticConfig(model_path, optimizer=with_function(config.critic), **compute)
    roles = launched(config, actor, rollout, reward, reference=config.reference(actor), critic=critic)
    roles.ways = WAYS
    return roles


def launched(
    config: RecipeConfig,
    actor: ActorConfig | CriticConfig,
    rollout: RolloutConfig | None,
    reward: RewardFunction | None,
    **others: Any,
) -> Roles:
    """The roles of a run where its options place them. ``others``: of `workers.launch`."""
    places = vars(config.ray) if config.on == "ray" else {}
    shown = config.on == "ray" and config.ray.show_logs
    return launch(
        actor,
        libraries=None if shown else config.run.output_dir.absolute() / LIBRARIES_FILE,
        reward=reward,
        rollout=rollout,
        on=config.on,
        layout=config.layout,
        phase=start_phase,
        **others,
        **places,
    )


def prompt_builder(
    data: DataConfig, model_path: str, template_arguments: Mapping[str, Any] | None = None
) -> PromptBuilder:
    """The builder of a run's prompts, for training and evaluation.

    Args:
        template_arguments: of the recipe, before those of the options.
    """
    return PromptBuilder.from_pretrained(
        model_path,
        data.max_prompt_length,
        data.min_pixels,
        data.max_pixels,
        template_arguments={**(template_arguments or {}), **data.template_arguments},
    )


def announce_replay(rollout: RolloutConfig, family: VLMFamily) -> None:
    """Says in one line whether the actor of a mixture of experts uses the experts that the engine chose."""
    if family.experts is None:
        return
    if replays_routing(rollout, family):
        print("routing replay: the actor uses the experts that the engine chose (--rollout.no-replay-routing)")
    else:
        named, asked = has_option(rollout.engine, "routed_experts"), "--rollout.no-replay-routing"
        print(f"no routing replay: {asked if named else f'engine {rollout.engine} names no experts'}")


def prompt_loader(config: Any, builder: PromptBuilder, rows: Any, shuffle: bool = True) -> PromptLoader:
    """Batches of rows without end, by the options ``config.data`` and the seed of ``config.run``."""
    data = config.data
    return PromptLoader(
        Curriculum(rows) if getattr(data, "curriculum", False) else rows,
        builder,
        data.batch_size,
        config.run.seed,
        shuffle=shuffle,
        on_bad_row=data.on_bad_row,
        num_workers=data.num_workers,
    )


def answered_at_a_time(config: PolicyGradientConfig) -> int:
    """Held-out prompts that are answered together: with all their samples at most as many rows as a step has."""
    return max(config.data.batch_size * config.algorithm.n // config.data.eval_samples, 1)


def open_problems(
    config: PolicyGradientConfig, builder: PromptBuilder, reward: RewardFunction | None = None, trains: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Training rows, and the held-out rows of each set by its name; those with a truth of no use for the reward count as bad."""
    data = config.data
    if data.data_path or data.eval_data_path:
        return open_data_set(data, builder, truth_check(reward), trains)
    test = ProblemRows(data.level, 0, "test", data.instruction)
    return ProblemRows(data.level, config.run.seed, "train", data.instruction), {"": test[: data.eval_rows]}


def open_data_set(
    data: DataConfig, builder: PromptBuilder, check_truth: CheckTruth | None = None, trains: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Training rows, and the held-out rows of each set by its name, that fit; without such sets see `split_rows`.

    Without ``trains`` the rows of the first set take the place of training rows, which are not read.
    """
    read = partial(load_rows, instruction=data.instruction, check_truth=check_truth)
    paths = [str(data.data_path)] if trains or not data.eval_data_path else []
    rows, held_out = open_sets(data, paths, read, builder, PROBLEM_COLUMNS, "only the reward gets")
    return next(iter([*rows, *held_out.values()])), held_out
