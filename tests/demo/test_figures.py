"""The label of a figure is the measure of what it labels, and the answer.

Measured here from the shapes alone, without the templates' arithmetic.
"""

import cmath
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from recipes.demo.figure import AngleMark, Label, Line, Region, WedgeLabel, draw, random_style
from recipes.demo.problems import rectangle_side, triangle_angle


def only(figure, kind):
    (shape,) = (shape for shape in figure if isinstance(shape, kind))
    return shape


def test_labels_and_answers_are_correct():
    random = Random(0)
    for _ in range(60):
        angle, side = triangle_angle(random), rectangle_side(random)
        for kind in (AngleMark, WedgeLabel):
            shape = only(angle.figure, kind)
            opening = cmath.phase((shape.b - shape.vertex) / (shape.a - shape.vertex))
            assert math.degrees(opening) == pytest.approx(float(angle.answer))
        assert only(angle.figure, WedgeLabel).text == angle.answer
        assert abs(only(side.figure, Region).corners[1]) / 4.4 == pytest.approx(float(side.answer))
        assert only(side.figure, Label).text == side.answer


def test_a_picture_shows_the_figure_turned_and_shifted_by_its_style():
    style = random_style(Random(0), turn=0, pen=1.3, font=12)
    shapes = (Line(0j, 30 + 0j), Line(30 + 0j, 30 + 10j))

    def ink(style):
        rows, columns = np.nonzero(np.asarray(draw(shapes, 56, style).convert("L")) < 128)
        return np.ptp(columns), np.ptp(rows), columns.min()

    wide, low, left = ink(replace(style, shift=-1 + 0j))
    assert (wide, low) == pytest.approx((30, 10), abs=2)
    assert ink(replace(style, shift=1 + 0j))[2] > left + 10
    narrow, high, _ = ink(replace(style, turn=math.pi / 2))
    assert (narrow, high) == pytest.approx((low, wide), abs=1)
