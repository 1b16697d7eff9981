"""Errors of the plane bare: what they say of partitions that the caller may not see is left out."""

from __future__ import annotations

import pytest

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    KeyNotFound,
    QuotaExceeded,
    StaleWrite,
)
from dataplane.gateway.access.limits import Limits
from dataplane.gateway.access.roles import ANYONE, VERBS, Grant, Principal
from dataplane.gateway.access.unseen import without_unseen

SOME = Principal("some", (Grant("mine*", VERBS), Grant("*.val", VERBS)), Limits())
WHY = "there is no partition 'mine'; 3 rows wanted; there are 'secret', 'b' and 5 more\n2 wait"


def errors() -> list[DataplaneError]:
    return [
        DeadlineExceeded(f"late within 1 s: {WHY}", waited_s=1.0, explanation=WHY),
        QuotaExceeded(
            "the store is full; partition 'secret' holds the most (task 'secret' lags most)",
            used_bytes=7, limit_bytes=8, oldest_keys=["secret"], lagging_task="secret",
        ),
        InvalidRequest("attempt 12 belongs to partition 'secret', and the put is for 'mine'"),
    ]  # fmt: skip


@pytest.mark.parametrize("error", errors())
def test_nothing_is_said_of_others(error: DataplaneError) -> None:
    left = without_unseen(error, SOME)
    said = [str(left), *(repr(getattr(left, name)) for name in left.attributes)]
    assert not any("secret" in text for text in said)


def test_what_the_caller_may_know_stays() -> None:
    late, full, attempt = [without_unseen(error, SOME) for error in errors()]
    assert isinstance(late, DeadlineExceeded)
    assert late.waited_s == 1.0
    assert late.explanation == "there is no partition 'mine'; 3 rows wanted"
    assert str(late) == f"late within 1 s: {late.explanation}"
    assert isinstance(full, QuotaExceeded)
    assert (full.used_bytes, full.limit_bytes) == (7, 8)
    assert str(full) == "the store is full"
    assert isinstance(attempt, StaleWrite)
    assert attempt.attempt == 12


def test_an_attempt_elsewhere_is_answered_like_one_that_is_not_open() -> None:
    elsewhere = without_unseen(errors()[2], SOME)
    closed = without_unseen(
        StaleWrite(
            "attempt 12 is not open: its group ended", partition_id="mine", keys=["k"], attempt=12
        ),
        SOME,
    )
    assert str(elsewhere) == str(closed)
    for name in StaleWrite.attributes:
        assert getattr(elsewhere, name) == getattr(closed, name)


@pytest.mark.parametrize("error", errors())
def test_who_sees_everything_is_told_everything(error: DataplaneError) -> None:
    assert without_unseen(error, ANYONE) is error


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("late: 3 rows fail; there are 4", waited_s=1.0, explanation="3 rows fail"),
        DeadlineExceeded("late", waited_s=1.0, explanation=None),
        QuotaExceeded("partition 'mine' is full", used_bytes=1, limit_bytes=1, oldest_keys=["a"]),
        KeyNotFound("no key 'a'", partition_id="mine", keys=["a"]),
        StaleWrite("cleared", partition_id="mine", keys=["a"], cleared_at=3),
    ],
)
def test_other_errors_stay_as_they_are(error: DataplaneError) -> None:
    assert without_unseen(error, SOME) is error
