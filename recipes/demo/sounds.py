"""Synthetic problems about sounds: which note is played, how many clicks there are, which digit is said.

Problem i is a function of (kind, seed, split, i) and of nothing else. The digits are said by eSpeak NG, of the extra ``speech``.
"""

import ctypes
import math
from functools import cache
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dataproto.errors import InvalidConfig
from dataproto.extras import require_extra
from recipes.demo.problems import Problem, Split, make_problem

RATE = 16_000
NOTES = {name: 261.63 * 2 ** (step / 12) for name, step in zip("cdefgab", (0, 2, 4, 5, 7, 9, 11), strict=True)}  # hertz
MOST_CLICKS = 4
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("en-us", "en-us+f1", "en-us+m3", "en-gb", "en-gb+f3", "en-gb-scotland")
MANNERS = ((150, 40), (175, 50), (200, 65), (165, 58))
"""Words a minute and pitch; the last is that of held-out problems."""
_SYNCHRONOUS, _SPEED, _PITCH, _UTF8 = 2, 1, 3, 1  # of espeak-ng/speak_lib.h


def note_problem(random: Random, split: Split) -> Problem:
    """One of seven notes of an octave, out of tune by at most a quarter of a semitone, with harmonics and noise."""
    name = random.choice(list(NOTES))
    hertz = NOTES[name] * 2 ** (random.uniform(-0.25, 0.25) / 12)
    time = np.arange(int(RATE * random.uniform(0.25, 0.35))) / RATE
    turns = [random.uniform(0, math.tau) for _ in range(3)]
    parts = [np.sin(math.tau * hertz * (number + 1) * time + turns[number]) for number in range(3)]
    tone = parts[0] + random.uniform(0, 0.3) * parts[1] + random.uniform(0, 0.15) * parts[2]
    return Problem(_audios(tone, RATE, random), "<audio>Which note?", name, "notes")


def click_problem(random: Random, split: Split) -> Problem:
    """One to `MOST_CLICKS` clicks of 10 ms at six places of 0.64 seconds, at least 70 ms from one to the next."""
    count = random.randint(1, MOST_CLICKS)
    time = np.arange(160) / RATE
    sound = np.zeros(int(0.64 * RATE))
    for place in sorted(random.sample(range(6), count)):
        start = int((0.02 + place * 0.1 + random.uniform(0, 0.02)) * RATE)
        sound[start : start + len(time)] += np.sin(math.tau * random.uniform(1500, 2500) * time) * np.exp(-time * 300)
    return Problem(_audios(sound, RATE, random), "<audio>How many clicks?", str(count), "clicks")


def digit_problem(random: Random, split: Split) -> Problem:
    """A digit said by one of `VOICES`; held-out ones at a speed and a pitch that training does not hear."""
    number = random.randrange(len(DIGITS))
    manner = len(MANNERS) - 1 if split == "test" else random.randrange(len(MANNERS) - 1)
    rate, words = _spoken()
    word = words[random.choice(VOICES), manner, number]
    before, after = (np.zeros(int(random.uniform(0, 0.03) * rate)) for _ in range(2))
    sound = _audios(np.concatenate([before, word, after]), rate, random)
    return Problem(sound, "<audio>Which digit?", str(number), "digits")


SoundLevel = Literal["notes", "clicks", "digits"]
SOUNDS = {"notes": note_problem, "clicks": click_problem, "digits": digit_problem}


def make_sound_problem(index: int, level: str, seed: int = 0, split: Split = "train") -> Problem:
    """Problem ``index`` of ``seed``, one of `SOUNDS`. The loudness of each sound is a random number: no two are equal.

    >>> problem = make_sound_problem(5, "notes")
    >>> (sound, rate), = problem.media["audios"]
    >>> problem.text, problem.answer, sound.dtype, rate
    ('<audio>Which note?', 'c', dtype('float32'), 16000)
    """
    return SOUNDS[level](Random(f"synthetic/{level}/{seed}/{split}/{index}"), split)


def problem_of_level(index: int, level: int | str, seed: int = 0, split: Split = "train") -> Problem:
    """A problem about a picture, of level 1, or about a sound, whose level is its name. Raises as `check_level`.

    >>> problem_of_level(5, "clicks").text, problem_of_level(5, 1).text[:7]
    ('<audio>How many clicks?', '<image>')
    """
    check_level(level)
    return make_sound_problem(index, str(level), seed, split) if level in SOUNDS else make_problem(index, seed, split)


def check_level(level: int | str) -> None:
    """Raises `InvalidConfig` for a level of which there are no problems."""
    if level not in (1, *SOUNDS):
        raise InvalidConfig(
            f"level={level}: choose one of 1, {', '.join(SOUNDS)}; benchmarks/synthetic_levels.py writes levels 2 to 4 as files"
        )


def _audios(sound: npt.NDArray[np.float64], rate: int, random: Random) -> dict[str, list[Any]]:
    """The column of a sound, at a random loudness, with noise of a thousandth of that."""
    noise = np.random.default_rng(random.getrandbits(64)).standard_normal(len(sound))
    loudest = random.uniform(0.3, 0.9)
    return {"audios": [((loudest * (sound / np.abs(sound).max() + 0.001 * noise)).astype(np.float32), rate)]}


@cache
def _spoken() -> tuple[int, dict[tuple[str, int, int], npt.NDArray[np.float64]]]:
    """The rate, and each digit by voice, manner and number.

    What eSpeak says depends on what it has said before, so all words are said once, in the same order in each process.
    """
    require_extra("speech", "recipes.demo.sounds", "espeakng_loader")
    import espeakng_loader

    espeak = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = espeak.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
    said: list[npt.NDArray[np.int16]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: "ctypes._Pointer[ctypes.c_short]", count: int, events: int) -> int:
        if count > 0:
            said.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    espeak.espeak_SetSynthCallback(keep)
    words = {}
    for voice in VOICES:
        espeak.espeak_SetVoiceByName(voice.encode())
        for manner, (speed, pitch) in enumerate(MANNERS):
            espeak.espeak_SetParameter(_SPEED, speed, 0)
            espeak.espeak_SetParameter(_PITCH, pitch, 0)
            for number, word in enumerate(DIGITS):
                said.clear()
                espeak.espeak_Synth(word.encode(), len(word) + 1, 0, 1, 0, _UTF8, None, None)
                words[voice, manner, number] = np.concatenate(said) / 32768
    espeak.espeak_Terminate()
    return rate, words
