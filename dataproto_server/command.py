"""The command ``dataproto serve``: makes the small model if no other is given, starts the server, and says how to use it."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dataproto.errors import InvalidConfig
from dataproto.extras import require_extra
from dataproto_server.config import ServeConfig, parse
from dataproto_server.keys import read_keys
from dataproto_server.supervisor import Supervisor
from recipes.options import exit_status

ENGINE = "dataproto_server.engine:engine_from_json"
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
        require_extra("serve", "dataproto serve", "starlette", "uvicorn", "zstandard")
        serve(config or parse(status.arguments), status.arguments)
    return status.code


def serve(config: ServeConfig, arguments: Sequence[str]) -> None:
    """Serves until the program is interrupted or terminated.

    Args:
        arguments: the command line of ``config``, which the front process reads again.

    Raises:
        InvalidConfig: the port is taken, the state directory is in use, or a process cannot start.
    """
    os.umask(0o077)
    if config.engine.sampler == "vllm" and (config.on == "local" or config.ray.address is None):
        require_extra("vllm", "--sampler vllm", "vllm")  # a running cluster may have it where this Python lacks it
    models: dict[str, str | None] = config.models or {name: str(tiny_model(config.state)) for name in TINY_NAMES}
    for name, path in models.items():
        if path is not None and not (Path(path) / "config.json").exists():
            raise InvalidConfig(f"model {name}={path}: there is no checkpoint, which would have a config.json")
    cluster = {} if config.on == "local" else {config.on: asdict(config.ray)}
    options = json.dumps({"models": models} | cluster | asdict(config.engine))
    read_keys(config.api_keys, made(config.state))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Supervisor(config.state, config.host, config.port, arguments, ENGINE, options) as supervisor:
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


def tiny_model(state: Path) -> Path:
    """The checkpoint of the small model below the state directory, made once: it is whole or absent, as a start may be killed."""
    path = made(state) / "tiny-model"
    if not (path / "config.json").exists():
        from recipes.demo.tiny_model import make_tiny_model  # which loads torch

        with TemporaryDirectory(dir=state, prefix=".tiny-model-") as temporary:
            whole = Path(temporary) / path.name
            make_tiny_model(whole)
            whole.rename(path)
    return path.resolve()


def how_to_use(config: ServeConfig, port: int, model: str) -> str:
    """The lines that a client's shell needs, and a program that works."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    if config.api_keys is None:
        key = f'"$(cat {(config.state / "api-key").resolve()})"'
    else:
        key = "tml-..."
    return USE.format(url=f"http://{host}:{port}", key=key, model=model)
