"""Reads, watches and claims when their connection breaks: what is asked again, and from where."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dataplane.errors import ClaimLost, InvalidRequest, TooOld, Unreachable
from dataplane.producer import AsyncProducer, RetryPolicy, attending
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.producer.scripted import ScriptedGateway, answer, break_off, refuse
from tests.deadline import until


@pytest_asyncio.fixture
async def producer(scripted: ScriptedGateway) -> AsyncIterator[AsyncProducer]:
    retry = RetryPolicy(first_pause_s=0.001, last_pause_s=0.002, per_s=1000)
    async with AsyncProducer(scripted.address, retry=retry) as it:
        yield it


def page(*keys: str, token: str = "", n: int = 5) -> pb.ListResponse:
    return pb.ListResponse(
        revision=pb.Revision(epoch=1, n=n), full=True, rows=[pb.Row(key=key) for key in keys],
        next_page_token=token,
    )  # fmt: skip


async def test_pages_are_put_together(scripted: ScriptedGateway, producer: AsyncProducer) -> None:
    scripted.script["List"] += [answer(page("a", token="t")), break_off(), answer(page("b"))]
    listing = await producer.kv_list("p")
    assert listing.keys == ["a", "b"]
    assert listing.revision == Revision(1, 5)
    assert [one.page_token for one in scripted.requests["List"]] == ["", "t", "t"]


async def test_a_listing_whose_pages_were_dropped_is_read_anew(
    scripted: ScriptedGateway, producer: AsyncProducer
) -> None:
    scripted.script["List"] += [
        answer(page("a", token="t")), refuse(TooOld("dropped")), answer(page("c", "d", n=9)),
    ]  # fmt: skip
    listing = await producer.kv_list("p")
    assert (listing.keys, listing.revision) == (["c", "d"], Revision(1, 9))
    assert [one.page_token for one in scripted.requests["List"]] == ["", "t", ""]


async def test_a_first_page_that_is_too_old_is_an_error(
    scripted: ScriptedGateway, producer: AsyncProducer
) -> None:
    scripted.script["List"].append(refuse(TooOld("dropped")))
    with pytest.raises(TooOld):
        await producer.kv_list("p")


def told(n: int, *keys: str, begun: bool = False) -> pb.WatchResponse:
    return pb.WatchResponse(
        revision=pb.Revision(epoch=1, n=n), rows=[pb.Row(key=key) for key in keys], begun=begun
    )


async def test_a_watch_goes_on_from_what_was_told_last(
    scripted: ScriptedGateway, producer: AsyncProducer
) -> None:
    scripted.script["Watch"] += [
        answer([told(3, begun=True)]), break_off(), answer([told(3, begun=True), told(4, "a")]),
        refuse(Unreachable("the gateway is ending")), answer([told(7, "b")]),
    ]  # fmt: skip
    changes = producer.kv_watch("p")
    assert (await anext(changes)).rows.keys == ["a"]
    assert (await anext(changes)).revision == Revision(1, 7)
    since = [one.since.n if one.HasField("since") else None for one in scripted.requests["Watch"]]
    assert since == [None, 3, 3, 4, 4]
    await changes.aclose()


async def test_a_producer_is_present_while_it_holds_claims(
    scripted: ScriptedGateway, producer: AsyncProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "PAUSE_S", 0.001)
    scripted.script["Attend"].append(break_off())
    claim = await producer.kv_claim("p", "task", count=2)
    await until(lambda: len(scripted.requests["Attend"]) == 2, "it is present again")
    assert scripted.requests["Attend"][0].client_id == producer.client_id
    (asked,) = scripted.requests["Claim"]
    assert (asked.client_id, asked.plane_id) == (producer.client_id, scripted.plane_id)
    await producer.kv_commit(claim)
    assert scripted.requests["Commit"][0].keys == ["row0", "row1"]
    assert producer._attending._task is None


async def test_a_claim_that_is_lost_in_part_is_held_for_the_rest(
    scripted: ScriptedGateway, producer: AsyncProducer
) -> None:
    claim = await producer.kv_claim("p", "task", count=2)
    lost = ClaimLost("gone", partition_id="p", keys=["row0"], task="task")
    scripted.script["Commit"].append(refuse(lost))
    with pytest.raises(ClaimLost) as caught:
        await producer.kv_commit(claim)
    assert producer._attending._task is not None
    await producer.kv_release(claim.without(caught.value.keys))
    assert producer._attending._task is None


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "1", True])
async def test_a_timeout_is_a_number_of_seconds(producer: AsyncProducer, timeout: object) -> None:
    with pytest.raises(InvalidRequest, match="positive number of seconds"):
        await producer.kv_list("p", timeout=timeout)  # type: ignore[arg-type]


async def test_arguments_that_cannot_be_are_refused_before_anything_is_asked(
    scripted: ScriptedGateway, producer: AsyncProducer
) -> None:
    with pytest.raises(InvalidRequest):
        await producer.kv_put("a", "p", tags={}, must_exist=True, if_absent=True)
    with pytest.raises(InvalidRequest):
        await producer.kv_put("a", "p")
    with pytest.raises(InvalidRequest):
        await producer.kv_batch_put(["a", "a"], "p", tags=[{}, {}])
    with pytest.raises(InvalidRequest):
        await producer.kv_batch_put("ab", "p", tags=[{}, {}])
    with pytest.raises(InvalidRequest):
        await producer.kv_batch_put(["a"], "p", [{"x": 1}, {"x": 2}])
    with pytest.raises(InvalidRequest):
        await producer.kv_clear(None, "p")
    with pytest.raises(InvalidRequest, match="partition_id"):
        await producer.end_group(5, "finished")
    with pytest.raises(InvalidRequest):
        await producer.request_outcome("nothing")
    assert not scripted.requests
