"""Room that is held for groups, and stores that help each other out: over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.sync import Client
from dataplane.errors import DataplaneError, InternalError, InvalidRequest, QuotaExceeded
from dataplane.wire.messages import IF_ABSENT
from tests.deadline import eventually
from tests.faults import stores
from tests.faults.planes import SEGMENT_ROOM, SMALL_STORE, MiB
from tests.faults.raw import Raw, block, meta
from tests.faults.stores import Stores

pytestmark = pytest.mark.faults

KiB = 1 << 10
EXTRA = MiB // 2 - 4096
"""What the largest draw may leave in each segment of a SMALL_STORE but one."""


@pytest.fixture
def plane(roots: dict[str, Path]) -> Iterator[Stores]:
    """A plane with one small value store, apart from its tag store."""
    with stores.running("holds", [SMALL_STORE], timeout_s=20, **roots) as plane:
        yield plane


@pytest.fixture
def client(plane: Stores) -> Iterator[Client]:
    with plane.client(home=None) as client:
        yield client


def row(nbytes: int, value: int = 0) -> dict[str, torch.Tensor]:
    """A row whose block takes so many bytes, with its front."""
    return {"x": torch.full((nbytes - 64,), value, dtype=torch.uint8)}


def fill(plane: Stores, store: int = 0) -> list[str]:
    """Take all that plain puts can have, in rows of 256 KiB and then of a page; their keys."""
    keys: list[str] = []
    with Raw.greeted(plane.at(store)) as raw:
        for size in (256 * KiB, 4096):
            head, payload = block(row(size))
            while True:
                key = f"full{store}-{len(keys)}"
                packed = meta("full", [key], number=raw.number + 1)
                try:
                    raw.ask("put_block", [packed, None, *head, 0.0, None], payload)
                except QuotaExceeded:
                    break
                keys.append(key)
    return keys


def content(client: Client, key: str, partition: str = "p") -> list[Any]:
    return client.kv_batch_get([key], partition, layout="list").fields["x"][0].unique().tolist()


class Later:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(work())
            except BaseException as error:
                self._future.set_exception(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        self._thread.join(stores.CALL_S)
        return self._future.result(stores.CALL_S)


@contextmanager
def drawing(plane: Stores, store: int = 0) -> Iterator[Callable[..., Any]]:
    """Puts blocks that draw, as a client that names an attempt does; each under its own key."""
    with Raw.greeted(plane.at(store)) as raw:

        def put(nbytes: int, draw: Any, wait_s: float | None = 0.0) -> Any:
            head, payload = block(row(nbytes))
            packed = meta("p", [f"drawn{raw.number}"], number=raw.number + 1)
            return raw.ask("put_block", [packed, None, *head, wait_s, draw], payload)

        yield put


# -- who may use what ------------------------------------------------------------------------


def test_a_full_store_takes_draws_and_write_backs_and_nothing_else(
    plane: Stores, client: Client
) -> None:
    client.kv_batch_put(["a", "b"], "p", {"y": torch.arange(2)})
    plane.hold(1, MiB)
    plane.hold(2, 2 * MiB)
    fill(plane)
    counts = plane.counts()
    assert (counts["held_bytes"], counts["holds"]) == (3 * MiB, 2)
    assert counts["used_bytes"] == 2 * SEGMENT_ROOM - 3 * MiB
    with pytest.raises(QuotaExceeded, match=f"{3 * MiB} are held for 2 groups") as full:
        client.kv_put("plain", "p", row(4096), timeout=2.0)
    assert (full.value.used_bytes, full.value.limit_bytes) == (counts["used_bytes"], 8 * MiB)
    with drawing(plane) as put:
        for nobody in (None, 3):
            with pytest.raises(QuotaExceeded):
                put(4096, nobody)
        with pytest.raises(QuotaExceeded):
            put(MiB + 4096, 1)
        put(MiB // 2, 1)
        put(MiB // 2, 1)
        with pytest.raises(QuotaExceeded):
            put(4096, 1)
        put(MiB // 2, 2)
    # Small through the socket and large in place.
    client.kv_put("a", "p", row(64 * KiB, 7), must_exist=True)
    client.kv_put("b", "p", row(MiB, 8), must_exist=True)
    assert (content(client, "a"), content(client, "b")) == ([7], [8])
    for key in ("a", "b"):
        client.kv_put(key, "p", row(64 * KiB, 9), must_exist=True)
    client.kv_clear(None, "p", where={})
    client.kv_clear(None, "full", where={})
    plane.held((1, 0), (2, 0))
    plane.comes_to(used_bytes=0, blocks=0, blocks_reserved=0, held_bytes=0, holds=0)
    client.kv_put("large", "p", row(SEGMENT_ROOM))


def test_a_reservation_draws_like_a_put_through_the_socket(plane: Stores, client: Client) -> None:
    plane.hold(5, 2 * MiB)
    fill(plane)
    with Raw.greeted(plane.at(0)) as raw:
        for draw in (None, 4):
            with pytest.raises(QuotaExceeded):
                raw.ask("reserve", [MiB, 0.0, draw])
        reserved = raw.ask("reserve", [MiB, 0.0, 5])
        assert plane.counts()["held_bytes"] == MiB
        head, payload = block(row(MiB))
        assert len(payload) == MiB
        raw.ask("commit", [reserved[0], meta("p", ["A"]), None, *head])
        assert plane.counts()["held_bytes"] == MiB


@pytest.mark.parametrize("draw", [False, 0, -1, 1.0, "1", b"1", [1], {}, 1 << 63])
def test_what_is_no_attempt_is_nothing_to_draw_on(plane: Stores, draw: Any) -> None:
    head, payload = block(row(4096))
    with Raw.greeted(plane.at(0)) as raw:
        with pytest.raises(InvalidRequest, match="draws on an attempt"):
            raw.ask("put_block", [meta("p", ["A"]), None, *head, 1.0, draw], payload)
        with pytest.raises(InvalidRequest, match="draws on an attempt"):
            raw.ask("reserve", [4096, 1.0, draw])
        with pytest.raises(InvalidRequest):
            raw.ask("reserve", [4096, 1.0])
    plane.comes_to(blocks=0, blocks_reserved=0)


def test_what_was_drawn_is_held_again_unless_it_is_published(plane: Stores, client: Client) -> None:
    client.kv_put("A", "p", None, {"n": 1})
    plane.hold(1, 2 * MiB)
    fill(plane)
    head, payload = block(row(MiB))
    with Raw.greeted(plane.at(0)) as raw:
        reserved = raw.ask("reserve", [MiB, 0.0, 1])
        raw.ask("abort", [reserved[0]])
        plane.comes_to(held_bytes=2 * MiB)
        packed = meta("p", ["A"], flags=IF_ABSENT)
        with pytest.raises(DataplaneError):
            raw.ask("put_block", [packed, None, *head, 0.0, 1], payload)
        plane.comes_to(held_bytes=2 * MiB, blocks_reserved=0)
        raw.ask("reserve", [MiB, 0.0, 1])
        raw.request("put_block", [meta("p", ["B"], 2), None, *head, 0.0, 1], len(payload))
        raw.send(payload[:1000])
        plane.comes_to(held_bytes=0)
    # Its connection ended, and with it both.
    plane.comes_to(held_bytes=2 * MiB, blocks_reserved=0)
    with Raw.greeted(plane.at(0)) as raw:
        raw.ask("reserve", [2 * MiB, 0.0, 1])


def test_a_put_that_is_repeated_draws_once(plane: Stores, client: Client) -> None:
    plane.hold(1, 2 * MiB)
    head, payload = block(row(MiB // 2))
    with Raw.greeted(plane.at(0)) as raw:
        body = [meta("p", ["A"], number=1), None, *head, 0.0, 1]
        assert raw.ask("put_block", body, payload) == raw.ask("put_block", body, payload)
        plane.comes_to(held_bytes=2 * MiB - MiB // 2, used_bytes=MiB // 2)


def test_room_is_held_elsewhere_when_a_client_may_still_write_where_it_was(
    plane: Stores, client: Client
) -> None:
    plane.hold(1, MiB)
    victim = Raw.greeted(plane.at(0))
    with victim:
        _, segment, *_ = victim.ask("reserve", [4096, 0.0, 1])
        victim.send(b"no frame at all" * 10)
        assert isinstance(victim.refusal(), InvalidRequest)
        # The store cut it off: whatever it maps is never used again.
        store = plane.store(0)
        others = eventually(
            lambda: [i for i in plane.call(lambda: list(store.segments)) if i != segment],
            "there is another segment for what is held",
        )
        with Raw.greeted(plane.at(0)) as raw:
            answer = raw.ask("reserve", [MiB, None, 1])
        assert [answer[1]] == others
        plane.comes_to(segments=1)


# -- what the tag store asks -----------------------------------------------------------------


def test_a_hold_makes_the_segments_that_it_needs_and_waits_for_nobody(
    plane: Stores, client: Client
) -> None:
    assert plane.counts()["segments"] == 1
    plane.hold(1, SEGMENT_ROOM)
    plane.hold(2, SEGMENT_ROOM - EXTRA)
    assert (plane.counts()["segments"], plane.counts()["segment_bytes"]) == (2, 8 * MiB)
    with pytest.raises(QuotaExceeded, match="group that declares 4096 bytes"):
        plane.hold(3, 4096)
    with pytest.raises(InvalidRequest, match="attempt 2 already"):
        plane.hold(2, 4096)
    plane.held((1, 0), (2, MiB))
    plane.hold(3, SEGMENT_ROOM)
    assert (plane.counts()["held_bytes"], plane.counts()["holds"]) == (SEGMENT_ROOM + MiB, 2)


def test_what_a_write_back_took_is_made_up_for_by_a_new_segment_if_there_can_be_one(
    plane: Stores, client: Client
) -> None:
    plane.hold(1, SEGMENT_ROOM)
    with drawing(plane) as put:
        client.kv_put("A", "p", None, {"n": 1})
        client.kv_put("A", "p", row(MiB // 2), must_exist=True)
        plane.comes_to(segments=2)
        for _ in range(7):
            put(MiB // 2, 1, None)
        put(SEGMENT_ROOM - 7 * (MiB // 2), 1, None)
    plane.comes_to(held_bytes=0)


def test_a_hold_larger_than_a_segment_is_one_piece_where_there_is_room_for_it(
    plane: Stores, client: Client
) -> None:
    plane.hold(1, 7 * MiB)
    with drawing(plane) as put:
        put(7 * MiB, 1)
    assert (plane.counts()["segments"], plane.counts()["held_bytes"]) == (1, 0)


def test_a_group_larger_than_the_whole_store_is_refused_at_once(plane: Stores) -> None:
    with pytest.raises(QuotaExceeded, match="larger than the whole value store") as full:
        plane.hold(1, 8 * MiB, 30.0)
    assert full.value.limit_bytes == 8 * MiB


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, None, "x"])
def test_a_hold_of_no_bytes_is_refused(plane: Stores, nbytes: Any) -> None:
    with pytest.raises(InvalidRequest):
        plane.hold(1, nbytes)
    with pytest.raises(InvalidRequest):
        plane.start(plane.seen().bind(7, 8)).result(stores.CALL_S)  # type: ignore[arg-type]


def test_what_a_value_store_does_not_know_is_refused_and_not_passed_over(plane: Stores) -> None:
    seen: Any = plane.seen()

    async def ask(kind: str, body: Any) -> Any:
        return await seen.connection.ask(kind, body)

    for kind, body, error in (
        ("evict", [], InvalidRequest), ("hold", [1], InternalError), ("held", 5, InternalError),
        ("free", [[b"x", {}]], InternalError),
    ):  # fmt: skip
        with pytest.raises(error):
            plane.start(ask(kind, body)).result(stores.CALL_S)
    plane.hold(1, 4096)


def test_a_hold_is_named_by_its_attempt_once_it_has_one(plane: Stores, client: Client) -> None:
    plane.hold(-1, MiB)
    fill(plane)
    with drawing(plane) as put:
        with pytest.raises(QuotaExceeded):
            put(4096, 77)
        plane.start(plane.seen().bind(-1, 77)).result(stores.CALL_S)  # type: ignore[arg-type]
        put(MiB // 2, 77)
    plane.held((-1, 0))
    assert plane.counts()["held_bytes"] == MiB // 2
    plane.held((77, 0))
    plane.comes_to(held_bytes=0, holds=0)


# -- who waits for whom ----------------------------------------------------------------------


def test_a_draw_overtakes_plain_puts_that_wait(plane: Stores, client: Client) -> None:
    plane.hold(1, MiB)
    keys = fill(plane)
    late = Later(lambda: client.kv_put("late", "p", row(64 * KiB, 3)))
    plane.comes_to(waiting=1)
    with drawing(plane) as put:
        put(MiB // 2, 1)
        put(MiB // 2, True)
    assert not late.is_done
    plane.held((1, 0))
    client.kv_clear(keys[:1], "full")
    late.result()
    assert content(client, "late") == [3]


def test_a_draw_beyond_what_is_held_waits_and_is_served_before_plain_puts(
    plane: Stores, client: Client
) -> None:
    plane.hold(1, MiB)
    keys = fill(plane)
    plain = Later(lambda: client.kv_put("plain", "p", row(256 * KiB)))
    plane.comes_to(waiting=1)
    with drawing(plane) as put:
        draw = Later(lambda: put(MiB + 256 * KiB, 1, 20.0))
        plane.comes_to(waiting=2)
        client.kv_clear(keys[:1], "full")
        draw.result()
    assert (plane.counts()["held_bytes"], plane.counts()["waiting"]) == (0, 1)
    assert not plain.is_done
    client.kv_clear(keys[1:2], "full")
    plain.result()


def test_a_draw_has_a_segment_made_for_it_while_a_plain_put_waits_for_more_than_there_can_be(
    plane: Stores, client: Client
) -> None:
    client.kv_put("full", "full", row(SEGMENT_ROOM))
    plain = Later(lambda: client.kv_put("plain", "p", row(5 * MiB)))
    plane.comes_to(waiting=1)
    with drawing(plane) as put:
        put(3 * MiB, True)
        with pytest.raises(QuotaExceeded):
            put(3 * MiB, True)
    assert not plain.is_done
    client.kv_clear(None, "p", where={})
    client.kv_clear(None, "full", where={})
    plain.result()


def test_draws_that_wait_do_not_wait_for_each_other(plane: Stores, client: Client) -> None:
    plane.hold(1, MiB)
    plane.hold(2, MiB)
    keys = fill(plane)
    with drawing(plane) as first, drawing(plane) as second:
        huge = Later(lambda: first(3 * MiB, 1, 20.0))
        plane.comes_to(waiting=1)
        small = Later(lambda: second(MiB + 256 * KiB, 2, 20.0))
        plane.comes_to(waiting=2)
        client.kv_clear(keys[:1], "full")
        small.result()
        assert not huge.is_done
        plane.comes_to(waiting=1)
        client.kv_clear(keys[1:], "full")
        huge.result()


def test_holds_and_plain_puts_wait_in_one_queue(plane: Stores, client: Client) -> None:
    keys = fill(plane)
    before = plane.counts()["used_bytes"]
    first = Later(lambda: client.kv_put("first", "p", row(MiB, 1)))
    plane.comes_to(waiting=1)
    held = plane.start(plane.holding(1, 2 * MiB, 20.0))
    plane.comes_to(waiting=2)
    last = Later(lambda: client.kv_put("last", "p", row(4096, 2)))
    plane.comes_to(waiting=3)
    # What came last would fit at once.
    client.kv_clear(keys[:1], "full")
    with drawing(plane) as put, pytest.raises(QuotaExceeded):
        put(4096, None)
    with pytest.raises(QuotaExceeded):
        plane.hold(2, 4096)
    assert plane.counts()["waiting"] == 3
    client.kv_clear(keys[1:4], "full")
    first.result()
    assert (plane.counts()["waiting"], plane.counts()["holds"]) == (2, 0)
    client.kv_clear(keys[4:12], "full")
    held.result(stores.CALL_S)
    assert plane.counts()["held_bytes"] == 2 * MiB
    client.kv_clear(keys[12:13], "full")
    last.result()
    assert plane.counts()["used_bytes"] < before


def test_a_hold_that_finds_no_room_in_time_is_refused_and_leaves_its_place_to_the_next(
    plane: Stores, client: Client
) -> None:
    plane.hold(1, 4 * MiB)
    client.kv_put("A", "p", row(MiB))
    held = plane.start(plane.holding(2, 4 * MiB, 2.0))
    plane.comes_to(waiting=1)
    small = Later(lambda: client.kv_put("small", "p", row(MiB)))
    with pytest.raises(QuotaExceeded, match=r"declares 4194304 bytes came free within 2 s"):
        held.result(stores.CALL_S)
    small.result()
    plane.comes_to(waiting=0, holds=1, held_bytes=4 * MiB)


def test_a_hold_that_waits_keeps_nothing_else_waiting_at_the_tag_store(
    plane: Stores, client: Client
) -> None:
    """On the connection that it waits on, blocks are freed and puts are published."""
    keys = fill(plane)
    held = plane.start(plane.holding(1, 2 * MiB, 20.0))
    plane.comes_to(waiting=1)
    before = plane.counts()["used_bytes"]
    client.kv_clear(keys[:1], "full")
    plane.comes_to(used_bytes=before - 256 * KiB)
    client.kv_put(keys[1], "full", None, {"n": 1})
    assert not held.done()
    client.kv_clear(None, "full", where={})
    held.result(stores.CALL_S)


@pytest.mark.parametrize("how", ["ended", "cancelled"])
def test_a_hold_that_nobody_wants_any_more_is_not_granted(
    plane: Stores, client: Client, how: str
) -> None:
    keys = fill(plane)
    held = plane.start(plane.holding(1, MiB, 20.0))
    plane.comes_to(waiting=1)
    if how == "ended":
        plane.held((1, 0))
        with pytest.raises(InvalidRequest, match="attempt 1 ended"):
            held.result(stores.CALL_S)
    else:
        held.cancel()
    client.kv_clear(keys[:8], "full")
    plane.comes_to(waiting=0, holds=0, held_bytes=0)
    client.kv_put("A", "p", row(MiB))


def test_rows_that_are_cleared_make_up_for_what_write_backs_took_first(
    plane: Stores, client: Client
) -> None:
    """A write-back that no group declared takes what is held for others until room comes free."""
    client.kv_put("A", "p", None, {"n": 1})
    plane.hold(1, MiB)
    keys = fill(plane)
    client.kv_put("A", "p", row(512 * KiB), must_exist=True)
    plain = Later(lambda: client.kv_put("plain", "p", row(256 * KiB)))
    plane.comes_to(waiting=1)
    client.kv_clear(keys[:2], "full")
    with drawing(plane) as put:
        plane.comes_to(held_bytes=MiB)
        put(MiB // 2, 1)
        put(MiB // 2, 1)
    assert not plain.is_done
    client.kv_clear(keys[2:4], "full")
    plain.result()


# -- other stores ----------------------------------------------------------------------------

TWO = [SMALL_STORE, SMALL_STORE]
SENT = pytest.mark.parametrize("settings", [{}, {"same_node_reads": False}], ids=["mapped", "sent"])


@pytest.fixture
def running(roots: dict[str, Path]) -> Iterator[Callable[..., Stores]]:
    """Starts planes of several stores."""
    with ExitStack() as stack:

        def start(*own: dict[str, Any], **settings: Any) -> Stores:
            settings = {"timeout_s": 20, **roots, **settings}
            return stack.enter_context(stores.running("several", own, **settings))

        yield start


@SENT
@pytest.mark.parametrize("nbytes", [4096, MiB])
def test_a_full_store_forwards_to_one_that_has_room(
    running: Callable[..., Stores], settings: dict[str, Any], nbytes: int
) -> None:
    plane = running(*TWO)
    with plane.client(0, **settings) as client:
        client.kv_put("0", "full", row(SEGMENT_ROOM))
        client.kv_put("1", "full", row(SEGMENT_ROOM))
        assert (plane.counts(0)["used_bytes"], plane.counts(1)["used_bytes"]) == (
            2 * SEGMENT_ROOM, 0,
        )  # fmt: skip
        for i in range(5):
            client.kv_put(f"k{i}", "p", row(nbytes, i))
        assert plane.counts(1)["used_bytes"] == 5 * nbytes
        for i in range(5):
            assert content(client, f"k{i}") == [i]
        client.kv_clear(None, "full", where={})
        plane.comes_to(used_bytes=0)
        client.kv_put("home", "p", row(nbytes))
        assert plane.counts(0)["used_bytes"] == nbytes
        client.kv_clear(None, "p", where={})
        for store in (0, 1):
            plane.comes_to(store, used_bytes=0, blocks=0, pins=0)


@SENT
async def test_an_async_client_forwards_many_puts_at_once(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    plane = running(*TWO)
    with plane.client(0) as filler:
        for i in range(2):
            filler.kv_put(f"{i}", "full", row(SEGMENT_ROOM))
        joined = replace(plane.joined, home="s0")
        client = AsyncClient(joined, plane.config.model_copy(update=settings))
        sizes = [4096, 256 * KiB, MiB, 64 * KiB] * 3
        await asyncio.gather(*(
            client.kv_put(f"k{i}", "p", row(nbytes, i)) for i, nbytes in enumerate(sizes)
        ))  # fmt: skip
        await client.close()
        for i in range(len(sizes)):
            assert content(filler, f"k{i}") == [i]
    assert plane.counts(1)["used_bytes"] == sum(sizes)


@SENT
def test_a_store_that_can_make_a_segment_is_not_full(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    plane = running(*TWO)
    with plane.client(0, **settings) as client:
        for i in range(12):
            client.kv_put(f"k{i}", "p", row(512 * KiB))
    assert (plane.counts(0)["segments"], plane.counts(1)["used_bytes"]) == (2, 0)


@SENT
@pytest.mark.parametrize("nbytes", [4096, MiB])
def test_where_no_store_has_room_a_put_waits_at_home(
    running: Callable[..., Stores], settings: dict[str, Any], nbytes: int
) -> None:
    plane = running(*TWO)
    with plane.client(0, **settings) as client, plane.client(1) as other:
        for home in (client, other):
            for i in range(2):
                home.kv_put(f"{home.client_id}-{i}", "full", row(SEGMENT_ROOM))
        late = Later(lambda: client.kv_put("A", "p", row(nbytes, 5)))
        plane.comes_to(0, waiting=1)
        other.kv_clear([f"{other.client_id}-0"], "full")
        plane.comes_to(1, used_bytes=SEGMENT_ROOM)
        assert not late.is_done
        client.kv_clear([f"{client.client_id}-0"], "full")
        late.result()
        assert content(client, "A") == [5]
        assert (plane.counts(0)["waiting"], plane.counts(1)["waiting"]) == (0, 0)


@SENT
def test_the_error_of_a_put_that_no_store_has_room_for_is_that_of_the_home_store(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    plane = running(SMALL_STORE, {**SMALL_STORE, "capacity_bytes": 4 * MiB})
    with plane.client(0, **settings) as client:
        for i in range(3):
            client.kv_put(f"{i}", "full", row(SEGMENT_ROOM))
        with pytest.raises(QuotaExceeded, match=f"{2 * SEGMENT_ROOM} of {8 * MiB} bytes") as full:
            client.kv_put("A", "p", row(4096), timeout=2.0)
        assert (full.value.used_bytes, full.value.limit_bytes) == (2 * SEGMENT_ROOM, 8 * MiB)


@SENT
@pytest.mark.parametrize("nbytes", [4096, MiB])
def test_a_draw_finds_the_store_that_holds_room_for_it(
    running: Callable[..., Stores], settings: dict[str, Any], nbytes: int
) -> None:
    plane = running(*TWO)
    with plane.client(0, **settings) as client:
        client.kv_put("A", "p", None, {"n": 1})
        plane.hold(1, 2 * MiB, store=1)
        for i in range(2):
            client.kv_put(f"{i}", "full", row(SEGMENT_ROOM))
        fill(plane, 1)
        for store in (0, 1):
            with drawing(plane, store) as put, pytest.raises(QuotaExceeded):
                put(nbytes, None)
        client.kv_put("A", "p", row(nbytes, 6), must_exist=True)
        assert content(client, "A") == [6]
        assert plane.counts(1)["held_bytes"] == 2 * MiB


@SENT
@pytest.mark.parametrize("nbytes", [4096, MiB])
def test_a_store_that_cannot_be_reached_is_passed_over(
    running: Callable[..., Stores], settings: dict[str, Any], nbytes: int
) -> None:
    plane = running(*TWO, SMALL_STORE)
    plane.stop(1)
    with plane.client(0, **settings) as client:
        for i in range(2):
            client.kv_put(f"{i}", "full", row(SEGMENT_ROOM))
        for i in range(6):
            client.kv_put(f"k{i}", "p", row(nbytes, i))
            assert content(client, f"k{i}") == [i]
        assert plane.counts(2)["used_bytes"] == 6 * nbytes


@SENT
def test_a_put_larger_than_the_home_store_goes_to_one_that_is_larger(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    large = {**SMALL_STORE, "capacity_bytes": 16 * MiB}
    plane = running(SMALL_STORE, large, SMALL_STORE)
    with plane.client(0, **settings) as client, plane.client(1) as other:
        client.kv_put("A", "p", row(9 * MiB, 4))
        assert content(client, "A") == [4]
        assert plane.counts(1)["used_bytes"] == 9 * MiB
        # Full, it is waited for: nowhere else could the put ever be.
        late = Later(lambda: client.kv_put("B", "p", row(10 * MiB, 5)))
        plane.comes_to(1, waiting=1)
        other.kv_clear(["A"], "p")
        late.result()
        assert content(client, "B") == [5]
        with pytest.raises(QuotaExceeded, match="larger than the whole value store") as full:
            client.kv_put("C", "p", row(17 * MiB))
        assert full.value.limit_bytes == 8 * MiB


def test_a_client_that_knows_of_one_store_asks_for_others_when_it_is_full(
    running: Callable[..., Stores],
) -> None:
    plane = running(*TWO)
    with plane.client(0) as client:
        client.kv_put("0", "full", row(SEGMENT_ROOM))
        del client._core.stores["s1"]
        client.kv_put("1", "full", row(SEGMENT_ROOM))
        assert list(client._core.stores) == ["s0"]
        client.kv_put("A", "p", row(4096, 2))
        assert content(client, "A") == [2]
    assert plane.counts(1)["used_bytes"] == 4096


@SENT
def test_a_full_partition_is_no_full_store(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    """What a partition's quota refuses is not put elsewhere: there it would be refused again."""
    plane = running(*TWO)
    with plane.client(0, **settings) as client:
        client.kv_create_partition("small", quota={"bytes": 8192})
        client.kv_put("A", "small", row(4096))
        for nbytes in (16 * KiB, MiB):
            with pytest.raises(QuotaExceeded, match="partition 'small'"):
                client.kv_put("B", "small", row(nbytes), timeout=1.0)
        assert client._core.stores["s1"].probed is False
    eventually(lambda: plane.counts(0)["used_bytes"] == 4096, "the refused blocks are gone")
    assert plane.counts(1)["used_bytes"] == 0


# -- groups ----------------------------------------------------------------------------------


@SENT
def test_a_group_finds_the_room_that_it_declared_in_a_store_that_is_full(
    running: Callable[..., Stores], settings: dict[str, Any]
) -> None:
    """From begin_group to the last clear, as producers and a trainer meet it."""
    plane = running(SMALL_STORE)
    with plane.client(0, **settings) as client:
        attempt = client.begin_group("g", "p", n=4, declared_bytes=3 * MiB)
        assert plane.counts()["held_bytes"] == 3 * MiB
        keys = fill(plane)
        with drawing(plane) as put, pytest.raises(QuotaExceeded):
            put(4096, None)
        for i in range(4):
            client.kv_put(f"g_{i}", "p", row(512 * KiB, i), attempt=attempt)
        plane.comes_to(held_bytes=MiB, holds=1)
        client.end_group(attempt, "finished")
        client.kv_batch_put(
            [f"g_{i}" for i in range(4)], "p",
            {"z": torch.zeros(4, 200 * KiB, dtype=torch.uint8)}, must_exist=True,
        )  # fmt: skip
        for i in range(4):
            assert content(client, f"g_{i}") == [i]
        client.kv_clear([f"g_{i}" for i in range(4)], "p", retire=True)
        plane.comes_to(held_bytes=0, holds=0)
        client.kv_put("plain", "p", row(MiB))
        client.kv_clear(keys, "full")
