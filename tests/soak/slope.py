"""How fast a series grows, and how sure that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

Z_95 = 1.6448536269514722
"""The 0.95 quantile of the standard normal distribution."""


class Slope(NamedTuple):
    """Growth per unit of time: as estimated, and its upper 95 % bound (one-sided)."""

    estimate: float
    upper: float


def least_squares(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of the line of least squares.

    b = sum((t - mean t)(v - mean v)) / S with S = sum((t - mean t)^2), and the bound is b + q * s /
    sqrt(S) with s^2 the sum of squared residuals over n - 2, and q the 0.95 quantile of Student's
    t with n - 2 degrees of freedom: Draper and Smith, Applied Regression Analysis, 3rd
    edition, section 1.4. Neighbouring samples of memory resemble each other, which makes that bound
    too low. So s^2 is multiplied with (1 + r) / (1 - r), r being the residuals' correlation with
    their neighbours (if positive): the variance of a mean, and of a slope, of an autoregressive
    series of order 1 (Priestley, Spectral Analysis and Time Series, section 5.3.2).

    ValueError if there are fewer than four samples, or all of one time.
    """
    n = len(times)
    if n < 4:
        raise ValueError(f"a slope takes four samples, not {n}")
    mean_t, mean_v = fmean(times), fmean(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if not spread:
        raise ValueError("all samples are of one time")
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
    rest = [v - mean_v - slope * (t - mean_t) for t, v in zip(times, values, strict=True)]
    squares = sum(r * r for r in rest)
    if not squares:
        return Slope(slope, slope)
    near = max(0.0, sum(a * b for a, b in pairwise(rest)) / squares)
    factor = (1 + near) / (1 - near) if near < 1 else math.inf
    error = math.sqrt(squares / (n - 2) * factor / spread)
    return Slope(slope, slope + _student_95(n - 2) * error)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The median of the slopes between all pairs of samples, which a few outliers do not move.

    The bound is the slope of rank (N + z * sqrt(n (n - 1) (2 n + 5) / 18)) / 2 of the N slopes in
    order, z being the 0.95 quantile of the normal distribution: Sen, Estimates of the regression
    coefficient based on Kendall's tau, JASA 63 (1968), section 3.

    ValueError if there are fewer than four samples, or all of one time.
    """
    n = len(times)
    if n < 4:
        raise ValueError(f"a slope takes four samples, not {n}")
    slopes = sorted(
        (values[j] - values[i]) / (times[j] - times[i])
        for i in range(n)
        for j in range(i + 1, n)
        if times[j] != times[i]
    )
    if not slopes:
        raise ValueError("all samples are of one time")
    width = Z_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    rank = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return Slope(median(slopes), slopes[rank])


def _student_95(degrees: int) -> float:
    """The 0.95 quantile of Student's t: Abramowitz and Stegun, Handbook of Mathematical Functions,
    formula 26.7.5, which is within 1 % from two degrees of freedom on (2.84 for 2.92)."""
    z, d = Z_95, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )
