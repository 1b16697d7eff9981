"""Calls that wait, made in threads, and watches of any kind of client as plain iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from dataplane.types import Change
from tests.contract.planes import Blocking, Plane

ROUND_TRIPS = 25
"""Requests of somebody else in which a call of another thread surely reaches the plane."""


@contextmanager
def under_way(
    plane: Plane, call: Callable[..., Any], *args: Any, **named: Any
) -> Iterator[Future[Any]]:
    """A call that waits at the plane, as far as one can tell from outside; its result."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call, *args, **named)
        for _ in range(ROUND_TRIPS):
            plane.witness.status()
        yield result


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
