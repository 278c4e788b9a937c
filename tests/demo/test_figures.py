r"""Every label of a figure is the measure of what it labels, and the answer agrees with the figure.

Measured here from the shapes alone, without the templates' arithmetic.
"""

import cmath
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from recipes.demo import figure
from recipes.demo.figure import (
    AngleLabel,
    AngleMark,
    Circle,
    Label,
    Line,
    Region,
    SideLabel,
    WedgeLabel,
    draw_with_texts,
    random_style,
)
from recipes.demo.problems import LEVELS
from recipes.demo.templates import Draft

TEMPLATES = [
    pytest.param(level, template, id=f"{level}-{template.__name__}")
    for level in LEVELS
    for template in LEVELS[level].templates
]
Template = Callable[[Random], Draft]
COVERED = 4.0  # pixels of lines that labels may cover
Texts = (Label, SideLabel, AngleLabel, WedgeLabel)


def number(answer: str) -> float:
    r"""Converts answers like ``60`` and ``25 \pi`` to numbers."""
    value, times, _ = answer.partition(r" \pi")
    return float(value) * (math.pi if times else 1)


def measure(text: str, x: float) -> float:
    """The value of a label: a number, or x."""
    return x if text == "x" else float(text.removesuffix("°"))


def opening(shape: AngleLabel | WedgeLabel | AngleMark) -> float:
    return math.degrees(cmath.phase((shape.b - shape.vertex) / (shape.a - shape.vertex))) % 360


def scale(draft: Draft, x: float) -> float:
    """The labelled length of a segment of length 1, the same for all of the figure's labels."""
    scales = [measure(shape.text, x) / abs(shape.a - shape.b) for shape in draft.figure if isinstance(shape, SideLabel)]
    if not scales:
        return 1.0
    assert scales == pytest.approx([scales[0]] * len(scales))
    return scales[0]


def only(draft: Draft, kind: type) -> object:
    (shape,) = (shape for shape in draft.figure if isinstance(shape, kind))
    return shape


def area(corners: tuple[complex, ...]) -> float:
    following = (*corners[1:], corners[0])
    return abs(sum((a.conjugate() * b).imag for a, b in zip(corners, following))) / 2


ASKED: dict[str, Callable[[Draft, float], float]] = {
    # The answer computed from the shapes; `unit` is the labelled length of a segment of length 1.
    "triangle_angle": lambda draft, unit: opening(only(draft, WedgeLabel)),
    "marked_angle": lambda draft, unit: opening(only(draft, AngleLabel)),
    "rectangle_side": lambda draft, unit: abs(only(draft, Region).corners[1]) / 4.4,
    "labelled_side": lambda draft, unit: float(only(draft, SideLabel).text),
    "labelled_radius": lambda draft, unit: float(only(draft, SideLabel).text),
    "labelled_area": lambda draft, unit: float(only(draft, Label).text),
    "rectangle_perimeter": lambda draft, unit: (
        unit * sum(abs(line.a - line.b) for line in draft.figure if isinstance(line, Line))
    ),
    "rectangle_area": lambda draft, unit: unit**2 * area(only(draft, Region).corners),
    "triangle_area": lambda draft, unit: unit**2 * area(only(draft, Region).corners),
    "circle_diameter": lambda draft, unit: unit * 2 * only(draft, Circle).radius,
    "circle_radius": lambda draft, unit: unit * only(draft, Circle).radius,
    "circle_area": lambda draft, unit: unit**2 * math.pi * only(draft, Circle).radius ** 2,
    "circumference": lambda draft, unit: unit * 2 * math.pi * only(draft, Circle).radius,
}


@pytest.mark.parametrize(("level", "template"), TEMPLATES)
def test_labels_and_answers_are_correct(level: int, template: Template) -> None:
    random = Random(template.__name__)
    for _ in range(60):
        draft = template(random)
        answer = number(draft.answer)
        for shape in draft.figure:
            if isinstance(shape, (AngleLabel, WedgeLabel)):
                assert opening(shape) == pytest.approx(measure(shape.text, answer))
            if isinstance(shape, AngleMark) and shape.right:
                assert opening(shape) == pytest.approx(90)
        unit = scale(draft, answer)
        unknowns = [shape for shape in draft.figure if isinstance(shape, (SideLabel, AngleLabel)) and "x" in shape.text]
        asked = ASKED.get(template.__name__)
        assert len(unknowns) == (0 if asked else 1)  # a label with x was checked above, with the answer as x
        if asked:
            assert asked(draft, unit) == pytest.approx(answer)


def lost_ink(draft: Draft, level: int, style: figure.Style) -> float:
    """Pixels of lines that labels cover: white labels over black lines, compared with black lines over white labels."""
    look = LEVELS[level]
    style = replace(style, ink=(0, 0, 0), accent=(255, 255, 255), tint=(255, 255, 255))
    under = sorted(draft.figure, key=lambda shape: not isinstance(shape, Texts))
    over, full = (
        np.asarray(draw_with_texts(shapes, look.size, style, draft.unit)[0].convert("L"), dtype=float)
        for shapes in (draft.figure, under)
    )
    return float((over - full).clip(0).sum()) / 255


@pytest.mark.parametrize(("level", "template"), [case for case in TEMPLATES if case.values[0] > 1])
def test_labels_do_not_cover_lines_or_each_other(
    level: int, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = LEVELS[level]
    for number in range(6):
        random = Random(number)
        draft = template(random)
        style = random_style(random, turn=look.turn, pen=look.pen, font=look.font)
        assert lost_ink(draft, level, style) < COVERED
        with monkeypatch.context() as patch:
            assert shared_ink(draft, level, style, patch) < COVERED


def shared_ink(draft: Draft, level: int, style: figure.Style, monkeypatch: pytest.MonkeyPatch) -> float:
    """Pixels where labels overlap: the sum of the ink of each label, minus the ink of all labels together."""
    look = LEVELS[level]
    style = replace(style, ink=(255, 255, 255), accent=(0, 0, 0), tint=(255, 255, 255))
    texts = [place for place, shape in enumerate(draft.figure) if isinstance(shape, Texts)]

    def ink(shown: list[int]) -> float:
        shapes = [
            replace(shape, text=" ") if place in texts and place not in shown else shape
            for place, shape in enumerate(draft.figure)
        ]
        return (
            float((255.0 - np.asarray(draw_with_texts(shapes, look.size, style, draft.unit)[0].convert("L"))).sum())
            / 255
        )

    shapes = [figure.turned(shape, cmath.rect(1, style.turn)) for shape in draft.figure]
    margin = figure._margin(shapes, look.size, style)
    monkeypatch.setattr(figure, "_margin", lambda *_: margin)  # the margin must not depend on the labels shown
    return sum(ink([place]) for place in texts) - ink(texts)


def test_a_label_on_a_line_is_detected() -> None:
    side = Line(0, 10)
    draft = Draft("", "", (side, Line(10, 5 + 8j), Line(5 + 8j, 0), Label("88", 5)))
    assert lost_ink(draft, 3, random_style(Random(0), turn=0, pen=1.4, font=14)) > COVERED


def test_a_label_on_a_label_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = (Label("88", 4 + 4j), Label("T", 4.3 + 4j))
    draft = Draft("", "", (Line(0, 10), Line(10, 10j), *labels))
    assert shared_ink(draft, 3, random_style(Random(0), turn=0, pen=1.4, font=14), monkeypatch) > COVERED


def test_side_labels_stay_inside_the_picture() -> None:
    shapes = [Line(0, 4j), Line(4j, 1 + 0j), Line(1 + 0j, 0), SideLabel("(12x+345)", 4j, 0)]
    style = random_style(Random(0), turn=0, pen=1, font=12)
    picture = np.asarray(draw_with_texts(shapes, 140, style)[0])
    assert (picture[:, 0] == 255).all()
    assert lost_ink(Draft("", "", shapes), 3, style) < 1


@pytest.mark.parametrize("unit", [1.0, None])
def test_texts_are_told_where_they_are_drawn(unit):
    """The ink of a text alone in its picture is around the place that is told."""
    style = replace(random_style(Random(4), turn=0, pen=1, font=14), turn=0.3)
    shapes = [Label("88", 20 + 5j), Circle(0j, 200)] if unit else [Circle(0j, 1), Label("88", 0.5 - 0.4j)]
    image, (text,) = draw_with_texts(shapes, 112, style, unit)
    assert text.text == "88"
    white = draw_with_texts([shape for shape in shapes if not isinstance(shape, Label)], 112, style, unit)[0]
    rows, columns = np.nonzero(np.abs(np.asarray(image, dtype=int) - np.asarray(white)).sum(-1) > 60)
    middle = (columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2
    assert middle == pytest.approx((text.x, text.y), abs=1)
    assert 8 <= np.ptp(rows) <= 14
