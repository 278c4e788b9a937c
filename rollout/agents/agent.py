"""What an agent is: a function of a task, or a command, that talks to the policy through a client of its own choice."""

import asyncio
import base64
import io
import json
import os
import shlex
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from dataproto.errors import InvalidConfig, raised_as
from rollout.prompts.sounds import wav_file

MOST_PROCESSES = 32
"""Processes of an agent at a time, of each engine, by default."""
EXIT_SECONDS = 0.05
"""Between looks at whether a process has ended."""
KEPT_BYTES = 1 << 16
"""Of what a process writes, from the end."""

Outcome = float | Mapping[str, Any] | None
"""The reward of an episode; or a dict with ``score`` and further numbers; or nothing, for a reward function that scores it."""


@dataclass(frozen=True)
class AgentTask:
    """What an agent gets: where the policy is, and what to do.

    ``base_url`` is that of OpenAI's clients, ``server_url`` that of Anthropic's. ``messages`` are those of the row, in the form
    of chat/completions with pictures as data URIs; ``tools`` are its tools. ``app`` is the policy as an ASGI application, for
    clients that need no connection: ``httpx.AsyncClient(transport=httpx.ASGITransport(task.app))``.
    """

    base_url: str
    server_url: str
    api_key: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    row: Mapping[str, Any]
    seed: int  # the same for all samples of a prompt
    app: Callable[..., Awaitable[None]] = field(repr=False)
    give: Callable[[float], None] = field(repr=False, default=lambda value: None)

    def reward(self, value: float) -> None:
        """Adds to the reward of the last turn that was answered."""
        self.give(value)


Agent = Callable[[AgentTask], Awaitable[Outcome] | Outcome]
"""An ``async`` function, of which all calls share one event loop; or a plain one, of which each call has its thread."""


def task_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a row in the form of chat/completions, with pictures as data URIs, and sounds as WAV files of 16
    bits.

    >>> task_messages([{"role": "user", "content": [{"type": "text", "text": "Go."}]}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'Go.'}]}]
    """
    found = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [_part(part) for part in content]
        found.append({**message, "content": content})
    return found


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    picture = part.get("image")
    if part.get("type") == "audio":
        data = base64.b64encode(wav_file(part["audio"])).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    if not isinstance(picture, Image.Image):
        if part.get("type") == "text":
            return dict(part)
        raise InvalidConfig(f"agents get texts, images and sounds: a row has a part of the type {part.get('type')!r}")
    file = io.BytesIO()
    picture.save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


class CommandAgent:
    """An agent that is a command, such as ``python my_agent.py``.

    Its process finds the policy by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MODEL, and the
    task as JSON on its standard input: ``messages``, ``tools``, ``seed``, and what JSON has of ``row``. The last line that it
    prints is the JSON of its reward; ``null``, or nothing, leaves it to the reward function.
    """

    def __init__(self, command: str, memory_gib: float | None = None, at_once: int = MOST_PROCESSES) -> None:
        """``memory_gib`` bounds the address space of each process. Further episodes begin as one of ``at_once`` ends. Raises
        `InvalidConfig` for a command that a shell could not read either, and for a program that is not there.
        """
        if at_once < 1:
            raise InvalidConfig(f"processes={at_once} must be at least 1")
        with raised_as(InvalidConfig, f"the command of the agent, {command!r}, cannot be read", ValueError):
            self.command, self.memory_gib, self.at_once = shlex.split(command), memory_gib, at_once
        if not self.command or shutil.which(self.command[0]) is None:
            wrong = "there is no such program, or its file may not be executed"
            raise InvalidConfig(f"the command of the agent, {command!r}, cannot run: {wrong}")

    async def __call__(self, task: AgentTask) -> Outcome:
        """Runs the command. Raises `RuntimeError` with the end of what it wrote on its standard error if it fails."""
        given = {"messages": task.messages, "tools": task.tools, "seed": task.seed, "row": _plain(task.row)}
        pipe, environment = asyncio.subprocess.PIPE, self._environment(task)
        command = self.command
        if self.memory_gib is not None:  # before it begins
            command = ["sh", "-c", f'ulimit -v {int(self.memory_gib * 2**20)} && exec "$@"', "sh", *command]
        process: Any = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
        reading = asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        try:
            with suppress(ConnectionError):  # it need not read its task
                process.stdin.write(json.dumps(given).encode())
                await process.stdin.drain()
            process.stdin.close()  # the end of its input
            while process.returncode is None:  # `Process.wait` also waits for processes that it has started
                await asyncio.sleep(EXIT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _kill_started(task.api_key)
            process.stdin.close()
            out, error = await reading
            await process.wait()
        if process.returncode:
            last = error.decode(errors="replace").strip()[-500:]
            kind = MemoryError if "MemoryError" in last else RuntimeError
            raise kind(f"{shlex.join(self.command)} ended with status {process.returncode}: {last}")
        lines = out.decode(errors="replace").strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError as problem:
            told = f"the last line that it printed is not the JSON of a reward: {lines[-1]!r:.200}"
            raise RuntimeError(told) from problem

    def _environment(self, task: AgentTask) -> dict[str, str]:
        openai = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key}
        anthropic = {"ANTHROPIC_BASE_URL": task.server_url, "ANTHROPIC_API_KEY": task.api_key}
        return {**os.environ, **openai, **anthropic, "MODEL": task.model}


def _kill_started(key: str) -> None:
    """Kills processes that the command of an episode has started in sessions of their own (on Linux): the key of the episode is
    in their environment.
    """
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if key.encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    """The last of what a process writes, however much that is."""
    kept = b""
    while chunk := await stream.read(KEPT_BYTES):
        kept = (kept + chunk)[-KEPT_BYTES:]
    return kept


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has of a row."""
    found = {}
    for name, value in row.items():
        with suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value))
    return found
