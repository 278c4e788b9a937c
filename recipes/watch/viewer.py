"""A run in the browser while it trains: ``dataproto view RUN_DIR``; of a directory of runs, how they compare.

Serves its curves and kept rows on this machine only, for reading only.
"""

import contextlib
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig
from recipes.options import REQUIRED, exit_status, parse_config
from recipes.options.config_file import CONFIG_FILE
from recipes.watch import rollout_files
from recipes.watch.metrics_file import METRICS_FILE, read_metrics
from recipes.watch.pages import TEMPLATES
from recipes.watch.report import comparison, curves, is_run, runs_in

ADDRESS = "127.0.0.1"
HOSTS = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d+)?", re.IGNORECASE)
PICTURE = re.compile(r"/images/([0-9a-f]{16}\.(png|jpg|wav))")
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "png": "image/png", "jpg": "image/jpeg"}
KINDS |= {"wav": "audio/wav"}
SETS = {
    "training": (rollout_files.kept_steps, rollout_files.rows_file, "uid"),
    "held-out": (rollout_files.rollout_steps, rollout_files.answers_file, "key"),
}
"""Of the rollouts that steps sampled, and of the answers of evaluations: the steps, the file of one, and what each row has."""
HEADERS = {
    # Text of rollouts cannot become code: scripts and styles come from this server's own files only.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class ViewConfig:
    """What is served, and where.

    Attributes:
        run_dir: the --output-dir of the run, or the directory that holds several
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


def main(arguments: Sequence[str] | None = None, config: ViewConfig | None = None) -> int:
    """Parses the command line, serves until it is interrupted, and returns the exit status."""
    with exit_status(arguments, resumes=False) as status:
        config = config or parse(status.arguments)
        if not is_run(config.run_dir) and not runs_in(config.run_dir):
            raise FileFormatError(f"{config.run_dir} is not the directory of a run, which would have a {CONFIG_FILE}")
        with ViewerServer(config.run_dir, config.port) as server:
            print(f"{config.run_dir}: {server.url} (Ctrl-C ends)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        print()
    return status.code


def overview(directory: Path) -> dict[str, Any]:
    """The name of a run, and stamps that change with its files: of the metrics, and of each step of `SETS`."""
    metrics = directory / METRICS_FILE
    return {
        "name": directory.resolve().name,
        "steps": {
            name: {step: _stamp(file(directory, step)) for step in steps(directory)}
            for name, (steps, file, _) in SETS.items()
        },
        "metrics": _stamp(metrics) if metrics.exists() else None,
    }


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
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileFormatError(f"{directory} is not the directory of a run")
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
        if path == "/" and not is_run(self.directory) and runs_in(self.directory):
            return comparison(self.directory).encode(errors="replace"), "text/html"
        if path in ("/", "/viewer.js", "/viewer.css", "/report.css"):
            file = TEMPLATES / (path[1:] or "viewer.html")
            return file.read_bytes(), KINDS[file.suffix[1:]]
        if path == "/favicon.ico":
            return b"", "image/x-icon"
        if picture := PICTURE.fullmatch(path):
            file = self.directory / rollout_files.FOLDER / "images" / picture[1]
            return (file.read_bytes(), KINDS[picture[2]]) if file.is_file() else None
        if path == "/api/curves":
            return curves(read_metrics(self.directory / METRICS_FILE)).encode(errors="replace"), "text/html"
        found = self._found(path, asked)
        return None if found is None else (json.dumps(found, allow_nan=False).encode(), "application/json")

    def _found(self, path: str, asked: dict[str, str]) -> Any:
        if path == "/api/run":
            return overview(self.directory)
        if path not in ("/api/rows", "/api/tokens"):
            return None
        name, step = asked.get("set", "training"), asked.get("step", "")
        if name not in SETS:
            raise InvalidConfig(f"no set {name!r}: choose training or held-out")
        steps, file, needed = SETS[name]
        if step not in map(str, steps(self.directory)):
            raise InvalidConfig(f"no {name} rollouts of step {step!r} are kept")
        if path == "/api/tokens":
            return rollout_files.load_tokens(self.directory, int(step))
        return rollout_files.read_lines(file(self.directory, int(step)), needed)


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
        except (DataProtoError, OSError) as error:
            status = HTTPStatus.BAD_REQUEST if isinstance(error, InvalidConfig) else HTTPStatus.INTERNAL_SERVER_ERROR
            self._send(status, str(error).encode(errors="replace"), "text/plain")
        else:
            if found is None:
                self._send(HTTPStatus.NOT_FOUND, b"nothing here", "text/plain")
            else:
                self._send(HTTPStatus.OK, *found)

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        picture = kind.startswith(("image/", "audio/"))
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
        with contextlib.suppress(ConnectionError):  # the reader has left
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_mtime_ns} {status.st_size}"
