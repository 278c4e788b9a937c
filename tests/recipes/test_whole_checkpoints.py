"""A checkpoint counts once the driver sees all that the workers have written."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dataproto.errors import CheckpointError
from recipes.run import RunConfig
from recipes.run.checkpoints import Checkpoints, TakenStep
from workers import Roles
from workers.training.checkpoint import checkpoint_steps, missing_parts, write_state


class Worker:
    """Writes one tensor, perhaps on another machine."""

    closed_reason: str | None = None

    def __init__(self, elsewhere: Path | None = None, loses: str = "", fails: Exception | None = None) -> None:
        self.elsewhere, self.loses, self.fails, self.finished = elsewhere, loses, fails, 0

    def save(self, directory: Path, in_background: bool = False) -> None:
        assert directory.is_absolute()
        written = (self.elsewhere / directory.name if self.elsewhere else directory) / "training"
        write_state({"weight": torch.ones(4)}, written)
        for file in written.glob(self.loses) if self.loses else ():
            file.unlink()

    def finish_save(self) -> None:
        self.finished += 1
        if self.fails:
            raise self.fails


def save(run: RunConfig, worker: Worker, step: int, critic: Worker | None = None) -> Checkpoints:
    checkpoints = Checkpoints(run, Roles(worker, None, {"critic": critic}))
    stateful = SimpleNamespace(state_dict=dict)
    checkpoints.save(TakenStep(step, {}, False), stateful, stateful)
    return checkpoints


def test_workers_that_write_to_another_file_system_leave_the_checkpoint_before(tmp_path):
    run = RunConfig(output_dir=tmp_path / "run", keep_checkpoints=1)
    save(run, Worker(), 1)
    for lost in (Worker(elsewhere=tmp_path / "elsewhere"), Worker(loses="*.distcp")):
        with pytest.raises(CheckpointError, match=r"'actor' have written: on several machines .* file system"):
            save(run, lost, 2)
        assert checkpoint_steps(run.output_dir) == [1]
    assert missing_parts(tmp_path / "run" / "global_step_1" / "actor" / "training") == []


def test_what_is_written_behind_the_run_is_looked_at_when_it_is_whole(tmp_path):
    run = RunConfig(output_dir=tmp_path / "run", save_in_background=True)
    worker = Worker(elsewhere=tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="file system"):
        save(run, worker, 1).finish()
    assert checkpoint_steps(run.output_dir) == []
    assert worker.finished == 1


def test_workers_are_given_paths_that_mean_the_same_in_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(RunConfig(output_dir=Path("run")), Worker(), 1)
    assert checkpoint_steps(Path(os.path.abspath("run"))) == [1]


def test_nothing_is_waited_for_where_nothing_is_being_written(tmp_path):
    """The workers may be busy, or hang."""
    worker = Worker()
    checkpoints = save(RunConfig(output_dir=tmp_path, save_in_background=True), worker, 1)
    checkpoints.finish()
    checkpoints.close()
    assert worker.finished == 1


def test_all_roles_have_written_before_a_failed_checkpoint_is_taken_away(tmp_path):
    run = RunConfig(output_dir=tmp_path, save_in_background=True)
    actor, critic = Worker(fails=OSError("no space")), Worker(fails=OSError("no space either"))
    checkpoints = save(run, actor, 1, critic)
    with pytest.raises(OSError, match="no space") as caught:
        checkpoints.finish()
    assert (actor.finished, critic.finished) == (1, 1)
    assert caught.value.__notes__ == ["and OSError: no space either"]
    assert checkpoint_steps(tmp_path) == []


def test_what_goes_wrong_with_the_last_checkpoint_ends_the_run_or_is_told_beside_its_error(tmp_path, capsys):
    run = RunConfig(output_dir=tmp_path, save_in_background=True)
    with pytest.raises(OSError, match="no space"), closing(save(run, Worker(fails=OSError("no space")), 1)):
        pass
    with pytest.raises(KeyError, match="mine"), closing(save(run, Worker(fails=OSError("no space")), 1)):
        raise KeyError("mine")
    assert capsys.readouterr().err == "the last checkpoint was not finished: no space\n"


def test_roles_wait_for_what_they_save_unless_an_error_ends_them():
    for worker, critic in ((Worker(), None), (Worker(), Worker())):
        with Roles(worker, None, {"critic": critic}):
            pass
        assert worker.finished == 1
        assert critic is None or critic.finished == 1
    closed = []
    with pytest.raises(OSError, match="full"), Roles(Worker(fails=OSError("full")), None, {}, lambda: closed.append(1)):
        pass
    assert closed == [1]
    busy, dead = Worker(), Worker()
    with pytest.raises(KeyError), Roles(busy, None, {}):
        raise KeyError
    dead.closed_reason = "an update failed, and the caller went on without them"
    with Roles(dead, None, {}):
        pass
    assert (busy.finished, dead.finished) == (0, 0)


def test_roles_release_environments_before_their_processes_end():
    ends = []
    close, release = (partial(ends.append, end) for end in ("closed", "released"))
    with Roles(Worker(), None, {}, close, release=release):
        assert ends == []
    assert ends == ["released", "closed"]
    with pytest.raises(KeyError), Roles(Worker(), None, {}, close, release=release):
        raise KeyError
    assert ends == ["released", "closed", "closed"]
