"""A reward over HTTP with a local server."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dataproto.errors import RewardError
from docs.judge import Judge
from recipes.grpo import main
from recipes.rewards import RewardRow, load_reward, remote_reward
from recipes.rewards import reward_servers as module
from workers.roles.reward import RewardWorker

ROWS = [RewardRow("four", "4", "drawn", {"hint": 1}), RewardRow("five", "4")]


class Server(BaseHTTPRequestHandler):
    """Scores by length; the path selects an error."""

    failures = 0

    def do_POST(self) -> None:
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
        body, status = json.dumps({"results": [{"score": len(row["solution_str"])} for row in rows]}).encode(), 200
        if self.path == "/refuses":
            status = 400
        if self.path == "/fails-once":
            Server.failures += 1
            status = 503 if Server.failures == 1 else 200
        if self.path == "/babbles":
            body = b"hello"
        if self.path == "/forgets":
            body = b"{}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def test_a_server_scores_the_rows(address):
    assert load_reward(f"{address}/score")(ROWS) == [{"score": 4}, {"score": 4}]
    assert load_reward(f"{address}/score")([]) == []


def test_a_request_that_fails_once_is_repeated(address):
    assert load_reward(f"{address}/fails-once")(ROWS) == [{"score": 4}, {"score": 4}]
    assert Server.failures == 2


@pytest.mark.parametrize(
    ("path", "reason"), [("refuses", "1 attempts"), ("babbles", "not JSON"), ("forgets", "without a list")]
)
def test_invalid_answers_raise_an_error(address, path, reason):
    with pytest.raises(RewardError, match=reason):
        load_reward(f"{address}/{path}")(ROWS)


def test_invalid_addresses_and_unreachable_servers_raise_an_error():
    with pytest.raises(RewardError, match="is not the address"):
        remote_reward("ftp://somewhere")
    with pytest.raises(RewardError, match="3 attempts"):
        remote_reward("http://127.0.0.1:9/", timeout_s=1)(ROWS)


@pytest.mark.parametrize("answer", ["yes", "none"])
def test_a_server_that_answers_anything_can_be_reached(address, answer, monkeypatch):
    """Servers of rewards answer POST alone."""
    if answer == "yes":
        load_reward(f"{address}/score", here=True)
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(module, "KNOCK_S", 0.2)
        load_reward(f"http://127.0.0.1:{silent.getsockname()[1]}/", here=True)


def test_a_server_that_refuses_connections_is_told_at_the_start(tmp_path, capsys):
    """It was told at the first evaluation, after the models were loaded."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/score"
    file = tmp_path / "judging.py"
    file.write_text(f"from docs.judge import Judge\n\nreward = Judge({url!r}, model='m')\n")
    for name in (url, f"{file}:reward"):
        assert main(["--reward", name, "--steps", "1", "--output-dir", str(tmp_path / "run")]) == 2
        told = capsys.readouterr()
        assert re.search(rf"^error: the reward's server at {url} cannot be reached \(3 attempts\)", told.err, re.M)
        assert "loading" not in told.out
    assert not (tmp_path / "run").exists()
    for reward in (remote_reward(url), Judge(url, "m")):
        with pytest.raises(RewardError, match="cannot be reached"):
            RewardWorker(reward, "nowhere")
