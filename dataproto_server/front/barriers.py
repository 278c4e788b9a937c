"""The requests of a run that are carried out alone: creation, updates, saving and loading."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dataproto_server.backend import OPTIMIZER_FILE
from dataproto_server.engine_link import CallFailed
from dataproto_server.front.sample_queue import Samples
from dataproto_server.json_requests import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    parse_json,
    read,
)
from dataproto_server.ledger.directories import (
    check_directory,
    checked_name,
    directory_size,
    files_of,
    link_files,
    new_directory,
    remove_directory,
)
from dataproto_server.ledger.journal import Entry, Outcome, snapshot_taken
from dataproto_server.ledger.records import Checkpoint, Job, Run, Sampler, change, drop, put, text
from dataproto_server.refusals import InvalidRequest
from workers.model.model_config import AdamParams

MILLIARD = 1_000_000_000
WITH_FILES = ("save", "save_for_sampler", "save_external", "load")
"""The kinds whose files take time, which the rounds do not wait for."""
NO_UPDATE = (
    "no update was made, and the gradients are dropped: together they have the norm {norm}, though those of each pass are "
    "finite; check logprobs, advantages and weights"
)
EXPIRED, EXPIRED_SECONDS = "_expired", 86400
SHORTEST_TTL, LONGEST_TTL = 1, 10 * 365 * 86400


@dataclass(frozen=True)
class Done:
    """What a request came to.

    Args:
        answer: the JSON that the client gets.
        jobs: writes that belong into the same commit.
        after: is called when that is on disk.
    """

    answer: dict[str, Any]
    jobs: Sequence[Job] = ()
    after: Callable[[], None] = lambda: None

    def outcome(self) -> Outcome:
        return Outcome(json.dumps(self.answer).encode())


class Barriers:
    """Carries out one request of a run at a time, and those of different runs at the same time.

    A request that a crash interrupted can be carried out again.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.link, self.catalogue = samples, samples.link, samples.catalogue
        self.config = samples.config
        self.kinds: dict[str, Callable[[Run, Entry, bytes], Any]] = {
            "create": self._create,
            "load": self._load,
            "optim_step": self._optim_step,
            "save": self._save,
            "save_for_sampler": self._save_for_sampler,
            "save_external": self._save_external,
        }

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
        done: Done = await self.kinds[entry.kind](run, entry, body)
        return done

    def _check_room(self, owner: str) -> None:
        """Raises `InvalidRequest` if the checkpoints and samplers of a key take all that they may."""
        used, most = self.catalogue.bytes_of(owner), self.config.limits.max_checkpoint_gb
        if used >= most * MILLIARD:
            raise InvalidRequest(
                f"the checkpoints and samplers of this key take {used / MILLIARD:.1f} GB: at most {most} "
                "(--max-checkpoint-gb)"
            )

    async def repeat(self, run: Run, entry: Entry, body: bytes) -> None:
        """Brings the engine to where it was after a request that was carried out before."""
        if entry.kind in ("create", "load", "optim_step"):
            await self.kinds[entry.kind](run, entry, body)

    async def _create(self, run: Run, entry: Entry, body: bytes) -> Done:
        check_optimizer(read(CreateModel, parse_json(body)).optimizer_config)
        self._check_runs(run, entry)
        await self._new_model(run, replayed=entry.state != "queued")
        run.state = "live"
        return Done({"model_id": run.id, "type": "create_model"}, [put(run)])

    def _check_runs(self, run: Run, entry: Entry) -> None:
        """Raises `InvalidRequest` if the earlier runs of a key are as many as it may have. No limit applies to a replay."""
        most = self.config.limits.max_runs
        earlier = sum(each.number < run.number for each in self.catalogue.live_runs(run.owner))
        if entry.state == "queued" and earlier >= most:
            raise InvalidRequest(f"this key has {earlier} runs in training: finish a session (--max-runs {most})")

    async def _new_model(self, run: Run, *, replayed: bool) -> None:
        model = {"model_id": run.id, "base_model": run.base_model, "lora": run.spec}
        await self.link.call("create", **model, replayed=replayed)

    async def _load(self, run: Run, entry: Entry, body: bytes) -> Done:
        asked = read(LoadWeights, parse_json(body))
        if asked.weights_access_token is not None:
            raise InvalidRequest("weights_access_token is not supported: publish the checkpoint to give others access")
        check_optimizer(asked.optimizer_config)
        if entry.seq == 0:
            self._check_runs(run, entry)
        checkpoint = self.catalogue.checkpoint(asked.path, run.owner)
        if asked.optimizer and checkpoint.kind != "weights":
            raise InvalidRequest(f"{asked.path} holds no optimizer state: load a checkpoint of save_state")
        base, lora = self.catalogue.spec_of(checkpoint)
        if asked.base_model not in (None, base):
            raise InvalidRequest(f"{asked.path} is an adapter of {base}, not of {asked.base_model}")
        with self.samples.hold(checkpoint.directory):
            await self._linked(run, entry, self.catalogue.place(checkpoint.directory), asked.optimizer)
        snapshot = self.catalogue.name_of(self._snapshot_directory(run, entry.seq))
        jobs: list[Job] = []
        try:
            if entry.seq == 0:
                run.base_model, run.lora = base, None if lora is None else text(lora)
                replayed = entry.state != "queued"
                await self._create_from(run, snapshot, optimizer=asked.optimizer, replayed=replayed)
                run.state = "live"
                jobs.append(put(run))
            else:
                await self._load_from(run, snapshot, optimizer=asked.optimizer)
        except CallFailed:
            await asyncio.to_thread(remove_directory, self.catalogue.place(snapshot))
            raise
        old, answer = run.snapshot, {"path": asked.path, "model_id": run.id, "type": "load_weights"}

        def after() -> None:
            run.snapshot, run.snapshot_seq = snapshot, entry.seq
            if old is not None:
                self.samples.retire(old)

        return Done(answer, [*jobs, snapshot_taken(run.id, entry.seq, snapshot)], after)

    async def _linked(self, run: Run, entry: Entry, source: Path, optimizer: bool) -> None:
        """Makes a checkpoint the snapshot of a run, which loads it from there: the checkpoint may be replaced or deleted."""
        await asyncio.to_thread(check_directory, source)
        async with new_directory(self._snapshot_directory(run, entry.seq)) as temporary:
            await asyncio.to_thread(link_files, source, temporary)
            if not optimizer:
                (temporary / OPTIMIZER_FILE).unlink(missing_ok=True)

    async def _load_from(self, run: Run, directory: str, *, optimizer: bool) -> None:
        place = self.catalogue.place(directory)
        await self.link.call("load", model_id=run.id, directory=place, optimizer=optimizer)

    async def _create_from(self, run: Run, directory: str, *, optimizer: bool, replayed: bool) -> None:
        """Makes an adapter with saved weights. One that cannot be loaded takes no place in the engine."""
        await self._new_model(run, replayed=replayed)
        try:
            await self._load_from(run, directory, optimizer=optimizer)
        except CallFailed:
            await self.link.call("release", model_id=run.id)
            raise

    async def _optim_step(self, run: Run, entry: Entry, body: bytes) -> Done:
        given = parse_json(body)
        if "optimizer_params" in given:
            raise InvalidRequest(
                "optimizer_params belong to an optimizer that is not supported: there is adamw (adam_params)"
            )
        params = msgspec.structs.asdict(read(OptimStep, given).adam_params)
        if not all(map(math.isfinite, params.values())):
            raise InvalidRequest(f"adam_params {params}: must be finite")
        metrics = await self.link.call("optim_step", model_id=run.id, adam=AdamParams(**params))
        if not math.isfinite(
            metrics["grad_norm"]
        ):  # the engine has dropped the gradients: the journal has that as done
            return Done({"error": NO_UPDATE.format(norm=metrics["grad_norm"]), "category": "user"})
        return Done({"metrics": metrics, "type": "optim_step"})

    async def _save(self, run: Run, entry: Entry, body: bytes) -> Done:
        asked = read(SaveWeights, parse_json(body))
        name = checked_name(asked.path or f"step-{entry.seq}")
        return await self._checkpoint(run, "weights", name, asked.ttl_seconds, asked.user_metadata, asked.overwrite)

    async def _save_external(self, run: Run, entry: Entry, body: bytes) -> Done:
        asked = read(SaveExternal, parse_json(body))
        if asked.age_encryption_recipients:
            raise InvalidRequest("age_encryption_recipients: this server does not encrypt exports")
        return await self._checkpoint(run, "external_weights", checked_name(asked.path), asked.ttl_seconds, None, False)

    async def _save_for_sampler(self, run: Run, entry: Entry, body: bytes) -> Done:
        asked = read(SaveForSampler, parse_json(body))
        if asked.path is not None:
            name = checked_name(asked.path)
            return await self._checkpoint(run, "sampler_weights", name, asked.ttl_seconds, asked.user_metadata, False)
        if asked.sampling_session_seq_id is None:
            raise InvalidRequest("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        sampler_id = f"{run.session}:sample:{asked.sampling_session_seq_id}"
        if sampler_id in self.catalogue.samplers:
            raise InvalidRequest(f"there is a sampling session {sampler_id} already: choose another number")
        moving = asked.kind == "inflight"
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
            moving=int(moving),
        )
        return self._new_sampler(sampler)

    def _new_sampler(self, sampler: Sampler) -> Done:
        """The sampler, to whose directory the earlier ones of the run move if they follow it."""
        earlier = [
            each
            for each in self.catalogue.samplers.values()
            if sampler.moving and each.moving and each.run == sampler.run
        ]
        left = {each.directory for each in earlier if each.directory != sampler.directory}
        moved = [change(each, directory=sampler.directory) for each in earlier]

        def after() -> None:
            for each in earlier:
                each.directory = sampler.directory
            self.catalogue.samplers[sampler.id] = sampler
            for directory in left:
                self.samples.retire(str(directory))

        answer = {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}
        return Done(answer, [put(sampler), *moved], after)

    async def _checkpoint(
        self,
        run: Run,
        kind: str,
        name: str,
        ttl: int | None,
        metadata: dict[str, Any] | None,
        overwrite: bool,
        limited: bool = True,
    ) -> Done:
        """Writes a checkpoint, and drops those beyond ``--keep-last``. One that is not ``limited`` needs no room of the key."""
        known = self.catalogue.checkpoints
        if (run.id, kind, name) in known and not overwrite:
            raise InvalidRequest(f"there is a checkpoint {kind}/{name} already: choose another name, or overwrite it")
        check_ttl(ttl)
        directory = self.catalogue.run_directory(run) / kind / f"{name}-{uuid.uuid4().hex[:8]}"
        if limited:
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
            expires=None if ttl is None else now + ttl,
            public=0,
            size=directory_size(directory),
            metadata=text(metadata),
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
        return Done(answer, [*map(drop, gone), put(checkpoint)], after)

    def _beyond(self, run: Run, kind: str, name: str) -> list[Checkpoint]:
        """The oldest unpublished checkpoints of a kind, where there are more than ``--keep-last`` with a new one."""
        if not self.config.keep_last:
            return []
        others = [each for each in self.catalogue.checkpoints_of(run=run.id) if each.kind == kind and each.name != name]
        return [each for each in others[: max(0, len(others) + 1 - self.config.keep_last)] if not each.public]

    async def snapshot(self, run: Run, seq: int) -> Path:
        """Writes the state of a run after an update, and returns the directory."""
        directory = self._snapshot_directory(run, seq)
        async with new_directory(directory) as temporary:
            await self.link.call("save", model_id=run.id, directory=temporary)
        return directory

    def _snapshot_directory(self, run: Run, seq: int) -> Path:
        return self.catalogue.run_directory(run) / f"snapshot-{seq}"

    async def keep(self, run: Run) -> Done:
        """Writes the checkpoint of a run whose client has gone, whatever room the key has left."""
        return await self._checkpoint(run, "weights", EXPIRED, EXPIRED_SECONDS, None, True, limited=False)

    async def restore(self, run: Run) -> None:
        """Brings the engine to a run's snapshot. That of a load without optimizer holds no state of it."""
        snapshot = str(run.snapshot)
        place = self.catalogue.place(snapshot)
        await asyncio.to_thread(check_directory, place)
        optimizer = OPTIMIZER_FILE in files_of(place)
        await self._create_from(run, snapshot, optimizer=optimizer, replayed=True)


SAVED = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


def check_optimizer(config: dict[str, Any] | None) -> None:
    """Raises `InvalidRequest` for any optimizer but AdamW."""
    if config not in (None, {"type": "adamw"}):
        raise InvalidRequest(f"optimizer {config.get('type')!r} is not supported: there is adamw")


def check_ttl(ttl: int | None) -> None:
    """Raises `InvalidRequest` for a time to live of no length, or beyond ten years."""
    if ttl is not None and not SHORTEST_TTL <= ttl <= LONGEST_TTL:
        raise InvalidRequest(f"ttl_seconds={ttl}: must be from {SHORTEST_TTL} to {LONGEST_TTL}, or null for no end")


def remove_run_files(directory: Path) -> None:
    """Removes the snapshots of a run that has ended."""
    for path in directory.glob("snapshot-*"):
        remove_directory(path)
