"""The label of a figure is the measure of what it labels, and the answer.

Measured here from the corners alone, without the templates' arithmetic, and from the pictures.
"""

import cmath
import math
from random import Random

import numpy as np
import pytest

from recipes.demo.problems import Draft, draw, rectangle_side, triangle_angle


def test_labels_and_answers_are_correct():
    random = Random(0)
    for _ in range(60):
        angle, side = triangle_angle(random), rectangle_side(random)
        vertex, base, top = angle.corners
        opening = cmath.phase((top - vertex) / (base - vertex))
        assert math.degrees(opening) == pytest.approx(float(angle.answer))
        assert abs(side.corners[1] - side.corners[0]) / 4.4 == pytest.approx(float(side.answer))
        assert (angle.marks_angle, side.marks_angle) == (True, False)


def test_a_picture_shows_the_figure_turned_and_shifted():
    draft = Draft("", "1", (0j, 10 + 0j, 10 + 6j, 6j))
    lefts, heights = set(), set()
    for seed in range(20):
        picture = np.asarray(draw(draft, Random(seed))).astype(int)
        rows, columns = np.nonzero((picture[..., 2] > 200) & (picture[..., 0] < 180))  # of the tint
        assert 6 <= np.ptp(columns) <= 11
        assert 3 <= np.ptp(rows) <= 8
        lefts.add(int(columns.min()))
        heights.add(int(np.ptp(rows)))
    assert max(lefts) - min(lefts) > 5
    assert len(heights) > 1
