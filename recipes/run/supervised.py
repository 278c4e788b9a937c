"""Supervised training: one step, the held-out loss, and the run around them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

from dataproto import DataProto
from recipes.configs.shared.run_config import announce_small_model
from recipes.configs.shared.supervised_config import RowsConfig, SupervisedConfig
from recipes.data.conversations import last_questions
from recipes.data.loader import EvaluationLoader, PromptLoader
from recipes.demo.tiny_model import make_tiny_model, make_tiny_processors, model_of_run, next_token_loss
from recipes.run.evaluation import Evaluate, evaluate_samples
from recipes.run.loop import StepFunction, attempts, train
from recipes.run.metrics import speed_metrics, timed
from recipes.run.out_of_memory import naming_options
from recipes.run.policy_gradient import begun, launched
from recipes.run.run_directory import open_run_directory, over_the_run, reported, with_function
from recipes.watch.console import start_phase
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.report import REPORT_FILE
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from workers import Roles
from workers.model.model_config import AggregationMode
from workers.roles.actor import ActorConfig
from workers.roles.critic import CriticConfig
from workers.roles.reward import RewardRow
from workers.roles.rollout_worker import RolloutConfig
from workers.training.forward_pass import LossFn
from workers.training.loading import checkpoint_family

Config = TypeVar("Config", bound=SupervisedConfig)
Builder = TypeVar("Builder", bound=PromptBuilder)
Learns = Literal["text", "preferences", "scores"]
"""What a model learns: what it says, whose held-out questions an engine answers; what it prefers to say next to a reference, the
same model before training, with adapters their base; or to score answers."""


@dataclass(frozen=True)
class SupervisedTask:
    """The data of a supervised recipe, and its evaluation."""

    builder: PromptBuilder
    loader: PromptLoader
    evaluate: Evaluate
    longest: int  # tokens of a question and its answer
    step: StepFunction | None = None  # by default `sft_step`
    learns: Learns = "text"


def run_supervised(config: Config, make_task: Callable[[Config, str], SupervisedTask]) -> Path:
    """Trains on the rows of a task, with evaluation, checkpoints, resume and report by the options.

    Args:
        make_task: called with the options and the path of the model.

    Returns:
        The path of the report, which an interrupted run leaves too.
    """
    announce_small_model(config)
    with begun(config) as started:
        if config.model_path is not None:
            checkpoint_family(config.model_path)  # refuses an unknown model before anything is written
        with TemporaryDirectory() as folder, start_phase("reading data"):  # before anything is written or overwritten
            task = make_task(config, config.model_path or str(make_tiny_processors(Path(folder))))
        config = open_run_directory(config, {"optimizer": 1}, task.loader)
        directory = config.run.output_dir
        model_path = config.model_path or str(tiny_model(directory / "model", config.run.seed, config.run.resume))
        limits = {"image_options": task.builder.image_options, "max_model_len": task.longest}
        kept = KeptRollouts(config.run.output_dir, config.keep_rows, task.builder.tokenizer)
        with naming_options(config, task.longest), reported(directory, started):
            for attempt in attempts(config.run, task.loader, config.max_restarts):
                step = task.step or sft_step
                with attempt, launch_supervised(config, model_path, limits, task.learns) as roles:
                    train(attempt.run, roles, task.loader, step, task.evaluate, task.builder, None, measure_rows, kept)
        return directory / REPORT_FILE


def rows_builder(kind: type[Builder], data: RowsConfig, model_path: str) -> Builder:
    """A builder of rows, whose limit is an option of its own."""
    limits = (data.max_length, data.min_pixels, data.max_pixels)
    builder = kind.from_pretrained(model_path, *limits, template_arguments=data.template_arguments)
    builder.limit_name = "max_length"
    return builder


def tiny_model(path: Path, seed: int, resumed: bool = False, *settings: Any) -> Path:
    """The path of a run's small model, made with random weights and ``settings`` unless a resumed run has it."""

    def make(draft: Path) -> None:
        with start_phase("making the tiny model"):
            make_tiny_model(draft, seed, *settings)

    return model_of_run(path, resumed, make)


def launch_supervised(
    config: SupervisedConfig, model_path: str, limits: Mapping[str, Any] | None = None, learns: Learns = "text"
) -> Roles:
    """Launches the model that learns, as the actor, and what it needs: by default an engine and the reward `exact_match`.

    Args:
        limits: options of vLLM, which processes images itself. Without them, for a program that trains step by step, vLLM keeps
            its weights while the actor works.
    """
    optimizer = with_function(over_the_run(config.optimizer, config.run.steps))
    made = CriticConfig if learns == "scores" else ActorConfig
    model = made(model_path=model_path, optimizer=optimizer, **vars(config.compute))
    if learns != "text":
        reference = model.frozen() if isinstance(model, ActorConfig) else None
        return launched(config, model, None, None, reference=reference)
    options = (dict(limits or {"sleep_level": 1}) if config.engine == "vllm" else {}) | dict(config.engine_options)
    rollout = RolloutConfig(model_path, config.engine, options, replay_routing=False)
    return launched(config, model, rollout, exact_match)


def sft_step(roles: Roles, rows: DataProto) -> tuple[DataProto, dict[str, float]]:
    """One update on the mean log-prob of the tokens to learn; returns the rows and the metrics.

    The rows get the column ``actor_log_probs (B, R)``: the tokens' log-probs before the update.
    """
    metrics = learn_from(roles, rows, next_token_loss, "token-mean")
    roles.sync_weights()
    return rows, metrics


def learn_from(roles: Roles, rows: DataProto, loss: LossFn, aggregation: AggregationMode) -> dict[str, float]:
    """One update, which adds the column ``actor_log_probs (B, R)`` of before it to the rows; the metrics."""
    metrics: dict[str, float] = {}
    with timed(metrics, "update_actor"):
        updated = roles.actor.update_and_score(sent(rows), loss, aggregation=aggregation)
    rows["actor_log_probs"] = updated.scores
    metrics |= updated.metrics
    metrics["train/loss"] = metrics.pop("actor/loss")
    return metrics


def sent(rows: DataProto) -> DataProto:
    """The rows as a model reads them: with tensors, and of the other columns groups and pictures only."""
    return rows.select(non_tensor_batch_keys=["uid", "multi_modal_inputs"])


def measure_rows(rows: DataProto, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
    """Row lengths, tokens to learn, rows with media, and speed of a step."""
    lengths, learnt = rows["attention_mask"].sum(1), rows["response_mask"].sum(1)
    sizes = {f"row_length/{name}": float(getattr(lengths.double(), name)()) for name in ("mean", "max", "min")}
    with_media = sum(bool(media) for media in rows["multi_modal_inputs"])
    return {
        **sizes,
        "data/learnt_tokens": int(learnt.sum()),
        "data/rows_with_media": with_media,
        **speed_metrics(rows, metrics, devices),
    }


def held_out_loss(roles: Roles, batches: Iterable[DataProto]) -> dict[str, float]:
    """``val/loss``: the mean over all tokens to learn, like ``train/loss``."""
    total, tokens = 0.0, 0
    for rows in batches:
        log_probs = roles.actor.log_probs(sent(rows), into="log_probs")["log_probs"]
        mask = rows["response_mask"].bool()
        total -= float(log_probs[mask].double().sum())
        tokens += int(mask.sum())
    return {"val/loss": total / tokens} if tokens else {}


def supervised_evaluation(
    config: SupervisedConfig,
    data: RowsConfig,
    model_path: str,
    held_out: Mapping[str, Sequence[Any]],
    builder: SupervisedBuilder,
    also: Callable[[list[DataProto]], dict[str, float]] = lambda answered: {},
) -> Evaluate:
    """The held-out loss and, unless answers have no tokens, greedy answers to the last question of each conversation.

    Args:
        held_out: the rows of each set by its name, which its metrics have: ``val/loss/NAME``, of which ``val/loss`` is the mean.
            The one of a set named "" is ``val/loss``.
        builder: of the conversations to learn.
        also: further metrics of the number of the step and the scored answers.
    """
    questions = rows_builder(PromptBuilder, data, model_path)

    def evaluate(roles: Roles, step: int) -> dict[str, float]:
        if not held_out:
            return {}
        size, bad = data.batch_size, data.on_bad_row
        rows = {name: EvaluationLoader(each, builder, size, bad) for name, each in held_out.items()}
        losses = {name: loss for name, each in rows.items() for loss in held_out_loss(roles, each).values()}
        metrics = {f"val/loss/{name}": loss for name, loss in losses.items() if name}
        metrics |= {"val/loss": fmean(losses.values())} if losses else {}
        if data.max_response_length:
            answers = {name: last_questions(each, builder.last_answer) for name, each in held_out.items()}
            asked = {name: EvaluationLoader(each, questions, 4 * size, bad) for name, each in answers.items()}
            greedy = SamplingParams(temperature=0, max_tokens=data.max_response_length)
            found, answered = evaluate_samples(roles, asked, greedy, config.run.output_dir, step)
            metrics |= found | also(answered)
        return metrics | {"data/skipped_eval_rows": sum(len(each.skipped) for each in rows.values())}

    return evaluate


def exact_match(rows: Sequence[RewardRow]) -> list[dict[str, float]]:
    """1 for an answer that equals the truth, except for white space around it.

    >>> exact_match([RewardRow("a cat ", "a cat"), RewardRow("A cat", "a cat")])
    [{'score': 1.0, 'acc': 1.0}, {'score': 0.0, 'acc': 0.0}]
    """
    right = [float(row.solution_str.strip() == str(row.ground_truth).strip()) for row in rows]
    return [{"score": value, "acc": value} for value in right]
