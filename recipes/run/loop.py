"""The loop around a step function: data, evaluation, checkpoints, resume, metrics."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dataproto import DataProto
from dataproto.columns import require
from dataproto.errors import InvalidConfig, WorkerFailed
from recipes.configs.shared.run_config import RunConfig
from recipes.run.checkpoints import Checkpoints, Loader, Stateful, TakenStep, restore
from recipes.run.episode_roles import FailedSteps
from recipes.run.evaluation import BestStep, Evaluate
from recipes.run.metrics import Measure, measure_rollouts, timed
from recipes.watch.console import LIBRARIES_FILE, Progress, start_metrics, start_phase
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.loggers import LoggedRun, RunLoggers, open_loggers
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.rollout_files import rows_file
from recipes.watch.signals import Signals
from rollout.prompts import PromptBuilder
from workers import Roles
from workers.cluster.host import libraries_aside
from workers.training.checkpoint import random_states, set_random_states


class StepFunction(Protocol):
    """One step of an algorithm: returns its rows, scored if `measure_rollouts` is to measure them, and its metrics."""

    def __call__(self, roles: Roles, prompts: DataProto, /) -> tuple[DataProto, dict[str, float]]: ...


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
    best, last = BestStep(run.keep_best), None
    if run.resume:
        with start_phase("loading the checkpoint"):
            last = restore(run, roles, loader, state, best)
    done = 0 if last is None else last.number
    if done and run.steps <= done:
        print(f"all {done} steps of {run.output_dir} are done: --change steps=N, with more, continues", flush=True)
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
        self.signals, self.failed = Signals(), FailedSteps()
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
        """Measures the rows of step ``number``, and keeps some of them. See `FailedSteps.check` for what it raises."""
        metrics |= self.measure(data, metrics, self.roles.devices)
        if self.kept is not None:
            with timed(metrics, "keep_rollouts"):
                self.kept.keep(number, data)
        self.failed.check(data, number, rows_file(self.run.output_dir, number))
        evaluates = self.evaluate is not None and is_due(number, self.run.eval_every, self.run.steps)
        plain = {name: value if isinstance(value, int) else one_number(name, value) for name, value in metrics.items()}
        return TakenStep(number, plain, evaluates)

    def finish(self, step: TakenStep) -> bool:
        """Evaluates if it is due, and reports; whether the evaluation found the step the best so far."""
        held_out = self._evaluated(step.number) if step.evaluates else {}
        is_best = step.evaluates and self.best.improved(step.number, held_out)
        metrics = step.metrics | held_out
        self._report(step.number, metrics, step.evaluates)
        for sign in self.signals.new_signs(metrics, self.progress.left):
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


def step_result(found: Any) -> tuple[DataProto, dict[str, float]]:
    """What a step returned. Raises `InvalidConfig` unless it is rows and metrics."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        names = [type(each).__name__ for each in (found if isinstance(found, tuple) else [found])]
        kinds = f"({', '.join(names)})" if isinstance(found, tuple) else names[0]
        raise InvalidConfig(f"the step returned {kinds}: it must end with `return data, metrics`, rows and numbers")
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


class Attempt(contextlib.AbstractContextManager["Attempt"]):
    """One attempt at a run, as a context manager: it suppresses `WorkerFailed` while restarts are left."""

    def __init__(self, run: RunConfig, restarts_left: int) -> None:
        self.run, self.restarts_left = run, restarts_left
        self.failed = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
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
        attempt = Attempt(run, restarts_left)
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
