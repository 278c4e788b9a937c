"""A run in the browser while it trains: ``dataproto view RUN_DIR``.

Serves its curves and kept rows on this machine only, for reading only.
"""

import contextlib
import gzip
import json
import math
import operator
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig
from recipes.options import REQUIRED, exit_status, parse_config
from recipes.options.config_file import CONFIG_FILE
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.report import curves
from recipes.watch.rollout_files import (
    FOLDER,
    Row,
    kept_steps,
    load_kept,
    load_tokens,
    read_lines,
    rollout_steps,
    rows_file,
    tokens_file,
)
from recipes.watch.style import STYLE

ADDRESS = "127.0.0.1"
HOSTS = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d+)?", re.IGNORECASE)
MOST_ROWS = 1000  # of one answer
PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/viewer.js": ("viewer.js", "text/javascript"),
    "/viewer.css": ("viewer.css", "text/css"),
}
HEADERS = {
    # Text of rollouts cannot become code: scripts and styles come from this server's own files alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PREVIEW = 160  # characters of a response in the list
PICTURE = re.compile(r"[0-9a-f]{16}\.(png|jpg)")
Test = Callable[[Row], bool]

NUMBERS = ("step", "sample", "reward", "length", "mismatch", "truncated")
TEXTS = {
    "uid": ("uid",),
    "source": ("source",),
    "prompt": ("prompt",),
    "response": ("response",),
    "truth": ("ground_truth",),
    "text": ("uid", "prompt", "response", "ground_truth"),
}
COMPARISONS = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
COMPARISON = re.compile(r"([A-Za-z_][\w/.-]*)(>=|<=|!=|=|>|<)([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class ViewConfig:
    """What is served, and where.

    Attributes:
        run_dir: the --output-dir of the run
        port: port of 127.0.0.1; 0: any free one
    """

    run_dir: Path
    port: int = 8420


def parse(arguments: Sequence[str]) -> ViewConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, ViewConfig(REQUIRED), __doc__, "dataproto view")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, serves until it is interrupted, and returns the exit status."""
    with exit_status(arguments, resumes=False) as status:
        serve(parse(status.arguments))
    return status.code


def serve(config: ViewConfig) -> None:
    """Serves a run until the program is interrupted.

    Raises:
        FileFormatError, InvalidConfig: see `ViewerServer`.
    """
    with ViewerServer(check_run(config.run_dir), config.port) as server:
        print(f"{config.run_dir}: {server.url} (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    print()


def check_run(directory: Path) -> Path:
    """The directory, if a run has written there; raises `FileFormatError` otherwise, and names runs that are in it."""
    if not _is_run(directory):
        inside = [each for each in sorted(directory.glob("*/")) if _is_run(each)]
        there = f", but has {', '.join(map(str, inside[:5]))}" if inside else f", which would have a {CONFIG_FILE}"
        raise FileFormatError(f"{directory} is not the directory of a run{there}")
    return directory


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG_FILE, METRICS_FILE))


class ViewerServer(ThreadingHTTPServer):
    """Serves a run at ``http://127.0.0.1:<port>``; as a context manager it closes its port at the end."""

    daemon_threads = True

    def __init__(self, directory: str | Path, port: int = 0) -> None:
        """
        Args:
            directory: of the run.
            port: 0 takes a free one.

        Raises:
            FileFormatError: the directory is missing.
            InvalidConfig: the port is taken.
        """
        self.files = RunFiles(directory)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InvalidConfig(f"port {port} cannot be used ({error}): give another one with --port") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def answer(self, path: str, asked: dict[str, str]) -> tuple[bytes, str] | None:
        """The content at a path, and its type; ``None`` if there is nothing.

        Raises:
            DataProtoError: what is asked for does not exist, or a file of the run is damaged.
        """
        if path in FILES:
            name, kind = FILES[path]
            return (PAGE / name).read_bytes(), kind
        if path == "/favicon.ico":
            return b"", "image/x-icon"
        if path == "/report.css":
            return STYLE.encode(), "text/css"
        if path.startswith("/images/"):
            picture = self.files.picture(path.removeprefix("/images/"))
            return None if picture is None else (picture, "image/jpeg" if path.endswith(".jpg") else "image/png")
        if path == "/api/curves":
            return self.files.curves().encode(errors="replace"), "text/html"
        found = self._found(path, asked)
        return None if found is None else (json.dumps(found, allow_nan=False).encode(), "application/json")

    def _found(self, path: str, asked: dict[str, str]) -> Any:
        if path == "/api/run":
            return self.files.overview()
        name = asked.get("set", "training")
        if name not in ("training", "held-out"):
            raise InvalidConfig(f"no set {name!r}: choose training or held-out")
        if path == "/api/rollouts":
            step = None if asked.get("step", "all") == "all" else _whole("step", asked["step"])
            start, count = _whole("start", asked.get("start", "0")), _whole("count", asked.get("count", "200"))
            sort, descending = asked.get("sort", "step"), asked.get("order") == "down"
            text = asked.get("filter", "")
            return self.files.listing(name, step, text, sort, descending, start, min(count, MOST_ROWS))
        if path == "/api/group":
            return self.files.group(name, _whole("step", asked.get("step", "")), asked.get("uid", ""))
        return None


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may stay silent

    def do_GET(self) -> None:
        if not HOSTS.fullmatch(self.headers.get("Host", "")):  # another site's name that leads here (DNS rebinding)
            self._send(HTTPStatus.FORBIDDEN, b"the viewer answers to 127.0.0.1 and localhost only", "text/plain")
            return
        url = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        try:
            found = self.server.answer(url.path, asked)
        except InvalidConfig as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error).encode(errors="replace"), "text/plain")
        except (DataProtoError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode(errors="replace"), "text/plain")
        else:
            if found is None:
                self._send(HTTPStatus.NOT_FOUND, b"nothing here", "text/plain")
            else:
                self._send(HTTPStatus.OK, *found)

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        picture = kind.startswith("image/")
        zipped = not picture and len(content) > 1000 and "gzip" in self.headers.get("Accept-Encoding", "")
        if zipped:
            content = gzip.compress(content, compresslevel=5)
        self.send_response(status)
        self.send_header("Content-Type", kind if picture else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        named_by_content = picture and status == HTTPStatus.OK
        self.send_header("Cache-Control", "max-age=31536000, immutable" if named_by_content else "no-store")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the reader has gone on
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise InvalidConfig(f"{name}={text!r}: must be a whole number")
    return int(text)


class RunFiles:
    """The metrics and rollouts of a run. Each file is read again only after it has changed.

    There are two sets of rollouts: ``training``, as the steps sampled them, and ``held-out``, of the evaluations.
    """

    def __init__(self, directory: str | Path) -> None:
        """
        Raises:
            FileFormatError: the directory is missing.
        """
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileFormatError(f"{directory} is not the directory of a run")
        self._read: dict[Path, tuple[tuple[int, int], Any]] = {}  # stamp and content of each file
        self._lock = threading.Lock()  # the server answers in several threads

    def overview(self) -> dict[str, Any]:
        """The name of the run, the steps whose rollouts are kept, and a stamp that changes with the metrics."""
        metrics = self.directory / METRICS_FILE
        return {
            "name": self.directory.resolve().name,
            "steps": {name: self.steps(name) for name in ("training", "held-out")},
            "metrics": _stamp(metrics) if metrics.exists() else None,
        }

    def curves(self) -> str:
        """Tiles and charts as HTML, with all text escaped."""
        path = self.directory / METRICS_FILE
        if not path.exists():
            return ""
        return self._cached(path, lambda: curves(read_metrics(path)))

    def steps(self, name: str) -> list[int]:
        """The steps of a set, in order."""
        return kept_steps(self.directory) if name == "training" else rollout_steps(self.directory)

    def rows(self, name: str, step: int | None = None) -> list[Row]:
        """The rows of a set at one step, or at all of them, without tokens.

        Raises:
            InvalidConfig: no rows of the step are kept.
        """
        steps = self.steps(name)
        if step is not None and step not in steps:
            raise InvalidConfig(f"no {name} rollouts of step {step} are kept")
        return [row for each in (steps if step is None else [step]) for row in self._rows_of(name, each)]

    def listing(
        self, name: str, step: int | None, text: str, sort: str, descending: bool, start: int, count: int
    ) -> dict[str, Any]:
        """``count`` rows from ``start`` of those that match, in order, in short form; their total number; fields to sort by.

        Raises:
            InvalidConfig: the filter or the field is not understood.
        """
        rows = self.rows(name, step)
        found = in_order(matching(rows, text), sort, descending) if rows else []
        return {
            "total": len(found),
            "of": len(rows),
            "fields": fields_of(rows),
            "rows": [_short(row) for row in found[start : start + count]],
        }

    def group(self, name: str, step: int, uid: str) -> list[Row]:
        """All kept rows of a prompt: the samples of a step with their tokens, or the answers of all evaluations.

        Raises:
            InvalidConfig: there is none.
        """
        if name == "training":
            rows = self.rows(name, step)
            tokens = _tokens(self.directory, step, _stamp(tokens_file(self.directory, step)))
            if len(rows) != len(tokens):
                raise FileFormatError(f"step {step}: {len(rows)} rows, but the tokens of {len(tokens)}")
            found = [row | token for row, token in zip(rows, tokens, strict=True) if row["uid"] == uid]
        else:
            found = [row for row in self.rows(name) if row["uid"] == uid]
        if not found:
            raise InvalidConfig(f"no rollouts of uid {uid!r} at step {step}")
        return found

    def picture(self, name: str) -> bytes | None:
        """The content of a kept picture; ``None`` for any other name."""
        path = self.directory / FOLDER / "images" / name
        return path.read_bytes() if PICTURE.fullmatch(name) and path.is_file() else None

    def _rows_of(self, name: str, step: int) -> list[Row]:
        if name == "training":
            path = rows_file(self.directory, step)
            return self._cached(path, lambda: load_kept(self.directory, step))
        path = self.directory / FOLDER / f"step_{step}.jsonl"
        return self._cached(path, lambda: [_held_out(row, step) for row in read_lines(path, path.read_bytes(), "key")])

    def _cached(self, path: Path, read: Callable[[], Any]) -> Any:
        with self._lock:
            stamp = _stamp(path)
            if self._read.get(path, (None,))[0] != stamp:
                self._read[path] = stamp, read()
            return self._read[path][1]


@lru_cache(maxsize=4)
def _tokens(directory: Path, step: int, stamp: tuple[int, int]) -> list[Row]:
    """`load_tokens` of the steps that were read last; ``stamp`` changes with the file."""
    return load_tokens(directory, step)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _held_out(row: Mapping[str, Any], step: int) -> Row:
    """An answer of an evaluation with the fields of a kept row."""
    accuracy = row.get("accuracy")
    return {
        "step": step,
        "uid": str(row["key"]),
        "sample": 0,
        "source": "",
        "prompt": str(row.get("prompt", "")),
        "response": str(row.get("response", "")),
        "ground_truth": str(row.get("ground_truth", "")),
        "reward": _finite(row.get("reward")),
        "parts": {} if accuracy is None else {"acc": _finite(accuracy)},
        "truncated": False,
        "images": list(row.get("images", ())),
        "length": None,
        "mismatch": None,
    }


def _short(row: Mapping[str, Any]) -> Row:
    kept = ("step", "uid", "sample", "reward", "parts", "length", "mismatch", "truncated")
    return {name: row[name] for name in kept} | {
        "response": row["response"][:PREVIEW],
        "image": (row["images"] or [None])[0],
    }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def value_of(row: Row, field: str) -> float | str | None:
    """The value of a field: a number, a part of the reward, or the uid."""
    return row[field] if field in NUMBERS or field == "uid" else row["parts"].get(field)


def fields_of(rows: Iterable[Row]) -> list[str]:
    """The fields that rows can be compared and sorted by, except for the uid."""
    return [*NUMBERS, *dict.fromkeys(name for row in rows for name in row["parts"])]


def matching(rows: list[Row], text: str) -> list[Row]:
    """The rows that match all terms of a filter.

    A term is a comparison (``reward>0.5``, ``acc=0``), a text in one field (``uid:7``, ``response:"x = 3"``), or a text that the
    uid, the prompt, the response or the ground truth contains. Upper and lower case are equal. A row without a value matches no
    comparison.

    Raises:
        InvalidConfig: a quotation mark is not closed, or a comparison names no field.

    >>> rows = [{"step": 1, "reward": r, "length": 2, "mismatch": None, "uid": "a", "prompt": "", "response": "Yes", "parts": {},
    ...          "sample": 0, "truncated": False, "ground_truth": ""} for r in (0.0, 1.0)]
    >>> [row["reward"] for row in matching(rows, "reward>=0.5 yes")], matching(rows, "mismatch<1")
    ([1.0], [])
    """
    try:
        terms = shlex.split(text)
    except ValueError as error:
        raise InvalidConfig(f"filter {text!r}: {error}") from error
    known = fields_of(rows)
    tests = [_test(term, known) for term in terms]
    return [row for row in rows if all(test(row) for test in tests)]


def in_order(rows: list[Row], field: str, descending: bool) -> list[Row]:
    """The rows sorted by a field; rows without a value come last, and equal ones stay in their order.

    Raises:
        InvalidConfig: there is no such field.
    """
    if field != "uid" and field not in (known := fields_of(rows)):
        raise InvalidConfig(f"no field {field!r} to sort by: choose one of uid, {', '.join(known)}")
    having = [row for row in rows if value_of(row, field) is not None]
    lacking = [row for row in rows if value_of(row, field) is None]
    return sorted(having, key=lambda row: value_of(row, field), reverse=descending) + lacking  # type: ignore[arg-type,return-value]


def _test(term: str, known: list[str]) -> Test:
    if match := COMPARISON.fullmatch(term):
        field, sign, number = match.groups()
        if field not in known:
            raise InvalidConfig(
                f"no field {field!r} to compare: choose one of {', '.join(known)}; or search for text:{term}"
            )
        return _comparison(field, COMPARISONS[sign], float(number))
    name, colon, wanted = term.partition(":")
    fields = TEXTS.get(name) if colon else None
    return _contains(*(("text", term) if fields is None else (name, wanted)))


def _comparison(field: str, compare: Callable[[Any, Any], bool], number: float) -> Test:
    def test(row: Row) -> bool:
        value = value_of(row, field)
        return value is not None and compare(value, number)

    return test


def _contains(name: str, wanted: str) -> Test:
    lowered = wanted.lower()
    return lambda row: any(lowered in row[field].lower() for field in TEXTS[name])
