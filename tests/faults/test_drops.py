"""A dropped partition leaves nothing in its server, though no collection of garbage ever runs.

Servers freeze what survives a collection: a circle that leads to rows would keep them for good.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.sync import Client
from dataplane.errors import DeadlineExceeded, PartitionNotFound, StaleWrite
from dataplane.server.crowd import Crowd
from dataplane.tags.claims.queues import Queue
from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.rows import Chunk, Row
from dataplane.tags.views.view import View
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import Plane

pytestmark = pytest.mark.faults

KINDS = (Partition, Chunk, Row, View, Queue, Group, Crowd)
P = "dropped"


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """A plane whose server is in this process."""
    with planes.in_thread("drops", timeout_s=20, **roots) as plane:
        yield plane


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def census() -> Counter[str]:
    """How many objects there are of the kinds that lead to rows."""
    return Counter(type(o).__name__ for o in gc.get_objects() if type(o) in KINDS)


def dropped_while(plane: Plane, what: str, wait: Callable[[Client], Any]) -> None:
    """Drop the partition while somebody waits for something."""
    with ThreadPoolExecutor(1) as pool, plane.another() as other:
        waiting = pool.submit(wait, other)
        eventually(lambda: plane.client.status()["waiting"][what] == 1, f"{what} are waited for")
        plane.client.kv_drop_partition(P)
        with pytest.raises((PartitionNotFound, StaleWrite)):
            waiting.result(20)
    plane.client.kv_put("again", P, tags={})


def watch(client: Client, timeout: float = 20) -> None:
    changes = client.kv_watch(P, since=client.kv_list(P, limit=0).revision, timeout=timeout)
    try:
        next(changes)
    finally:
        changes.close()


def in_groups(plane: Plane) -> None:
    client = plane.client
    attempt = client.begin_group("u", P, n=1, declared_bytes=8192)
    client.kv_put("u_0", P, {"x": torch.tensor(1)}, attempt=attempt)
    client.begin_group("v", P, n=1)
    client.end_group(attempt, "finished")
    claim = client.kv_claim(P, "train", count=1, groups=True, timeout=20)
    client.kv_commit(claim)


def by_claims(plane: Plane) -> None:
    client = plane.client
    client.kv_commit(client.kv_claim(P, "train", count=1, timeout=20))
    client.kv_release(client.kv_claim(P, "train", count=1, order_by="n", timeout=20))
    client.kv_claim(P, "train", count=1, timeout=20)
    client.kv_claim(P, "step", count=2, replica=(0, 2, 0), timeout=20)


def too_late(plane: Plane) -> None:
    client = plane.client
    for call in (
        lambda: client.kv_wait(P, {"n": 9}, timeout=0.05),
        lambda: client.kv_wait(P, group_by="uid", timeout=0.05),
        lambda: watch(client, 0.05),
        lambda: client.kv_claim(P, "train", count=9, timeout=0.05),
    ):
        with pytest.raises(DeadlineExceeded):
            call()


def for_room(plane: Plane) -> None:
    plane.client.kv_create_partition(P, quota={"rows": 3})
    dropped_while(plane, "room", lambda client: client.kv_put("more", P, tags={}, timeout=20))


def looked_at(plane: Plane) -> None:
    client = plane.client
    since = client.kv_list(P).revision
    client.kv_wait(P, {"n": 1}, timeout=20)
    client.kv_clear(["a"], P)
    client.kv_list(P, since=since)
    client.kv_clear(None, P, where={"n": 1})
    client.explain(P, task="train", count=2)


USES: dict[str, Callable[[Plane], None]] = {
    "looked at": looked_at,
    "claims": by_claims,
    "groups": in_groups,
    "deadlines": too_late,
    "a wait": lambda plane: dropped_while(plane, "rows", lambda c: c.kv_wait(P, {"n": 9})),
    "a watch": lambda plane: dropped_while(plane, "rows", watch),
    "a claim": lambda plane: dropped_while(
        plane, "claims", lambda c: c.kv_claim(P, "t", count=9, timeout=20)
    ),
    "room": for_room,
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", USES)
def test_a_dropped_partition_leaves_nothing_without_a_collection(plane: Plane, use: str) -> None:
    before = census()
    rows = {"x": torch.arange(3)}
    plane.client.kv_batch_put(["a", "b", "c"], P, rows, [{"n": i} for i in range(3)])
    assert census() != before
    USES[use](plane)
    plane.client.kv_drop_partition(P)
    # Of the last one that was dropped, a task that has yet to end may hold something.
    eventually(lambda: census() == before, f"{before} and no more is left")
