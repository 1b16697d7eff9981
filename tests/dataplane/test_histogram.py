"""Histograms of lengths: one by one or all at once the same, percentiles within a bin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.histogram import BINS, Lengths, bin_of, bin_range

LENGTH = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 2**31 - 1))


@given(LENGTH)
def test_a_bin_holds_its_lengths(length: int) -> None:
    low, high = bin_range(bin_of(length))
    assert low <= length <= high
    assert bin_of(low) == bin_of(high) == bin_of(length) < BINS
    assert high - low <= max(0, low // 100)


@given(st.lists(LENGTH, min_size=1, max_size=200))
def test_one_by_one_is_all_at_once(values: list[int]) -> None:
    single, whole = Lengths(), Lengths()
    for value in values:
        single.add(value)
    whole.add_all(np.array(values, np.int32))
    told = whole.told()
    assert told == single.told()
    assert (told["rows"], told["min"], told["max"]) == (len(values), min(values), max(values))
    assert told["mean"] == pytest.approx(sum(values) / len(values), abs=1e-3)
    ordered = sorted(values)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = ordered[max(1, int(np.ceil(share * len(ordered)))) - 1]
        assert exact <= told[name] <= exact + exact // 100 + 1
    assert sum(rows for _, _, rows in told["histogram"]) == len(values)
    for low, high, rows in told["histogram"]:
        assert rows == sum(low <= value <= high for value in values)
    assert len(told["histogram"]) <= 21


def test_short_lengths_are_exact() -> None:
    lengths = Lengths()
    lengths.add_all(np.array([0, 0, 3, 255], np.int32))
    told = lengths.told()
    assert told["p50"] == 0
    assert told["p99"] == 255
    assert told["histogram"] == [[0, 15, 3], [240, 255, 1]]


def test_no_rows() -> None:
    lengths = Lengths()
    lengths.add_all(np.array([], np.int32))
    assert lengths.told() == {
        "rows": 0, "min": 0, "max": 0, "mean": 0.0, "p50": 0, "p90": 0, "p99": 0, "histogram": [],
    }  # fmt: skip
