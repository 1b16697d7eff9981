"""Slopes and their bounds, against worked numbers and series of which the truth is known."""

from __future__ import annotations

import random

import pytest

from tests.soak.slope import Slope, least_squares, theil_sen

FITS = [least_squares, theil_sen]


@pytest.mark.parametrize("fit", FITS)
def test_a_line_has_its_own_slope(fit: object) -> None:
    slope = fit([0.0, 1.0, 2.0, 4.0, 7.0], [1.0, 3.0, 5.0, 9.0, 15.0])  # type: ignore[operator]
    assert slope == Slope(2.0, 2.0)


def test_least_squares_as_worked_by_hand() -> None:
    """t = 1..5, v = 2, 4, 5, 4, 5: b = 6 / 10; residuals -0.8, 0.6, 1, -0.6, -0.2, squares 2.4, so
    s^2 = 0.8 and the error is sqrt(0.08); the products of neighbours are -0.48 + 0.6 - 0.6 + 0.12 <
    0; t(0.95, 3) = 2.353."""
    slope = least_squares([1, 2, 3, 4, 5], [2, 4, 5, 4, 5])
    assert slope.estimate == pytest.approx(0.6)
    assert slope.upper == pytest.approx(0.6 + 2.353 * 0.08**0.5, rel=0.005)


def test_an_outlier_moves_the_one_and_not_the_other() -> None:
    values = [100.0] * 40
    values[-1] = 1000.0
    assert theil_sen(range(40), values) == Slope(0.0, 0.0)
    assert least_squares(range(40), values).estimate > 1


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("truth", [0.0, 0.05])
def test_the_bound_is_above_the_truth_as_often_as_it_says(fit: object, truth: float) -> None:
    chance = random.Random(1)
    times = [float(i) for i in range(60)]
    held = 0
    for _ in range(400):
        slope = fit(times, [truth * t + chance.gauss(0, 1) for t in times])  # type: ignore[operator]
        held += slope.upper >= truth
    assert 0.91 < held / 400 < 0.99


def test_the_bound_holds_where_neighbours_resemble_each_other() -> None:
    chance = random.Random(2)
    held = 0
    for _ in range(400):
        values, level = [], 0.0
        for _ in range(200):
            level = 0.7 * level + chance.gauss(0, 1)
            values.append(level)
        held += least_squares(range(200), values).upper >= 0
    assert held / 400 > 0.92


@pytest.mark.parametrize("fit", FITS)
def test_what_has_no_slope_is_refused(fit: object) -> None:
    for times in ([1.0, 2.0, 3.0], [1.0] * 4):
        with pytest.raises(ValueError, match=r"four samples|one time"):
            fit(times, times)  # type: ignore[operator]
