"""The command: its options, what it prints, and that the printed program works."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataproto.errors import InvalidConfig
from dataproto_server.command import ENGINE, Child, check_models, listening, made, tiny_model
from dataproto_server.config import LimitsConfig, ServeConfig, parse
from dataproto_server.keys import Keys, read_keys

NOTHING_HEAVY = """
import sys
import dataproto_server.routes.application, dataproto_server.command, dataproto_server.command
assert not {"torch", "transformers", "tinker", "ray", "vllm"} & set(sys.modules), set(sys.modules)
"""


def test_options_say_what_is_impossible(tmp_path):
    config = parse(["--model", "a=/models/a", "b", "--keep-last", "3", "--max-images", "2"])
    assert (config.models, config.keep_last, config.limits.max_images) == ({"a": "/models/a", "b": None}, 3, 2)
    for options, told in (
        ({"host": "0.0.0.0"}, "give a file of keys with --api-keys"),
        ({"poll_seconds": 50}, "at most 40"),
        ({"port": 70_000}, "port=70000"),
        ({"snapshot_steps": 0}, "snapshot_steps=0"),
        ({"gap_seconds": 0}, "gap_seconds"),
    ):
        with pytest.raises(InvalidConfig, match=told):
            ServeConfig(**options)
    with pytest.raises(InvalidConfig, match="max_images=0: must be above 0"):
        LimitsConfig(max_images=0)
    with pytest.raises(InvalidConfig, match="--on has ended: dataproto serve computes on the machine"):
        parse(["--on", "ray"])


def test_a_file_of_keys_is_read_strictly_and_an_own_key_is_private(tmp_path):
    keys = read_keys(None, tmp_path)
    key = (tmp_path / "api-key").read_text()
    assert keys.owner(key) == "local"
    assert read_keys(None, tmp_path).owner(key) == "local"  # the same one at the next start
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("api-key", "signing-secret")] == [0o600, 0o600]
    file = tmp_path / "keys"
    ann, bob = ("a" * 64, "b" * 64)
    for text, told in (
        ("ann: tml-plain", "keys, line 1: must be 'name: sha256"),
        ("# none\n", "has no key"),
        (f"ann: {ann}\n\nann: {bob}\n", "keys, line 3: 'ann' has a key already"),
        (f"ann: {ann}\nbob: {ann}\n", "keys, line 2: 'bob' has the same key as 'ann'"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidConfig, match=told):
            read_keys(file, tmp_path)


def test_an_empty_key_is_nobodys_and_an_empty_file_of_one_is_refused(tmp_path):
    assert read_keys(None, tmp_path).owner(None) is None
    assert read_keys(None, tmp_path).owner("") is None
    assert Keys({hashlib.sha256(b"").hexdigest(): "ann"}, b"secret").owner(None) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api-key", "signing-secret"]
    for name in ("api-key", "signing-secret"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text("")  # a crash of an earlier version
        with pytest.raises(InvalidConfig, match=f"{name} is empty: remove it"):
            read_keys(None, tmp_path)
        (tmp_path / name).write_text(text)


def test_a_signature_holds_for_its_path_and_time(tmp_path):
    keys = read_keys(None, tmp_path)
    signature = keys.signature("a/b", 100)
    assert keys.signed("a/b", 100, signature, 99)
    assert not keys.signed("a/b", 100, signature, 100)
    assert not keys.signed("a/c", 100, signature, 99)
    assert not keys.signed("a/b", 101, signature, 99)
    assert not keys.signed("a/b", 100, "é" + signature[1:], 99)
    assert not keys.signed("a/b", 100, "\udc80", 99)


@pytest.mark.slow
def test_a_process_that_is_killed_at_its_start_starts_again_after_a_pause(monkeypatch):
    pauses: list[float] = []
    sleep, here = time.sleep, threading.get_ident()

    def note(seconds: float) -> None:
        pauses.append(seconds) if threading.get_ident() == here else sleep(seconds)

    monkeypatch.setattr("dataproto_server.command.SHORT_LIFE_SECONDS", 1e9)
    monkeypatch.setattr("dataproto_server.command.time.sleep", note)
    child = Child("front", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", [], os.environ)
    for _ in range(3):
        child.process.wait()
        child.look()
    found = list(pauses)
    child.stop()
    assert found == [0.2, 0.4, 0.8]


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_given_up_however_long_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr("dataproto_server.command.SHORT_LIFE_SECONDS", 0.0)
    child = Child("engine", "raise SystemExit(3)", [], os.environ, tmp_path / "mark")
    for _ in range(4):
        child.process.wait()
        child.look()
    child.process.wait()
    with pytest.raises(InvalidConfig, match=r"the engine process cannot start \(exit status 3\)"):
        child.look()


@pytest.mark.slow
def test_a_mistake_ends_the_first_start_of_an_engine_and_no_later_one(tmp_path):
    mark = tmp_path / "mark"
    child = Child("engine", "raise SystemExit(2)", [], os.environ, mark)
    child.process.wait()
    with pytest.raises(InvalidConfig, match=r"the engine process cannot start \(exit status 2\)"):
        child.look()
    mark.touch()
    for _ in range(2):  # it had started, and then ends in a start
        child.look()
        child.process.wait()
    assert child.failures == 1


@pytest.mark.slow
def test_a_process_without_a_mark_that_has_lived_long_starts_again_after_a_mistake(monkeypatch):
    child = Child("front", "raise SystemExit(2)", [], os.environ)
    for seconds in (0.0, 10.0):  # it has lived long, and then ends in a start
        monkeypatch.setattr("dataproto_server.command.SHORT_LIFE_SECONDS", seconds)
        child.process.wait()
        child.look()
    child.process.wait()
    assert child.failures == 1


@pytest.mark.slow
def test_a_mistake_that_keeps_an_engine_from_starting_is_one_line(tmp_path):
    own = "from dataproto.errors import InvalidConfig\n\ndef make(options):\n    raise InvalidConfig('no such model')\n"
    done = start_of_own_engine(own, tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "error: no such model"
    assert "Traceback" not in done.stderr
    done = start_of_own_engine(own, tmp_path, "--traceback")
    assert done.returncode == 2
    assert "own_engine.py" in done.stderr.partition("Traceback")[2]


@pytest.mark.slow
def test_an_engine_whose_models_cannot_be_loaded_ends_before_the_front_process_can_connect(tmp_path):
    own = "class Own:\n    def start(self):\n        raise SystemExit(7)\n\ndef make(options):\n    return Own()\n"
    assert start_of_own_engine(own, tmp_path).returncode == 7
    assert not (tmp_path / "engine").exists()


def start_of_own_engine(source, tmp_path, *arguments):
    """The end of an engine's process whose backend the function ``make`` of this source makes."""
    (tmp_path / "own_engine.py").write_text(source)
    read, write = os.pipe()
    told = {"engine": str(tmp_path / "engine"), "pipe": read, "arguments": list(arguments)}
    code = ENGINE.format(**told, factory="own_engine:make", options="{}")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[read],
        env=os.environ | {"PYTHONPATH": path},
        timeout=100,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(read)
    os.close(write)
    return done


def test_an_answer_is_sent_without_delay():
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_the_front_process_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def with_this_source() -> dict[str, str]:
    """The environment of a process that finds these packages in any working directory, whether or not they are installed."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.long
def test_without_arguments_it_serves_a_small_model_and_prints_a_program_that_works(tmp_path):
    environment = with_this_source()
    code = "import sys; from recipes.commands import main; sys.exit(main(['serve', '--port', '0']))"
    command = [sys.executable, "-c", code]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        while not lines or "decode(" not in lines[-1]:
            line = server.stdout.readline()
            assert line, "the server ended"
            lines.append(line)
        text = "".join(lines)
        exports = dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))
        exports["TINKER_API_KEY"] = (tmp_path / "outputs/serve/api-key").read_text()
        program = text[text.index("import tinker") :]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environment | exports,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        losses = [float(line.split()[1]) for line in done.stdout.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]
        assert losses[-1] < 0.6 * losses[0]
        assert "look: the circle is blue. look:" in done.stdout  # which it has learned by heart
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


@pytest.mark.slow
def test_a_missing_checkpoint_is_told_in_one_line(tmp_path):
    code = "import sys; from recipes.commands import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--model", f"a={tmp_path}/nothing"]
    done = subprocess.run(command, cwd=tmp_path, env=with_this_source(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        f"error: model a={tmp_path}/nothing: there is no checkpoint, which would have a config.json",
    )


def test_a_name_stands_for_the_same_checkpoint_as_before(tmp_path):
    """Of one with other weights, adapters of the same shapes would go on as if nothing were."""
    for name, number in (("one", 1.0), ("copy", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": torch.full((2,), number)}, tmp_path / name / "model.safetensors")
    for path in ("one", "copy"):  # it may move
        check_models({"m": str(tmp_path / path), "hub/name": None}, tmp_path)
    check_models({"n": str(tmp_path / "other")}, tmp_path)
    with pytest.raises(InvalidConfig, match=r"model m=.*other is another checkpoint than the one of this name before"):
        check_models({"m": str(tmp_path / "other")}, tmp_path)
    check_models({"m": str(tmp_path / "one")}, tmp_path)


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for state in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(InvalidConfig, match=rf"--state {state} cannot be made: .*; choose another directory"):
            made(state)


def test_the_small_model_is_whole_or_absent(tmp_path, monkeypatch):
    def interrupted(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("recipes.demo.tiny_model.make_tiny_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = tiny_model(tmp_path)
    assert path == tmp_path / "tiny-model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in path.iterdir()}
    assert list(tmp_path.iterdir()) == [path]
