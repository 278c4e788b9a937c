"""The viewer's server: what it answers, to whom, and how much it sends."""

import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image

from dataproto.errors import FileFormatError, InvalidConfig
from helpers.kept_runs import scored_batch, write_run
from helpers.tiny_prompts import tiny_tokenizer
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.metrics_file import MetricsLog
from recipes.watch.pages import TEMPLATES
from recipes.watch.rollout_files import RolloutSample, save_rollouts
from recipes.watch.viewer import ViewerServer, main


@contextmanager
def serving(directory):
    with ViewerServer(directory) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, host=None, method="GET", accept="gzip", **asked):
    """Status, headers, body, and the number of bytes that were sent for the body."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    headers = {"Accept-Encoding": accept} | ({} if host is None else {"Host": host})
    connection.request(method, f"{path}?{urlencode(asked)}", headers=headers)
    answer = connection.getresponse()
    sent = answer.read()
    connection.close()
    body = gzip.decompress(sent) if answer.headers["Content-Encoding"] == "gzip" else sent
    return answer.status, answer.headers, body, len(sent)


def found(server, path, **asked):
    status, _, body, _ = ask(server, path, **asked)
    assert status == 200, body
    return json.loads(body)


def test_the_rows_of_a_step_come_with_their_tokens_and_pictures(tmp_path):
    with serving(write_run(tmp_path / "run")) as server:
        steps = found(server, "/api/run")["steps"]
        assert (list(steps["training"]), steps["held-out"]) == (["1", "2", "3"], {})
        rows, tokens = found(server, "/api/rows", step=2), found(server, "/api/tokens", step=2)
        assert [(row["uid"], row["sample"]) for row in rows[3:5]] == [("prompt-0", 3), ("prompt-1", 0)]
        assert "".join(tokens[3]["texts"]) == rows[3]["response"]
        assert rows[3]["response"].endswith("!!!")
        numbers = [len(tokens[3][name]) for name in ("tokens", "advantages", "engine_log_probs")]
        assert numbers == [rows[3]["length"]] * 3
        status, headers, body, _ = ask(server, f"/images/{rows[3]['images'][0]}")
        assert (status, headers["Content-Type"], body[:4]) == (200, "image/png", b"\x89PNG")
        assert "immutable" in headers["Cache-Control"]


def test_steps_written_while_it_serves_appear(tmp_path):
    with serving(tmp_path) as server:
        assert found(server, "/api/run")["steps"] == {"training": {}, "held-out": {}}
        assert ask(server, "/api/curves")[2] == b""
        kept = KeptRollouts(tmp_path, 8, tiny_tokenizer())
        with MetricsLog(tmp_path) as log:
            for step in (1, 2):
                kept.keep(step, scored_batch(["x", "y"], [0.0, step / 2], ["a", "a"]))
                log.log(step, {"critic/score/mean": step / 4})
                before = found(server, "/api/run")["steps"]["training"]
                assert list(before) == ["1", "2"][:step]
                assert b"<svg" in ask(server, "/api/curves")[2]
        kept.keep(2, scored_batch(["x", "y"], [0.75, 0.75], ["a", "a"]))  # a resumed run writes a step again
        after = found(server, "/api/run")["steps"]["training"]
        assert before["1"] == after["1"]
        assert before["2"] != after["2"]
        assert {row["reward"] for row in found(server, "/api/rows", step=2)} == {0.75}


def test_answers_of_evaluations_are_rows_too(tmp_path):
    save_rollouts(tmp_path, 5, [RolloutSample("k", "Find x.", "at 5", "3", 1.0, float("nan"))])
    with serving(tmp_path) as server:
        (row,) = found(server, "/api/rows", set="held-out", step=5)
        assert (row["key"], row["response"], row["accuracy"]) == ("k", "at 5", None)
        assert list(found(server, "/api/run")["steps"]["held-out"]) == ["5"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server that tests ask only."""
    with serving(write_run(tmp_path_factory.mktemp("served") / "run", steps=1)) as server:
        yield server


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost:1@evil.example", "", "10.0.0.1:80"]
)
def test_other_hosts_are_refused(shared, host):
    assert shared.server_address[0] == "127.0.0.1"
    for path in ("/", "/api/run", "/viewer.js"):
        status, _, body, _ = ask(shared, path, host=host)
        assert status == 403
        assert b"localhost" in body
        assert b"colour" not in body
    assert ask(shared, "/", host="localhost:9999")[0] == 200  # through a tunnel


@pytest.mark.parametrize(
    "path",
    ["/../metrics.jsonl", "/images/../../metrics.jsonl", "/images/..%2f..%2fmetrics.jsonl", "/metrics.jsonl", "/api/x"],
)
def test_nothing_else_of_the_machine_is_served(shared, path):
    assert ask(shared, path)[0] == 404


@pytest.mark.parametrize(
    ("path", "asked", "message"),
    [
        ("/api/rows", {"step": "-1"}, "step '-1'"),
        ("/api/rows", {"step": 99}, "step '99'"),
        ("/api/rows", {"step": 1, "set": "test"}, "no set 'test'"),
        ("/api/tokens", {}, "step ''"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(shared, path, asked, message):
    status, headers, body, _ = ask(shared, path, **asked)
    assert (status, headers["Content-Type"]) == (400, "text/plain; charset=utf-8")
    assert message in body.decode()


def test_a_damaged_file_is_named_and_writing_refused(tmp_path):
    with serving(write_run(tmp_path / "run", steps=1)) as server:
        (tmp_path / "run" / "rollouts" / "training" / "step_1.jsonl").write_text("nonsense\n")
        status, _, body, _ = ask(server, "/api/rows", step=1)
        assert status == 500
        assert b"step_1.jsonl, line 1" in body
        assert ask(server, "/api/run", method="POST")[0] == 501


def test_text_of_rollouts_cannot_become_code(tmp_path):
    attack = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(1, scored_batch([attack], [1.0], ["<script>u"]))
    with MetricsLog(tmp_path) as log:
        log.log(1, {"val-core/<script>x</script>/acc/mean@1": 0.5})
    with serving(tmp_path) as server:
        _status, headers, body, _ = ask(server, "/api/rows", step=1)
        assert json.loads(body)[0]["response"] == attack
        assert headers["Content-Type"].startswith("application/json")
        assert headers["X-Content-Type-Options"] == "nosniff"
        curves = ask(server, "/api/curves")[2]
        assert b"<script" not in curves
        assert b"&lt;script&gt;" in curves
        policy = ask(server, "/")[1]["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
    code = (TEMPLATES / "viewer.js").read_text() + (TEMPLATES / "viewer.html").read_text()
    assert not any(
        word in code
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http:", "https:")
    )


def photograph(seed):
    """Smooth colours with the noise of a camera: 250 kB as PNG."""
    random = np.random.default_rng(seed)
    smooth = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (448, 336), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(smooth).astype(int) + random.integers(-6, 7, (336, 448, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@pytest.mark.slow
def test_rollouts_with_all_their_tokens_and_photographs_are_small(tmp_path):
    """With pictures of one colour they were; the photographs of 1,000 rollouts took 28 MB."""
    kept = KeptRollouts(tmp_path, 50, tiny_tokenizer())
    words = ["angle", "blue", "circle", "1.25", "therefore", "x", "=", "(b)"]
    for step in range(1, 5):
        texts = [" ".join(words[(row * place + step) % 8] for place in range(60)) for row in range(50)]
        batch = scored_batch(texts, [row % 7 / 7 for row in range(50)], [f"p{row // 10}" for row in range(50)])
        seen = [photograph(100 * step + group) for group in range(5)]
        for row, media in enumerate(batch["multi_modal_data"]):
            media["image"] = [seen[row // 10]]
        kept.keep(step, batch)
    with serving(tmp_path) as server:
        sent = sum(ask(server, path)[3] for path in ("/", "/viewer.js", "/viewer.css", "/report.css"))
        pictures = set()
        for step in range(1, 5):
            _, _, body, size = ask(server, "/api/rows", step=step)
            sent += size + ask(server, "/api/tokens", step=step)[3]
            pictures |= {name for row in json.loads(body) for name in row["images"]}
        answers = [ask(server, f"/images/{name}") for name in pictures]
        assert {headers["Content-Type"] for _, headers, _, _ in answers} == {"image/jpeg"}
        sent += sum(size for *_, size in answers)
    assert len(pictures) == 20
    assert sent < 4e6


def test_the_command_serves_until_it_is_interrupted(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=1)
    program = "import sys; from recipes.commands import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "view", str(run), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        line = process.stdout.readline()
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(2)
        assert process.wait(20) == 0
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "empty is not the directory of a run, which would have a config.json" in capsys.readouterr().err


def test_a_directory_of_runs_shows_their_curves_over_each_other_and_the_options_that_differ(tmp_path):
    for name, rate, rewards in (("slow", 1e-6, [0.25, 0.5]), ("fast <b>", 1e-5, [0.25, 0.875])):
        (tmp_path / name).mkdir()
        config = {"optimizer": {"lr": rate, "kind": "adamw"}, "run": {"output_dir": name, "steps": 2}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        rows = [{"step": step, "critic/score/mean": reward} for step, reward in enumerate(rewards, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other").mkdir()
    with serving(tmp_path) as server:
        status, _, body, _ = ask(server, "/")
    page = body.decode()
    assert status == 200
    assert "2 runs" in page
    (table,) = re.findall(r"<table.*?</table>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", table)]
    assert cells == [
        ["", "fast &lt;b&gt;", "slow"],
        ["steps", "2", "2"],
        ["Reward", "0.875", "0.5"],
        ["optimizer.lr", "1e-05", "1e-06"],
    ]
    assert page.count("<svg") == 1
    assert page.count('<polyline class="line"') == 2


def test_a_missing_directory_and_a_taken_port_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="not the directory of a run"):
        ViewerServer(tmp_path / "absent")
    with serving(tmp_path) as server, pytest.raises(InvalidConfig, match="give another one with --port"):
        ViewerServer(tmp_path, server.server_address[1])
