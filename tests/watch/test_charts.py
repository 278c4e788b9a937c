import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.watch.charts import HEIGHT, MAX_POINTS, WIDTH, Series, line_chart, smooth, thin, ticks


def corners(svg):
    lines = [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line.get("points").split()] for line in lines]


def test_a_line_runs_from_corner_to_corner():
    svg = line_chart([Series("a", [(0, 0.0), (10, 1.0)])], percent=True)
    ((start, end),) = corners(svg)
    assert start == (46.0, 194.0)  # left and bottom margins
    assert end == (450.0, 10.0)
    assert ">100%<" in svg
    assert "step 10: 100%" in svg


@pytest.mark.parametrize("points", [[], [(0, math.nan)], [(3, math.inf), (4, -math.inf)]])
def test_nothing_finite_is_no_chart(points):
    assert line_chart([Series("a", points)]) == ""
    assert line_chart([]) == ""


def test_a_single_point_is_shown():
    svg = line_chart([Series("a", [(5, 0.3)])])
    assert "<circle" in svg
    assert "step 5: 0.3" in svg


def test_long_noisy_lines_are_smoothed_over_a_faint_raw_one():
    svg = line_chart([Series("a", [(step, step % 7) for step in range(5000)])])
    raw, line = corners(svg)
    assert len(raw) == len(line) == MAX_POINTS
    assert len(svg) < 20_000
    spread = [max(y for _, y in path) - min(y for _, y in path) for path in (raw, line)]
    assert spread[1] < spread[0]


numbers = st.floats(-1e12, 1e12, allow_nan=False) | st.sampled_from([math.nan, math.inf, 0.0, 1e-30, 1e-300])


@given(st.lists(st.lists(numbers, max_size=60), max_size=8), st.booleans())
def test_every_chart_is_well_formed_and_inside_its_frame(values, percent):
    svg = line_chart([Series("a", list(enumerate(line))) for line in values], percent=percent, label='<&">')
    if any(math.isfinite(value) for line in values for value in line):
        for path in corners(svg):
            assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in path)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_enclose_and_are_few(low, width):
    found = ticks(low, low + width)
    near = 1e-6 * (width + abs(low)) + 1e-9
    assert found[0] <= low + near
    assert found[-1] >= low + width - near
    assert 2 <= len(found) <= 9
    assert found == sorted(set(found))


def test_smoothing_does_not_lag_behind_a_straight_line():
    points = [(step, 2.0 * step) for step in range(100)]
    assert smooth(points)[5:95] == points[5:95]
    assert smooth([]) == []
    assert smooth([(1, 4.0)]) == [(1, 4.0)]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=100), st.integers(1, 20))
def test_thinning_keeps_the_mean_of_equal_stretches(values, limit):
    got = thin(list(enumerate(values)), limit)
    assert len(got) == min(limit, len(values))
    if len(values) % limit == 0:
        assert math.fsum(y for _, y in got) / len(got) == pytest.approx(math.fsum(values) / len(values), abs=1e-9)
