"""The process that clients talk to. It imports no torch."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from dataproto_server.config import ServeConfig, parse
from dataproto_server.engine_process import end_with_parent
from dataproto_server.front import Service
from dataproto_server.routes import application
from dataproto_server.routes.joined_writes import JoiningProtocol

KEEP_ALIVE_SECONDS = 75
SHUTDOWN_SECONDS = 3
SWITCH_SECONDS = 0.0005
"""For which the event loop may keep other threads waiting: a commit takes the interpreter's lock many times. Python has 5 ms."""


def main(arguments: Sequence[str], engine_socket: str, listener: int, parent_pipe: int) -> None:
    """Serves on a socket that listens already, which the process that started this one holds open across restarts."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_with_parent(parent_pipe)
    sys.setswitchinterval(SWITCH_SECONDS)
    slim_log_records()
    serve_front(parse(arguments), Path(engine_socket), listener)


def slim_log_records() -> None:
    """Lets records of the log be made without what their format leaves out: see "Optimization" in Python's logging how-to."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def serve_front(config: ServeConfig, engine_socket: Path, listener: int) -> None:
    """Serves until a signal ends it."""
    os.umask(0o077)
    app = application(Service(config, engine_socket))
    uvicorn.run(
        app,
        fd=listener,
        http=JoiningProtocol,
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
