"""Sounds in kept rows, in answers of evaluations, on pages and in the terminal."""

import base64
import io
import json
import wave

import numpy as np
import soundfile
from test_viewer_server import ask, found, serving

from dataproto import DataProto, object_array
from helpers.kept_runs import load_kept
from helpers.tiny_prompts import tiny_tokenizer
from recipes.commands import main
from recipes.demo.tiny_model import make_tiny_processors
from recipes.watch.kept_rollouts import KeptRollouts
from recipes.watch.report import write_report
from recipes.watch.rollout_files import (
    load_rollouts,
    rollout_samples,
    save_rollouts,
)
from rollout.prompts.sounds import wav_file

SOUND = (0.5 * np.sin(np.arange(8000) / 7)).astype(np.float32)


def scored(rows=2):
    media = {"audio": [SOUND]}
    return DataProto.from_dict(
        non_tensors={
            "response_text": object_array(["c"] * rows),
            "score": object_array([1.0] * rows),
            "index": object_array(list(range(rows))),
            "raw_prompt": object_array([[{"role": "user", "content": "<audio>Which note?"}]] * rows),
            "multi_modal_data": object_array([dict(media) for _ in range(rows)]),
        }
    )


def test_a_kept_sound_is_a_file_that_players_read():
    samples, rate = soundfile.read(io.BytesIO(wav_file(SOUND)))
    assert rate == 16_000
    assert np.abs(samples - SOUND).max() < 1e-4  # 16 bits


def test_answers_of_evaluations_keep_each_sound_once_and_the_report_plays_it(tmp_path):
    rows = rollout_samples(scored(), 8)
    assert [(row.prompt, row.sounds) for row in rows] == [("Which note?", (wav_file(SOUND),))] * 2
    save_rollouts(tmp_path, 3, rows)
    assert [row.sounds for row in load_rollouts(tmp_path, 3)] == [row.sounds for row in rows]
    (file,) = (tmp_path / "rollouts" / "images").iterdir()
    uri = f"data:audio/wav;base64,{base64.b64encode(wav_file(SOUND)).decode()}"
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert f'<audio controls preload="metadata" src="{uri}"></audio>' in page
    assert "media-src data:" in page
    with serving(tmp_path) as server:
        assert [row["sounds"] for row in found(server, "/api/rows", set="held-out", step=3)] == [[file.name]] * 2
        status, headers, body, _ = ask(server, f"/images/{file.name}")
        assert (status, headers["Content-Type"], body) == (200, "audio/wav", wav_file(SOUND))
        assert "media-src 'self'" in headers["Content-Security-Policy"]
    file.unlink()
    assert [row.sounds for row in load_rollouts(tmp_path, 3)] == [(), ()]


def test_a_step_that_a_run_keeps_names_its_sounds(tmp_path):
    import torch

    tensors = {name: torch.ones(2, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    tensors |= {
        "mm_token_type_ids": torch.tensor([[3, 3, 0]] * 2, dtype=torch.int8),
        "response_mask": torch.ones(2, 2).long(),
    }
    data = DataProto.from_dict(
        tensors | {"actor_log_probs": -torch.ones(2, 2)},
        non_tensors={
            "uid": object_array(["a", "b"]),
            "multi_modal_data": object_array([{"audio": [SOUND]}, {}]),
        },
    )
    KeptRollouts(tmp_path, 8, tiny_tokenizer()).keep(1, data)
    first, second = load_kept(tmp_path, 1)
    (name,) = first["sounds"]
    assert (tmp_path / "rollouts" / "images" / name).read_bytes() == wav_file(SOUND)
    assert (first["images"], "sounds" in second) == ([], False)


def test_show_tells_seconds_and_rate_and_its_page_has_a_player(tmp_path, capsys):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 12_000))
    rows = [{"problem": "Which?", "answer": "c", "audio": name} for name in ("a.wav", "gone.wav")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_tiny_processors(tmp_path / "model", hears=True)
    page = tmp_path / "show.html"
    arguments = ["show", "grpo", tmp_path / "rows.jsonl", "--model-path", model, "--page", page]
    assert main([*map(str, arguments)]) == 1
    told = capsys.readouterr().out
    assert "sounds: 1.50 s at 16,000 Hz" in told
    assert "<|AUDIO|> × 37" in told
    assert "sound 'gone.wav' cannot be read: No such file or directory" in told
    assert page.read_text(encoding="utf-8").count("<audio controls") == 1


def test_show_takes_the_small_model_that_hears_for_synthetic_sounds(capsys):
    assert main(["show", "grpo", "--level", "notes", "--rows", "1"]) == 0
    told = capsys.readouterr().out
    assert "those of the small Qwen2.5-Omni" in told
    assert "<|AUDIO|> × 7<|audio_eos|>Which note?" in told
