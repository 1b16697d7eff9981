"""A crowd without sockets: who is woken when, and with what, while the store goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest

import dataplane.server.crowd as crowd_module
from dataplane.client.results import unpack_listing
from dataplane.errors import PartitionNotFound
from dataplane.server.crowd import BEFORE_ALL, Crowd, Late
from dataplane.server.listings import Packed
from dataplane.server.slices import WorstSlice
from dataplane.server.telling import SMALL_CHANGE, Told
from dataplane.tags.history import History
from dataplane.tags.query import compile_where
from dataplane.tags.store import TagStore
from dataplane.tags.views.view import condition_of
from tests.dataplane.audit import put

ONE = {"v": 1}


class Stage:
    """A store whose changes wake one crowd, as the service has it."""

    def __init__(self, where: Any = ONE, history: History | None = None) -> None:
        self.store = TagStore(1, history)
        put(self.store, "p", ["first"], tags=[{"v": 0}])
        self.partition = self.store.partition("p")
        predicate = compile_where(where)
        condition = condition_of(predicate, frozenset(), grouped=False)
        view = self.partition.views.open(condition, predicate)
        self.crowd = Crowd(self.store, self.partition, view, WorstSlice())
        self.looks = 0
        self.looks_begun = asyncio.Event()
        self.packs = 0
        self.packs_begun = asyncio.Event()
        self.gate = asyncio.Event()
        """While it is closed, nothing that is looked for or packed comes to an end."""
        self.gate.set()

    def put(self, *keys: str, **tags: Any) -> int:
        """A put of rows with these tags, and its wake; its revision."""
        n = put(self.store, "p", keys, tags=[tags] * len(keys))
        self.tell()
        return n

    def tell(self) -> None:
        for first in self.partition.views.take_stirred().values():
            self.crowd.wake(first)

    def wait(self, count: int, for_s: float = 20.0) -> asyncio.Task[tuple[int, Packed]]:
        return asyncio.create_task(self.crowd.rows(count, self.at(for_s)))

    def watch(self, after: int, for_s: float = 20.0) -> asyncio.Task[Told]:
        return asyncio.create_task(self.crowd.changes(after, self.at(for_s)))

    def at(self, for_s: float) -> float:
        return asyncio.get_running_loop().time() + for_s


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    pack_moment, changes_since = crowd_module.pack_moment, crowd_module.changes_since

    async def counted_pack(*args: Any) -> Packed:
        made.packs += 1
        made.packs_begun.set()
        packed = await pack_moment(*args)
        await made.gate.wait()
        return packed

    async def counted_look(*args: Any) -> Told:
        made.looks += 1
        made.looks_begun.set()
        told = await changes_since(*args)
        await made.gate.wait()
        return told

    monkeypatch.setattr(crowd_module, "pack_moment", counted_pack)
    monkeypatch.setattr(crowd_module, "changes_since", counted_look)
    return made


async def turns(count: int = 5) -> None:
    """Let everything that is due run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(event: asyncio.Event) -> None:
    await within(event.wait())


def keys_of(packed: Packed) -> list[str]:
    head, buffers, _ = packed
    payload = memoryview(b"".join(memoryview(buffer).cast("B") for buffer in buffers))
    return unpack_listing("p", [(1, 0), True, [], *head], payload).keys


async def within(awaited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaited, 20)


# -- rows ------------------------------------------------------------------------------------


async def test_each_is_woken_when_its_count_is_reached(stage: Stage) -> None:
    calls = {count: stage.wait(count) for count in (3, 1, 2, 5)}
    await turns()
    stage.put("other", v=2)
    await turns()
    assert not any(call.done() for call in calls.values())
    stage.put("a", "b", v=1)
    assert keys_of((await within(calls[1]))[1]) == ["a", "b"]
    assert keys_of((await within(calls[2]))[1]) == ["a", "b"]
    assert not calls[3].done()
    stage.put("c", v=1)
    n = stage.store.n
    assert await within(calls[3]) == (n, (await calls[3])[1])
    assert not calls[5].done()
    calls[5].cancel()
    await turns()
    assert stage.crowd._waiters == []


async def test_those_who_come_while_an_answer_is_packed_share_it(stage: Stage) -> None:
    stage.put(*[f"k{i}" for i in range(3000)], v=1)
    stage.gate.clear()
    first = stage.wait(1)
    await begun(stage.packs_begun)
    stage.put("other", v=2)  # does not concern them
    second = stage.wait(1000)
    await turns()
    stage.gate.set()
    one, two = await within(first), await within(second)
    assert one[1] is two[1]
    assert stage.packs == 1
    # The rows are the same; what is known to be true of them is later.
    assert (one[0], two[0]) == (stage.store.n - 1, stage.store.n)


async def test_who_comes_after_a_change_gets_what_is_there_then(stage: Stage) -> None:
    stage.put(*[f"k{i}" for i in range(3000)], v=1)
    stage.gate.clear()
    first = stage.wait(1)
    await begun(stage.packs_begun)
    stage.put("k5", v=2)
    stage.put("late", v=1)
    second = stage.wait(1)
    await turns()
    stage.gate.set()
    one, two = keys_of((await within(first))[1]), keys_of((await within(second))[1])
    assert one == [f"k{i}" for i in range(3000)]
    assert two == [*[f"k{i}" for i in range(3000) if i != 5], "late"]
    assert stage.packs == 2


async def test_a_deadline_does_not_cut_a_scan_or_an_answer_short() -> None:
    stage = Stage()
    stage.put(*[f"k{i}" for i in range(5000)], v=1)
    assert len(keys_of((await within(stage.wait(5000, for_s=-1.0)))[1])) == 5000
    with pytest.raises(Late):
        await within(stage.wait(5001, for_s=-1.0))
    with pytest.raises(Late):
        await within(stage.wait(5001, for_s=0.01))
    assert stage.crowd._waiters == []


async def test_one_scan_serves_all(stage: Stage) -> None:
    stage.put(*[f"k{i}" for i in range(5000)], v=1)
    scans = 0
    scan = stage.partition.views.scan

    def counted(view: Any) -> Any:
        nonlocal scans
        scans += 1
        return scan(view)

    stage.partition.views.scan = counted
    calls = [stage.wait(1) for _ in range(10)]
    calls[0].cancel()
    await turns(2)
    calls[1].cancel()  # who began it goes, and it goes on
    for call in calls[2:]:
        assert len(keys_of((await within(call))[1])) == 5000
    assert scans == 1


async def test_an_error_reaches_all_who_share_the_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> Packed:
        raise OverflowError("too much")

    monkeypatch.setattr(crowd_module, "pack_moment", broken)
    monkeypatch.setattr(crowd_module, "changes_since", broken)
    n = stage.store.n
    calls: list[Any] = [stage.wait(1), stage.wait(2), stage.watch(n), stage.watch(n)]
    await turns()
    stage.put("a", "b", v=1)
    for call in calls:
        with pytest.raises(OverflowError, match="too much"):
            await within(call)
    monkeypatch.undo()
    assert keys_of((await within(stage.wait(2)))[1]) == ["a", "b"]


async def test_all_end_with_their_partition(stage: Stage) -> None:
    stage.put(*[f"k{i}" for i in range(2000)], v=1)
    calls: list[Any] = [stage.watch(stage.store.n), stage.wait(5000), stage.wait(1)]
    await turns(1)  # the scan has begun
    late = stage.wait(1)
    await turns(1)
    stage.crowd.end(PartitionNotFound("it was dropped", partition_id="p"))
    for call in [*calls, late]:
        with pytest.raises(PartitionNotFound, match="it was dropped"):
            await within(call)


# -- changes ---------------------------------------------------------------------------------


async def test_a_watch_looks_once_for_each_change_of_its_concern(stage: Stage) -> None:
    start = stage.store.n
    call = stage.watch(start)
    await turns()
    assert stage.looks == 0
    for i in range(50):
        stage.put(f"k{i}", v=2)
    await turns()
    assert stage.looks == 0
    n = stage.put("a", v=1)
    told = await within(call)
    assert (told.upto, told.changes) == (n, [[(1, n), [], 1, False]])
    assert stage.looks == 1
    assert stage.crowd._watchers == set()


async def test_what_turns_out_to_be_no_news_is_looked_at_once(stage: Stage) -> None:
    stage.put("a", v=1)
    call = stage.watch(stage.store.n)
    await turns()
    stage.put("a", v=2)  # it matched, and does not any more: nothing to tell
    await turns(20)
    assert (call.done(), stage.looks) == (False, 1)
    n = stage.put("b", v=1)
    assert (await within(call)).changes == [[(1, n), [], 1, False]]
    assert stage.looks == 2


async def test_those_who_stand_at_one_revision_share_a_look(stage: Stage) -> None:
    n = stage.store.n
    calls = [stage.watch(n) for _ in range(20)]
    await turns()
    stage.put("other", v=2)
    elsewhere = stage.watch(stage.store.n)
    await turns()
    stage.put("a", v=1)
    told = [await within(call) for call in [*calls, elsewhere]]
    assert all(one is told[0] for one in told[:20])
    assert told[20].changes == told[0].changes
    assert stage.looks == 1  # nothing of concern lay between them


async def test_a_change_that_comes_during_a_look_is_looked_at_next(stage: Stage) -> None:
    start = stage.store.n
    many = [f"k{j}" for j in range(5 * SMALL_CHANGE)]  # too much for one turn
    stage.put(*many, v=1)
    stage.put(*many, v=2)
    stage.gate.clear()
    call = stage.watch(start)
    await begun(stage.looks_begun)
    n = stage.put("a", v=1)
    await turns(200)
    assert (call.done(), stage.looks) == (False, 1)
    stage.gate.set()
    told = await within(call)
    assert told.changes == [[(1, n), [], 1, False]]
    assert keys_of(told.packed) == ["a"]


async def test_a_deadline_that_passes_during_a_look_waits_for_it(stage: Stage) -> None:
    start = stage.store.n
    many = [f"k{j}" for j in range(5 * SMALL_CHANGE)]
    stage.put(*many, v=1)
    stage.put(*many, v=2)
    with pytest.raises(Late):
        await within(stage.watch(start, for_s=-1.0))
    assert stage.looks == 1
    stage.put(*many, v=1)
    told = await within(stage.watch(start, for_s=-1.0))
    assert told.changes == [[(1, stage.store.n), [], 5 * SMALL_CHANGE, False]]
    with pytest.raises(Late):
        await within(stage.watch(stage.store.n, for_s=0.01))
    assert stage.crowd._watchers == set()


async def test_who_waited_all_along_needs_no_history(stage: Stage) -> None:
    stage.store.history = History(max_changes=10)
    start = stage.store.n
    call = stage.watch(start)
    await turns()
    for i in range(50):
        stage.put(f"k{i}", v=2)
    assert not stage.store.history.covers(stage.partition.partition_id, start)
    n = stage.put("a", v=1)
    assert (await within(call)).changes == [[(1, n), [], 1, False]]
    told = await within(stage.watch(start))  # who comes back to it does
    assert told.changes == [[(1, n), [], 1, True]]


async def test_who_knows_another_epoch_is_told_everything(stage: Stage) -> None:
    stage.put("a", "b", v=1)
    told = await within(stage.watch(BEFORE_ALL))
    assert told.changes == [[(1, stage.store.n), [], 2, True]]
    assert keys_of(told.packed) == ["a", "b"]


async def test_long_catching_up_comes_in_parts_and_loses_nothing(stage: Stage) -> None:
    start = stage.store.n
    numbers = itertools.count()
    for _ in range(3 * SMALL_CHANGE // 4):
        some = [f"k{next(numbers)}" for _ in range(4)]
        stage.put(*some, v=1)
    stage.put(*[f"big{i}" for i in range(2 * SMALL_CHANGE)], v=1)
    stage.put("last", v=1)
    keys: list[str] = []
    answers = 0
    at = start
    while at < stage.store.n:
        told = await within(stage.watch(at))
        answers += 1
        assert [count for _, _, count, _ in told.changes][:3] in ([4, 4, 4], [2048, 1])
        at = told.changes[-1][0][1]
        keys += keys_of(told.packed)
    assert keys == [
        *[f"k{i}" for i in range(next(numbers))],
        *[f"big{i}" for i in range(2 * SMALL_CHANGE)],
        "last",
    ]
    assert answers == 4
