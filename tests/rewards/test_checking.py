import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mathruler.grader import grade_answer

from dataproto.errors import InvalidConfig, RewardError
from recipes.rewards import checking
from recipes.rewards.checking import AnswerChecker, quick_verdict

pytestmark = pytest.mark.slow

HANGING = "9**9**9**9"
TRUTH = "12.5"  # not an integer, so that mathruler asks sympy


@pytest.fixture(scope="module")
def checker():
    one = AnswerChecker(seconds=1.0, processes=1)
    yield one
    one.close()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    for _ in range(200):
        if not running(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


numbers = st.builds(
    lambda sign, whole, digits: f"{sign}{whole}{digits and '.' + digits}",
    st.sampled_from(["", "-"]),
    st.one_of(st.integers(0, 30), st.integers(0, 999_999_999)),
    st.text("0123456789", max_size=6),
)


@given(numbers, numbers)
@settings(max_examples=150)
def test_the_shortcut_for_plain_numbers_agrees_with_mathruler(answer, truth):
    assert quick_verdict(answer, truth) is grade_answer(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.5", ".5"),
        ("9.5", "9.50"),
        ("65.0", "65"),
        ("65", "65.3"),
        ("-0", "0"),
        ("0.1", "0.100000"),
        ("12", "12.000001"),
    ],
)
def test_the_shortcut_agrees_at_the_edges(answer, truth):
    assert quick_verdict(answer, truth) in (None, grade_answer(answer, truth))


@given(st.text(max_size=30))
@settings(max_examples=100)
def test_the_shortcut_for_equal_strings_agrees_with_mathruler(text):
    assert quick_verdict(text, text) is True
    assert grade_answer(text, text) is True


def test_verdicts_equal_those_of_mathruler(checker):
    pairs = [
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("\\frac{1}{2}", "0.5"),
        ("65^\\circ", "65"),
        ("(1, 2)", "(1,2)"),
        ("x+x", "2x"),
        ("x", "2x"),
        ("3/6", "1/2"),
        ("4 \\sqrt { 3 }", "4\\sqrt{3}"),
        ("six", "6"),
        ("", "6.5"),
        ("zwölf", "12.5"),
    ]
    verdicts = checker(pairs)
    assert verdicts == [grade_answer(*pair) for pair in pairs]
    assert set(verdicts) == {True, False}


def test_an_answer_that_hangs_is_wrong_and_the_next_is_right(checker):
    pairs = [("x+x", "2x"), (HANGING, TRUTH), ("25/2", TRUTH), ("y+y", "2y")]
    assert checker(pairs) == [True, False, True, True]
    assert checker(pairs) == [True, False, True, True]


def test_a_hanging_answer_is_graded_once(checker, monkeypatch):
    checker([(HANGING, TRUTH)])
    monkeypatch.setattr(checker, "_ask", lambda pairs: pytest.fail(f"asked again: {pairs}"))
    assert checker([(HANGING, TRUTH)] * 3) == [False] * 3


@pytest.mark.parametrize(
    "hostile",
    [
        "(" * 400,
        "9" * 900 + "**99999",
        "x" * 100_000,
        "[0]*10**12",
        "\\frac{" * 150,
        "\0",
        "\ud800",
        "1\n2",
        "exit()",
        "0/0",
    ],
)
def test_hostile_answers_are_wrong_and_do_no_harm(checker, hostile):
    assert checker([(hostile, TRUTH), ("25/2", TRUTH)]) == [False, True]


def pids(checker):
    """The ids of its processes, after a comparison that needs mathruler."""
    checker._verdicts.clear()
    assert checker([("w+w", "2w")]) == [True]
    return [child.process.pid for child in checker._children]


def test_memory_is_limited(checker):
    before = pids(checker)
    (limit,) = [line for line in Path(f"/proc/{before[0]}/limits").read_text().splitlines() if "address space" in line]
    assert limit.split()[3] == str(1 << 30)
    assert checker([("1<<10**11", TRUTH)]) == [False]
    assert pids(checker) == before  # it ran out of memory, answered at once, and still runs


def test_a_process_that_was_killed_is_replaced(checker):
    for pid in pids(checker):
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
    assert checker([("v+v", "2v")]) == [True]


def test_several_processes_share_the_work():
    several = AnswerChecker(seconds=20, processes=2)
    try:
        pairs = [(f"{number}x + x", f"{number + 1}x") for number in range(20)]
        assert several(pairs) == [True] * 20
        assert len(several._children) == 2
    finally:
        several.close()


def test_closing_ends_the_processes_and_the_next_call_starts_new_ones():
    closing = AnswerChecker(processes=1)
    assert closing([("x+x", "2x")]) == [True]
    pid = closing._children[0].process.pid
    closing.close()
    assert not running(pid)
    assert closing([("y+y", "2y")]) == [True]
    closing.close()


def test_a_checker_that_cannot_start_raises_an_error(monkeypatch):
    monkeypatch.setattr(checking.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="does not start"):
        AnswerChecker(processes=1)([("x+x", "2x")])


@pytest.mark.parametrize("options", [{"seconds": 0}, {"processes": 0}])
def test_invalid_options_raise_an_error(options):
    with pytest.raises(InvalidConfig):
        AnswerChecker(**options)


def test_the_checking_process_loads_neither_torch_nor_this_project():
    code = """
        import runpy, sys
        runpy.run_path(PATH, run_name="loaded")["serve"](1.0, 1 << 30)
        loaded = {"torch", "numpy", "recipes", "dataproto", "transformers"} & set(sys.modules)
        sys.exit(f"loaded {loaded}" if loaded else 0)
    """
    path = Path(checking.__file__).with_name("_grading_process.py")
    done = subprocess.run(
        [sys.executable, "-c", f"PATH = {str(path)!r}\n" + textwrap.dedent(code)],
        input=b'["x+x", "2x"]\n["x", "2x"]\n',
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"r10"), done.stderr


@pytest.mark.parametrize("end", ["ctrl-c", "exit"])
def test_no_process_outlives_the_program(end):
    """Ctrl-C while an answer hangs ends the program and the grading process at once."""
    code = f"""
        from recipes.rewards.checking import AnswerChecker
        checker = AnswerChecker(seconds=600, processes=1)
        checker([("x+x", "2x")])
        print(checker._children[0].process.pid, flush=True)
        if {end == "ctrl-c"}:
            checker([({HANGING!r}, {TRUTH!r})])
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pid = int(program.stdout.readline())
    if end == "ctrl-c":
        time.sleep(0.5)
        assert running(pid)
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert (b"KeyboardInterrupt" in errors) == (end == "ctrl-c"), errors
    wait_until_gone(pid)
