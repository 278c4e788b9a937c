"""The requests of a run that are carried out alone: creation, updates, saving and loading; and snapshots of runs."""

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dataproto_server import json_requests as bodies
from dataproto_server.backend import OPTIMIZER_FILE
from dataproto_server.engine_link import EngineLost
from dataproto_server.front.futures import answered
from dataproto_server.front.lanes import Lane
from dataproto_server.front.sample_queue import Samples
from dataproto_server.json_requests import parse_json, read
from dataproto_server.ledger import directories
from dataproto_server.ledger.directories import checked_name, new_directory
from dataproto_server.ledger.journal import Entry, Outcome, snapshot_taken
from dataproto_server.ledger.records import Checkpoint, Job, Run, Sampler, change, drop, put, text, together
from dataproto_server.refusals import CallFailed, InvalidRequest
from workers.model.model_config import AdamParams

log = logging.getLogger("dataproto.serve")
MILLIARD = 1_000_000_000
WITH_FILES = ("save", "save_for_sampler", "save_external", "load")
"""The kinds whose files take time, which the rounds do not wait for."""
NO_UPDATE = (
    "no update was made, and the gradients are dropped: together they have the norm {norm}, though those of each pass are "
    "finite; check logprobs, advantages and weights"
)
EXPIRED, EXPIRED_SECONDS = "_expired", 86400
SAVED = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


@dataclass(frozen=True)
class Done:
    """What a request came to.

    Args:
        outcome: what the client gets.
        jobs: writes that belong into the same commit.
        after: is called when that is on disk.
    """

    outcome: Outcome
    jobs: Sequence[Job] = ()
    after: Callable[[], None] = lambda: None


class Barriers:
    """Carries out one request of a run at a time, and those of different runs at the same time.

    A request that a crash interrupted can be carried out again.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.link, self.catalogue = samples, samples.link, samples.catalogue
        self.config = samples.config
        self._kinds: dict[str, tuple[type[bodies.Body], Callable[..., Awaitable[Done]]]] = {
            "create": (bodies.CreateModel, self._create),
            "load": (bodies.LoadWeights, self._load),
            "optim_step": (bodies.OptimStep, self._optim_step),
            "save": (bodies.SaveWeights, self._save),
            "save_for_sampler": (bodies.SaveForSampler, self._save_for_sampler),
            "save_external": (bodies.SaveExternal, self._save_external),
        }
        self._writing: dict[str, asyncio.Task[None]] = {}  # snapshots, by run

    async def carry_out(self, run: Run, entry: Entry, body: bytes) -> Done:
        """
        Raises:
            CallFailed, EngineLost: see `EngineLink.call`.
            InvalidRequest: it cannot be carried out.
        """
        if run.state not in ("new", "live"):
            raise InvalidRequest(
                f"run {run.id} is not in training: it has {'failed' if run.state == 'failed' else 'ended'}"
            )
        form, work = self._kinds[entry.kind]
        return await work(run, entry, read(form, parse_json(body)))

    async def repeat(self, run: Run, entry: Entry, body: bytes) -> None:
        """Brings the engine to where it was after a request that was carried out before."""
        if entry.kind in ("create", "load", "optim_step"):
            await self.carry_out(run, entry, body)

    async def _create(self, run: Run, entry: Entry, asked: bodies.CreateModel) -> Done:
        check_optimizer(asked.optimizer_config)
        self._check_runs(run, entry)
        await self._new_model(run, replayed=entry.state != "queued")
        run.state = "live"
        return Done(answered({"model_id": run.id, "type": "create_model"}), [put(run)])

    def _check_runs(self, run: Run, entry: Entry) -> None:
        """Raises `InvalidRequest` if the earlier runs of a key are as many as it may have. No limit applies to a replay."""
        most = self.config.limits.max_runs
        earlier = sum(each.number < run.number for each in self.catalogue.live_runs(run.owner))
        if entry.state == "queued" and earlier >= most:
            raise InvalidRequest(f"this key has {earlier} runs in training: finish a session (--max-runs {most})")

    async def _new_model(self, run: Run, *, replayed: bool, saved: Path | None = None, optimizer: bool = False) -> None:
        """Makes the model of a run, with saved weights if there are some. One that cannot be loaded takes no place."""
        model = {"model_id": run.id, "base_model": run.base_model, "lora": run.spec}
        await self.link.call("create", **model, replayed=replayed)
        if saved is not None:
            try:
                await self.link.call("load", model_id=run.id, directory=saved, optimizer=optimizer)
            except CallFailed:
                await self.link.call("release", model_id=run.id)
                raise

    async def _load(self, run: Run, entry: Entry, asked: bodies.LoadWeights) -> Done:
        """Makes a checkpoint the snapshot of a run, and loads it from there: the checkpoint may be replaced or deleted."""
        if asked.weights_access_token is not None:
            raise InvalidRequest("weights_access_token is not supported: publish the checkpoint to give others access")
        check_optimizer(asked.optimizer_config)
        if entry.seq == 0:
            self._check_runs(run, entry)
        checkpoint = self.catalogue.checkpoint(asked.path, run.owner)
        if asked.optimizer and checkpoint.kind != "weights":
            raise InvalidRequest(f"{asked.path} holds no optimizer state: load a checkpoint of save_state")
        writer = self.catalogue.runs[checkpoint.run]
        if others := {asked.base_model, run.base_model} - {None, "", writer.base_model}:
            raise InvalidRequest(f"{asked.path} is an adapter of {writer.base_model}, not of {others.pop()}")
        theirs, ours = _shape(writer), _shape(run)
        if entry.seq and theirs != ours:
            way_out = "create_training_client_from_state makes a run of it"
            raise InvalidRequest(f"{asked.path} is an adapter with {theirs}, and this run's has {ours}: {way_out}")
        place = self._snapshot_place(run, entry.seq)
        with self.samples.hold(checkpoint.directory):
            await self._link_files(self.catalogue.place(checkpoint.directory), place, asked.optimizer)
        jobs: list[Job] = []
        try:
            if entry.seq == 0:
                run.base_model, run.lora = writer.base_model, writer.lora
                await self._new_model(run, replayed=entry.state != "queued", saved=place, optimizer=asked.optimizer)
                run.state = "live"
                jobs.append(put(run))
            else:
                await self.link.call("load", model_id=run.id, directory=place, optimizer=asked.optimizer)
        except CallFailed:
            await asyncio.to_thread(directories.remove_directory, place)
            raise
        old, snapshot = run.snapshot, self.catalogue.name_of(place)

        def after() -> None:
            run.snapshot, run.snapshot_seq = snapshot, entry.seq
            if old is not None:
                self.samples.retire(old)

        answer = {"path": asked.path, "model_id": run.id, "type": "load_weights"}
        return Done(answered(answer), [*jobs, snapshot_taken(run.id, entry.seq, snapshot)], after)

    async def _link_files(self, source: Path, target: Path, optimizer: bool) -> None:
        await asyncio.to_thread(directories.check_directory, source)
        async with new_directory(target) as temporary:
            await asyncio.to_thread(directories.link_files, source, temporary)
            if not optimizer:
                (temporary / OPTIMIZER_FILE).unlink(missing_ok=True)

    async def _optim_step(self, run: Run, entry: Entry, asked: bodies.OptimStep) -> Done:
        if asked.adam_params is None or asked.optimizer_params is not None:
            raise InvalidRequest(
                "optim_step takes adam_params: there is adamw, and optimizer_params of others are not supported"
            )
        adam = AdamParams(**msgspec.structs.asdict(asked.adam_params))
        metrics = await self.link.call("optim_step", model_id=run.id, adam=adam)
        if not math.isfinite(metrics["grad_norm"]):  # the gradients are dropped: the journal has that as done
            return Done(answered({"error": NO_UPDATE.format(norm=metrics["grad_norm"]), "category": "user"}))
        return Done(answered({"metrics": metrics, "type": "optim_step"}))

    async def _save_external(self, run: Run, entry: Entry, asked: bodies.SaveExternal) -> Done:
        if asked.age_encryption_recipients:
            raise InvalidRequest("age_encryption_recipients: this server does not encrypt exports")
        return await self._save(run, entry, asked, "external_weights")

    async def _save_for_sampler(self, run: Run, entry: Entry, asked: bodies.SaveForSampler) -> Done:
        if asked.path is not None:
            return await self._save(run, entry, asked, "sampler_weights")
        if asked.sampling_session_seq_id is None:
            raise InvalidRequest("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{run.session}:sample:{asked.sampling_session_seq_id}"
        if sampler_id in self.catalogue.samplers:
            raise InvalidRequest(f"there is a sampling session {sampler_id} already: choose another number")
        directory = self.catalogue.run_directory(run) / f"sampler-{entry.seq}"
        self._check_room(run.owner)
        async with new_directory(directory) as temporary:
            await self.link.call("export", model_id=run.id, directory=temporary, sampled=True)
        sampler = Sampler(
            id=sampler_id,
            session=run.session,
            owner=run.owner,
            run=run.id,
            base_model=run.base_model,
            directory=self.catalogue.name_of(directory),
            own=1,
            moving=int(asked.kind == "inflight"),
        )
        # Earlier ones that follow the run move to its directory.
        others = self.catalogue.samplers.values() if sampler.moving else ()
        earlier = [each for each in others if each.moving and each.run == sampler.run]
        left = {each.directory for each in earlier if each.directory != sampler.directory}
        moved = [change(each, directory=sampler.directory) for each in earlier]

        def after() -> None:
            for each in earlier:
                each.directory = sampler.directory
            self.catalogue.samplers[sampler.id] = sampler
            for directory in left:
                self.samples.retire(str(directory))

        answer = {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}
        return Done(answered(answer), [put(sampler), *moved], after)

    def _check_room(self, owner: str) -> None:
        """Raises `InvalidRequest` if the checkpoints and samplers of a key take all that they may."""
        used, most = self.catalogue.bytes_of(owner), self.config.limits.max_checkpoint_gb
        if used >= most * MILLIARD:
            raise InvalidRequest(
                f"the checkpoints and samplers of this key take {used / MILLIARD:.1f} GB: at most {most} "
                "(--max-checkpoint-gb)"
            )

    async def _save(self, run: Run, entry: Entry | None, asked: bodies.SaveWeights, kind: str = "weights") -> Done:
        """Writes a checkpoint, and drops those beyond ``--keep-last``. One without an entry needs no room of the key."""
        known, name = self.catalogue.checkpoints, checked_name(asked.path or f"step-{asked.seq_id}")
        if (run.id, kind, name) in known and not asked.overwrite:
            raise InvalidRequest(f"there is a checkpoint {kind}/{name} already: choose another name, or overwrite it")
        directory = self.catalogue.run_directory(run) / kind / f"{name}-{uuid.uuid4().hex[:8]}"
        if entry is not None:
            self._check_room(run.owner)
        async with new_directory(directory) as temporary:
            await self.link.call("save" if kind == "weights" else "export", model_id=run.id, directory=temporary)
        now = time.time()
        checkpoint = Checkpoint(
            run=run.id,
            kind=kind,
            name=name,
            owner=run.owner,
            directory=self.catalogue.name_of(directory),
            created=now,
            expires=None if asked.ttl_seconds is None else now + asked.ttl_seconds,
            public=0,
            size=directories.directory_size(directory),
            metadata=text(asked.user_metadata),
        )
        replaced = known.get((run.id, kind, name))
        gone = [*([replaced] if replaced else []), *self._beyond(run, kind, name)]

        def after() -> None:
            for each in gone:
                known.pop((each.run, each.kind, each.name), None)
                self.samples.retire(each.directory)
            known[run.id, kind, name] = checkpoint

        answer = {"path": checkpoint.path, "type": SAVED[kind]}
        if kind == "external_weights":
            answer["size_bytes"] = checkpoint.size  # type: ignore[assignment]
        return Done(answered(answer), [*map(drop, gone), put(checkpoint)], after)

    def _beyond(self, run: Run, kind: str, name: str) -> list[Checkpoint]:
        """The oldest unpublished checkpoints of a kind, where there are more than ``--keep-last`` with a new one."""
        if not self.config.keep_last:
            return []
        others = [each for each in self.catalogue.checkpoints_of(run=run.id) if each.kind == kind and each.name != name]
        return [each for each in others[: max(0, len(others) + 1 - self.config.keep_last)] if not each.public]

    async def keep(self, run: Run) -> bool:
        """Writes the checkpoint of a run whose client has gone, whatever room the key has left; ``False`` if that has to be
        tried again.
        """
        asked = bodies.SaveWeights(model_id=run.id, seq_id=0, path=EXPIRED, ttl_seconds=EXPIRED_SECONDS, overwrite=True)
        try:
            done = await self._save(run, None, asked)
        except EngineLost:
            raise
        except (CallFailed, OSError) as error:
            log.exception("no checkpoint of the expired run %s", run.id)
            return isinstance(error, CallFailed) and error.failure.category == "user"  # its weights cannot be saved
        await self.catalogue.database.run(together(*done.jobs))
        done.after()
        return True

    # Snapshots of runs: their state after an update, where no gradient stands

    async def after_step(self, lane: Lane, seq: int) -> None:
        """Begins a snapshot after the update ``seq`` if it is time, and none is being written.

        The engine copies the state before the next request of the run, and a thread writes the copy.
        """
        lane.steps += 1
        due = lane.steps >= self.config.snapshot_steps
        due = due or time.monotonic() - lane.last_snapshot >= self.config.snapshot_seconds
        if due and lane.run.id not in self._writing:
            task = self._writing[lane.run.id] = asyncio.create_task(self._write_snapshot(lane, seq))
            task.add_done_callback(lambda _: self._writing.pop(lane.run.id))
            await asyncio.sleep(0)  # the engine is asked before the next request of the run can be

    async def settled(self, *runs: str) -> None:
        """Returns when the snapshots of runs, or of all runs, have been written or have failed."""
        tasks = [task for run, task in self._writing.items() if not runs or run in runs]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_snapshot(self, lane: Lane, seq: int) -> None:
        run, steps, began = lane.run, lane.steps, time.monotonic()
        try:
            async with new_directory(place := self._snapshot_place(run, seq)) as temporary:
                await self.link.call("save", model_id=run.id, directory=temporary)
        except EngineLost:  # which is an OSError too
            return
        except (CallFailed, OSError):
            log.exception("no snapshot of %s: the journal keeps its requests", run.id)
            return
        old, name = run.snapshot, self.catalogue.name_of(place)
        await self.catalogue.database.run(snapshot_taken(run.id, seq, name))
        run.snapshot, run.snapshot_seq = name, seq
        lane.steps, lane.last_snapshot = lane.steps - steps, began
        if old is not None:
            await asyncio.to_thread(directories.remove_directory, self.catalogue.place(old))

    def _snapshot_place(self, run: Run, seq: int) -> Path:
        return self.catalogue.run_directory(run) / f"snapshot-{seq}"

    async def restore(self, run: Run) -> None:
        """Brings the engine to a run's snapshot. That of a load without optimizer holds no state of it."""
        place = self.catalogue.place(str(run.snapshot))
        await asyncio.to_thread(directories.check_directory, place)
        optimizer = OPTIMIZER_FILE in directories.files_of(place)
        await self._new_model(run, replayed=True, saved=place, optimizer=optimizer)


def check_optimizer(config: dict[str, Any] | None) -> None:
    """Raises `InvalidRequest` for any optimizer but AdamW."""
    if config not in (None, {"type": "adamw"}):
        raise InvalidRequest(f"optimizer {config.get('type')!r} is not supported: there is adamw")


def remove_run_files(directory: Path) -> None:
    """Removes the snapshots of a run that has ended."""
    for path in directory.glob("snapshot-*"):
        directories.remove_directory(path)


def _shape(run: Run) -> dict[str, Any]:
    """The settings of a run's adapter that decide the shapes of its weights."""
    return {name: value for name, value in json.loads(run.lora or "{}").items() if name != "seed"}
