"""A run's checkpoint as a model in the dtype that it is served in."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from helpers.checkpoints import write_checkpoint
from recipes import export
from recipes.configs.export_config import ModelExportConfig, parse
from recipes.export import main
from workers import ActorConfig, ActorWorker


def test_an_exported_checkpoint_loads_with_its_tokenizer(tmp_path, capsys):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    worker = ActorWorker(ActorConfig(path))
    with torch.no_grad():
        worker.module.model.lm_head.weight.add_(1.0)
    worker.save(tmp_path / "global_step_3" / "actor")
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "global_step_3" / "actor" / "huggingface")
    assert main([str(tmp_path / "global_step_3"), str(tmp_path / "out")]) == 0
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} >= {"model", "processor"}
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, worker.module.model.lm_head.weight.bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("x")["input_ids"]
    options = (tmp_path / "out" / "config.yaml").read_text()
    assert f"# CHECKPOINT: {tmp_path / 'global_step_3'}\n" in options
    again = ["--config", str(tmp_path / "out" / "config.yaml")]
    assert parse(["other", "place", *again]) == ModelExportConfig(Path("other"), Path("place"))
    assert parse(["other", "place", *again, "--dtype", "float32"]).dtype == "float32"


def test_an_export_says_how_its_processor_is_loaded(tmp_path, monkeypatch):
    def needs_torchvision(path):
        raise ImportError(
            "\nQwen2VLVideoProcessor requires the Torchvision library but it was not found. Check out\nthe page"
        )

    monkeypatch.setattr(export.AutoProcessor, "from_pretrained", needs_torchvision)
    assert export.how_to_load(tmp_path) == (
        "processor: AutoTokenizer and AutoImageProcessor load its parts; AutoProcessor does not here: "
        "Qwen2VLVideoProcessor requires the Torchvision library but it was not found"
    )
    monkeypatch.setattr(export.AutoProcessor, "from_pretrained", lambda path: path)
    assert export.how_to_load(tmp_path) == "processor: AutoProcessor loads it"


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no checkpoint of an actor" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "out"), "--dtype", "int8"]) == 2


class Hub(BaseHTTPRequestHandler):
    """What the hub's API answers to an upload of small files."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"]) if "Content-Length" in self.headers else 0
        body = self.rfile.read(length) if length else self.chunks()
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        url = f"http://127.0.0.1:{self.server.server_port}/mine/tiny"
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self.reply(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self.reply(200, {"url": url, "name": "mine/tiny"})
        if self.path == "/api/models/mine/tiny/preupload/main":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.reply(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        if self.path == "/api/models/mine/tiny/commit/main":
            return self.reply(200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/commit/{'0' * 40}"})
        return self.reply(404, {"error": f"{self.path} is unknown"})

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Authorization"), b""))
        self.reply(404, {"error": "not found"})

    def chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        return found

    def reply(self, status, value) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def export_and_push(hub, folder, token):
    """The command in a process of its own, whose hub is the server."""
    path = write_checkpoint("qwen2_5_vl", folder / "model")
    source = folder / "global_step_3" / "actor" / "huggingface"
    source.parent.mkdir(parents=True)
    Path(path).rename(source)
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "recipes.export", str(folder / "global_step_3"), str(folder / "out")]
    return subprocess.run(
        [*command, "--push-to-hub", "mine/tiny"], env=os.environ | own, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_an_export_is_pushed_to_the_hub(hub, tmp_path):
    done = export_and_push(hub, tmp_path, "hf_right")
    assert done.returncode == 0, done.stderr
    created = json.loads(next(body for path, _, body in hub.requests if path == "/api/repos/create"))
    assert (created["name"], created["organization"]) == ("tiny", "mine")
    assert created.get("private") or created.get("visibility") == "private"  # by the hub client's version
    commit = next(body for path, _, body in hub.requests if path.endswith("/commit/main"))
    lines = [json.loads(line) for line in commit.decode().splitlines()]
    pushed = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
    }
    assert {name: (tmp_path / "out" / name).read_bytes() for name in pushed} == pushed
    assert {"config.json", "model.safetensors"} <= pushed.keys()
    assert set(pushed) == {file.name for file in (tmp_path / "out").iterdir()} - {"config.yaml"}


@pytest.mark.slow
def test_a_login_that_the_hub_refuses_costs_no_export(hub, tmp_path):
    done = export_and_push(hub, tmp_path, "hf_wrong")
    assert done.returncode == 2
    assert "error: push_to_hub=mine/tiny: " in done.stderr
    assert "401" in done.stderr
    assert not (tmp_path / "out").exists()
