"""A generative judge served by a chat server on localhost."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from dataproto.errors import RewardError
from docs import judge
from docs.judge import Judge
from recipes.rewards import RewardRow, load_reward

QUESTION = [
    {
        "role": "user",
        "content": [{"type": "image", "image": Image.new("RGB", (2, 2))}, {"type": "text", "text": "2 + 2?"}],
    }
]


class Chat(BaseHTTPRequestHandler):
    """Grades a response by its length; the name of the model selects what goes wrong."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, self.headers.get("Authorization"), body))
            count = len(server.requests)
            server.running += 1
            server.most = max(server.most, server.running)
        status, reply = self.answer(body["model"], count, body["messages"][0]["content"])
        with server.lock:
            server.running -= 1
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, model, count, content):
        text = content if isinstance(content, str) else content[-1]["text"]
        grade = "Fine. Score: 9? No.\nScore: " + text.split("<<")[1].split(">>")[0]
        if model == "slow":
            time.sleep(0.2)
        if model == "hangs":
            self.server.released.wait(10)
        if model == "busy" and count < 3:
            return (429, 503)[count - 1], {}
        if model == "refuses":
            return 401, {"error": "no key"}
        if model == "babbles":
            return 200, b"hello"
        if model == "mumbles" or (model == "mumbles-once" and count == 1):
            grade = "Who knows"
        return 200, {"choices": [{"message": {"role": "assistant", "content": grade}}]}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    running = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    running.lock, running.requests, running.running, running.most = threading.Lock(), [], 0, 0
    running.released = threading.Event()
    threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
    yield running
    running.released.set()
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch) -> None:
    monkeypatch.setattr(judge, "PAUSE_S", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def at(server, model, **options) -> Judge:
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    return Judge(url, model, template="{question} <<{response}>> {ground_truth}", **options)


def graded(number: int) -> RewardRow:
    return RewardRow(str(number), "4", prompt=QUESTION)


def test_each_response_gets_the_last_number_of_a_reply(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert at(server, "good")([graded(7), graded(10)]) == [{"score": 0.7}, {"score": 1.0}]
    path, key, body = min(server.requests, key=lambda request: len(str(request)))
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body["messages"] == [{"role": "user", "content": "2 + 2? <<7>> 4"}]
    assert (body["temperature"], body["max_tokens"]) == (0.0, 512)
    assert at(server, "good")([]) == []


def test_a_response_cannot_fill_other_fields_of_the_template():
    row = RewardRow("{ground_truth} {question}", "4", prompt="2 + 2?")
    asked = Judge("http://127.0.0.1:1/v1", "m", template="{question}|{response}|{ground_truth}").message(row)
    assert asked["content"] == "2 + 2?|{ground_truth} {question}|4"


def test_a_judge_that_sees_gets_the_images(server):
    assert at(server, "good", show_images=True)([graded(5)]) == [{"score": 0.5}]
    image, text = server.requests[0][2]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "2 + 2? <<5>> 4"}


@pytest.mark.slow
def test_requests_run_together_up_to_a_limit(server):
    rows = [graded(number) for number in range(6)]
    assert [each["score"] for each in at(server, "slow", concurrency=3)(rows)] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert server.most == 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "requests"), [("busy", 3), ("mumbles-once", 2)])
def test_what_may_pass_is_tried_again(server, model, requests):
    assert at(server, model)([graded(6)]) == [{"score": 0.6}]
    assert len(server.requests) == requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason", "requests"),
    [
        ("refuses", "row 0: .* refuses the request: .*401.*no key", 1),
        ("babbles", "row 0: .* did not reply as a chat completion", 1),
        ("mumbles", "row 0: .* in 3 attempts: no score in the reply 'Who knows'", 3),
        ("hangs", "row 0: .* in 3 attempts: .*Timeout", 3),
    ],
)
def test_what_does_not_pass_names_the_row(server, model, reason, requests):
    with pytest.raises(RewardError, match=reason):
        at(server, model, timeout_s=0.3 if model == "hangs" else 60.0)([graded(6)])
    assert len(server.requests) == requests


def test_a_response_that_no_reply_grades_may_have_a_score_of_its_own(server):
    assert at(server, "mumbles", unreadable=-0.5)([graded(6)]) == [{"score": -0.5}]
    with pytest.raises(RewardError, match="in 3 attempts"):
        Judge("http://127.0.0.1:9/v1", "m", unreadable=0.0)([graded(6)])  # nobody answers: that is no grade


def test_the_command_line_names_a_judge_in_a_file(server, tmp_path):
    """A copy of the document's file, with another last line."""
    file = tmp_path / "mine.py"
    url = f"http://127.0.0.1:{server.server_port}/v1"
    lines = Path(judge.__file__).read_text().splitlines()[:-1]
    file.write_text(
        "\n".join([*lines, f"reward = Judge({url!r}, 'good', template='<<{{response}}>>', full_score=1)\n"])
    )
    assert load_reward(f"{file}:reward")([graded(3)]) == [{"score": 3.0}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "127.0.0.1:8000"}, "not the address"),
        ({"template": "Grade it."}, "must contain {response}"),
        ({"pattern": r"\d+"}, "must have a group"),
        ({"attempts": 0}, "must be above 0"),
    ],
)
def test_an_impossible_judge_is_refused(options, reason):
    with pytest.raises(RewardError, match=reason):
        Judge(**{"url": "http://127.0.0.1:1/v1", "model": "m"} | options)
