"""Problems about sounds, whose answers an independent measurement finds in the samples."""

import subprocess
import sys
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest

from dataproto.errors import MissingPackage
from recipes.demo import sounds
from recipes.demo.rows import ProblemRows
from recipes.demo.sounds import MOST_CLICKS, NOTES, SOUNDS, make_sound_problem
from rollout.prompts.sounds import RATE, load_sound

every_level = pytest.mark.parametrize("level", SOUNDS)
DIGESTS = """
from hashlib import blake2b
from recipes.demo.sounds import SOUNDS, make_sound_problem
for level in reversed(SOUNDS):
    for index in (7, 3):
        print(blake2b(make_sound_problem(index, level, 1, "test").media["audios"][0][0].tobytes(), digest_size=8).hexdigest())
"""


def samples(problem):
    return problem.media["audios"][0][0]


def test_a_problem_is_the_same_in_every_process_and_order():
    done = subprocess.run([sys.executable, "-c", DIGESTS], capture_output=True, text=True, check=True, timeout=120)
    made = [make_sound_problem(index, level, 1, "test") for level in SOUNDS for index in (3, 7)]
    assert done.stdout.split()[::-1] == [blake2b(samples(each).tobytes(), digest_size=8).hexdigest() for each in made]


@every_level
def test_splits_and_seeds_share_no_sound_and_all_answers_occur(level):
    parts = [
        [make_sound_problem(n, level, seed, split) for n in range(100)]
        for seed in (0, 1)
        for split in ("train", "test")
    ]
    assert len({samples(each).tobytes() for part in parts for each in part}) == 400
    found = Counter(each.answer for part in parts for each in part)
    assert len(found) == {"notes": len(NOTES), "clicks": MOST_CLICKS, "digits": 10}[level]
    assert min(found.values()) > 400 / len(found) / 2
    assert all(each.text.startswith("<audio>") and np.abs(samples(each)).max() <= 1 for part in parts for each in part)


def test_the_note_is_the_loudest_frequency():
    for index in range(40):
        problem = make_sound_problem(index, "notes")
        spectrum = np.abs(np.fft.rfft(samples(problem) * np.hanning(len(samples(problem))), 2**17))
        hertz = np.argmax(spectrum) * RATE / 2**17
        assert min(NOTES, key=lambda name: abs(np.log(NOTES[name] / hertz))) == problem.answer


def test_the_clicks_are_as_many_as_the_answer_says():
    for index in range(40):
        problem = make_sound_problem(index, "clicks")
        loud = np.flatnonzero(np.abs(samples(problem)) > 0.2 * np.abs(samples(problem)).max())
        assert 1 + int((np.diff(loud) > RATE // 50).sum()) == int(problem.answer)


def test_held_out_digits_are_said_as_training_does_not_hear_them(monkeypatch):
    rate, words = sounds._spoken()
    assert len({word.tobytes() for word in words.values()}) == len(words) == 240
    assert all(0.15 < len(word) / rate < 0.8 for word in words.values())
    monkeypatch.setattr(sounds, "_spoken", lambda: (rate, {key: np.full(99, key[1] + 1.0) for key in words}))
    monkeypatch.setattr(sounds, "_audios", lambda sound, rate, random: {"audios": [(sound, rate)]})
    manners = {
        split: {samples(make_sound_problem(n, "digits", 0, split)).max() for n in range(60)}
        for split in ("train", "test")
    }
    assert manners == {"train": {1, 2, 3}, "test": {4}}


def test_the_rows_are_those_of_a_data_set():
    row = ProblemRows("digits")[3]
    assert (row["data_source"], row["index"], len(row["audios"]), row["images"]) == ("synthetic/digits", 3, 1, [])
    assert row["prompt"][0]["content"] == "<audio>Which digit?"
    assert load_sound(row["audios"][0]).shape[0] == round(len(row["audios"][0][0]) * RATE / row["audios"][0][1])


def test_a_missing_synthesiser_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sounds.require_extra.__globals__, "find_spec", lambda name: None)
    sounds._spoken.cache_clear()
    with pytest.raises(MissingPackage, match=r"needs espeakng_loader: pip install 'dataproto-vlm\[speech\]'"):
        make_sound_problem(0, "digits")
