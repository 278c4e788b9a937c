"""The command ``dataproto serve``: makes the small model if no other is given, starts the two processes of the server, starts
each again when it ends, and says how to use it.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dataproto.errors import InvalidConfig, ending
from dataproto.extras import require_extra
from dataproto_server.config import ServeConfig, parse
from dataproto_server.keys import read_keys
from recipes.directory_lock import locked
from recipes.options import exit_status

FRONT = "from dataproto_server.routes.application import main; main({arguments!r}, {engine!r}, {listener}, {pipe})"
ENGINE = (
    "from dataproto_server.engine_process import main; "
    "main({factory!r}, {options!r}, {engine!r}, {pipe}, {arguments!r})"
)
LOOK_SECONDS = 0.1
SHORT_LIFE_SECONDS = 10.0  # a process without a mark that ends sooner than this after its start has failed to start
MOST_FAILURES = 5  # in a row
MISTAKE = 2  # the exit status after a user's mistake
STOP_SECONDS = 10.0


class Child:
    """A process that is started again when it ends."""

    def __init__(
        self, name: str, code: str, passed: Sequence[int], environment: Mapping[str, str], mark: Path | None = None
    ) -> None:
        """
        Args:
            passed: file descriptors that it inherits.
            mark: a file that it makes when its start is over; a process that ends without it has failed to start.
        """
        self.name, self.code, self.passed, self.environment, self.mark = name, code, passed, environment, mark
        self.failures = 0
        self.has_started = False
        self.start()

    def start(self) -> None:
        """``-P`` keeps the working directory out of the places from which modules are imported."""
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", self.code],
            pass_fds=self.passed,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def look(self) -> None:
        """Starts the process again if it has ended.

        Raises:
            InvalidConfig: it has failed to start too often, or at its first start by a user's mistake.
        """
        if self.process.poll() is None:
            return
        started = self.mark is not None and self.mark.exists()
        short = time.monotonic() - self.began < SHORT_LIFE_SECONDS if self.mark is None else not started
        self.has_started |= not short
        self.failures = self.failures + 1 if short else 0
        code = self.process.returncode
        if started:
            self.mark.unlink()  # type: ignore[union-attr]
        mistake = code == MISTAKE and not self.has_started
        if short and code > 0 and (mistake or self.failures >= MOST_FAILURES):
            raise InvalidConfig(f"the {self.name} process cannot start (exit status {code}): see its messages above")
        print(f"the {self.name} process ended ({code}) and starts again", file=sys.stderr, flush=True)
        if short:
            time.sleep(min(2.0**self.failures, 10.0) / 10)
        self.start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Supervisor(ExitStack):
    """The listening socket, the lock of the state directory, and both processes, all of which its `close` ends.

    The processes end when this one does, by whatever cause: they watch a pipe from it. The socket stays open while the front
    process starts again, so that clients wait and are not refused.
    """

    def __init__(
        self,
        state: Path,
        host: str,
        port: int,
        front_arguments: Sequence[str],
        factory: str,
        options: str,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            front_arguments: the command line of the front process; the engine reads ``--traceback`` there.
            factory: ``module:function`` that makes the engine's backend of ``options``.
            environment: of both processes.

        Raises:
            InvalidConfig: the port is taken, or another server uses the state directory.
        """
        super().__init__()
        self.enter_context(locked(state, "give another --state"))
        self.listener = self.enter_context(listening(host, port))
        self.port: int = self.listener.getsockname()[1]
        # Only this user can open it (mode 0700), and its path is short enough for a socket.
        directory = self.enter_context(TemporaryDirectory(prefix="dataproto-serve-", ignore_cleanup_errors=True))
        read, write = os.pipe()
        self.callback(os.close, read)
        self.callback(os.close, write)
        engine, listener = f"{directory}/engine", self.listener.fileno()
        told = {"arguments": list(front_arguments), "engine": engine, "pipe": read}
        self.front = Child("front", FRONT.format(**told, listener=listener), [listener, read], environment)
        self.enter_context(ending(self.front.stop))
        code = ENGINE.format(**told, factory=factory, options=options)
        self.engine = Child("engine", code, [read], environment, Path(engine))
        self.enter_context(ending(self.engine.stop))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Watches both processes. Raises `InvalidConfig` if one cannot start."""
        while not until():
            self.front.look()
            self.engine.look()
            time.sleep(LOOK_SECONDS)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `InvalidConfig` if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise InvalidConfig(f"{host}:{port} cannot be used ({error}): give another --port or --host") from error
    # Connections inherit it. Without it the body of an answer, written after the head, waits 40 ms for the client's ACK.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


BACKEND = "dataproto_server.engine:engine_from_json"
"""What makes the engine's backend."""
TINY_NAMES = ("tiny", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-VL-30B-A3B-Instruct")
"""Names of the small model: its own, and two that the Tinker cookbook knows, so that its recipes run on it."""

USE = """{url} serves {model}; Ctrl-C ends.

export TINKER_BASE_URL={url}
export TINKER_API_KEY={key}
export TINKER_TELEMETRY=0

import tinker

with tinker.ServiceClient() as service:
    client = service.create_lora_training_client("{model}", rank=8).result()
    tokenizer = client.get_tokenizer()
    tokens = tokenizer.encode("look: the circle is blue. look: the square is red.")
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={{"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}},
    )
    for step in range(60):
        passed = client.forward_backward([datum], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=3e-3))
        print(step, passed.result().metrics["loss:sum"] / len(tokens))
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(tokens[:6])
    answer = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=16, temperature=0)).result()
    print(tokenizer.decode([*tokens[:6], *answer.sequences[0].tokens]))  # what it has learned by heart
"""


def main(arguments: Sequence[str] | None = None, config: ServeConfig | None = None) -> int:
    """Parses the command line, serves until it is interrupted, and returns the exit status."""
    with exit_status(arguments, resumes=False) as status:
        require_extra("serve", "dataproto serve", "starlette", "uvicorn")
        serve(config or parse(status.arguments), status.arguments)
    return status.code


def serve(config: ServeConfig, arguments: Sequence[str]) -> None:
    """Serves until the program is interrupted or terminated.

    Args:
        arguments: the command line of ``config``, which the front process reads again.

    Raises:
        InvalidConfig: the port is taken, the state directory is in use or of other models, or a process cannot start.
    """
    os.umask(0o077)
    if config.engine.sampler == "vllm":
        require_extra("vllm", "--sampler vllm", "vllm")
    models: dict[str, str | None] = config.models or {name: str(tiny_model(config.state)) for name in TINY_NAMES}
    for name, path in models.items():
        if path is not None and not (Path(path) / "config.json").exists():
            raise InvalidConfig(f"model {name}={path}: there is no checkpoint, which would have a config.json")
    options = json.dumps({"models": models} | asdict(config.engine))
    read_keys(config.api_keys, made(config.state))
    check_models(models, config.state)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Supervisor(config.state, config.host, config.port, arguments, BACKEND, options) as supervisor:
        print(how_to_use(config, supervisor.port, next(iter(models))), flush=True)
        try:
            supervisor.run()
        except KeyboardInterrupt:
            print("\nstopped: the same command continues the runs", flush=True)


def made(directory: Path) -> Path:
    """The state directory. Raises `InvalidConfig` if it is a file or may not be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"--state {directory} cannot be made: {error.strerror}; choose another directory"
        ) from error
    return directory


def check_models(models: Mapping[str, str | None], state: Path) -> None:
    """Records which checkpoint each name stands for. A name of a hub stands for itself.

    Raises:
        InvalidConfig: a name stood for another one before, whose adapters the state directory has.
    """
    file = state / "models.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    found = {name: checkpoint_digest(Path(path)) for name, path in models.items() if path is not None}
    for name, digest in found.items():
        if known.get(name, digest) != digest:
            raise InvalidConfig(
                f"model {name}={models[name]} is another checkpoint than the one of this name before, whose adapters --state "
                f"{state} has: give that one, this one another name, or another --state"
            )
    new = file.with_suffix(".new")
    new.write_text(json.dumps(known | found, indent=1))
    new.replace(file)


def checkpoint_digest(path: Path) -> str:
    """Of the configuration of a checkpoint, and of the sizes and first megabytes of its files of weights, wherever they lie."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + opened.read(1 << 20))
    return digest.hexdigest()


def tiny_model(state: Path) -> Path:
    """The checkpoint of the small model below the state directory, made once: it is whole or absent, as a start may be killed."""
    path = made(state) / "tiny-model"
    if not (path / "config.json").exists():
        from recipes.demo.tiny_model import make_tiny_model, model_of_run  # which loads torch

        model_of_run(path, True, make_tiny_model)
    return path.resolve()


def how_to_use(config: ServeConfig, port: int, model: str) -> str:
    """The lines that a client's shell needs, and a program that works."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    key = "tml-..." if config.api_keys else f'"$(cat {(config.state / "api-key").resolve()})"'
    return USE.format(url=f"http://{host}:{port}", key=key, model=model)
