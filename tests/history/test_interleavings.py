"""Random clients on a real plane: whatever they are told, one correct plane could have told it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dataplane.errors import ClaimLost, FieldNotFound, KeyNotFound, StaleWrite
from tests.faults import planes
from tests.faults.planes import Plane
from tests.history.calls import Mix
from tests.history.checker import check
from tests.history.races import in_tasks, in_threads
from tests.history.record import Claim, Clear, End, Get, History, Op, Put, Settle
from tests.history.words import story
from tests.history.workload import SETTINGS, interleave

INTERLEAVINGS = 1000

COMMON = Mix()
BREAKING = Mix(cut=0.2, leave=0.05, die=0.03)
LOSING = Mix(lease_s=0.1, die=0.03, leave=0.05)
WRITING = Mix(put=12, clear=6, get=3, claim=0, settle=0, large=0.6, split=0.3)
GROUPING = Mix(begin=4, end=4, attempt=0.7, grouped=0.5)
MIXES = (
    COMMON, COMMON, COMMON, BREAKING, BREAKING, WRITING, WRITING, GROUPING, GROUPING, LOSING,
)  # fmt: skip


def legal(history: History, seed: int) -> History:
    """The history, if it is legal; else the test fails with the seed and the whole story."""
    found = check(history)
    if found is not None:
        print(story(history))
        pytest.fail(f"seed {seed}: {found.rule}: {found.what}")
    return history


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_interleavings_are_legal(plane: Plane, pool: ThreadPoolExecutor) -> None:
    ops: list[Op] = []
    for seed in range(INTERLEAVINGS):
        ops += legal(interleave(plane, pool, seed, MIXES[seed % len(MIXES)]), seed).ops
    assert met(ops) == set(SIGHTS)


SIGHTS: dict[str, Callable[[Op], bool]] = {
    "a put that was late": lambda op: isinstance(op.error, StaleWrite) and not op.error.attempt,
    "a put for a closed attempt": lambda op: isinstance(op, Put) and _is_closed(op),
    "an end of a closed attempt": lambda op: isinstance(op, End) and _is_closed(op),
    "a put that was asked for again": lambda op: isinstance(op, Put) and op.ok and op.broken > 0,
    "a put that nobody heard of": lambda op: isinstance(op, Put) and op.end is None,
    "a put for a group": lambda op: isinstance(op, Put) and op.ok and op.attempt is not None,
    "a put whose head came first": lambda op: isinstance(op, Put) and op.ok and bool(op.begun),
    "a clear of many rows": lambda op: isinstance(op, Clear) and op.removed > 1,
    "a clear by tags": lambda op: isinstance(op, Clear) and bool(op.where) and op.removed > 0,
    "a clear that was asked for again": lambda op: isinstance(op, Clear) and op.broken > 0,
    "a get of many rows": lambda op: isinstance(op, Get) and len(op.rows) > 1,
    "a get that missed keys": lambda op: isinstance(op, Get) and isinstance(op.error, KeyNotFound),
    "a get that missed fields": lambda op: isinstance(op.error, FieldNotFound),
    "a get that was asked for again": lambda op: isinstance(op, Get) and op.ok and op.broken > 0,
    "a claim of many rows": lambda op: isinstance(op, Claim) and len(op.rows) > 1,
    "a claim of whole groups": lambda op: isinstance(op, Claim) and op.grouped and bool(op.rows),
    "a claim that was asked for again": lambda op: isinstance(op, Claim) and _was_repeated(op),
    "a row that was delivered twice": lambda op: isinstance(op, Claim) and _is_second(op),
    "a claim that nobody heard of": lambda op: isinstance(op, Claim) and op.end is None,
    "a claim that waited in vain": lambda op: isinstance(op, Claim) and op.refused,
    "a commit": lambda op: isinstance(op, Settle) and op.ok and op.commit,
    "a release": lambda op: isinstance(op, Settle) and op.ok and not op.commit,
    "a claim that was lost": lambda op: isinstance(op.error, ClaimLost),
}
"""What must have happened, or nothing was tried."""


def _is_closed(op: Op) -> bool:
    return isinstance(op.error, StaleWrite) and op.error.attempt is not None


def _was_repeated(op: Claim) -> bool:
    return op.ok and op.broken > 0 and len(op.rows) > 0


def _is_second(op: Claim) -> bool:
    return any(number > 1 for _, _, number in op.rows)


def met(ops: Iterable[Op]) -> set[str]:
    """Which of the sights some call shows."""
    counts = Counter(name for op in ops for name, shows in SIGHTS.items() if shows(op))
    print(dict(counts))
    return set(counts)


def test_a_plane_that_soon_forgets_refuses_what_it_cannot_judge(
    roots: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    unjudged = 0
    with ExitStack() as stack:
        plane = planes.start(stack, "forgetful", **SETTINGS, **roots, history_changes=4)
        for seed in range(100):
            history = legal(interleave(plane, pool, seed, WRITING, calls=24), seed)
            unjudged += sum(
                isinstance(op.error, StaleWrite) and op.error.cleared_at is None
                for op in history.ops
            )
    assert unjudged


@pytest.mark.parametrize("mix", [COMMON, LOSING], ids=["with-long-leases", "with-short-leases"])
def test_clients_in_threads_are_told_what_is_legal(plane: Plane, mix: Mix) -> None:
    for seed in range(6):
        legal(in_threads(plane, seed, mix, clients=4, calls=40), seed)


@pytest.mark.parametrize("mix", [COMMON, LOSING], ids=["with-long-leases", "with-short-leases"])
def test_clients_in_tasks_are_told_what_is_legal(plane: Plane, mix: Mix) -> None:
    for seed in range(6):
        legal(in_tasks(plane, seed, mix, clients=3, calls=30), seed)
