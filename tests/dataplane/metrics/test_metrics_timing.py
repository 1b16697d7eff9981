"""Durations and failures by verb, and which names become labels: pure."""

from __future__ import annotations

from time import perf_counter

from dataplane.errors import KeyNotFound
from dataplane.metrics.labels import MAX_CHARACTERS, OTHER, Largest, readable
from dataplane.metrics.timing import BOUNDS_S, UNKNOWN, Begun, Histogram, Meter
from dataplane.metrics.totals import Totals


def test_a_duration_is_in_the_first_bucket_that_is_as_long() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, 1e9):
        histogram.add(seconds)
    assert histogram.counts == [2, 1, *[0] * (len(BOUNDS_S) - 2), 1]
    assert histogram.count == 4
    assert histogram.sum_s > 1e9


def test_bounds_grow() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_a_request_is_counted_once_by_its_verb() -> None:
    meter, begun = Meter({"list"}), Begun()
    begun[1] = "list", perf_counter()
    meter.end(begun, 1)
    meter.end(begun, 1)
    assert {verb: h.count for verb, h in meter.durations.items()} == {"list": 1}
    assert begun == {}


def test_verbs_that_callers_make_up_are_one() -> None:
    meter, begun = Meter({"list"}), Begun()
    for number in range(1, 1000):
        begun[number] = f"made-up-{number}", perf_counter()
        meter.fail(begun, number, KeyNotFound("none", partition_id="p", keys=[]))
    assert {verb: h.count for verb, h in meter.durations.items()} == {UNKNOWN: 999}
    assert meter.failures == {(UNKNOWN, "KeyNotFound"): 999}


def test_what_is_never_answered_is_counted_with_its_connection() -> None:
    meter, begun = Meter({"wait"}), Begun()
    begun[1] = "wait", perf_counter()
    begun[2] = "wait", perf_counter()
    meter.end(begun, 1)
    meter.abandon(begun)
    assert meter.abandoned == {"wait": 1}
    assert meter.durations["wait"].count == 1


def test_totals_are_plain_numbers_by_name() -> None:
    totals = Totals()
    totals.refuse(KeyNotFound("none", partition_id="p", keys=[]))
    totals.puts += 2
    told = totals.as_dict()
    assert (told["puts"], told["refused"]) == (2, 1)
    assert all(type(value) is int for value in told.values())


def test_the_largest_are_shown_and_stay_shown() -> None:
    largest = Largest(2)
    assert largest.choose({"a": 1, "b": 2, "c": 3}) == {"b", "c"}
    # Another one outgrows them: series must not come and go with every scrape.
    assert largest.choose({"a": 9, "b": 2, "c": 3}) == {"b", "c"}
    assert largest.label("a") == OTHER
    assert largest.choose({"a": 9, "c": 3}) == {"a", "c"}


def test_one_that_is_called_other_is_among_the_others() -> None:
    largest = Largest(2)
    assert largest.choose({OTHER: 5, "a": 1}) == {"a"}
    assert largest.label(OTHER) == OTHER


def test_labels_are_short_and_can_be_printed() -> None:
    assert readable("train") == "train"
    assert readable("a\x1b[31mb\u202ec\n") == "a?[31mb?c?"
    assert len(readable("x" * 1000)) == MAX_CHARACTERS
