import base64
import io
import pickle
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto import DataProto, object_array
from dataproto.errors import InvalidMedia, InvalidPrompt, InvalidRow, MissingPackage
from helpers.tiny_prompts import tiny_builder
from recipes.data.column_keys import ColumnKeys
from recipes.data.conversations import read_conversation_row
from recipes.data.preferences import read_preference_row
from recipes.data.problem_rows import load_rows, read_row
from rollout.prompts import sounds
from rollout.prompts.prepared_rows import media_objects
from rollout.prompts.sounds import RATE, ProcessedSound, load_sound, sound_samples
from rollout.prompts.sources import media_list


def tone(hertz=440.0, rate=RATE, seconds=0.5):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def encoded(samples, rate=RATE, kind="WAV", **options):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, **options)
    return buffer.getvalue()


class Decoder:
    """What ``datasets`` gives of a decoded column: the interface of torchcodec's decoder, which needs FFmpeg's libraries."""

    def __init__(self, samples, rate):
        self.samples, self.rate = samples, rate

    def get_all_samples(self):
        return type("AudioSamples", (), {"data": self.samples[None], "sample_rate": self.rate})()


def test_every_source_gives_the_same_samples(tmp_path):
    samples = tone()
    data = encoded(samples, subtype="FLOAT")
    (path := tmp_path / "a.wav").write_bytes(data)
    text = base64.b64encode(data).decode()
    sources = [
        samples,
        (samples, RATE),
        data,
        path,
        str(path),
        path.as_uri(),
        f"data:audio/wav;base64,{text}",
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        {"array": samples, "sampling_rate": RATE, "path": None},
        {"array": samples.tolist(), "sampling_rate": RATE},
        Decoder(samples, RATE),
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}},
        {"type": "audio", "audio": samples},
        {"type": "audio", "audio": {"array": samples, "sampling_rate": RATE}},
        {"type": "audio", "audio": str(path)},
    ]
    for source in sources:
        found = load_sound(source)
        assert (found.dtype, found.shape) == (np.float32, (8000,)), source
        np.testing.assert_array_equal(found, samples)
        assert sound_samples(source) == 8000
    np.testing.assert_array_equal(load_sound("a.wav", root=tmp_path), samples)


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_formats_are_read(kind):
    assert np.abs(load_sound(encoded(tone(), kind=kind)) - tone())[1000:-1000].max() < (
        1e-4 if kind == "FLAC" else 0.05
    )


def test_channels_are_averaged_and_integers_scaled():
    left, right = np.full(50, 16384, dtype=np.int16), np.zeros(50, dtype=np.int16)
    for stereo in (np.stack([left, right]), np.stack([left, right], axis=1)):
        np.testing.assert_array_equal(load_sound((stereo, RATE)), np.full(50, 0.25))
    np.testing.assert_array_equal(load_sound(encoded(np.stack([left, right], axis=1))), np.full(50, 0.25))
    np.testing.assert_array_equal(load_sound(np.array([0, 128, 192], dtype=np.uint8)), [-1, 0, 0.5])
    np.testing.assert_array_equal(load_sound(np.array([-(2**31), 2**30], dtype=np.int32)), [-1, 0.5])


@given(
    rate=st.sampled_from([8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000]), samples=st.integers(1, 9_000)
)
@settings(max_examples=40, deadline=None)
def test_the_length_is_known_before_samples_are_resampled(rate, samples):
    assert sound_samples((np.zeros(samples), rate)) == len(load_sound((np.zeros(samples), rate)))


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_resampled_tone_is_the_tone_at_the_other_rate(rate):
    found = load_sound(encoded(tone(1000, rate), rate, subtype="FLOAT"))
    assert np.abs(found - tone(1000))[500:-500].max() < 1e-5  # of amplitude 0.5


def test_what_overshoots_is_clipped():
    np.testing.assert_array_equal(load_sound(np.array([1.25, -1.25, 0.5])), [1, -1, 0.5])


def cut_wav():
    return encoded(tone())[:4000]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("gone.wav", r"sound 'gone\.wav' cannot be read: No such file or directory in .*\(--media-root\)"),
        (b"RIFF", r"sound \(4 bytes\) cannot be read"),
        (cut_wav(), r"sound \(4000 bytes\) is cut"),
        (encoded(tone(), kind="FLAC")[:3000], "cannot be read"),
        (encoded(tone()[:0]), "is empty"),
        (np.zeros(0), "is empty"),
        (np.array([0.0, 3.0]), "values up to 3, of an unknown scale"),
        (np.array([0.0, np.nan]), "values up to nan"),
        ((np.zeros(4), 0), "a sampling rate of 0 is none"),
        ({"array": np.zeros(4)}, "without a sampling_rate"),
        (np.zeros((2, 3, 4)), r"must be \(samples,\)"),
        (0.25, "neither an array with its sampling rate, a path, bytes nor a data URI"),
        ({"bytes": None, "path": None}, "contains neither bytes nor a path"),
        (None, "the sound is missing"),
        ("https://host/a.wav", "sounds are not downloaded; save it to a file first"),
        ("data:audio/wav,xyz", "only data URIs with base64 content"),
        ({"input_audio": {"data": "%%%", "format": "wav"}}, "base64 content is broken"),
    ],
)
def test_bad_sounds_are_refused_with_the_reason(source, says):
    with pytest.raises(InvalidMedia, match=says):
        load_sound(source)


def test_a_cut_wav_is_refused_by_its_header(monkeypatch):
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    with pytest.raises(InvalidMedia, match="is cut: it ends after"):
        sound_samples(cut_wav())


def test_a_long_sound_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(sounds, "MAX_SECONDS", 1)
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    for source in (encoded(np.zeros(2 * RATE)), np.zeros(2 * RATE)):
        with pytest.raises(InvalidMedia, match="has 2 seconds, more than 1"):
            load_sound(source)
        with pytest.raises(InvalidMedia, match="has 2 seconds, more than 1"):
            sound_samples(source)


def test_a_wav_that_was_written_to_a_pipe_is_whole():
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(bytes(2000))
    streamed = buffer.getvalue().replace((2000).to_bytes(4, "little"), b"\xff\xff\xff\xff")
    assert len(load_sound(streamed)) == 1000


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    find = sounds.require_extra.__globals__["find_spec"]
    monkeypatch.setitem(
        sounds.require_extra.__globals__, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(MissingPackage, match=rf"needs {package}: pip install 'dataproto-vlm\[audio\]'"):
        load_sound(encoded(tone(rate=8_000), 8_000))


# Rows


def test_columns_of_sounds_are_read_in_every_schema():
    for column, value in (("audio", "a.wav"), ("audios", ["a.wav"]), ("audios", '["a.wav"]'), ("audio", ["a.wav"])):
        assert (
            read_row({"problem": "Which?", "answer": "3", column: value}, 0)["prompt"][0]["content"][:14]
            == "<audio>Which? "
        )
    talk = read_conversation_row({"prompt": "<audio>Which?", "answer": "3", "audio": {"bytes": b"x", "path": None}}, 0)
    assert talk["audios"] == [{"bytes": b"x", "path": None}]
    pair = read_preference_row({"prompt": "Which?", "chosen": "3", "rejected": "4", "audios": ["a.wav", "b.wav"]}, 0)
    assert pair["prompt"][0]["content"] == "<audio><audio>Which?"
    named = read_row(
        {"question": "Which?", "label": "3", "clip": "a.wav"},
        0,
        keys=ColumnKeys("question", answer_key="label", audio_key="clip"),
    )
    assert (named["audios"], named["media_columns"]) == (["a.wav"], {"clip": "audio"})
    with pytest.raises(InvalidPrompt, match="1 audio markers in the prompt, but 2 audios"):
        tiny_builder().prepare(read_row({"problem": "<audio>?", "answer": "3", "audios": ["a.wav", "b.wav"]}, 0))


def test_a_column_of_datasets_is_not_decoded(tmp_path):
    import datasets

    (tmp_path / "a.wav").write_bytes(encoded(tone()))
    table = datasets.Dataset.from_dict({"problem": ["Which?"], "answer": ["3"], "audio": [str(tmp_path / "a.wav")]})
    table.cast_column("audio", datasets.Audio()).to_parquet(tmp_path / "a.parquet")
    (row,) = load_rows(tmp_path / "a.parquet")
    np.testing.assert_allclose(load_sound(row["audios"][0]), tone(), atol=1e-4)  # 16 bits


def test_a_model_without_ears_refuses_a_sound_by_its_row():
    with pytest.raises(InvalidRow, match=r"row 7: models of type .* take no audios; take a model that hears"):
        tiny_builder()([{"prompt": "<audio>Which?", "audios": [tone()], "index": 7}])


def test_a_row_keeps_an_array_or_a_pair_as_one_sound():
    assert [len(media_list(sound)) for sound in (tone(), (tone(), RATE), [tone(), tone()])] == [1, 1, 2]


def test_sounds_travel_without_a_copy_and_once():
    sound = ProcessedSound(b"a", tone(), {})
    media = media_objects([sound])
    assert media["audio"][0] is sound.content
    data = DataProto.from_dict(non_tensors={"multi_modal_data": object_array([dict(media) for _ in range(4)])})
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers].count(sound.content.nbytes) == 1
    assert len(text) < sound.content.nbytes
    back = pickle.loads(text, buffers=buffers)["multi_modal_data"]
    assert all(np.shares_memory(row["audio"][0], sound.content) for row in back)
