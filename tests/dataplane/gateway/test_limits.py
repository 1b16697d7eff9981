"""Limits of one principal: rates by a clock of the test, and what is under way."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest, RateLimited
from dataplane.gateway.access.limits import MAX_IDLE, Limits, Throttle, Throttles


class Clock:
    """Time that passes when told."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_calls_go_at_once_up_to_a_second_s_worth_and_then_at_their_rate() -> None:
    clock = Clock()
    throttle = Throttle(Limits(calls_per_s=4), clock)
    assert [throttle.call() for _ in range(5)] == [0, 0, 0, 0, 0.25]
    assert throttle.call() == 0.25  # a refused call costs nothing
    clock.now += 0.125
    assert throttle.call() == 0.125
    clock.now += 0.125
    assert throttle.call() == 0
    clock.now += 1000
    assert [throttle.call() for _ in range(5)] == [0, 0, 0, 0, 0.25]


def test_a_rate_under_one_a_second_lets_one_go() -> None:
    clock = Clock()
    throttle = Throttle(Limits(calls_per_s=0.1), clock)
    assert throttle.call() == 0
    assert throttle.call() == pytest.approx(10)
    clock.now += 10
    assert throttle.call() == 0


@given(st.floats(0.01, 1e4), st.integers(1, 50))
def test_who_comes_again_when_told_is_let_in(rate: float, calls: int) -> None:
    clock = Clock(0.0)
    throttle = Throttle(Limits(calls_per_s=rate), clock)
    for _ in range(calls):
        wait = throttle.call()
        if wait:
            clock.now += wait
            assert throttle.call() == 0


@given(
    st.floats(0.1, 100),
    st.lists(st.floats(0, 3, allow_subnormal=False), min_size=1, max_size=60),
)
def test_no_pattern_of_calls_beats_the_rate(rate: float, gaps: list[float]) -> None:
    clock = Clock(0.0)
    throttle = Throttle(Limits(calls_per_s=rate), clock)
    let_in = 0
    for gap in gaps:
        clock.now += gap
        let_in += throttle.call() == 0
    assert let_in <= max(rate, 1) + rate * clock.now + 1e-6


def test_bytes_run_into_debt_and_say_how_long_to_wait() -> None:
    clock = Clock()
    throttle = Throttle(Limits(bytes_per_s=1000), clock)
    assert throttle.bytes(1000) == 0
    assert throttle.bytes(500) == 0.5
    assert throttle.bytes(500) == 1.0  # another stream of the same principal
    clock.now += 1.0
    assert throttle.bytes(0) == 0
    assert throttle.bytes(5000) == 5.0  # more than a second's worth in one piece


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    clock = Clock()
    throttle = Throttle(Limits(calls_per_s=1), clock)
    assert throttle.call() == 0
    clock.now -= 50
    assert throttle.call() == 1
    clock.now += 1
    assert throttle.call() == 0


def test_a_call_too_many_says_when_to_come_again() -> None:
    clock = Clock()
    throttle = Throttle(Limits(calls_per_s=2), clock)
    throttle.require_call()
    throttle.require_call()
    with pytest.raises(RateLimited, match=r"more than 2 calls/s; call again in 0\.5 s") as told:
        throttle.require_call()
    assert (told.value.retry_after_s, told.value.limit) == (0.5, "calls_per_s")


def test_calls_under_way_are_counted() -> None:
    throttle = Throttle(Limits(open_streams=2), Clock())
    throttle.open_stream()
    throttle.open_stream()
    with pytest.raises(RateLimited, match="2 calls are under way already") as told:
        throttle.open_stream()
    assert (told.value.retry_after_s, told.value.limit) == (0.0, "open_streams")
    throttle.close_stream()
    throttle.open_stream()
    assert throttle.open_streams == 2


def test_bytes_in_memory_are_refused_before_they_are_taken() -> None:
    throttle = Throttle(Limits(inflight_bytes=100), Clock())
    throttle.hold(60)
    with pytest.raises(RateLimited, match="60 of 100 bytes are under way, and 50 more") as told:
        throttle.hold(50)
    assert told.value.limit == "inflight_bytes"
    with pytest.raises(InvalidRequest, match="101 bytes at once are more than the 100"):
        throttle.hold(101)
    assert throttle.held_bytes == 60
    throttle.let_go(60)
    throttle.hold(100)


def test_without_limits_nothing_is_refused() -> None:
    throttle = Throttle(Limits(), Clock())
    for _ in range(1000):
        throttle.require_call()
        throttle.open_stream()
        throttle.hold(1 << 40)
        assert throttle.bytes(1 << 40) == 0


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5"])
@pytest.mark.parametrize("name", ["calls_per_s", "open_streams"])
def test_a_limit_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"limit {name} must be"):
        Limits(**{name: value})


def test_credentials_of_one_name_share_what_they_may_use() -> None:
    clock = Clock()
    throttles = Throttles(clock)
    limits = Limits(calls_per_s=1)
    assert throttles.of("a", limits) is throttles.of("a", Limits(calls_per_s=1))
    assert throttles.of("a", limits) is not throttles.of("b", limits)
    assert throttles.of("a", limits) is not throttles.of("a", Limits(calls_per_s=2))


def test_who_is_at_rest_is_forgotten_and_who_owes_is_not() -> None:
    clock = Clock()
    throttles = Throttles(clock)
    busy, owing = throttles.of("busy", Limits()), throttles.of("owing", Limits(bytes_per_s=1))
    busy.open_stream()
    owing.bytes(1000)
    for i in range(3 * MAX_IDLE):
        throttles.of(f"name-{i}", Limits())
        assert len(throttles) <= MAX_IDLE + 1
    assert throttles.of("busy", Limits()) is busy
    assert throttles.of("owing", Limits(bytes_per_s=1)) is owing
    busy.close_stream()
    assert busy.is_at_rest
    assert not owing.is_at_rest
    clock.now += 1000
    assert owing.is_at_rest
