#!/usr/bin/env bash
# httpx 0.28.1, httpcore 1.0.9: in a client that many tasks share, each request costs more the more connections are open.
#
# httpx's documents advise one client for all requests: it keeps connections, so that a request need not open one. So one expects
# 256 tasks that talk to one server at the same time to cost least through one client. But as a request begins, and again as it
# ends, the client's pool goes over all its connections several times and asks each idle one's socket whether the server has closed
# it. With 256 connections a request takes many times the processor time that it takes with one client for each task, each of which
# opens a connection of its own. Each such look also lets other threads of the process run, which then compete for the interpreter.
#
# Ends with 0 while httpx behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "httpx==0.28.1" "httpcore==1.0.9" "anyio==4.16.0" "h11==0.16.0"
cat >"$folder/clients.py" <<'PY'
import asyncio
import multiprocessing
import time
from contextlib import nullcontext

import httpx

TURNS = 4
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nup"


async def answer(reader, writer):
    while True:
        try:
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return writer.close()
        await asyncio.sleep(0.05)
        writer.write(ANSWER)


def serve(port):
    async def forever():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


def client():
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(), verify=False, trust_env=False)


async def talk(url, context):
    async with context as http:
        for _ in range(TURNS):
            assert (await http.get(url)).text == "up"


async def together(url, tasks, share):
    if not share:
        await asyncio.gather(*(talk(url, client()) for _ in range(tasks)))
        return
    async with client() as http:
        await asyncio.gather(*(talk(url, nullcontext(http)) for _ in range(tasks)))


def milliseconds(url, tasks, share):
    began = time.process_time()
    asyncio.run(together(url, tasks, share))
    return (time.process_time() - began) * 1000 / tasks / TURNS


if __name__ == "__main__":
    port = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port.get()}/"
    asyncio.run(together(url, 8, True))
    found = {(tasks, share): milliseconds(url, tasks, share) for tasks in (16, 256) for share in (True, False)}
    for (tasks, share), value in found.items():
        print(f"{tasks} tasks, {'one client' if share else 'a client each'}: {value:.2f} ms of processor time a request")
    server.terminate()
    raise SystemExit(found[256, True] < 3 * found[256, False])
PY
"$folder/env/bin/python" "$folder/clients.py"
# Seen on 2026-11-28, Python 3.11, x86-64, two cores:
# 16 tasks, one client: 2.10 ms of processor time a request
# 16 tasks, a client each: 1.37 ms of processor time a request
# 256 tasks, one client: 12.05 ms of processor time a request
# 256 tasks, a client each: 1.06 ms of processor time a request
