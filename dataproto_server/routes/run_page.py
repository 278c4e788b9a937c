"""The page of runs, and the numbers for Prometheus."""

import html
import time

from starlette.responses import HTMLResponse, PlainTextResponse, Response

from dataproto_server.ledger.records import Run
from dataproto_server.routes.gate import Call
from recipes.watch.style import STYLE

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MOST_RUNS = 200
COLUMNS = ("run", "model", "rank", "state", "next request", "waiting", "checkpoints", "last request")


async def page(call: Call) -> Response:
    """The runs of a key, the last used first."""
    mine = [run for run in call.service.catalogue.runs.values() if run.owner == call.owner]
    mine.sort(key=lambda run: -run.last_request)
    rows = "".join(_row(call, run) for run in mine[:MOST_RUNS])
    heads = "".join(f"<th>{name}</th>" for name in COLUMNS)
    gauges = call.service.gauges()
    engine = "is running" if gauges["engine_connected"] else "is starting"
    summary = (
        f"The engine {engine}. {gauges['live_runs']:g} runs are in training, {gauges['waiting_requests']:g} requests and "
        f"{gauges['sample_requests_in_flight']:g} requests for samples wait."
    )
    text = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>dataproto serve</title><style>{STYLE}</style>"
        f"<main><h1>Runs of {html.escape(call.owner)}</h1><p>{summary}</p><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></main></html>"
    )
    return HTMLResponse(text, headers=HEADERS)


def _row(call: Call, run: Run) -> str:
    lane = call.service.scheduler.lanes.get(run.id)
    cells = (
        run.id,
        run.base_model,
        run.spec.rank if run.spec else "all weights",
        "waits for another start" if lane and lane.resting else run.state,
        run.next_seq,
        len(lane.entries) if lane else 0,
        len(call.service.catalogue.checkpoints_of(run=run.id)),
        f"{time.time() - run.last_request:.0f} s ago",
    )
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


async def metrics(call: Call) -> Response:
    return PlainTextResponse(call.service.counters.text(call.service.gauges()))
