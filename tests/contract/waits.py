"""Calls that wait, made in threads, and watches of any kind of client as plain iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from dataplane.errors import DeadlineExceeded
from dataplane.types import Change
from tests.contract.planes import Blocking, Plane
from tests.deadline import eventually


def waiting(plane: Plane) -> int:
    """How many requests wait for anything in the plane."""
    status = plane.witness.status()
    stores = sum(store["waiting"] for store in status["values"].values())
    return stores + sum(status["waiting"].values())


@contextmanager
def under_way(
    plane: Plane, call: Callable[..., Any], *args: Any, **named: Any
) -> Iterator[Future[Any]]:
    """A call that has come to wait at the plane, or is over already; its result."""
    least = waiting(plane)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call, *args, **named)

        def arrived() -> bool:
            nonlocal least
            now = waiting(plane)
            least = min(least, now)  # what others gave up before may leave only now
            return result.done() or now > least

        eventually(arrived, "the call waits at the plane", within_s=20)
        yield result


def in_vain(call: Callable[[], Any]) -> DeadlineExceeded:
    """What the store says of a call that waits in vain."""
    for _ in range(10):
        with pytest.raises(DeadlineExceeded) as late:
            call()
        if not is_of_client(late.value):
            return late.value
    raise AssertionError("the store never had the time to say it")


def is_of_client(late: DeadlineExceeded) -> bool:
    """Whether it is the client that gave up, a while after the store should have said something:
    a busy machine may leave a store no time for that."""
    return "was not answered" in str(late) or "did not answer in time" in str(late)


class Watch:
    """A watch of any client: call it for the next Change."""

    def __init__(self, client: Any, partition_id: str, **named: Any) -> None:
        self._blocking = client if isinstance(client, Blocking) else None
        behind = client if self._blocking is None else self._blocking.client
        self._changes: Any = behind.kv_watch(partition_id, **named)

    def __call__(self) -> Change:
        if self._blocking is None:
            return next(self._changes)
        return self._blocking._run(anext(self._changes))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._blocking is None:
            self._changes.close()
        else:
            self._blocking._run(self._changes.aclose())


def told(change: Change) -> tuple[list[str], list[str]]:
    """The keys of a Change: of rows, and cleared."""
    return change.rows.keys, change.cleared
