"""List, Wait and Watch through a gateway: pages of one revision, nobody polls, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import DeadlineExceeded, InvalidRequest, PartitionNotFound, TooOld
from dataplane.gateway.calls import listed as listed_module
from dataplane.gateway.calls import listing as listing_module
from dataplane.gateway.calls.listed import Listed
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.values import tags_from, to_value
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve, plane_error
from tests.dataplane.gateway.guarded import add_token
from tests.deadline import until
from tests.faults import planes
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """One in this process, so that a test sees who waits there."""
    with planes.in_thread("listing-calls", timeout_s=20, **roots) as plane:
        yield plane


def waiting(plane: Plane) -> int:
    assert plane.server is not None
    assert plane.server.tags is not None
    return len(plane.server.tags.waiting)


def put(plane: Plane, partition: str, first: int, last: int, **tags: Any) -> None:
    """Tag-only rows `k00001`, `k00002` …"""
    keys = [f"k{i:05}" for i in range(first, last)]
    plane.client.kv_batch_put(keys, partition, None, [{"n": i, **tags} for i in range(first, last)])


async def all_pages(caller: Caller, **parts: Any) -> list[pb.ListResponse]:
    pages: list[pb.ListResponse] = []
    token = ""
    while not pages or token:
        pages.append(await caller.call("List", pb.ListRequest(page_token=token, **parts)))
        token = pages[-1].next_page_token
        assert len(pages) < 50, "pages come to an end"
    return pages


def keys_of(pages: list[pb.ListResponse]) -> list[str]:
    return [row.key for page in pages for row in page.rows]


# -- List ------------------------------------------------------------------------------------


async def test_a_row_is_listed_with_its_tags_fields_and_lengths(
    caller: Caller, plane: Plane, partition: str
) -> None:
    client = plane.client
    client.kv_put("a", partition, {"ids": np.arange(3)}, {"status": "new", "n": None})
    client.kv_put("b", partition, {"ids": np.arange(7), "x": np.array(1.0)}, {"m": [1, {"y": 2.5}]})
    client.kv_put("c", partition, None, {})
    answer = await caller.call("List", pb.ListRequest(partition_id=partition))
    a, b, c = answer.rows
    assert (a.key, tags_from(a.tags)) == ("a", {"status": "new", "n": None})
    assert (list(a.fields), dict(a.lengths)) == (["ids"], {"ids": 3})
    assert tags_from(b.tags) == {"m": [1, {"y": 2.5}]}
    assert (list(b.fields), dict(b.lengths)) == (["ids", "x"], {"ids": 7})
    assert (c.key, tags_from(c.tags), list(c.fields), dict(c.lengths)) == ("c", {}, [], {})
    assert answer.full
    assert (answer.revision.epoch, answer.revision.n) == client.kv_list(partition).revision
    assert not answer.next_page_token


async def test_pages_are_of_one_revision_and_hold_every_row_once(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 2500)
    first = await caller.call("List", pb.ListRequest(partition_id=partition, page_size=700))
    plane.client.kv_clear(["k00001", "k02000"], partition)
    put(plane, partition, 2490, 2600, late=True)
    rest = []
    token = first.next_page_token
    while token:
        asked = pb.ListRequest(partition_id=partition, page_size=700, page_token=token)
        rest.append(await caller.call("List", asked))
        again = await caller.call("List", asked)
        assert again == rest[-1], "a page may be asked for again"
        token = rest[-1].next_page_token
        assert len(rest) < 10, "pages come to an end"
    pages = [first, *rest]
    assert [len(page.rows) for page in pages] == [700, 700, 700, 400]
    assert keys_of(pages) == [f"k{i:05}" for i in range(2500)]
    assert {(page.revision.epoch, page.revision.n) for page in pages} == {
        (first.revision.epoch, first.revision.n)
    }
    assert all("late" not in row.tags.values for page in pages for row in page.rows)


async def test_what_changed_since_a_revision_is_listed(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 30)
    before = await caller.call("List", pb.ListRequest(partition_id=partition))
    plane.client.kv_clear(["k00003", "k00004"], partition)
    put(plane, partition, 10, 15, changed=True)
    pages = await all_pages(caller, partition_id=partition, since=before.revision, page_size=2)
    assert keys_of(pages) == [f"k{i:05}" for i in range(10, 15)]
    assert [sorted(page.cleared) for page in pages] == [["k00003", "k00004"], [], []]
    assert not any(page.full for page in pages)


async def test_cleared_keys_without_room_on_a_page_make_the_listing_a_full_one(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 200)
    before = await caller.call("List", pb.ListRequest(partition_id=partition))
    plane.client.kv_clear([f"k{i:05}" for i in range(150)], partition)
    gateway._looking._page_bytes = 3000
    pages = await all_pages(caller, partition_id=partition, since=before.revision)
    assert all(page.full and not page.cleared for page in pages)
    assert keys_of(pages) == [f"k{i:05}" for i in range(150, 200)]


async def test_columns_and_predicates_and_limits_are_the_plane_s(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 20, status="new")
    put(plane, partition, 20, 40, status="old")
    where = to_value({"status": "old", "n": {">=": 22}})
    asked = pb.ListRequest(partition_id=partition, where=where, columns=["n"], limit=5)
    pages = await all_pages(
        caller, partition_id=partition, where=where, columns=["n"], limit=5, page_size=2
    )
    assert keys_of(pages) == [f"k{i:05}" for i in range(22, 27)]
    assert [tags_from(row.tags) for row in pages[0].rows] == [{"n": 22}, {"n": 23}]
    asked.only_columns = True
    del asked.columns[:]
    bare = await caller.call("List", asked)
    assert [tags_from(row.tags) for row in bare.rows] == [{}] * 5


@pytest.mark.parametrize(
    "where", [[1], "status", {"status": b"x"}, {"x": np.zeros(2)}, {"x": {"~": 1}}]
)
async def test_a_predicate_that_is_none_is_refused(
    caller: Caller, plane: Plane, partition: str, where: Any
) -> None:
    put(plane, partition, 0, 1)
    for rpc, kind in (("List", pb.ListRequest), ("Wait", pb.WaitRequest)):
        with pytest.raises(InvalidRequest):
            await caller.call(rpc, kind(partition_id=partition, where=to_value(where)))


async def test_pages_end_at_so_many_bytes(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 12, text="x" * 1000)
    put(plane, partition, 12, 13, text="x" * 9000)
    gateway._looking._page_bytes = 5000
    pages = await all_pages(caller, partition_id=partition)
    assert keys_of(pages) == [f"k{i:05}" for i in range(13)]
    assert [len(page.rows) for page in pages] == [4, 4, 4, 1], "a row larger than a page goes alone"


async def test_a_token_is_good_for_its_question_and_its_principal_and_a_while(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    put(plane, partition, 0, 10)
    path = tmp_path / "tokens.json"
    tokens = [add_token(path, name, "reader") for name in ("one", "two")]
    gateway = await serve(token_file=path, page_ttl_s=60.0)
    one, two = [await callers(gateway, token=token.text) for token in tokens]
    now = [0.0]
    gateway._looking.pages._clock = lambda: now[0]
    first = await one.call("List", pb.ListRequest(partition_id=partition, page_size=4))
    asked = pb.ListRequest(partition_id=partition, page_size=4, page_token=first.next_page_token)
    with pytest.raises(TooOld) as of_another:
        await two.call("List", asked)
    with pytest.raises(InvalidRequest, match="another question"):
        await one.call("List", pb.ListRequest(**_with(asked, limit=3)))
    for wrong in ("x", "x.y", ".3", "x" * 100 + ".1", asked.page_token + "0"):
        with pytest.raises((InvalidRequest, TooOld)):
            await one.call("List", pb.ListRequest(**_with(asked, page_token=wrong)))
    now[0] = 59.0
    assert len((await one.call("List", asked)).rows) == 4
    now[0] = 120.0
    with pytest.raises(TooOld, match="List again without a page_token") as late:
        await one.call("List", asked)
    assert late.value.code is grpc.StatusCode.ABORTED
    assert str(late.value) == str(of_another.value), "whose a token is, is not told"
    assert len(gateway._looking.pages) == 0


def _with(asked: pb.ListRequest, **parts: Any) -> dict[str, Any]:
    return {
        "partition_id": asked.partition_id,
        "page_size": asked.page_size,
        "page_token": asked.page_token,
        **parts,
    }


def test_a_listing_read_in_order_is_decoded_once(
    plane: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(plane, partition, 0, 5000)
    listing = plane.client.kv_list(partition)
    pieces = len(listing.parts())
    assert pieces > 2
    made: list[Any] = []

    class Counted(listed_module._Part):
        def __init__(self, part: Any) -> None:
            made.append(part)
            super().__init__(part)

    monkeypatch.setattr(listed_module, "_Part", Counted)
    listed = Listed(listing)
    keys = [row.key for at in range(0, 5000, 37) for row in listed.rows(at, min(at + 37, 5000))]
    assert keys == listing.keys
    assert len(made) == pieces


async def test_a_partition_that_is_not_there_is_not_found(caller: Caller, partition: str) -> None:
    with pytest.raises(PartitionNotFound) as missing:
        await caller.call("List", pb.ListRequest(partition_id=partition))
    assert missing.value.code is grpc.StatusCode.NOT_FOUND


# -- Wait ------------------------------------------------------------------------------------


async def test_a_wait_is_woken_by_the_row_that_it_lacks_and_asks_once(
    caller: Caller, plane: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(plane, partition, 0, 2, status="done")
    asked: list[Any] = []
    assert plane.server is not None
    verbs = plane.server.verbs
    verb = verbs["wait"]

    def counted(*call: Any) -> Any:
        asked.append(call)
        return verb(*call)

    monkeypatch.setitem(verbs, "wait", counted)
    message = pb.WaitRequest(partition_id=partition, where=to_value({"status": "done"}), count=3)
    task = asyncio.ensure_future(caller.call("Wait", message))
    await until(lambda: waiting(plane) == 1)
    put(plane, partition, 2, 3, status="new")
    put(plane, partition, 3, 5, status="done")
    answer = await task
    assert [row.key for row in answer.rows] == ["k00000", "k00001", "k00003", "k00004"]
    assert (answer.revision.epoch, answer.revision.n) == plane.client.kv_list(partition).revision
    assert len(asked) == 1
    assert waiting(plane) == 0


async def test_the_deadline_of_a_wait_says_what_is_missing(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 2, status="running")
    message = pb.WaitRequest(partition_id=partition, where=to_value({"status": "done"}), count=3)
    with pytest.raises(DeadlineExceeded, match="did not come to 3 matching rows") as late:
        await caller.call("Wait", message, timeout=1.0)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert late.value.waited_s > 0
    assert "running" in (late.value.explanation or "")
    assert waiting(plane) == 0


async def test_a_wait_whose_caller_has_gone_is_left(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 1)
    tasks = len(asyncio.all_tasks())
    call = caller.stub.Wait(pb.WaitRequest(partition_id=partition, count=5), timeout=60)
    await until(lambda: waiting(plane) == 1)
    call.cancel()
    await until(lambda: waiting(plane) == 0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_what_was_waited_for_and_is_too_large_for_an_answer_is_to_be_listed(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 3, text="x" * 1000)
    gateway._looking._max_answer_bytes = 2000
    with pytest.raises(InvalidRequest, match="List it, in pages"):
        await caller.call("Wait", pb.WaitRequest(partition_id=partition, count=1))


# -- Watch -----------------------------------------------------------------------------------


def watch(caller: Caller, partition: str, timeout: float = 20.0, **parts: Any) -> Any:
    return caller.stub.Watch(
        pb.WatchRequest(partition_id=partition, **parts), timeout=timeout, metadata=caller.metadata
    )


async def told(call: Any) -> pb.WatchResponse:
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        raise plane_error(error) from error
    assert answer is not grpc.aio.EOF
    return answer


async def test_a_watch_says_that_it_stands_and_then_what_changes(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 3)
    call = watch(caller, partition, where=to_value({"n": {">=": 1}}))
    begun = await told(call)
    assert begun.begun
    assert not begun.rows
    plane.client.kv_put("a", partition, {"ids": np.arange(4)}, {"n": 5})
    first = await told(call)
    assert not first.begun
    assert [(row.key, list(row.fields), dict(row.lengths)) for row in first.rows] == [
        ("a", ["ids"], {"ids": 4})
    ]
    plane.client.kv_clear(["k00002"], partition)
    second = await told(call)
    assert list(second.cleared) == ["k00002"]
    assert (second.revision.epoch, second.revision.n) == plane.client.kv_list(partition).revision
    call.cancel()
    await until(lambda: waiting(plane) == 0)


async def test_a_watch_goes_on_from_what_was_told(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 3)
    call = watch(caller, partition)
    begun = await told(call)
    call.cancel()
    put(plane, partition, 3, 4)
    put(plane, partition, 4, 5)
    call = watch(caller, partition, since=begun.revision)
    again = await told(call)
    assert again.begun
    assert again.revision == begun.revision
    seen = [row.key for row in (await told(call)).rows]
    if len(seen) < 2:
        seen += [row.key for row in (await told(call)).rows]
    assert seen == ["k00003", "k00004"]
    call.cancel()


async def test_a_watch_ends_at_its_callers_deadline_without_an_error(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 1)
    call = watch(caller, partition, timeout=1.0)
    answers = [answer async for answer in call]
    assert [answer.begun for answer in answers] == [True]
    assert await call.code() is grpc.StatusCode.OK
    await until(lambda: waiting(plane) == 0)


async def test_a_watch_without_a_deadline_goes_on(
    caller: Caller, plane: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the plane again now and then, and misses nothing in between."""
    monkeypatch.setattr(listing_module, "WATCH_S", 0.05)
    put(plane, partition, 0, 1)
    call = caller.stub.Watch(pb.WatchRequest(partition_id=partition))
    await told(call)
    asked = [0]
    assert plane.server is not None
    verb = plane.server.verbs["watch"]

    def counted(*parts: Any) -> Any:
        asked[0] += 1
        return verb(*parts)

    monkeypatch.setitem(plane.server.verbs, "watch", counted)
    for i in range(1, 4):
        before = asked[0]
        await until(lambda before=before: asked[0] > before)
        put(plane, partition, i, i + 1)
        assert [row.key for row in (await told(call)).rows] == [f"k{i:05}"]
    call.cancel()
    await until(lambda: waiting(plane) == 0)


async def test_a_watch_whose_caller_has_gone_leaves_nothing_behind(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 1)
    tasks = len(asyncio.all_tasks())
    calls = [watch(caller, partition) for _ in range(20)]
    for call in calls:
        await told(call)
    await until(lambda: waiting(plane) == 20)
    for call in calls:
        call.cancel()
    await until(lambda: waiting(plane) == 0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_watch_of_the_future_is_refused(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 1)
    now = plane.client.kv_list(partition).revision
    with pytest.raises(InvalidRequest, match="ahead of the plane"):
        await told(watch(caller, partition, since=pb.Revision(epoch=now.epoch, n=now.n + 1000)))


async def test_a_change_without_room_in_one_answer_comes_in_several(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 40)
    gateway._looking._page_bytes = 600
    call = watch(caller, partition)
    begun = await told(call)
    put(plane, partition, 100, 200)
    rows: list[str] = []
    answers: list[pb.WatchResponse] = []
    while len(rows) < 100:
        answers.append(await told(call))
        rows += [row.key for row in answers[-1].rows]
    assert rows == [f"k{i:05}" for i in range(100, 200)]
    assert len(answers) > 2
    assert all(answer.ByteSize() < 700 for answer in answers)
    at = plane.client.kv_list(partition).revision
    assert [(a.revision.epoch, a.revision.n) for a in answers] == [
        (begun.revision.epoch, begun.revision.n)
    ] * (len(answers) - 1) + [at], "only the last may be gone on from"
    plane.client.kv_clear([f"k{i:05}" for i in range(100, 200)], partition)
    cleared: list[str] = []
    while len(cleared) < 100:
        cleared += (await told(call)).cleared
    assert sorted(cleared) == rows
    call.cancel()


async def test_who_is_told_everything_without_room_for_it_is_to_list(
    caller: Caller, plane: Plane, gateway: GatewayServer, partition: str
) -> None:
    put(plane, partition, 0, 100)
    gateway._looking._page_bytes = 1500
    call = watch(caller, partition, since=pb.Revision(epoch=0, n=0))
    assert (await told(call)).begun
    with pytest.raises(TooOld, match="List it, in pages"):
        await told(call)


async def test_who_watches_from_before_history_is_told_everything(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 5)
    call = watch(caller, partition, since=pb.Revision(epoch=0, n=0))
    await told(call)
    answer = await told(call)
    assert answer.full
    assert [row.key for row in answer.rows] == [f"k{i:05}" for i in range(5)]
    call.cancel()


async def test_watchers_of_a_partition_that_is_dropped_are_told(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 0, 1)
    call = watch(caller, partition)
    await told(call)
    await until(lambda: waiting(plane) == 1)
    plane.client.kv_drop_partition(partition)
    with pytest.raises(PartitionNotFound, match="dropped"):
        await told(call)
