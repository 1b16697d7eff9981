"""Every named point is come to by the verb that it names, and a signal is due there once."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dataplane.client.sync import Client
from dataplane.errors import InternalError, InvalidRequest, KeyNotFound
from dataplane.server.snapshotting import Snapshots
from dataplane.tags.journal import FileJournal
from dataplane.testing import MemoryPlane, plane, switches
from dataplane.testing.hits import Switches
from dataplane.testing.points import POINTS
from tests.deadline import eventually

MiB = 1 << 20


class Watched:
    """A plane with switches, whose signals are noted instead of sent."""

    def __init__(self, made: MemoryPlane, tmp: Path) -> None:
        self.plane = made
        self.tmp = tmp
        self.sent: list[int] = []
        self.switches: Switches = made.call(
            lambda: switches.install(made.server, "both", act=self.sent.append)
        )
        # Of connections that were greeted before, nothing is watched.
        self.client = made.connect()
        self.remote = made.connect(same_node_reads=False, small_put_bytes=16 * MiB)

    @property
    def runtime(self) -> Path:
        return self.plane.folders.runtime


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with plane(capacity_bytes=8 * MiB) as made:
        yield Watched(made, tmp_path)


def _small(client: Client, key: str = "A", partition: str = "p", **tags: Any) -> None:
    client.kv_put(key, partition, {"x": torch.arange(3)}, tags)


def _put(w: Watched) -> None:
    w.client.kv_put(uuid.uuid4().hex, "p", None, {"n": 1})


def _clear(w: Watched) -> None:
    _put(w)
    w.client.kv_clear(w.client.kv_list("p").keys, "p")


def _clear_where(w: Watched) -> None:
    _put(w)
    w.client.kv_clear(None, "p", where={"n": 1})


def _begin(w: Watched) -> int:
    return w.client.begin_group(uuid.uuid4().hex, "p", n=1, declared_bytes=4096)


def _end(w: Watched) -> None:
    w.client.end_group(_begin(w), "failure")


def _claim(w: Watched) -> Any:
    _put(w)
    return w.client.kv_claim("p", "train", count=1)


def _reserve(w: Watched, client: Client | None = None) -> None:
    (client or w.client).kv_put("L", "p", {"big": torch.zeros(MiB, dtype=torch.uint8)})


def _refused(w: Watched) -> None:
    _small(w.client)
    with pytest.raises(KeyNotFound):
        w.client.kv_put(uuid.uuid4().hex, "p", {"x": torch.arange(3)}, must_exist=True)


def _pin(w: Watched) -> None:
    _small(w.client)
    w.client.kv_batch_get(["A"], "p")


def _read(w: Watched) -> None:
    _small(w.client)
    w.remote.kv_batch_get(["A"], "p")


def _free(w: Watched) -> None:
    freed = w.switches.hits["values.free.done"]
    _small(w.client)
    w.client.kv_clear(["A"], "p")
    eventually(lambda: w.switches.hits["values.free.done"] > freed, "the block is freed")


def _repack(w: Watched) -> None:
    """A store that is full of blocks of which one row in eight is live, and a put."""
    rows = {"x": torch.zeros(8, 120 << 10, dtype=torch.uint8)}
    for number in range(7):
        keys = [f"{number}-{row}" for row in range(8)]
        w.client.kv_batch_put(keys, "full", rows)
        w.client.kv_clear(keys[1:], "full")
    done = w.switches.hits["values.repack.done"]
    w.client.kv_put("large", "full", {"y": torch.zeros(3 * MiB, dtype=torch.uint8)})
    assert w.switches.hits["values.repack.done"] > done
    w.client.kv_clear(None, "full", where={}, retire=True)
    w.plane.client.kv_drop_partition("full")
    eventually(lambda: not w.client.status()["bytes_in_use"], "the store is empty again")


def _save(w: Watched) -> Path:
    path = w.tmp / uuid.uuid4().hex
    _small(w.client)
    w.client.save_checkpoint(path)
    return path


def _load(w: Watched) -> None:
    path = _save(w)
    for partition in w.client.status()["partitions"]:
        w.client.kv_drop_partition(partition)
    w.client.load_checkpoint(path)


def _snapshot(w: Watched) -> None:
    _put(w)
    assert w.plane.server.tags is not None
    snapshots = Snapshots(cast("FileJournal", w.plane.server.tags.journal), 1)
    assert w.plane._loop is not None
    assert asyncio.run_coroutine_threadsafe(snapshots.take(), w.plane._loop).result(30)


SCENARIOS: dict[str, Callable[[Watched], Any]] = {
    "tags.put": _put,
    "tags.clear": _clear,
    "tags.begin_group": _begin,
    "tags.end_group": _end,
    "tags.claim": _claim,
    "tags.commit": lambda w: w.client.kv_commit(_claim(w)),
    "tags.release": lambda w: w.client.kv_release(_claim(w)),
    "tags.repack": _repack,
    **{f"tags.save_{step}": _save for step in ("open", "state", "rows", "close")},
    **{
        f"tags.load_{step}": _load
        for step in ("begin", "partition", "rows", "block", "state", "end")
    },
    "tags.snapshot": _snapshot,
    "values.reserve": _reserve,
    "values.put_block": lambda w: w.remote.kv_put(
        "R", "p", {"big": torch.zeros(MiB, dtype=torch.uint8)}
    ),
    "values.allocate": lambda w: _small(w.client),
    "values.publish": _reserve,
    "values.abort": _refused,
    "values.pin": _pin,
    "values.read": _read,
    "values.unpin": _pin,
    "values.free": _free,
    "values.hold": _begin,
    "values.repack": _repack,
}
"""How each verb of the table comes about."""


def test_every_verb_of_the_table_has_a_scenario() -> None:
    assert {f"{point.role}.{point.verb}" for point in POINTS.values()} == set(SCENARIOS)
    assert all(name.startswith(f"{p.role}.{p.verb}.") for name, p in POINTS.items())


@pytest.mark.parametrize("verb", SCENARIOS)
def test_each_point_is_come_to_by_its_verb(watched: Watched, verb: str) -> None:
    # One run tells what is never come to; then each is armed.
    SCENARIOS[verb](watched)
    points = [name for name in POINTS if name.startswith(f"{verb}.")]

    def missed() -> set[str]:
        return set(points) - set(watched.switches.hits)

    eventually(lambda: not missed(), f"{verb}: {missed()} are come to")
    for point in points:
        switches.arm(watched.runtime, point, signal=signal.SIGKILL)
        SCENARIOS[verb](watched)
        eventually(lambda: watched.sent, f"{point} was come to")
        assert watched.sent == [signal.SIGKILL], point
        assert switches.armed(watched.runtime) is None
        watched.sent.clear()


def test_a_scan_that_clears_comes_to_the_points_of_clear(watched: Watched) -> None:
    _clear_where(watched)
    came = {point for point in watched.switches.hits if point.startswith("tags.clear.")}
    assert came >= {"tags.clear.asked", "tags.clear.written", "tags.clear.applied"}


def test_the_nth_time_counts_from_when_it_is_armed(watched: Watched) -> None:
    _put(watched)
    switches.arm(watched.runtime, "tags.put.written", 3, signal.SIGSTOP)
    for _ in range(2):
        _put(watched)
        assert watched.sent == []
        assert switches.armed(watched.runtime) == "tags.put.written"
    _put(watched)
    assert watched.sent == [signal.SIGSTOP]
    assert switches.armed(watched.runtime) is None
    _put(watched)
    assert watched.sent == [signal.SIGSTOP]


def test_what_is_disarmed_is_not_sent(watched: Watched) -> None:
    switches.arm(watched.runtime, "tags.put.written")
    switches.disarm(watched.runtime)
    switches.disarm(watched.runtime)
    _put(watched)
    assert watched.sent == []


def test_a_torn_record_is_half_of_the_one_that_follows(watched: Watched) -> None:
    assert watched.plane.server.tags is not None
    journal: Any = watched.plane.server.tags.journal
    _put(watched)
    before = journal.path.read_bytes()
    halves: list[bytes] = []
    watched.switches.act = lambda _: halves.append(journal.path.read_bytes()[len(before) :])
    switches.arm(watched.runtime, "tags.put.torn")
    _put(watched)
    (half,) = halves
    whole = journal.path.read_bytes()[len(before) :]
    assert half
    assert whole.count(half) >= 1
    assert len(half) < len(whole)


@pytest.mark.parametrize(
    ("point", "nth", "number"),
    [
        ("tags.put", 1, signal.SIGKILL),
        ("tags.put.written", 0, signal.SIGKILL),
        ("tags.put.torn", 1, signal.SIGSTOP),
    ],
)
def test_what_cannot_be_armed_is_refused(tmp_path: Path, point: str, nth: int, number: int) -> None:
    with pytest.raises(InvalidRequest):
        switches.arm(tmp_path, point, nth, number)
    assert switches.armed(tmp_path) is None


def test_a_method_that_is_gone_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataplane.tags.store import TagStore

    with plane() as made:
        monkeypatch.delattr(TagStore, "apply_repack")
        with pytest.raises(InternalError, match="apply_repack"):
            made.call(lambda: switches.install(made.server, "both"))


def test_a_verb_that_is_gone_is_told_at_the_start() -> None:
    with plane() as made:
        del made.server.verbs["claim"]
        with pytest.raises(InternalError, match="claim"):
            made.call(lambda: switches.install(made.server, "both"))
