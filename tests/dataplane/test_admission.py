"""Who waits for room under a quota: in order, woken when there is room, nobody forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import KeyNotFound, QuotaExceeded
from dataplane.server import admission as admissions
from dataplane.server.admission import Admission
from dataplane.tags.quota import Shortage, shortage
from dataplane.tags.store import TagStore
from dataplane.types import Quota
from tests.dataplane.audit import put
from tests.deadline import eventually_async

P = "p"
LONG_S = 1000.0


class Desk:
    """A store with one partition, and its admission: who asks puts so many rows of tags."""

    def __init__(self, **limits: int) -> None:
        self.store = TagStore(1)
        self.partition = self.store.apply_create(P, 0.0)
        self.partition.quota = Quota(**limits)
        self.admission = Admission(self.store)
        self.served: list[str] = []
        """Whose rows were put, in the order in which they were."""
        self.wrong: set[str] = set()
        """Who is to be told that something is wrong."""
        self._numbers = 0

    def ask(
        self,
        name: str,
        rows: int = 1,
        *,
        client: str | None = None,
        number: int | None = None,
        wait_s: float = LONG_S,
    ) -> Any:
        """What comes of a put of so many rows: a revision, or a future of it."""
        client = client or name
        if number is None:
            self._numbers += 1
            number = self._numbers

        def check() -> Shortage | None:
            if name in self.wrong:
                raise KeyNotFound("wrong", partition_id=P, keys=[name])
            return shortage(self.partition, client, 0, rows)

        def attempt() -> Any:
            short = check()
            if short is not None:
                return short
            self.served.append(name)
            keys = [f"{name}-{i}" for i in range(rows)]
            return put(self.store, P, keys, tags=[{} for _ in keys], client_id=client)

        return self.admission.admit(P, client, number, attempt, check, wait_s)

    def clear(self, *names: str) -> None:
        """Clear rows, and tell who waits."""
        keys = [row.key for row in self.partition.slots if row.key.rpartition("-")[0] in names]
        self.store.apply_clear(P, keys, 0.0)
        self.admission.run(self.partition)

    @property
    def waiting(self) -> int:
        return self.admission.waiting(P)


async def test_who_has_room_is_served_at_once() -> None:
    desk = Desk(rows=3)
    assert desk.ask("a", 3) == 2
    waits = desk.ask("b")
    assert isinstance(waits, asyncio.Future)
    assert (desk.served, desk.waiting) == (["a"], 1)
    desk.clear("a")
    assert await waits == 4
    assert desk.waiting == 0


async def test_nobody_overtakes_who_waits_for_the_partition() -> None:
    desk = Desk(rows=4)
    desk.ask("a", 3)
    waits = [desk.ask("large", 4), desk.ask("small", 1), desk.ask("middle", 3)]
    assert (desk.served, desk.waiting) == (["a"], 3)
    desk.admission.run(desk.partition)
    assert desk.waiting == 3
    desk.clear("a")
    assert await waits[0] == 4
    desk.clear("large")
    await asyncio.gather(*waits)
    assert desk.served == ["a", "large", "small", "middle"]


async def test_a_producer_at_its_limit_holds_up_itself_alone() -> None:
    desk = Desk(rows=100, producer_rows=2)
    desk.ask("x1", 2, client="x")
    large = desk.ask("x2", 2, client="x")
    desk.clear("nobody")
    assert type(desk.ask("y1", 1, client="y")) is int
    assert type(desk.ask("y2", 1, client="y")) is int
    small = desk.ask("x3", 1, client="x")
    assert isinstance(small, asyncio.Future)
    # One row of x goes: the later put would fit, and does not overtake the one before it.
    desk.store.apply_clear(P, ["x1-0"], 0.0)
    desk.admission.run(desk.partition)
    assert not small.done()
    assert desk.served == ["x1", "y1", "y2"]
    # z was never held up by all that.
    assert type(desk.ask("z", 2, client="z")) is int
    desk.clear("x1")
    await large
    assert not small.done()
    desk.clear("x2")
    await small
    assert desk.served == ["x1", "y1", "y2", "z", "x2", "x3"]


async def test_a_later_put_of_a_held_up_producer_holds_up_nobody_else() -> None:
    desk = Desk(rows=100, producer_rows=2)
    desk.ask("x1", 1, client="x")
    desk.ask("x2", 2, client="x")  # has no room
    desk.ask("x3", 1, client="x")  # would have, and waits behind it
    assert type(desk.ask("y1", 1, client="y")) is int
    assert desk.waiting == 2


async def test_who_was_held_up_by_its_own_limit_may_then_wait_for_the_partition() -> None:
    desk = Desk(rows=4, producer_rows=2)
    desk.ask("x1", 2, client="x")
    desk.ask("y1", 2, client="y")
    own = desk.ask("x2", 2, client="x")
    theirs = desk.ask("z1", 2, client="z")
    desk.clear("x1")  # x has room of its own again, and comes before z
    await own
    assert not theirs.done()
    desk.clear("x2")
    await theirs
    assert desk.served == ["x1", "y1", "x2", "z1"]


async def test_what_is_larger_than_the_quota_is_refused_whoever_waits() -> None:
    desk = Desk(rows=2)
    for _ in range(2):
        with pytest.raises(QuotaExceeded, match="larger than the whole quota"):
            desk.ask("huge", 3)
        desk.ask("a", 2)
    assert desk.waiting == 1
    desk.wrong.add("b")
    with pytest.raises(KeyNotFound):  # and what is wrong
        desk.ask("b")


async def test_without_patience_nobody_waits() -> None:
    desk = Desk(rows=2)
    desk.ask("a", 1)
    with pytest.raises(QuotaExceeded, match="2 more rows: 1 of 2"):
        desk.ask("b", 2, wait_s=0)
    waits = desk.ask("c", 2)
    with pytest.raises(QuotaExceeded, match="others who came before"):
        desk.ask("d", 1, wait_s=0)
    assert desk.waiting == 1
    waits.cancel()


async def test_at_the_end_of_its_patience_it_says_what_is_taken_then() -> None:
    desk = Desk(rows=4)
    desk.ask("a", 1)
    desk.ask("b", 3)
    waits, behind = desk.ask("c", 4, wait_s=0.05), desk.ask("d", 1, wait_s=0.05)
    desk.clear("a")
    with pytest.raises(QuotaExceeded, match="4 more rows: 3 of 4") as full:
        await waits
    assert full.value.oldest_keys == ["b-0", "b-1", "b-2"]
    # The one behind it would have had room all the while; now it has its turn, or gave up too.
    assert await asyncio.gather(behind, return_exceptions=True)
    assert desk.waiting == 0


@pytest.mark.parametrize("how", ["gives up", "goes away", "is wrong"])
async def test_when_the_first_leaves_the_next_has_its_turn(how: str) -> None:
    desk = Desk(rows=4)
    desk.ask("a", 2)
    first = desk.ask("b", 4, wait_s=0.05 if how == "gives up" else LONG_S)
    second = desk.ask("c", 2)
    if how == "goes away":
        first.cancel()
    elif how == "is wrong":
        desk.wrong.add("b")
        desk.admission.run(desk.partition, everyone=True)
        with pytest.raises(KeyNotFound):
            await first
    assert await asyncio.wait_for(second, 5.0) > 0
    assert desk.served == ["a", "c"]
    await asyncio.gather(first, return_exceptions=True)
    assert desk.waiting == 0


async def test_other_settings_concern_everyone_and_other_rows_only_who_is_first() -> None:
    desk = Desk(rows=4)
    desk.ask("a", 4)
    waits = [desk.ask(name, 2) for name in "bcd"]
    desk.partition.quota = Quota(rows=8)
    desk.admission.run(desk.partition)  # nothing came free
    assert not any(future.done() for future in waits)
    desk.admission.run(desk.partition, everyone=True)
    await asyncio.gather(*waits[:2])
    assert not waits[2].done()
    desk.partition.quota = Quota(rows=1)
    desk.admission.run(desk.partition, everyone=True)
    with pytest.raises(QuotaExceeded, match="larger than the whole quota"):
        await waits[2]
    assert desk.waiting == 0


async def test_a_request_that_comes_again_has_its_own_place_and_one_answer() -> None:
    desk = Desk(rows=2)
    desk.ask("a", 2)
    first = desk.ask("b", 1, client="x", number=7)
    second = desk.ask("c", 1, client="y", number=7)
    again = desk.ask("b", 1, client="x", number=7)
    assert desk.waiting == 2
    with pytest.raises(Exception, match="came again"):
        await first
    desk.clear("a")
    await asyncio.gather(again, second)
    assert desk.served == ["a", "b", "c"]


async def test_a_first_that_comes_again_when_there_is_room_is_served() -> None:
    desk = Desk(rows=2)
    desk.ask("a", 2)
    first = desk.ask("b", 2, client="x", number=1)
    behind = desk.ask("c", 1)
    desk.store.apply_clear(P, ["a-0", "a-1"], 0.0)  # nobody was told yet
    again = desk.ask("b", 2, client="x", number=1)
    with pytest.raises(Exception, match="came again"):
        await first
    assert await asyncio.wait_for(again, 5.0) > 0
    assert not behind.done()


async def test_a_fault_of_one_is_told_to_it_and_stops_nobody() -> None:
    desk = Desk(rows=2)
    desk.ask("a", 2)

    def broken() -> Any:
        raise ZeroDivisionError("a bug")

    faulty = desk.admission.admit(P, "x", 1, lambda: full(), lambda: full(), LONG_S)
    next(iter(desk.admission._lines[P].by_place.values())).attempt = broken
    fine = desk.ask("b", 1)
    desk.clear("a")
    with pytest.raises(ZeroDivisionError):
        await faulty
    assert await fine > 0


def full() -> Shortage:
    return Shortage("rows", 1, 2, 2, 0, None)


async def test_many_are_served_in_slices_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "SLICE_S", 0.0)  # everybody is a slice of its own
    desk = Desk(rows=50)
    desk.ask("full", 50)
    waits = [desk.ask(f"w{i}", 1) for i in range(50)]
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not all(future.done() for future in waits):
            asyncio.get_running_loop().call_soon(turn)

    turn()
    desk.clear("full")
    late = desk.ask("late", 1)  # in the midst of it
    assert isinstance(late, asyncio.Future)
    await asyncio.gather(*waits)
    assert turns > 20
    assert desk.served == ["full", *(f"w{i}" for i in range(50))]
    desk.clear("w0")
    await late
    assert desk.served[-1] == "late"


async def test_what_comes_free_while_others_are_served_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admissions, "SLICE_S", 0.0)
    desk = Desk(rows=2)
    desk.ask("full", 2)
    waits = [desk.ask(f"w{i}", 1) for i in range(4)]
    desk.store.apply_clear(P, ["full-0"], 0.0)
    desk.admission.run(desk.partition)  # serves the first, and goes on in the next turn
    desk.store.apply_clear(P, ["full-1", "w0-0"], 0.0)
    desk.admission.run(desk.partition)
    await asyncio.wait_for(asyncio.gather(*waits[:3]), 5.0)
    assert desk.waiting == 1
    waits[3].cancel()


# -- whatever happens

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "clear", "clear", "leave", "again", "quota", "turn"]),
        st.sampled_from("xyz"),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps, st.booleans())
def test_everyone_is_served_in_order_whatever_happens(
    steps: list[tuple[str, str, int]], sliced: bool
) -> None:
    """The first of those who wait has no room, and each producer's come in their order."""
    before = admissions.SLICE_S
    admissions.SLICE_S = 0.0 if sliced else before
    try:
        asyncio.run(_play(steps))
    finally:
        admissions.SLICE_S = before


async def _play(steps: list[tuple[str, str, int]]) -> None:
    desk = Desk(rows=6, producer_rows=4)
    asked: dict[str, tuple[str, int, int, Any]] = {}
    """Client, rows, number and what came of it, by name, in the order of the first asking."""

    async def settled() -> bool:
        line = desk.admission._lines.get(P)
        return line is None or not line.passing

    for index, (step, client, size) in enumerate(steps):
        waiting = [name for name, (*_, result) in asked.items() if _waits(result)]
        if step == "ask":
            name = f"{client}{index}"
            try:
                asked[name] = (
                    client,
                    size,
                    index,
                    desk.ask(name, size, client=client, number=index),
                )
            except QuotaExceeded:
                assert desk.partition.quota is not None
                assert size > 3  # a quota of 3 is the least
        elif step == "clear":
            held = sorted({row.key.rpartition("-")[0] for row in desk.partition.slots})
            desk.clear(*held[:size])
        elif step == "leave" and waiting:
            asked[waiting[size % len(waiting)]][3].cancel()
        elif step == "again" and waiting:
            name = waiting[size % len(waiting)]
            client, rows, number, old = asked[name]
            try:
                result = desk.ask(name, rows, client=client, number=number)
            except QuotaExceeded:
                result = None
            asked[name] = (client, rows, number, result)
            await asyncio.gather(old, return_exceptions=True)
        elif step == "quota":
            desk.partition.quota = Quota(rows=size + 2, producer_rows=4)
            desk.admission.run(desk.partition, everyone=True)
        elif step == "turn":
            await asyncio.sleep(0)
        assert desk.partition.account.total_rows <= max(8, 6)
    await asyncio.sleep(0)  # who left is out of the line in the next turn
    await eventually_async(settled, "all in line are gone through")
    desk.admission.run(desk.partition)
    await eventually_async(settled, "all in line are gone through once more")
    _check_line(desk, asked)
    for client in "xyz":  # each producer's were served in the order in which they came
        own = [name for name in desk.served if name[0] == client]
        assert own == [name for name in asked if name in own]
    await _drain(desk, asked)
    for _, _, _, result in asked.values():
        if isinstance(result, asyncio.Future):
            await asyncio.gather(result, return_exceptions=True)


def _waits(result: Any) -> bool:
    return isinstance(result, asyncio.Future) and not result.done()


def _check_line(desk: Desk, asked: dict[str, tuple[str, int, int, Any]]) -> None:
    """Nobody waits who could be served now."""
    held: set[str] = set()
    waiting = [(client, rows) for client, rows, _, result in asked.values() if _waits(result)]
    assert desk.waiting == len(waiting)
    for client, rows in waiting:
        if client in held:
            continue
        short = shortage(desk.partition, client, 0, rows)
        assert short is not None, "somebody waits who has room"
        if not short.producer:
            break
        held.add(client)


async def _drain(desk: Desk, asked: dict[str, tuple[str, int, int, Any]]) -> None:
    """With everything cleared again and again, everybody is served or told."""
    for _ in range(200):
        if not desk.waiting:
            return
        held = {row.key.rpartition("-")[0] for row in desk.partition.slots}
        desk.clear(*held)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    raise AssertionError(f"{desk.waiting} are never served")
