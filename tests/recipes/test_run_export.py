"""A run's checkpoint as a model in the dtype that it is served in."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from helpers.checkpoints import write_checkpoint
from helpers.file_limits import files_of_at_most
from helpers.geo3k_files import drawing
from recipes import export
from recipes.configs.export_config import ModelExportConfig, parse
from recipes.demo.tiny_model import make_tiny_model
from recipes.export import main
from rollout.prompts import PromptBuilder
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


def test_the_page_loads_an_export_without_torchvision(tmp_path, capsys):
    make_tiny_model(tmp_path / "model")
    drawing(0, (84, 56)).save(tmp_path / "dots.png")
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from PIL import Image\n.*?)```", page, re.DOTALL)
    for name, place in (("OUTPUT", "model"), ("dots.png", "dots.png")):
        code = code.replace(f'"{name}"', repr(str(tmp_path / place)))
    found: dict[str, Any] = {}
    exec(code, found)
    assert capsys.readouterr().out.strip()
    row = {"prompt": [{"role": "user", "content": "<image>How many dots?"}], "images": [tmp_path / "dots.png"]}
    ours, theirs = PromptBuilder.from_pretrained(tmp_path / "model", 100)([row]), found["inputs"]
    for name, mine in (("input_ids", ours["input_ids"]), ("mm_token_type_ids", ours["mm_token_type_ids"])):
        assert torch.equal(theirs[name], mine.to(torch.int64)), name
    (media,) = ours["multi_modal_inputs"]
    assert all(torch.equal(theirs[name], media[name]) for name in ("pixel_values", "image_grid_thw"))


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


def test_an_export_to_a_full_disk_names_the_way_out_and_leaves_nothing(tmp_path, capsys):
    write_checkpoint("qwen2_5_vl", tmp_path / "run" / "actor" / "huggingface")
    with files_of_at_most(100 * 1024):
        assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert re.search(
        r"out could not be written: .*too large.*; make room there, or choose another output\n", capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no checkpoint of an actor" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "out"), "--dtype", "int8"]) == 2
    assert main([str(tmp_path), str(tmp_path / "out"), "--push-to-hub", "mine/tiny"]) == 2
    assert "hf upload ORG/NAME OUTPUT" in capsys.readouterr().err
