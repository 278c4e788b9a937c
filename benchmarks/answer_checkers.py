r"""Compares checkers of answers in the forms of Geometry3K: ``python benchmarks/answer_checkers.py``.

The checkers are `mathruler`, which the reward uses, `math-verify` (skipped if it is not installed), and the reward's
`AnswerChecker`. Each pair is an answer as a model writes it in ``\boxed{}``, a ground truth as Geometry3K writes it, and the
verdict by hand. An answer is right if its value equals the ground truth exactly; a unit, a degree sign or ``x =`` does not
matter. Ground truths have the forms of ``hiyouga/geometry3k``: whole numbers, decimals, ``2 \sqrt { 221 }``, ``12 \pi``,
``\frac { 26 } { 3 }``. Some copies of the data set have upper-case commands.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mathruler.grader import grade_answer

from recipes.rewards.checking import AnswerChecker

Judge = Callable[[Sequence[tuple[str, str]]], list[bool]]

PAIRS: dict[str, list[tuple[str, str, bool]]] = {
    "numbers": [
        ("65", "65", True),
        ("65.0", "65", True),
        ("66", "65", False),
        ("7.5", "7.5", True),
        ("7.50", "7.5", True),
        (".8", "0.8", True),
        ("7.4", "7.5", False),
        ("1,200", "1200", True),
        ("-3", "3", False),
        ("20.0", "20", True),
        ("15/2", "7.5", True),
        (r"\frac{15}{2}", "7.5", True),
        ("7.07", r"5 \sqrt { 2 }", False),
        ("314", r"100 \pi", False),
    ],
    "degrees and units": [
        (r"30^\circ", "30", True),
        (r"30^{\circ}", "30", True),
        ("30°", "30", True),
        ("30 degrees", "30", True),
        (r"35^\circ", "30", False),
        (r"12 \text{ cm}", "12", True),
        (r"12\text{ inches}", "12", True),
        (r"12 \text{ units}", "12", True),
        (r"48 \text{ square units}", "48", True),
        (r"25.1\,\text{m}", "25.1", True),
        (r"54.3 \text{ in}^2", "54.3", True),
        (r"13 \text{ cm}", "12", False),
    ],
    "roots": [
        (r"2\sqrt{221}", r"2 \sqrt { 221 }", True),
        (r"4\sqrt{3}", r"4 \sqrt { 3 }", True),
        (r"\sqrt{48}", r"4 \sqrt { 3 }", True),
        (r"\sqrt{3} \cdot 4", r"4 \sqrt { 3 }", True),
        (r"\frac{12}{\sqrt{3}}", r"4 \sqrt { 3 }", True),
        (r"\frac{15\sqrt{3}}{2}", r"\frac { 15 \sqrt { 3 } } { 2 }", True),
        (r"7.5\sqrt{3}", r"\frac { 15 \sqrt { 3 } } { 2 }", True),
        (r"\dfrac{15}{2}\sqrt{3}", r"\frac { 15 \sqrt { 3 } } { 2 }", True),
        (r"4\sqrt3", r"4 \sqrt { 3 }", True),
        ("4√3", r"4 \sqrt { 3 }", True),
        (r"4\sqrt{2}", r"4 \sqrt { 3 }", False),
        (r"3\sqrt{4}", r"4 \sqrt { 3 }", False),
        ("43", r"4 \sqrt { 3 }", False),
    ],
    "fractions": [
        (r"\frac{26}{3}", r"\frac { 26 } { 3 }", True),
        (r"\dfrac{26}{3}", r"\frac { 26 } { 3 }", True),
        ("26/3", r"\frac { 26 } { 3 }", True),
        (r"\frac{52}{6}", r"\frac { 26 } { 3 }", True),
        (r"8\frac{2}{3}", r"\frac { 26 } { 3 }", True),
        ("8.67", r"\frac { 26 } { 3 }", False),
        ("2.5", r"\frac { 5 } { 2 }", True),
        ("0.6", r"\frac { 3 } { 5 }", True),
        (r"\frac{3}{26}", r"\frac { 26 } { 3 }", False),
    ],
    "multiples of pi": [
        (r"12\pi", r"12 \pi", True),
        ("12π", r"12 \pi", True),
        (r"\pi \cdot 12", r"12 \pi", True),
        (r"\frac{25\pi}{3}", r"\frac { 25 } { 3 } \pi", True),
        (r"12\pi \text{ cm}^2", r"12 \pi", True),
        ("12", r"12 \pi", False),
        (r"12\pi^2", r"12 \pi", False),
    ],
    "equations and words": [
        ("x = 9", "9", True),
        ("x=4\\sqrt{3}", r"4 \sqrt { 3 }", True),
        (r"m\angle A = 65", "65", True),
        (r"m\angle A = 65^\circ", "65", True),
        ("x = 8", "9", False),
        (r"\text{65}", "65", True),
        ("x", "9", False),
        ("", "9", False),
    ],
    "several values": [
        ("(3, 4)", "(3,4)", True),
        ("(4, 3)", "(3,4)", False),
        ("x = 3, y = 4", "3, 4", True),
        (r"4, 4\sqrt{3}", r"4, 4 \sqrt { 3 }", True),
        ("3", "3, 4", False),
    ],
    "hedged answers": [
        (r"8 \text{ or } 9", "9", False),
        ("8, 9", "9", False),
        (r"\{8, 9\}", "9", False),
        (r"x = 8 \text{ or } x = 9", "9", False),
        (r"9 \pm 1", "9", False),
        ("x > 9", "9", False),
        (r"x \le 9", "9", False),
        ("8 = 9", "9", False),
        ("9 = 8", "9", False),
        (r"9 \neq 8", "9", False),
        (r"(8, 9)", "9", False),
        ("9x", "9", False),
        ("9%", "9", False),
        ("0.09", "9", False),
        ("8; 9", "9", False),
        (r"8 \quad 9", "9", False),
        (r"8, \boxed{9}", "9", False),
        (r"x = 9, y = 8", "9", False),
    ],
    "upper-case commands": [
        (r"2\sqrt{221}", r"2 \SQRT { 221 }", True),
        (r"12\pi", r"12 \PI", True),
        (r"\frac{26}{3}", r"\FRAC { 26 } { 3 }", True),
    ],
}


def mathruler(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    return [bool(grade_answer(*pair)) for pair in pairs]


def math_verify(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    from math_verify import parse, verify

    return [bool(verify(parse(rf"\boxed{{{truth}}}"), parse(rf"\boxed{{{answer}}}"))) for answer, truth in pairs]


def judges() -> dict[str, Judge]:
    found: dict[str, Judge] = {"mathruler": mathruler}
    try:
        import math_verify as _  # noqa: F401

        found["math-verify"] = math_verify
    except ImportError:
        print("math-verify is not installed: pip install math-verify", file=sys.stderr)
    return found | {"AnswerChecker": AnswerChecker(processes=1)}


def main() -> None:
    names, pairs = list(judged := judges()), [pair for group in PAIRS.values() for pair in group]
    verdicts: dict[str, dict[tuple[str, str], bool]] = {}
    milliseconds = {}
    for name, judge in judged.items():
        judge([("x+x", "2x")])  # starts processes, loads sympy
        start = time.perf_counter()
        answers = [(answer, truth) for answer, truth, _ in pairs]
        verdicts[name] = dict(zip(answers, judge(answers), strict=True))
        milliseconds[name] = 1000 * (time.perf_counter() - start) / len(pairs)
    print(f"{'right verdicts':22}{'pairs':>7}" + "".join(f"{name:>15}" for name in names))
    for kind, group in [*PAIRS.items(), ("all", pairs)]:
        right = [sum(verdicts[name][answer, truth] == by_hand for answer, truth, by_hand in group) for name in names]
        print(f"{kind:22}{len(group):>7}" + "".join(f"{count:>15}" for count in right))
    for what, wanted in (("accepted wrongly", False), ("rejected wrongly", True)):
        wrong = [sum(verdicts[name][pair[:2]] != wanted and pair[2] == wanted for pair in pairs) for name in names]
        print(f"{what:22}{'':7}" + "".join(f"{count:>15}" for count in wrong))
    print(f"{'milliseconds a pair':22}{'':7}" + "".join(f"{milliseconds[name]:>15.2f}" for name in names))
    print("\nwrong verdicts:")
    for answer, truth, by_hand in pairs:
        wrong_by = [name for name in names if verdicts[name][answer, truth] != by_hand]
        if wrong_by:
            print(f"  {answer!r} for {truth!r} is {'right' if by_hand else 'wrong'}: {', '.join(wrong_by)}")


if __name__ == "__main__":
    main()
