"""The loop around a step function: data, evaluation, checkpoints, resume, metrics."""

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import CheckpointError, InvalidConfig, WorkerFailed, writing
from recipes.configs.shared.run_config import RunConfig
from recipes.run.evaluation import BestStep, Evaluate
from recipes.run.metrics import Measure, measure_rollouts, timed
from recipes.watch.console import LIBRARIES_FILE, Progress, libraries_aside, start_metrics, start_phase
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.loggers import RunLoggers, open_loggers
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.signals import LearningSignals, SpeedSignals
from recipes.watch.trackers import LoggedRun
from rollout.prompts import PromptBuilder
from workers import Roles
from workers.training.checkpoint import (
    latest_checkpoint,
    missing_parts,
    prune_checkpoints,
    random_states,
    set_random_states,
    write_json,
    writing_checkpoint,
)

STATE_FILE = "trainer.pt"
BEST_FILE = "best.json"


class StepFunction(Protocol):
    """One step of an algorithm: returns its rows, scored if `measure_rollouts` is to measure them, and its metrics."""

    def __call__(self, roles: Roles, prompts: DataProto, /) -> tuple[DataProto, dict[str, float]]: ...


class Stateful(Protocol):
    """An object whose position can be saved, as values that `torch.load` reads without running code."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loader(Stateful, Protocol):
    """An endless source of batches. Each row has a unique ``uid``, the same after a resume; see `PromptLoader`."""

    @property
    def skipped(self) -> dict[int, str]:
        """Rows that could not be used: index to reason."""
        ...

    def __next__(self) -> DataProto: ...


def train(
    run: RunConfig,
    roles: Roles,
    loader: Loader,
    step: StepFunction,
    evaluate: Evaluate | None = None,
    builder: PromptBuilder | None = None,
    state: Stateful | None = None,
    measure: Measure = measure_rollouts,
    kept: KeptRollouts | None = None,
) -> None:
    """Calls ``step`` until the run has ``run.steps`` of them, with evaluation, metrics, checkpoints and resume around it.

    Each step writes one row of ``metrics.jsonl`` and gives it to ``run.loggers``; row 0 holds the evaluation before the first
    step, if there is one. With ``run.resume`` it continues after the newest checkpoint, and each step equals that of an
    uninterrupted run. See `recipes.run` for an example.

    Args:
        step: called as ``step(roles, prompts)``.
        evaluate: called as ``evaluate(roles, number)``; see `AroundSteps`.
        builder: its tokenizer and image processor are saved beside the exported weights, so that these are a whole model.
        state: what the algorithm carries from step to step; checkpoints hold it.
        measure, kept: see `AroundSteps`.

    Raises:
        MissingColumn, CheckpointError, FileNotWritten: a batch has no ``uid``; a checkpoint is damaged; a file could not be
            written.
    """
    check_step(step)
    best, last = BestStep(run.keep_best), None
    if run.resume:
        with start_phase("loading the checkpoint"):
            last = restore(run, roles, loader, state, best)
    done = 0 if last is None else last.number
    kept_row = None if not run.resume else -1 if last is None else done
    with (
        open_loggers(run.loggers, LoggedRun(run.output_dir, kept_row)) as loggers,
        contextlib.closing(Checkpoints(run, roles, builder, best)) as checkpoints,
    ):
        around = AroundSteps(
            run, roles, loggers, Progress(run.steps, done, run.console_columns), best, evaluate, measure, kept
        )
        around.begin(last, kept_row)
        checkpoints.name_best()
        with libraries_aside(run.output_dir / LIBRARIES_FILE), around.progress:
            for number in range(done + 1, run.steps + 1):
                metrics: dict[str, float] = {}
                with timed(metrics, "step"):
                    with timed(metrics, "data"):
                        prompts = next_batch(loader)
                    data, found = step_result(step(roles, prompts))
                metrics |= found | {"data/skipped_rows": len(loader.skipped)}
                taken = around.measured(number, data, metrics)
                saved = is_due(number, run.save_every, run.steps)
                if saved:  # first, since the evaluation may fail
                    checkpoints.save(taken, loader, state)
                is_best = around.finish(taken)
                if is_best and saved:
                    checkpoints.name_best()
                elif is_best:
                    checkpoints.save(taken, loader, state)


@dataclass(frozen=True)
class TakenStep:
    """A step that has been taken; its evaluation and its report come after it, and after its checkpoint."""

    number: int
    metrics: dict[str, float]  # without those of its evaluation
    evaluates: bool


@dataclass
class AroundSteps:
    """What a run does before its first step and after each one: it measures, evaluates, keeps rollouts and reports.

    It evaluates before the first step unless ``run.eval_first`` is off, every ``run.eval_every`` steps and after the last one.
    The checkpoint of a step is written before its evaluation; if that fails, a resumed run evaluates again and loses nothing.
    """

    run: RunConfig
    roles: Roles
    loggers: RunLoggers
    progress: Progress
    best: BestStep
    evaluate: Evaluate | None
    measure: Measure  # statistics of the rows that a step returns
    kept: KeptRollouts | None  # writes some of these rows for the viewer

    def __post_init__(self) -> None:
        self.signals, self.speed = LearningSignals(), SpeedSignals()
        self._start = start_metrics(self.roles.start_seconds)  # which the first report gets too

    def begin(self, last: TakenStep | None, kept_row: int | None) -> None:
        """Evaluates before the first step, if that is due, or makes up for a missing evaluation or report.

        Args:
            last: the step whose checkpoint was restored.
            kept_row: the step of the last row of an earlier attempt that stays, -1 for none; ``None``: there was no attempt.
        """
        if self.kept is not None and kept_row is not None:
            self.kept.drop_after(kept_row)
        if last is None:
            if self.evaluate is not None and self.run.eval_first:
                with start_phase("evaluating before the first step"):
                    measured = self._evaluated(0)
                self._report(0, measured, evaluated=True)
            return
        reported = [row for row in read_metrics(self.run.output_dir / METRICS_FILE) if row["step"] == last.number]
        if reported and last.evaluates:
            self.best.improved(last.number, reported[0])
        elif last.metrics and not reported:
            with start_phase(f"evaluating step {last.number}, whose evaluation did not end"):
                self.finish(last)

    def measured(self, number: int, data: DataProto, metrics: dict[str, float]) -> TakenStep:
        """Measures the rows of step ``number``, and keeps some of them."""
        metrics |= self.measure(data, metrics, self.roles.devices)
        if self.kept is not None:
            with timed(metrics, "keep_rollouts"):
                self.kept.keep(number, data)
        evaluates = self.evaluate is not None and is_due(number, self.run.eval_every, self.run.steps)
        plain = {name: value if isinstance(value, int) else one_number(name, value) for name, value in metrics.items()}
        return TakenStep(number, plain, evaluates)

    def finish(self, step: TakenStep) -> bool:
        """Evaluates if it is due, and reports; whether the evaluation found the step the best so far."""
        held_out = self._evaluated(step.number) if step.evaluates else {}
        is_best = step.evaluates and self.best.improved(step.number, held_out)
        metrics = step.metrics | held_out
        self._report(step.number, metrics, step.evaluates)
        for problem in self.signals.new_problems(metrics):
            self.progress.note(f"warning: {problem}")
        for sign in self.speed.new_signs(metrics, self.progress.left):
            self.progress.note(sign)
        return is_best

    def _report(self, number: int, metrics: Mapping[str, float], evaluated: bool) -> None:
        """Gives a step's metrics to loggers and display; after an evaluation, its saved rollouts to the loggers too."""
        start, self._start = self._start, {}
        self.loggers.log(number, {**metrics, **start})
        if evaluated:
            self.loggers.log_saved_rollouts(number)
        self.progress.update(number, metrics)

    def _evaluated(self, number: int) -> dict[str, float]:
        """The metrics of an evaluation. It leaves the random states alone, which the checkpoint of its step has already."""
        if self.evaluate is None:
            return {}
        states = random_states()
        held_out = self.evaluate(self.roles, number)
        set_random_states(states)
        return held_out


def check_step(step: Callable[..., Any]) -> None:
    """Raises `InvalidConfig` for a step with the arguments of an earlier version, in which ``state`` was two of them."""
    if {"progression", "more"} & signature(step).parameters.keys():
        raise InvalidConfig(
            "a step is called as step(roles, prompts, config, sampling, state) by run, and as step(roles, prompts) by train: "
            "state has what progression and more gave (recipes.run.StepState)"
        )


def step_result(found: Any) -> tuple[DataProto, dict[str, float]]:
    """What a step returned. Raises `InvalidConfig` unless it is rows and metrics."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        kinds = (
            f"({', '.join(type(each).__name__ for each in found)})"
            if isinstance(found, tuple)
            else type(found).__name__
        )
        raise InvalidConfig(
            f"the step returned {kinds}: it must end with `return data, metrics`, the rows and a dict of numbers"
        )
    return found[0], dict(found[1])


def one_number(name: str, value: Any) -> float:
    """A metric as a number. Raises `InvalidConfig` if it is none."""
    try:
        return float(value)
    except (RuntimeError, TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise InvalidConfig(
            f"the step's metric {name!r} is a {type(value).__name__}{shape}: a metric is one number, such as float(values.mean())"
        ) from None


def next_batch(loader: Loader) -> DataProto:
    """The loader's next batch.

    Raises:
        MissingColumn: it has no ``uid``. Uids made up later would depend on the process, so no resume would be exact.
    """
    prompts = next(loader)
    require(prompts, "uid")
    return prompts


class Attempt:
    """One attempt at a run, as a context manager: it suppresses `WorkerFailed` while restarts are left."""

    def __init__(self, run: RunConfig, restarts_left: int, restarted: bool = False) -> None:
        self.run, self.restarts_left, self.restarted = run, restarts_left, restarted
        self.failed = False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.failed = isinstance(error, WorkerFailed) and self.restarts_left > 0
        if self.failed:
            left = f"{self.restarts_left} restarts left"
            print(f"{error}\nstarting again from the last checkpoint ({left})", file=sys.stderr)
        return self.failed


def attempts(run: RunConfig, loader: Loader, max_restarts: int) -> Iterator[Attempt]:
    """Yields an attempt at the run and, each time a worker fails, another one from the last checkpoint.

    ``max_restarts`` limits the further attempts; the error of the last one reaches the caller::

        for attempt in attempts(run, loader, max_restarts=2):
            with attempt, launch(...) as roles:
                train(attempt.run, roles, loader, step)
    """
    start = loader.state_dict()
    for restarts_left in range(max_restarts, -1, -1):
        attempt = Attempt(run, restarts_left, restarts_left < max_restarts)
        yield attempt
        if not attempt.failed:
            return
        loader.load_state_dict(start)  # for a run without a checkpoint; else `restore` sets the position
        run = replace(run, resume=True, overwrite=False)


def is_due(step: int, every: int, last: int) -> bool:
    """Every ``every`` steps, and after the last one.

    >>> [step for step in range(1, 8) if is_due(step, every=3, last=7)]
    [3, 6, 7]
    """
    return step == last or (every > 0 and step % every == 0)


class Checkpoints:
    """Writes the checkpoints of a run, whole or not at all; with ``run.save_behind`` while training goes on."""

    def __init__(
        self, run: RunConfig, roles: Roles, builder: PromptBuilder | None = None, best: BestStep | None = None
    ) -> None:
        """``builder``: its processors are saved beside the actor's exported weights. ``best``: the step whose
        checkpoint is kept beside the newest ones.
        """
        self.run, self.roles, self.builder, self.best = run, roles, builder, best or BestStep()
        self.root = run.output_dir.absolute()  # workers may have another working directory
        self.models = {"actor": roles.actor} | ({"critic": roles.critic} if roles.has("critic") else {})
        self._open = contextlib.ExitStack()  # the checkpoint that is still being written
        self._writing = False
        self._best = self.best.state_dict()  # as the checkpoints tell it

    def save(self, step: TakenStep, loader: Loader, state: Stateful | None) -> None:
        """Writes the checkpoint of a step, after the previous one is complete.

        Raises:
            CheckpointError: this process does not find the files that the workers wrote.
        """
        self.finish()
        self._best = self.best.state_dict()
        saved = {
            "step": step.number,
            "metrics": step.metrics,
            "evaluates": step.evaluates,
            "loader": loader.state_dict(),
            "progression": state.state_dict() if state else {},
            "random": random_states(),
            "best": self._best,
        }
        with contextlib.ExitStack() as stack:
            stack.push(self._complete)
            directory = stack.enter_context(writing_checkpoint(self.root, step.number))
            stack.push(partial(self._check_written, directory))
            for name, group in self.models.items():
                group.save(directory / name, behind=self.run.save_behind)
            if self.builder is not None:
                with writing(directory / "actor" / "huggingface"):
                    self.builder.save_pretrained(directory / "actor" / "huggingface")
            encoded = io.BytesIO()  # a full disk then is an `OSError`, not one of torch's own
            torch.save(saved, encoded)
            with writing(directory / STATE_FILE):
                (directory / STATE_FILE).write_bytes(encoded.getvalue())
            if self.run.save_behind:
                self._open, self._writing = stack.pop_all(), True

    def finish(self) -> None:
        """Waits until all roles have written the last checkpoint; raises their error, which leaves the previous checkpoint."""
        writing, self._writing = self._writing, False
        with self._open.pop_all():
            if writing:
                self.roles.finish_saves()

    def name_best(self) -> None:
        """Names the best step, which has a checkpoint; where that is still being written, once it is complete."""
        self._best = self.best.state_dict()
        if not self._writing and self._best["step"] is not None:
            self._complete()

    def _complete(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Names the best step and deletes old checkpoints, now that the new one is complete."""
        if kind is None:
            if self._best["step"] is not None:
                draft = self.root / f".{BEST_FILE}"
                write_json(draft, self._best)
                draft.replace(self.root / BEST_FILE)
            prune_checkpoints(self.root, self.run.keep_checkpoints, self._best["step"])

    def _check_written(self, directory: Path, kind: type[BaseException] | None, *_: object) -> None:
        for name in self.models if kind is None else ():
            training = directory / name / "training"
            if missing := missing_parts(training):
                raise CheckpointError(
                    f"{training} lacks {missing[:3]}, which the workers of {name!r} have written: on several machines "
                    f"{self.root} must be on a file system that all of them share; the checkpoint is discarded"
                )

    def close(self) -> None:
        """Like `finish`; if the run has failed, a checkpoint that could not be finished is only reported."""
        failed = sys.exc_info()[0] is not None
        try:
            self.finish()
        except Exception as error:
            if not failed:
                raise
            print(f"the last checkpoint was not finished: {error}", file=sys.stderr)


def restore(
    run: RunConfig, roles: Roles, loader: Loader, state: Stateful | None, best: BestStep | None = None
) -> TakenStep | None:
    """Restores models, data position, random states and the best step from the newest checkpoint.

    Returns:
        The step of the checkpoint, or ``None`` if there is none. Earlier versions wrote no metrics there.

    Raises:
        CheckpointError: the checkpoint is damaged or of another step.
    """
    found = latest_checkpoint(run.output_dir.absolute())
    if found is None:
        return None
    step, directory = found
    saved = _read_state(directory / STATE_FILE)
    if saved.get("step") != step:
        raise CheckpointError(f"{directory / STATE_FILE} is of step {saved.get('step')}, not of step {step}")
    roles.actor.load(directory / "actor")
    if roles.has("critic"):
        roles.critic.load(directory / "critic")
    roles.sync_weights()
    loader.load_state_dict(saved["loader"])
    if state is not None:
        state.load_state_dict(saved["progression"])
    if best is not None:
        best.load_state_dict(saved.get("best", {}))
    set_random_states(saved["random"])
    return TakenStep(step, saved.get("metrics", {}), saved.get("evaluates", False))


def _read_state(file: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = torch.load(file, weights_only=True)
    except (EOFError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file} cannot be read: {reason}; delete {file.parent} to resume from the checkpoint before it"
        ) from error
    return state
