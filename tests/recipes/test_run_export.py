"""A run's checkpoint as a model in the dtype that it is served in."""

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from helpers.checkpoints import write_checkpoint
from recipes.export.__main__ import main
from workers import ActorConfig, ActorWorker


def test_an_exported_checkpoint_loads_with_its_tokenizer(tmp_path, capsys):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    worker = ActorWorker(ActorConfig(path))
    with torch.no_grad():
        worker.module.model.lm_head.weight.add_(1.0)
    worker.save(tmp_path / "global_step_3" / "actor")
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "global_step_3" / "actor" / "huggingface")
    assert main([str(tmp_path / "global_step_3"), str(tmp_path / "out")]) == 0
    assert "model: " in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, worker.module.model.lm_head.weight.bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("x")["input_ids"]


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no checkpoint of an actor" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "out"), "--dtype", "int8"]) == 2
