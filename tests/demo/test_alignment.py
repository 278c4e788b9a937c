"""Pictures with names, the model's own text, and the two phases that teach them. The models here are tiny."""

import io
import json
import shutil
import tarfile
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from dataproto.errors import FileFormatError, InvalidConfig
from helpers.easy_vqa_files import write_easy_vqa
from helpers.tiny_prompts import tiny_tokenizer
from recipes.configs.make_vlm_config import MakeVLMConfig, TowerConfig
from recipes.data import easy_vqa_rows
from recipes.data.easy_vqa_rows import open_easy_vqa
from recipes.data.packages import digest
from recipes.demo import make_vlm
from recipes.demo.captions import DrawnCaptions, IconCaptions, read_icons
from recipes.demo.classes import COLOURS, SHAPES, draw_class
from recipes.demo.make_vlm import (
    Replay,
    align,
    main,
    own_answers,
    phases,
    questions_about,
    text_loss,
)
from recipes.demo.smolvlm import assemble, with_image_tokens

NAMES = {"RED APPLE": "Food & Drink", "HAT": "Objects", "GRINNING FACE": "Smileys & Emotion", "BOOKS": "Objects"}
INKS = {"a red apple": (200, 0, 0), "a hat": (0, 0, 200), "books": (0, 160, 0)}


def write_tarball(path, **changes):
    """A tarball with the layout of the package of emoji: squares in the colours of `INKS` on transparent ground."""
    files, listed = {}, []
    for number, (name, category) in enumerate(NAMES.items()):
        image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
        ink = next((ink for phrase, ink in INKS.items() if name.lower() in phrase), (9, 9, 9))
        image.paste((*ink, 255), (16, 16, 48, 48))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files[f"img/google/64/{number}.png"] = buffer.getvalue()
        entry = {"name": name, "category": category, "subcategory": "some", "has_img_google": True}
        listed.append(entry | {"image": f"{number}.png"} | changes)
    files["emoji.json"] = json.dumps(listed).encode()
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def icons(tmp_path_factory):
    return read_icons(write_tarball(tmp_path_factory.mktemp("icons") / "icons.tgz"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": len(tiny_tokenizer()), "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}
    tower = TowerConfig(width=32, depth=2, heads=2, image_size=32, patch_size=8)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **words))
    return assemble(tmp_path_factory.mktemp("vlm"), model, with_image_tokens(tiny_tokenizer()), tower)


def test_icons_have_names_and_white_ground(icons):
    assert {icon.phrase: icon.image.getpixel((32, 32)) for icon in icons} == INKS
    assert all((icon.image.size, icon.image.getpixel((0, 0))) == ((64, 64), (255, 255, 255)) for icon in icons)


def test_another_file_is_no_package_of_emoji(tmp_path):
    (tmp_path / "text.tgz").write_text("no tarball")
    for path in (tmp_path / "text.tgz", write_tarball(tmp_path / "faces.tgz", category="Smileys & Emotion")):
        with pytest.raises(FileFormatError, match=f"{path.name} is no package of emoji"):
            read_icons(path)


def test_captions_of_drawn_pictures_are_true():
    rows = DrawnCaptions(seed=1)
    seen = set()
    for place in range(200):
        picture = draw_class(place, seed=1)
        question, answer = (message["content"].removeprefix("<image>") for message in rows[place]["prompt"])
        asked = question.rstrip("?.").split()[-1]
        if answer in ("yes", "no"):
            assert asked in SHAPES or asked in COLOURS
            assert (answer == "yes") == (asked in (picture.shape, picture.colour))
        else:
            truth = {"picture": (picture.shape, picture.label), "shape": (picture.colour,)}[asked]
            assert any(each in answer for each in truth)
        seen.add((question.split()[0], answer in ("yes", "no")))
    assert seen == {("Describe", False), ("What", False), ("Is", True)}
    assert DrawnCaptions(1, "test")[0]["images"][0].tobytes() != rows[0]["images"][0].tobytes()


def test_captions_of_icons_are_true(icons):
    rows, answers = IconCaptions(icons, seed=1), set()
    for place in range(100):
        row = rows[place]
        (image,), (question, answer) = row["images"], (message["content"] for message in row["prompt"])
        inks = {colour for _, colour in image.getcolors(64 * 64)}
        (shown,) = (phrase for phrase, ink in INKS.items() if ink in inks)
        expected = {
            "Describe the picture.": f"A picture of {shown}.",
            "What is in the picture?": shown.split(" ", 1)[-1],
        }
        if "Is this" in question:
            expected[question.removeprefix("<image>")] = "yes" if f" {shown}?" in question else "no"
        assert answer == expected[question.removeprefix("<image>")]
        answers.add(answer)
    assert {"yes", "no", "hat", "A picture of books."} <= answers
    assert rows[3]["images"][0].tobytes() == IconCaptions(icons, seed=1)[3]["images"][0].tobytes()


@pytest.mark.slow
def test_own_answers_are_those_that_ended(checkpoint, tmp_path, icons):
    questions = questions_about([icon.phrase for icon in icons], seed=0, count=24)
    answers = own_answers(checkpoint, questions, seed=0)
    assert 0 < len(answers) < 24  # a random model ends at random
    assert own_answers(checkpoint, questions, seed=0) == answers
    assert {question for question, _ in answers} <= set(questions)
    assert all(answer and "<|im_end|>" not in answer for _, answer in answers)
    file = tmp_path / "replay.json"
    file.write_text(json.dumps({"answers": answers, "loss": 1.5}))
    replay = Replay.of(checkpoint, [], 0, file)  # asks nobody
    assert replay == Replay(answers, 1.5)
    assert len(replay.rows) + len(replay.held_out) == len(answers)


def test_the_loss_of_text_is_that_of_the_answers_tokens(checkpoint):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    tokenizer = with_image_tokens(tiny_tokenizer())
    pairs, losses = (("Find x.", "the angle"), ("Why?", "angle of the triangle")), []
    for question, answer in pairs:
        prompt = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        ids = torch.tensor([prompt + tokenizer(f"{answer}<|im_end|>")["input_ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1]
        log_probs[:, model.config.image_token_id] = -torch.inf  # which the policy never samples
        log_probs = log_probs.log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        losses += (-log_probs[:, 0]).tolist()
    rows = Replay(pairs, 0.0).held_out + Replay(pairs, 0.0).rows
    assert text_loss(checkpoint, rows) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.slow
def test_the_tower_learns_first_and_then_all_weights(checkpoint, icons, tmp_path, monkeypatch):
    monkeypatch.setattr(make_vlm, "EVAL_ROWS", 8)
    config = MakeVLMConfig(output_dir=tmp_path / "vlm", steps=4, batch_size=8, lr=1e-2)
    shutil.copytree(checkpoint, config.output_dir)
    replay = Replay(tuple((f"What is {number}?", "the angle of the triangle") for number in range(20)), 0.0)
    run = phases(config, icons, open_easy_vqa(write_easy_vqa(tmp_path / "asked.whl")), replay)
    before = parts_of(config.output_dir)
    align(config.output_dir, config, run[:1])
    first = parts_of(config.output_dir)
    changed = [before[part] != first[part] for part in ("vision_model", "connector", "text_model")]
    assert changed == [True, True, False]
    resumed = replace(config, resume=True, num_workers=1)  # the first phase is done and does not run again
    report = align(config.output_dir, resumed, run)
    assert report.is_file()
    second = parts_of(config.output_dir)
    assert all(first[part] != second[part] for part in first)
    settings = [json.loads((config.run_dir / phase.name / "config.json").read_text()) for phase in run]
    assert [each["compute"]["freeze_language"] for each in settings] == [True, False]


@pytest.mark.slow
def test_the_command_teaches_the_model_and_describes_it(checkpoint, tmp_path, monkeypatch, capsys):
    """With packages of the same layout in the cache, and few questions; nothing is downloaded."""
    monkeypatch.setattr(make_vlm, "EVAL_ROWS", 8)
    monkeypatch.setattr(make_vlm, "ASKED", 40)
    for module, name, path in (
        (make_vlm, "ICONS", write_tarball(tmp_path / "icons.tgz")),
        (easy_vqa_rows, "EASY_VQA", write_easy_vqa(tmp_path / "asked.whl")),
    ):
        pinned = replace(getattr(module, name), file=path.name, sha256=digest(path))
        monkeypatch.setattr(module, name, pinned)
    path = shutil.copytree(checkpoint, tmp_path / "vlm")
    (path / "README.md").write_text("assembled")
    arguments = ["--output-dir", str(path), "--steps", "2", "--batch-size", "4", "--cache", str(tmp_path)]
    assert main([*arguments, "--resume"]) == 0
    said, card = capsys.readouterr().out, (path / "README.md").read_text()
    before = json.loads((tmp_path / "vlm-alignment" / "replay.json").read_text())["loss"]
    assert f"held-out text: {before:.3f} nats a token before" in said
    assert f"{before:.3f} nats a token before training" in card
    assert "for 1 updates of 4 captions" in card
    assert all((tmp_path / "vlm-alignment" / name / "report.html").is_file() for name in ("tower", "whole"))
    assert main(arguments) == 2  # without --resume the directory is left alone
    with pytest.raises(InvalidConfig, match="steps=1: must be 0 or at least 2"):
        MakeVLMConfig(steps=1)


def parts_of(path):
    """Bytes of the weights of each part, from a checkpoint that is whole."""
    model, loading = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values()), loading
    parts = {}
    for name, weight in model.named_parameters():
        part = name.split(".")[1]
        parts[part] = parts.get(part, b"") + weight.detach().numpy().tobytes()
    return parts
