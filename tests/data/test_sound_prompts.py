"""Sounds of rows to mel frames and tokens, next to Hugging Face's feature extractor."""

import json

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from dataproto.errors import InvalidRow, MediaMismatch
from helpers.tiny_models import OMNI_TYPES
from helpers.tiny_prompts import tiny_builder
from recipes.data.problem_rows import load_rows
from rollout.prompts import PromptBuilder
from rollout.prompts.conversations import SupervisedBuilder

RATE = 16_000
every_type = pytest.mark.parametrize("model_type", OMNI_TYPES)


def tone(seconds, pitch=440.0):
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


@every_type
def test_frames_are_those_of_the_whole_padded_sound_and_tokens_as_many_as_features(model_type):
    builder = tiny_builder(model_type)
    family, config = builder.family, builder.config
    sounds = [tone(1.23), tone(0.5, 900.0)]
    rows = [
        {"prompt": "<audio>High or<audio> low?", "audios": sounds},
        {
            "prompt": [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "?"}]}],
            "audios": sounds[:1],
        },
    ]
    batch = builder(rows)
    extractor = builder.feature_extractor
    padded = extractor(
        sounds, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    inputs = batch["multi_modal_inputs"][0]
    lengths = padded["attention_mask"].sum(1)
    assert inputs["audio_feature_lengths"].tolist() == lengths.tolist() == [123, 50]
    expected = torch.cat([each[:, :length].T for each, length in zip(padded["input_features"], lengths)])
    assert (inputs["input_features"] - expected).abs().max() < 1e-5
    heard = batch["input_ids"] == config.audio_token_id
    counts = family.media_layout.sound_features(lengths)
    assert heard.sum(1).tolist() == [int(counts.sum()), int(counts[0])]
    assert torch.equal(batch["mm_token_type_ids"] == 3, heard)
    assert [builder.prompt_length(row) for row in rows] == batch["attention_mask"].sum(1).tolist()
    assert batch["raw_prompt_ids"][0].count(config.audio_token_id) == 2
    assert all(np.array_equal(*pair) for pair in zip(batch["multi_modal_data"][0]["audio"], sounds))


@every_type
def test_a_video_with_its_sound_is_one_run_of_tokens(model_type):
    builder = tiny_builder(model_type)
    family, config = builder.family, builder.config
    frames = np.random.default_rng(0).integers(0, 255, (4, 16, 16, 3), dtype=np.uint8)
    film = {"video": (frames, {"fps": 1.0}), "audio": tone(2.0)}
    rows = [{"prompt": "<video>Who <audio>speaks?", "videos": [film], "audios": [tone(0.3)]}]
    batch = builder(rows)
    ids = batch["input_ids"][0].tolist()
    inputs = batch["multi_modal_inputs"][0]
    assert inputs["audio_feature_lengths"].tolist() == [200, 30]
    first, last = (ids.index(getattr(config, f"vision_{end}_token_id")) for end in ("start", "end"))
    heard, _ = family.media_layout.sound_features(inputs["audio_feature_lengths"]).tolist()
    run = family.joined_run(inputs["video_grid_thw"][0].tolist(), 2.0, heard, config)
    assert ids[first + 1 : last] == [config.audio_start_token_id, *run, config.audio_end_token_id]
    assert (family.feature_counts(inputs, config)[1:]) == (
        run.count(config.video_token_id),
        (batch["mm_token_type_ids"] == 3).sum(),
    )
    assert "audio" in batch["multi_modal_data"][0]


@pytest.mark.parametrize("typed", [False, True], ids=["in_the_column", "as_a_typed_part"])
def test_a_videos_sound_is_read_from_its_file(tmp_path, typed):
    soundfile.write(tmp_path / "clip.wav", tone(2.0), 16_000, subtype="FLOAT")
    for frame in range(4):
        Image.new("RGB", (16, 16), (60 * frame, 0, 0)).save(tmp_path / f"{frame}.png")
    film = {"video": [f"{frame}.png" for frame in range(4)], "fps": 1.0, "audio": "clip.wav"}
    question = [{"type": "video", **film}, {"type": "text", "text": "Who speaks?"}] if typed else "<video>Who speaks?"
    row = {"messages": [{"role": role, "content": text} for role, text in (("user", question), ("assistant", "I"))]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row if typed else row | {"videos": [film]}))
    builder = tiny_builder("qwen2_5_omni_thinker")
    read = builder([load_rows(tmp_path / "rows.jsonl")[0]])
    frames = np.stack([np.array(Image.open(tmp_path / name)) for name in film["video"]])
    given = builder(
        [{"prompt": "<video>Who speaks?", "videos": [{"video": (frames, {"fps": 1.0}), "audio": tone(2.0)}]}]
    )
    assert torch.equal(read["input_ids"], given["input_ids"])
    inputs, others = (each["multi_modal_inputs"][0] for each in (read, given))
    assert inputs.keys() == others.keys() >= {"input_features", "second_per_grid_ts"}
    assert all(torch.equal(value, others[name]) for name, value in inputs.items())


def test_what_does_not_fit_is_refused_with_its_row():
    builder = tiny_builder("qwen2_5_omni_thinker", max_prompt_length=40)
    with pytest.raises(InvalidRow, match="row 0: the prompt has 120 tokens, more than max_prompt_length=40"):
        builder([{"prompt": "<audio>?", "audios": [tone(4.0)]}])
    with pytest.raises(InvalidRow, match=r"a sound of 31\.0 seconds: the model's processor reads at most 30"):
        builder([{"prompt": "<audio>?", "audios": [tone(31.0)]}])
    with pytest.raises(InvalidRow, match="1 audio markers in the prompt, but 2 audios"):
        builder([{"prompt": "<audio>?", "audios": [tone(0.2), tone(0.2)]}])
    with pytest.raises(InvalidRow, match="needs 3 mel frames of each sound"):
        builder([{"prompt": "<audio>?", "audios": [tone(0.01)]}])
    with pytest.raises(MediaMismatch, match="needs 3 mel frames of each sound"):
        builder.prompt_length({"prompt": "<audio>?", "audios": [tone(0.01)]})  # at the start of a run
    with pytest.raises(InvalidRow, match="models of type qwen2_5_vl take no audios"):
        tiny_builder()([{"prompt": "<audio>?", "audios": [tone(0.2)]}])


def test_a_video_whose_sound_would_be_read_from_its_file_is_refused(tmp_path):
    film, asked = {"video": ([Image.new("RGB", (64, 64), "red")] * 2, {"fps": 1.0})}, {"use_audio_in_video": True}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<video>Who speaks?", "videos": ["clip.mp4"], "answer": "she", **asked}))
    part = {"role": "user", "content": [{"type": "video", **film, **asked}, {"type": "text", "text": "Who speaks?"}]}
    builder, row = tiny_builder("qwen2_5_omni_thinker"), {"prompt": "<video>Who speaks?", "videos": [film]}
    for wrong in ({"prompt": [part]}, row | asked, load_rows(file)[0]):
        with pytest.raises(InvalidRow, match=r'use_audio_in_video: .* give both, .*"audio": "clip\.wav"'):
            builder([wrong])
    heard, silent = row | {"videos": [film | asked | {"audio": tone(2.0)}]}, row | {"use_audio_in_video": False}
    assert [int((ids == builder.config.audio_token_id).sum()) for ids in builder([heard, silent])["input_ids"]] == [
        50,
        0,
    ]


@every_type
def test_a_checkpoint_keeps_the_feature_extractor(model_type, tmp_path):
    rows = [
        {"prompt": "<audio>High or <image> low?", "audios": [tone(0.4)], "images": [Image.new("RGB", (16, 16), "red")]}
    ]
    builder = tiny_builder(model_type)
    builder.save_pretrained(tmp_path)
    builder.config.save_pretrained(tmp_path)
    again = PromptBuilder.from_pretrained(tmp_path, 512)
    one, other = (each(rows) for each in (builder, again))
    assert torch.equal(one["input_ids"], other["input_ids"])
    inputs, others = (each["multi_modal_inputs"][0] for each in (one, other))
    assert set(inputs) == {"input_features", "audio_feature_lengths", "pixel_values", "image_grid_thw"}
    assert all(torch.equal(value, others[name]) for name, value in inputs.items())


@every_type
def test_conversations_with_sounds_are_learned_at_their_answers_only(model_type):
    parts = tiny_builder(model_type)
    builder = SupervisedBuilder(
        parts.tokenizer, parts.image_processor, parts.config, 512, feature_extractor=parts.feature_extractor
    )
    messages = [
        {"role": "user", "content": "<audio>?"},
        {"role": "assistant", "content": "low"},
        {"role": "user", "content": "And <audio>?"},
        {"role": "assistant", "content": "high"},
    ]
    data = builder([{"prompt": messages, "audios": [tone(0.4), tone(0.7)]}])
    learned = data["input_ids"][0, 1:][data["response_mask"][0].bool()]
    assert builder.tokenizer.decode(learned) == "low<|im_end|>high<|im_end|>"
    assert (
        int((data["mm_token_type_ids"] == 3).sum())
        == builder.family.feature_counts(data["multi_modal_inputs"][0], parts.config)[2]
    )
