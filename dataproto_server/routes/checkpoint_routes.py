"""Runs and checkpoints: lists, publishing, deletion, time to live and downloads."""

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from starlette.responses import FileResponse

from dataproto_server.json_requests import Body, Seconds
from dataproto_server.ledger.directories import MANIFEST, checked_name
from dataproto_server.ledger.records import KINDS, Catalogue, Checkpoint, Run
from dataproto_server.refusals import InvalidRequest, NotFound, Refused
from dataproto_server.routes.gate import Answer, Call


def moment(seconds: float | None) -> str | None:
    """A time as the SDK reads it."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def checkpoint_info(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": moment(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": bool(checkpoint.public),
        "user_metadata": strings(checkpoint.metadata),
        "expires_at": moment(checkpoint.expires),
    }


def strings(metadata: str) -> dict[str, str] | None:
    """Metadata with texts as values, which is what the SDK reads."""
    found = json.loads(metadata)
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()} or None


def run_info(run: Run, catalogue: Catalogue) -> dict[str, Any]:
    last = {each.kind: checkpoint_info(each) for each in catalogue.checkpoints_of(run=run.id)}
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner,
        "is_lora": run.lora is not None,
        "lora_rank": run.spec.rank if run.spec else None,
        "corrupted": run.state == "failed",
        "last_request_time": moment(run.last_request),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": strings(run.metadata),
    }


def page_of(call: Call, name: str, items: list[dict[str, Any]]) -> Answer:
    """A part of a list, with its place in the whole."""
    offset, limit = call.number("offset", 0), call.number("limit", 20)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


async def list_runs(call: Call) -> Answer:
    catalogue = call.service.catalogue
    project = call.request.query_params.get("project_id")
    mine = [run for run in catalogue.runs.values() if run.owner == call.owner]
    if project is not None:
        sessions = {session.id for session in catalogue.sessions.values() if session.project == project}
        mine = [run for run in mine if run.session in sessions]
    mine.sort(key=lambda run: -run.last_request)
    return page_of(call, "training_runs", [run_info(run, catalogue) for run in mine])


async def get_run(call: Call) -> Answer:
    """A run of the key, or one with a published checkpoint."""
    catalogue = call.service.catalogue
    run = catalogue.runs.get(call.path("run"))
    if run is None or (
        run.owner != call.owner and not any(each.public for each in catalogue.checkpoints_of(run=run.id))
    ):
        raise NotFound(f"there is no run {call.path('run')[:200]!r}")
    info = run_info(run, catalogue)
    if run.owner != call.owner:
        info |= {"last_checkpoint": None, "last_sampler_checkpoint": None}
    return info


async def list_run_checkpoints(call: Call) -> Answer:
    run = call.service.catalogue.run(call.path("run"), call.owner)
    return {"checkpoints": [checkpoint_info(each) for each in call.service.catalogue.checkpoints_of(run=run.id)]}


async def list_checkpoints(call: Call) -> Answer:
    newest_first = call.service.catalogue.checkpoints_of(call.owner)[::-1]
    return page_of(call, "checkpoints", [checkpoint_info(each) for each in newest_first])


def _checkpoint(call: Call, own: bool = True) -> Checkpoint:
    path = f"tinker://{call.path('run')}/{call.path('kind')}/{call.path('name')}"
    return call.service.catalogue.checkpoint(path, call.owner, own=own)


async def delete_checkpoint(call: Call) -> None:
    await call.service.lifecycle.delete_checkpoint(_checkpoint(call))


async def publish(call: Call) -> None:
    """Publishes a checkpoint (POST), or takes that back (DELETE)."""
    await call.service.catalogue.change(_checkpoint(call), public=int(call.request.method == "POST"))


class SetTtl(Body):
    ttl_seconds: Seconds | None = None


async def set_ttl(call: Call) -> None:
    ttl = (await call.read(SetTtl)).ttl_seconds
    await call.service.catalogue.change(_checkpoint(call), expires=None if ttl is None else time.time() + ttl)


class WeightsInfo(Body):
    tinker_path: str


async def weights_info(call: Call) -> Answer:
    catalogue = call.service.catalogue
    run = catalogue.runs[catalogue.checkpoint((await call.read(WeightsInfo)).tinker_path, call.owner).run]
    info: dict[str, Any] = {"base_model": run.base_model, "is_lora": run.lora is not None}
    if run.spec is not None:
        info["lora_rank"] = run.spec.rank
        info |= {key: getattr(run.spec, key) for key in ("train_unembed", "train_mlp", "train_attn")}
    return info | {"optimizer_config": {"type": "adamw"}}


async def external_weights_urls(call: Call) -> Answer:
    """Addresses of the files of an exported checkpoint, which need no key for a quarter of an hour."""
    checkpoint = _checkpoint(call, own=False)
    if checkpoint.kind != "external_weights":
        raise InvalidRequest(f"{checkpoint.path} is no export: make one by save_weights_external")
    expires = int(time.time()) + 900  # seconds
    base = str(call.request.base_url).rstrip("/")
    urls = {}
    for path in sorted(call.service.catalogue.place(checkpoint.directory).iterdir()):
        if path.name != MANIFEST:
            place = f"{checkpoint.run}/{checkpoint.kind}/{checkpoint.name}/{path.name}"
            signature = call.service.keys.signature(f"{checkpoint.directory}/{path.name}", expires)
            urls[path.name] = f"{base}/files/{quote(place)}?expires={expires}&signature={signature}"
    return {"urls": urls, "expires": moment(expires)}


async def download(call: Call) -> FileResponse:
    """A file of an exported checkpoint, to who has a signed address."""
    run, kind, name, file = (call.path(part) for part in ("run", "kind", "name", "file"))
    query = call.request.query_params
    expires = call.number("expires", 0, most=10**11)
    checkpoint, signature = call.service.catalogue.checkpoints.get((run, kind, name)), query.get("signature", "")
    # the directory is signed, not the name, which a later checkpoint may have
    if checkpoint is None or not call.service.keys.signed(
        f"{checkpoint.directory}/{file}", expires, signature, time.time()
    ):
        raise Refused(403, "the address is not signed or has expired, or the checkpoint is gone: ask for a new one")
    path = call.service.catalogue.place(checkpoint.directory) / checked_name(file)
    if not path.is_file():
        raise NotFound(f"the checkpoint has no file {file!r}")
    return FileResponse(path, filename=file)
