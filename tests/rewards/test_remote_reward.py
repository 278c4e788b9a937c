"""A reward over HTTP with a local server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dataproto.errors import RewardError
from recipes.rewards import RewardRow, load_reward
from recipes.rewards import reward_functions as module

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
    threading.Thread(target=server.serve_forever, daemon=True).start()
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
        module.remote_reward("ftp://somewhere")
    with pytest.raises(RewardError, match="3 attempts"):
        module.remote_reward("http://127.0.0.1:9/", timeout_s=1)(ROWS)
