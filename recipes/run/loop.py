"""The loop around a step function: data, evaluation, checkpoints, resume, metrics."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import CheckpointError, InvalidConfig, WorkerFailed
from dataproto.packing import MAX_TOKENS
from recipes.run.dynamic_sampling import More
from recipes.run.metrics import MetricsLog, rollout_metrics, speed_metrics, timed
from recipes.run.progress import Progress
from workers import Roles
from workers.training.checkpoint import latest_checkpoint, random_states, set_random_states, writing_checkpoint
from workers.training.checkpoint_files import missing_parts

STATE_FILE = "trainer.pt"

# prompts, and what gives more of them -> scored rollouts, metrics
StepFunction = Callable[[DataProto, More], tuple[DataProto, dict[str, float]]]
Evaluate = Callable[[int], dict[str, float]]  # step -> metrics
Measure = Callable[[DataProto, Mapping[str, float], int], dict[str, float]]
"""What a step returned, and how many devices the run has -> further metrics."""


def measure_rollouts(data: DataProto, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
    """Statistics of a scored rollout batch, and speed."""
    longest = data.meta_info.get(MAX_TOKENS)
    return rollout_metrics(data, max_response_length=longest) | speed_metrics(data, metrics, devices)


class Stateful(Protocol):
    """Something whose position can be saved, as values that `torch.load` reads without running code."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loader(Stateful, Protocol):
    """An endless source of prompt batches, each row with a ``uid`` of its own, the same after a resume."""

    @property
    def skipped(self) -> dict[int, str]:
        """Rows that could not be used: index to reason."""
        ...

    def __next__(self) -> DataProto: ...


@dataclass(frozen=True)
class RunConfig:
    """How long a run goes on, what it leaves behind and when."""

    steps: int = 100  # of rollout and update
    eval_every: int = 0  # steps between evaluations; 0: before the first and after the last step only
    save_every: int = 20  # steps between checkpoints; 0: after the last step only
    save_behind: bool = False  # write checkpoints while training goes on, from a copy in host memory
    keep_checkpoints: int = 2  # the newest ones
    resume: bool = False  # continue from the newest checkpoint in output_dir, or begin if there is none
    overwrite: bool = False  # begin anew, deleting the run that output_dir holds
    seed: int = 0  # of data order and sampling; the tiny model's weights too
    output_dir: Path = Path("outputs/geo3k_grpo")  # metrics, checkpoints, report

    def __post_init__(self) -> None:
        if self.steps < 1 or self.keep_checkpoints < 1:
            raise InvalidConfig(f"steps={self.steps} and keep_checkpoints={self.keep_checkpoints} must be at least 1")
        if self.eval_every < 0 or self.save_every < 0:
            raise InvalidConfig(f"eval_every={self.eval_every} and save_every={self.save_every} must be at least 0")
        if self.resume and self.overwrite:
            raise InvalidConfig("resume and overwrite contradict each other: choose one")


def train(
    run: RunConfig,
    roles: Roles,
    loader: Loader,
    step_function: StepFunction,
    evaluate: Evaluate,
    save_processors: Callable[[Path], None],
    progression: Stateful,
    measure: Measure = measure_rollouts,
) -> None:
    """Runs the steps from wherever the run stands, and writes one metrics row for each.

    Row 0 holds the evaluation before the first step. A checkpoint is written after its step's row; a resumed run drops the
    rows after its checkpoint, and every step that follows is the one that an uninterrupted run makes.

    Args:
        save_processors: writes tokenizer and image processor beside the exported weights.
        progression: what the algorithm carries from step to step.
        measure: statistics of a step's batch.
    """
    done = restore(run, roles, loader, progression) if run.resume else None
    first = 1 if done is None else done + 1
    keep = done if done is not None or not run.resume else -1
    checkpoints = Checkpoints(run, roles, save_processors)
    with (
        MetricsLog(run.output_dir, resume_after=keep) as log,
        Progress(run.steps, first - 1) as progress,
        contextlib.closing(checkpoints),
    ):
        if done is None:
            progress.note("evaluating before the first step")
            log.write(0, evaluate(0))
        for step in range(first, run.steps + 1):
            metrics = train_step(loader, step_function, progress, measure, roles.devices)
            if is_due(step, run.eval_every, run.steps):
                metrics |= evaluate(step)
            log.write(step, metrics)
            progress.update(step, metrics)
            if is_due(step, run.save_every, run.steps):
                checkpoints.save(step, loader, progression)


def with_restarts(attempt: Callable[[RunConfig], None], run: RunConfig, loader: Loader, max_restarts: int) -> None:
    """Runs ``attempt``; after a worker has failed, again from the last checkpoint, at most ``max_restarts`` times.

    Raises:
        WorkerFailed: the last attempt's.
    """
    start = loader.state_dict()
    for restarts_left in range(max_restarts, -1, -1):
        try:
            return attempt(run)
        except WorkerFailed as failure:
            if not restarts_left:
                raise
            print(
                f"{failure}\nstarting again from the last checkpoint ({restarts_left} restarts left)", file=sys.stderr
            )
            loader.load_state_dict(start)  # where there is no checkpoint yet; else `restore` sets it
            run = replace(run, resume=True, overwrite=False)


def train_step(
    loader: Loader, step_function: StepFunction, progress: Progress, measure: Measure, devices: int
) -> dict[str, float]:
    metrics: dict[str, float] = {}

    def draw() -> DataProto:
        prompts = next(loader)
        require(
            prompts, "uid"
        )  # streams of rows without one are counted from the start of a process, so no resume is exact
        return prompts

    def more(reason: str) -> DataProto:
        progress.doing(reason)
        return draw()

    with timed(metrics, "step"):
        with timed(metrics, "data"):
            prompts = draw()
        data, step_metrics = step_function(prompts, more)
    metrics |= step_metrics | {"data/skipped_rows": len(loader.skipped)}
    return metrics | measure(data, metrics, devices)


def is_due(step: int, every: int, last: int) -> bool:
    """Every ``every`` steps, and after the last one.

    >>> [step for step in range(1, 8) if is_due(step, every=3, last=7)]
    [3, 6, 7]
    """
    return step == last or (every > 0 and step % every == 0)


class Checkpoints:
    """Writes the checkpoints of a run, at once or behind its back; whole or not at all."""

    def __init__(self, run: RunConfig, roles: Roles, save_processors: Callable[[Path], None]) -> None:
        self.run, self.roles, self.save_processors = run, roles, save_processors
        self.root = run.output_dir.absolute()  # workers may stand in another directory
        self.models = {"actor": roles.actor} | ({"critic": roles.critic} if roles.has("critic") else {})
        self._open = contextlib.ExitStack()  # the checkpoint that is still being written
        self._writing = False

    def save(self, step: int, loader: Loader, progression: Stateful) -> None:
        """Writes the checkpoint of a step; the one before is finished first.

        Raises:
            CheckpointError: what the workers wrote is not where this process looks for it.
        """
        self.finish()
        state = {
            "step": step,
            "loader": loader.state_dict(),
            "progression": progression.state_dict(),
            "random": random_states(),
        }
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(writing_checkpoint(self.root, step, self.run.keep_checkpoints))
            stack.push(partial(self._check_written, directory))
            for name, group in self.models.items():
                group.save(directory / name, behind=self.run.save_behind)
            self.save_processors(directory / "actor" / "huggingface")
            torch.save(state, directory / STATE_FILE)
            if self.run.save_behind:
                self._open, self._writing = stack.pop_all(), True

    def finish(self) -> None:
        """Waits until all roles have written the last checkpoint; raises what went wrong, which leaves the one before."""
        writing, self._writing = self._writing, False
        with self._open.pop_all():
            if writing:
                self.roles.finish_saves()

    def _check_written(self, directory: Path, kind: type[BaseException] | None, *_: object) -> None:
        for name in self.models if kind is None else ():
            training = directory / name / "training"
            if missing := missing_parts(training):
                raise CheckpointError(
                    f"{training} lacks {missing[:3]}, which the workers of {name!r} have written: on several machines "
                    f"{self.root} has to be on a file system that all of them share; the checkpoint is left out"
                )

    def close(self) -> None:
        """As `finish`; after an error of the run it only says that a checkpoint could not be finished."""
        failed = sys.exc_info()[0] is not None
        try:
            self.finish()
        except Exception as error:
            if not failed:
                raise
            print(f"the last checkpoint was not finished: {error}", file=sys.stderr)


def restore(run: RunConfig, roles: Roles, loader: Loader, progression: Stateful) -> int | None:
    """Sets everything to where the newest checkpoint was; returns its step, or ``None`` if there is no checkpoint.

    Raises:
        CheckpointError: it is not of this kind of run.
    """
    found = latest_checkpoint(run.output_dir.absolute())
    if found is None:
        return None
    step, directory = found
    state: Mapping[str, Any] = torch.load(directory / STATE_FILE, weights_only=True)
    if state.get("step") != step:
        raise CheckpointError(f"{directory / STATE_FILE} is of step {state.get('step')}, not of step {step}")
    roles.actor.load(directory / "actor")
    if roles.has("critic"):
        roles.critic.load(directory / "critic")
    roles.sync_weights()
    loader.load_state_dict(state["loader"])
    progression.load_state_dict(state["progression"])
    set_random_states(state["random"])
    return step
