"""The checkpoints of a run: written whole or not at all, pruned, and restored."""

import contextlib
import io
import pickle
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dataproto import DataProto
from dataproto.errors import CheckpointError, replace_file, writing
from recipes.configs.shared.run_config import RunConfig
from recipes.run.evaluation import BestStep
from rollout.prompts import PromptBuilder
from workers import Roles
from workers.training import checkpoint

STATE_FILE = "trainer.pt"
BEST_FILE = "best.json"


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


@dataclass(frozen=True)
class TakenStep:
    """A step that has been taken; its evaluation and its report come after it, and after its checkpoint."""

    number: int
    metrics: dict[str, float]  # without those of its evaluation
    evaluates: bool


class Checkpoints:
    """Writes the checkpoints of a run, whole or not at all; with ``run.save_in_background`` while training continues."""

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
            "random": checkpoint.random_states(),
            "best": self._best,
        }
        with contextlib.ExitStack() as stack:
            stack.push(self._complete)
            directory = stack.enter_context(checkpoint.writing_checkpoint(self.root, step.number))
            stack.push(partial(self._check_written, directory))
            for name, group in self.models.items():
                group.save(directory / name, in_background=self.run.save_in_background)
            if self.builder is not None:
                with writing(directory / "actor" / "huggingface"):
                    self.builder.save_pretrained(directory / "actor" / "huggingface")
            encoded = io.BytesIO()  # a full disk then is an `OSError`, not one of torch's own
            torch.save(saved, encoded)
            replace_file(directory / STATE_FILE, encoded.getvalue())
            if self.run.save_in_background:
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
                checkpoint.write_json(self.root / BEST_FILE, self._best)
            checkpoint.prune_checkpoints(self.root, self.run.keep_checkpoints, self._best["step"])

    def _check_written(self, directory: Path, kind: type[BaseException] | None, *_: object) -> None:
        for name in self.models if kind is None else ():
            training = directory / name / "training"
            if missing := checkpoint.missing_parts(training):
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
    found = checkpoint.latest_checkpoint(run.output_dir.absolute())
    if found is None:
        return None
    step, directory = found
    saved = _read_state(directory / STATE_FILE)
    if saved.get("step") != step:
        raise CheckpointError(f"{directory / STATE_FILE} is of step {saved.get('step')}, not of step {step}")
    try:
        roles.actor.load(directory / "actor")
        if roles.has("critic"):
            roles.critic.load(directory / "critic")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; if it is damaged, delete {directory} to resume from an earlier one") from error
    roles.sync_weights()
    loader.load_state_dict(saved["loader"])
    if state is not None:
        state.load_state_dict(saved["progression"])
    if best is not None:
        best.load_state_dict(saved.get("best", {}))
    checkpoint.set_random_states(saved["random"])
    return TakenStep(step, saved.get("metrics", {}), saved.get("evaluates", False))


def check_position(run: RunConfig, loader: Loader) -> None:
    """Raises `CheckpointError` if the newest checkpoint of a resumed run is of other rows, before a change of it is recorded."""
    if run.resume and (found := checkpoint.latest_checkpoint(run.output_dir.absolute())):
        state = _read_state(found[1] / STATE_FILE)["loader"]
        copy(loader).load_state_dict(state.get("loader", state))  # which is within the state of carried samples


def _read_state(file: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = torch.load(file, weights_only=True)
    except (EOFError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise CheckpointError(
            f"{file} cannot be read: {reason}; delete {file.parent} to resume from the checkpoint before it"
        ) from error
    return state
