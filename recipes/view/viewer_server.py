"""The server of the viewer: on this machine only, for reading only."""

import contextlib
import gzip
import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dataproto.errors import DataProtoError, FileFormatError, InvalidConfig
from recipes.configs.view_config import ViewConfig, parse
from recipes.options import exit_status
from recipes.report.metrics_file import METRICS_FILE
from recipes.report.page import CONFIG_FILE
from recipes.report.style import STYLE
from recipes.view.run_files import RunFiles

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


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise InvalidConfig(f"{name}={text!r}: must be a whole number")
    return int(text)
