"""Back-pressure: full stores and partitions, producers that outrun, die or begin again, and a
consumer that always gets through."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.effects import Ask
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DataplaneError, QuotaExceeded, StaleWrite
from tests.deadline import eventually, eventually_async
from tests.faults import stores
from tests.faults.planes import SMALL_STORE, MiB, Plane
from tests.faults.processes import Process, Speaker
from tests.faults.stores import Stores

pytestmark = pytest.mark.faults

KiB = 1 << 10
SHORT_S = 0.5


@pytest.fixture
def running(roots: dict[str, Path]) -> Iterator[Callable[..., Stores]]:
    """Starts planes with value stores of these settings."""
    with ExitStack() as stack:

        def run(*settings: dict[str, Any]) -> Stores:
            return stack.enter_context(stores.running("pressed", settings, timeout_s=20, **roots))

        yield run


def row(nbytes: int, value: int = 0) -> dict[str, torch.Tensor]:
    """A row whose block takes so many bytes, with its front."""
    return {"x": torch.full((nbytes - 64,), value, dtype=torch.uint8)}


class Later:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[..., Any], *args: Any, **named: Any) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(work(*args, **named))
            except BaseException as error:
                self._future.set_exception(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def waits(self) -> bool:
        return not self._future.done()

    def result(self) -> Any:
        self._thread.join(30.0)
        return self._future.result(0.0)


def waiting(client: Any, partition: str) -> int:
    """How many requests wait for room under a quota."""
    return client.kv_list_partitions()[partition]["waiting"]


# -- a store that is full of finished groups -------------------------------------------------


def finish_groups(client: Client, count: int, declared: int) -> list[str]:
    """Groups that hold all that they declared, or nearly, and have ended; their uids."""
    uids = [f"g{i}" for i in range(count)]
    for uid in uids:
        attempt = client.begin_group(uid, "train", n=2, declared_bytes=declared)
        for i in range(2):
            client.kv_put(
                f"{uid}_{i}", "train", row(declared // 2 - 16 * KiB, int(uid[1:])),
                {"uid": uid}, attempt=attempt,
            )  # fmt: skip
        client.end_group(attempt, "finished")
    return uids


@pytest.mark.parametrize(
    "settings", [{}, {"same_node_reads": False}], ids=["mapped", "through the socket"]
)
def test_a_trainer_gets_through_a_store_that_is_full_of_finished_groups(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    plane = running(SMALL_STORE)
    with plane.client(0, **settings) as client, plane.client(0) as producer:
        finish_groups(client, 3, 2 * MiB)
        # Nothing else fits: neither a plain put nor another group.
        with pytest.raises(QuotaExceeded, match="groups") as full:
            producer.kv_put("plain", "train", row(2 * MiB), timeout=SHORT_S)
        assert full.value.limit_bytes == 8 * MiB
        with pytest.raises(QuotaExceeded) as full:
            producer.begin_group("late", "train", n=2, declared_bytes=2 * MiB, timeout=SHORT_S)
        assert full.value.oldest_keys == ["g0_0", "g0_1", "g1_0", "g1_1", "g2_0"]
        next_group = Later(
            producer.begin_group, "g3", "train", n=2, declared_bytes=2 * MiB, timeout=20
        )
        plane.comes_to(waiting=1)
        # The trainer waits for whole groups, reads them, writes back in two stages, and clears.
        for number in range(3):
            meta = client.kv_wait("train", {"uid": f"g{number}"}, count=1, group_by="uid")
            assert meta.keys == [f"g{number}_0", f"g{number}_1"]
            rows = client.kv_batch_get(meta.keys, "train", ["x"], layout="list")["x"]
            assert [r.unique().tolist() for r in rows] == [[number], [number]]
            for stage in ("old_logprobs", "values"):
                client.kv_batch_put(
                    meta.keys, "train", {stage: torch.zeros(2, 3 * KiB // 4)},
                    [{"stage": stage}] * 2, must_exist=True, timeout=5,
                )  # fmt: skip
            assert next_group.waits
        assert client.kv_clear(["g1_0", "g1_1"], "train") == 2
        attempt = next_group.result()
        assert client.kv_list("train").revision.n == attempt
        for i in range(2):
            producer.kv_put(f"g3_{i}", "train", row(900 * KiB), attempt=attempt, timeout=5)
        client.kv_clear(None, "train", where={}, retire=True)
        plane.comes_to(used_bytes=0, held_bytes=0, holds=0)
        assert client.status()["held_bytes"] == {}


def test_a_group_begins_anew_where_its_older_attempt_fills_the_store(
    running: Callable[..., Stores],
) -> None:
    plane = running(SMALL_STORE)
    with plane.client(0) as client:
        old = client.begin_group("u", "train", n=2, declared_bytes=6 * MiB)
        for i in range(2):
            client.kv_put(f"u_{i}", "train", row(3 * MiB - 64 * KiB), attempt=old)
        new = client.begin_group("u", "train", n=2, declared_bytes=6 * MiB, timeout=5)
        with pytest.raises(StaleWrite):
            client.kv_put("u_0", "train", row(KiB), attempt=old)
        plane.comes_to(used_bytes=0, holds=1, held_bytes=6 * MiB)
        for i in range(2):
            client.kv_put(f"u_{i}", "train", row(3 * MiB - 64 * KiB, 1), attempt=new, timeout=5)
        client.end_group(new, "finished")
        client.kv_drop_partition("train")
        plane.comes_to(used_bytes=0, held_bytes=0, holds=0)


def test_room_that_others_took_meanwhile_is_not_given_twice(
    running: Callable[..., Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that begins anew counts on the room of its older attempt. While a value store makes
    room for it, that attempt may go, and what it gave back to somebody else."""
    page = 4096
    plane = running(SMALL_STORE)
    values = plane.seen(0)
    asked, go_on = threading.Event(), asyncio.Event()
    hold = values.hold

    async def slow(attempt: int, nbytes: int, timeout_s: float) -> None:
        await hold(attempt, nbytes, timeout_s)
        if nbytes == 10 * page:
            asked.set()
            await go_on.wait()

    with plane.client(0) as client, plane.client(0) as other:
        client.kv_create_partition("train", quota={"bytes": 10 * page})
        client.begin_group("u", "train", n=1, declared_bytes=9 * page)
        monkeypatch.setattr(values, "hold", slow)
        late = Later(other.begin_group, "u", "train", n=1, declared_bytes=10 * page, timeout=20)
        assert asked.wait(10.0)  # it has a page more reserved than the older attempt had
        small = client.begin_group("u", "train", n=1, declared_bytes=2 * page)
        taken = client.begin_group("v", "train", n=1, declared_bytes=7 * page)
        plane.call(go_on.set)
        eventually(lambda: waiting(client, "train") == 1, "it has to wait after all")
        assert client.status()["held_bytes"] == {"train": 9 * page}
        assert client.end_group(small, "failure").n > taken  # which was not closed meanwhile
        client.kv_clear(["v"], "train", retire=True)
        assert late.result() > taken
        assert client.status()["held_bytes"] == {"train": 10 * page}
        client.kv_drop_partition("train")
        plane.comes_to(held_bytes=0, holds=0)


def test_a_group_that_ends_before_its_store_knows_its_name_keeps_no_room(
    running: Callable[..., Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = running(SMALL_STORE)
    values = plane.seen(0)
    asked, go_on = threading.Event(), asyncio.Event()
    bind = values.bind

    async def slow(token: int, attempt: int) -> None:
        asked.set()
        await go_on.wait()
        await bind(token, attempt)

    monkeypatch.setattr(values, "bind", slow)
    with plane.client(0) as client, plane.client(0) as other:
        begun = Later(other.begin_group, "u", "train", n=1, declared_bytes=MiB, timeout=20)
        assert asked.wait(10.0)
        attempt = client.kv_list("train").tags[0]["attempt"]
        assert client.kv_clear(["u"], "train", retire=True) == 1
        assert client.status()["held_bytes"] == {}
        plane.comes_to(holds=1)  # under its token
        plane.call(go_on.set)
        assert begun.result() == attempt
        plane.comes_to(holds=0, held_bytes=0)


def test_a_begin_told_that_there_is_no_room_does_not_happen_after_all(
    running: Callable[..., Stores],
) -> None:
    """Its first try may wait at a store still, on a connection of whose end nobody heard."""
    plane = running(SMALL_STORE)
    with plane.client(0) as client:
        client.begin_group("u", "train", n=1, declared_bytes=6 * MiB)
        lost = plane.client(0)
        first = Later(lost.begin_group, "v", "train", n=1, declared_bytes=6 * MiB, timeout=3)
        plane.comes_to(waiting=1)
        number = lost._core.numbers._last

        def again() -> Any:
            body = ["v", "train", 1, 6 * MiB, None, 0.5, number, number - 1]
            return (yield Ask(None, "begin_group", body))

        with pytest.raises(QuotaExceeded):
            lost._drive(again(), time.monotonic() + 10.0)
        client.kv_clear(["u"], "train", retire=True)
        plane.comes_to(holds=0, waiting=0)
        with pytest.raises(DataplaneError):
            first.result()
        assert client.kv_list("train").keys == []
        plane.comes_to(holds=0, held_bytes=0)
        lost.close()


def test_a_group_whose_home_is_full_has_its_room_elsewhere(running: Callable[..., Stores]) -> None:
    plane = running(SMALL_STORE, SMALL_STORE)
    with plane.client(0) as client:
        first = client.begin_group("u", "train", n=1, declared_bytes=6 * MiB)
        assert plane.counts(0)["held_bytes"] == 6 * MiB
        second = client.begin_group("v", "train", n=2, declared_bytes=6 * MiB, timeout=5)
        assert plane.counts(1)["held_bytes"] == 6 * MiB
        waits = Later(client.begin_group, "w", "train", n=1, declared_bytes=6 * MiB, timeout=20)
        for store in (0, 1):
            plane.comes_to(store, waiting=1)  # room may come free in either
        for i in range(2):
            client.kv_put(f"v_{i}", "train", row(2 * MiB), attempt=second, timeout=5)
        eventually(lambda: plane.counts(1)["used_bytes"] > 0, "its puts find their room")
        client.kv_clear(["v", "v_0", "v_1"], "train", retire=True)
        third = waits.result()
        plane.comes_to(0, waiting=0, holds=1)
        plane.comes_to(1, waiting=0, holds=1, held_bytes=6 * MiB)
        client.kv_put("w_0", "train", row(3 * MiB), attempt=third, timeout=5)
        client.kv_put("u_0", "train", row(3 * MiB), attempt=first, timeout=5)
        client.kv_clear(None, "train", where={}, retire=True)
        for store in (0, 1):
            plane.comes_to(store, used_bytes=0, held_bytes=0, holds=0, waiting=0)


def test_who_goes_away_while_a_store_is_full_leaves_no_room_held(
    running: Callable[..., Stores],
) -> None:
    plane = running(SMALL_STORE)
    with plane.client(0) as client:
        client.begin_group("u", "train", n=1, declared_bytes=6 * MiB)
        for _ in range(3):
            with plane.client(0) as other, pytest.raises(QuotaExceeded):
                other.begin_group("v", "train", n=1, declared_bytes=6 * MiB, timeout=SHORT_S)
        with Process(begin, plane.joined, plane.config, "v", 6 * MiB) as impatient:
            plane.comes_to(waiting=1)
            impatient.kill()
        plane.comes_to(waiting=0)
        client.kv_clear(["u"], "train", retire=True)
        plane.comes_to(holds=0, held_bytes=0)
        assert client.kv_list("train").keys == []
        assert client.status()["held_bytes"] == {}


def begin(speaker: Speaker, joined: Joined, config: Config, uid: str, declared: int) -> None:
    with Client(joined, config) as client:
        speaker.say(client.begin_group(uid, "train", n=1, declared_bytes=declared, timeout=600))


# -- producers that outrun their consumer ----------------------------------------------------

CAPACITY = 100
EACH = CAPACITY + 1
PRODUCERS = 4


def produce(speaker: Speaker, joined: Joined, config: Config, name: str, count: int) -> None:
    """Put rows as fast as there is room for them; say how often there was none in time."""
    refused = 0
    with Client(joined, config) as client:
        for i in range(count):
            while True:
                try:
                    client.kv_put(
                        f"{name}-{i}", "train", {"x": torch.tensor([i])}, {"of": name, "i": i},
                        timeout=1.0,
                    )  # fmt: skip
                    break
                except QuotaExceeded as full:
                    assert f"of {CAPACITY} rows" in str(full) or "wait in line" in str(full)  # noqa: PT017
                    refused += 1
        speaker.say(refused)


def test_producers_that_outrun_their_consumer_lose_nothing_and_are_told(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    client = plane.client
    client.kv_create_partition("train", quota={"rows": CAPACITY})
    with ExitStack() as stack:
        producers = [
            stack.enter_context(Process(produce, plane.joined, plane.config, f"p{n}", EACH))
            for n in range(PRODUCERS)
        ]
        eventually(lambda: len(client.kv_list("train", columns=[])) == CAPACITY, "it is full")
        eventually(lambda: waiting(client, "train") == PRODUCERS, "all of them wait")
        consumed: list[tuple[str, int]] = []
        while len(consumed) < PRODUCERS * EACH:
            assert len(client.kv_list("train", columns=[])) <= CAPACITY
            left = PRODUCERS * EACH - len(consumed)
            claim = client.kv_claim("train", "trainer", count=min(7, left), timeout=20)
            rows = client.kv_batch_get(claim.keys, "train", layout="list")["x"]
            for tags, x in zip(claim.tags, rows, strict=True):
                assert x.tolist() == [tags["i"]]
                consumed.append((str(tags["of"]), x.tolist()[0]))
            client.kv_commit(claim)
            client.kv_clear(claim.keys, "train")
        for producer in producers:
            producer.says()
    for n in range(PRODUCERS):  # each once, and each producer's in its order
        assert [i for of, i in consumed if of == f"p{n}"] == list(range(EACH))
    assert waiting(client, "train") == 0
    plane.comes_to(used_bytes=0)


def put_one(speaker: Speaker, joined: Joined, config: Config, key: str, size: int) -> None:
    with Client(joined, config) as client:
        fields = {"x": torch.zeros(size)} if size else None
        speaker.say(client.kv_put(key, "train", fields, {} if not size else None, timeout=600).keys)


def test_producers_that_die_while_they_wait_are_waited_for_by_nobody(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    client = plane.client
    client.kv_create_partition("train", quota={"rows": 1})
    client.kv_put("first", "train", tags={})
    with ExitStack() as stack:
        dead = [
            stack.enter_context(Process(put_one, plane.joined, plane.config, f"dead-{size}", size))
            for size in (0, 4, 1_000_000)
        ]
        eventually(lambda: waiting(client, "train") == 3, "all of them wait")
        alive = stack.enter_context(Process(put_one, plane.joined, plane.config, "alive", 4))
        eventually(lambda: waiting(client, "train") == 4, "one more waits behind them")
        for process in dead:
            process.kill()
        eventually(lambda: waiting(client, "train") == 1, "the dead are out of the line")
        client.kv_clear(["first"], "train")
        assert alive.says() == ["alive"]
    assert client.kv_list("train").keys == ["alive"]
    client.kv_clear(["alive"], "train")
    plane.comes_to(used_bytes=0, blocks=0)


def run_groups(
    speaker: Speaker, joined: Joined, config: Config, name: str, count: int, declared: int
) -> None:
    """Begin groups one after the other, put their rows, end them; say how many."""
    with Client(joined, config) as client:
        for i in range(count):
            uid = f"{name}.{i}"
            attempt = client.begin_group(uid, "train", n=2, declared_bytes=declared, timeout=60)
            for j in range(2):
                client.kv_put(
                    f"{uid}_{j}", "train", {"x": torch.full((declared // 32,), i)}, {"uid": uid},
                    attempt=attempt, timeout=10,
                )  # fmt: skip
            client.end_group(attempt, "finished")
        speaker.say(count)


@pytest.mark.parametrize("limit", ["quota", "store"])
def test_groups_of_many_producers_go_through_a_room_of_a_few(
    own_plane: Callable[..., Plane], limit: str
) -> None:
    """Half-made groups never lock each other out: what began has room for all of its rows."""
    declared = 2 * MiB
    plane = own_plane(**(SMALL_STORE if limit == "store" else {}))
    client = plane.client
    client.kv_create_partition("train", quota={"bytes": 6 * MiB} if limit == "quota" else None)
    with ExitStack() as stack:
        producers = [
            stack.enter_context(
                Process(run_groups, plane.joined, plane.config, f"p{n}", 5, declared)
            )
            for n in range(3)
        ]
        seen: Counter[str] = Counter()
        while len(seen) < 15:
            claim = client.kv_claim("train", "trainer", count=1, groups=True, timeout=20)
            assert len(claim) == 2
            uid = str(claim.tags[0]["uid"])
            seen[uid] += 1
            rows = client.kv_batch_get(claim.keys, "train", ["x"], layout="list")["x"]
            assert {int(x) for r in rows for x in r.unique()} == {int(uid.split(".")[1])}
            client.kv_batch_put(
                claim.keys, "train", {"adv": torch.ones(2, 1000)}, must_exist=True, timeout=10
            )
            client.kv_commit(claim)
            client.kv_clear([*claim.keys, uid], "train")
        for producer in producers:
            assert producer.says() == 5
    assert set(seen.values()) == {1}
    assert client.status()["held_bytes"] == {}
    plane.comes_to(used_bytes=0, held_bytes=0, holds=0, waiting=0)


# -- many who wait ---------------------------------------------------------------------------


async def test_a_thousand_who_wait_are_served_without_holding_up_anybody(
    own_plane: Callable[..., Plane],
) -> None:
    plane = own_plane()
    count = 1000
    plane.client.kv_create_partition("train", quota={"rows": 1})
    plane.client.kv_put("first", "train", tags={})
    async with AsyncClient(plane.joined, plane.config) as client:
        puts = [
            asyncio.create_task(client.kv_put(f"w{i}", "train", tags={"i": i}, timeout=60))
            for i in range(count)
        ]

        async def all_wait() -> bool:
            return (await client.kv_list_partitions())["train"]["waiting"] == count

        await eventually_async(all_wait, "all of them wait")
        # Others are answered while a thousand wait, and each clear lets the next one in.
        for i in range(50):
            oldest = (await client.kv_list("train")).keys
            assert len(oldest) == 1
            assert await client.kv_clear(oldest, "train") == 1
            await puts[i]
            assert not puts[i + 1].done()
        started = time.perf_counter()
        raised = asyncio.create_task(client.kv_create_partition("train", quota={"rows": 2000}))
        slowest = 0.0
        while not all(put.done() for put in puts):
            began = time.perf_counter()
            await client.kv_list("train", limit=1)
            slowest = max(slowest, time.perf_counter() - began)
        await raised
        took = time.perf_counter() - started
    revisions = [put.result().revision for put in puts]
    assert revisions == sorted(revisions)
    print(f"{count - 50} puts let in after {took:.3f} s, others waited {slowest * 1e3:.1f} ms")
    assert slowest < max(0.25, took / 2)


def test_many_who_give_up_at_once_are_all_told(own_plane: Callable[..., Plane]) -> None:
    plane = own_plane()
    plane.client.kv_create_partition("train", quota={"rows": 5})
    keys = [f"full-{i}" for i in range(5)]
    plane.client.kv_batch_put(keys, "train", None, [{}] * 5)

    async def all_of_them() -> list[Any]:
        async with AsyncClient(plane.joined, plane.config) as client:
            puts = [client.kv_put(f"w{i}", "train", tags={}, timeout=10.0) for i in range(300)]
            return await asyncio.gather(*puts, return_exceptions=True)

    errors = asyncio.run(all_of_them())
    assert {type(error) for error in errors} == {QuotaExceeded}
    assert {tuple(error.oldest_keys) for error in errors} == {tuple(keys)}
    assert waiting(plane.client, "train") == 0
    assert plane.client.kv_list("train").keys == keys


def test_a_plane_that_ends_tells_who_waits(own_plane: Callable[..., Plane]) -> None:
    plane = own_plane()
    plane.client.kv_create_partition("train", quota={"rows": 1})
    plane.client.kv_put("first", "train", tags={})
    other = plane.another()
    waits = Later(other.kv_put, "second", "train", tags={}, timeout=30)
    eventually(lambda: waiting(plane.client, "train") == 1, "it waits")
    plane.client.close(destroy=True)
    with pytest.raises(DataplaneError):
        waits.result()
    other.close()
