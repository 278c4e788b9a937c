"""Problems are pure functions of their number, splits are disjoint, and the text does not reveal the answer."""

import hashlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from recipes.demo.problems import TEMPLATES, Problem, make_problem, sample_texts, split_of
from recipes.demo.rows import ProblemRows
from recipes.rewards import compute_score


def content(problem: Problem) -> tuple[str, str, str, bytes]:
    return problem.text, problem.answer, problem.kind, problem.image.tobytes()


def drafts(number: int) -> list[tuple[str, str, str]]:
    """(kind, text, answer) of ``number`` drafts of each template, without drawing them."""
    made = []
    for template in TEMPLATES:
        random = Random(f"{template.__name__}/{number}")
        for _ in range(number):
            draft = template(random)
            made.append((template.__name__, draft.text, draft.answer))
    return made


@given(st.integers(0, 2**40), st.integers(0, 2**31), st.sampled_from(["train", "test"]))
@settings(max_examples=20)
def test_problem_is_a_function_of_its_number(index: int, seed: int, split: str) -> None:
    first = make_problem(index, seed, split)
    make_problem(index + 1, seed, split)
    assert content(make_problem(index, seed, split)) == content(first)
    assert split_of(first) == split


def test_problems_are_the_same_in_another_process() -> None:
    cases = [(index, seed, "test") for index in (0, 7, 8, 9) for seed in (0, 3)]
    program = f"""
import hashlib, sys
sys.path[:0] = {[path for path in sys.path if path]}
from recipes.demo.problems import make_problem
problems = [make_problem(*case) for case in {cases}]
made = [(problem.text, problem.answer, problem.kind, problem.image.tobytes()) for problem in problems]
print(hashlib.sha256(repr(made).encode()).hexdigest())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    made = [content(make_problem(*case)) for case in cases]
    assert run.stdout.strip() == hashlib.sha256(repr(made).encode()).hexdigest()


@pytest.mark.slow
def test_train_and_test_are_disjoint() -> None:
    splits = {split: {content(make_problem(index, 0, split)) for index in range(24)} for split in ("train", "test")}
    assert not splits["train"] & splits["test"]
    assert all(
        split_of(make_problem(index, seed, split)) == split for split in splits for seed in (1, 2) for index in range(3)
    )


def test_one_candidate_in_eight_is_held_out() -> None:
    picture = make_problem(0).image
    named = [Problem({"images": [picture]}, f"question {number}", "1", "kind") for number in range(4000)]
    share = sum(split_of(problem) == "test" for problem in named) / len(named)
    assert share == pytest.approx(1 / 8, abs=0.02)


def test_numbers_and_seeds_give_different_problems() -> None:
    pictures = [make_problem(index, seed).image.tobytes() for seed in (0, 1, 2) for index in (*range(8), 2**32, 2**40)]
    assert len(set(pictures)) == len(pictures)


def test_pictures_have_their_size_and_show_something() -> None:
    for index in range(12):
        image = make_problem(index).image
        assert image.mode == "RGB"
        assert image.size == (56, 56)
        pixels = np.asarray(image)
        dark = (pixels.max(axis=2) < 128).mean()
        assert 0.003 < dark < 0.3  # ink on paper
        frame = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (frame == 255).all()  # nothing is cropped


def test_text_has_one_marker_and_no_number() -> None:
    for index in range(12):
        assert make_problem(index).text.startswith("<image>")
    for kind, text, _ in drafts(100):
        assert "<image>" not in text, kind
        assert not re.search(r"\d", text), f"{kind}: {text}"


def test_text_does_not_tell_the_answer() -> None:
    """The most frequent answer to each text is correct about as often as the most frequent answer of each template, which
    is rarely. Frequencies are from the other half of the problems.
    """
    made = drafts(1000)
    seen, unseen = made[::2], made[1::2]
    by_text, by_kind = defaultdict(Counter), defaultdict(Counter)
    for kind, text, answer in seen:
        by_text[text][answer] += 1
        by_kind[kind][answer] += 1

    def guess(kind: str, text: str) -> str:
        return (by_text.get(text) or by_kind[kind]).most_common(1)[0][0]

    right = np.mean([guess(kind, text) == answer for kind, text, answer in unseen])
    chance = np.mean([counts.most_common(1)[0][1] / counts.total() for counts in by_kind.values()])
    assert right <= chance + 0.02
    assert chance < 0.18


def test_answers_of_every_template_vary_under_one_text() -> None:
    made = drafts(200)
    for kind in {kind for kind, _, _ in made}:
        assert len({text for other, text, _ in made if other == kind}) == 1
        answers = {answer for other, _, answer in made if other == kind}
        assert len(answers) >= 7, kind


@pytest.mark.slow
def test_answers_are_graded_as_equal_to_themselves_and_to_no_other() -> None:
    answers = sorted({answer for _, _, answer in drafts(6)})
    for answer, other in pairwise(answers):
        response = rf"<think>look</think> \boxed{{{answer}}}"
        assert compute_score("synthetic", response, answer)["score"] == 1.0
        assert compute_score("synthetic", response, other)["acc"] == 0.0


def test_unknown_levels_and_splits_raise_an_error() -> None:
    with pytest.raises(InvalidConfig, match="split='dev' is unknown: choose"):
        make_problem(0, split="dev")
    for level in (0, 3, "colours"):
        with pytest.raises(InvalidConfig, match=f"level={level}: choose one of 1, notes, clicks, digits; benchmarks"):
            ProblemRows(level)[0]


def test_tiny_tokenizer_learns_from_both_questions() -> None:
    assert set(sample_texts(3)) == {"Find the marked angle.", "Find the labelled side."}
    assert len(sample_texts(3)) == 6
