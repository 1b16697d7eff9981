"""Calls that are repeated: which, how often, under which number, and what is said at the end."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from dataplane.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    PlaneLost,
    QuotaExceeded,
    RateLimited,
    StaleWrite,
    Unauthenticated,
    Unreachable,
)
from dataplane.producer import Access, AsyncProducer, RetryPolicy
from dataplane.producer.access import gateway_of
from dataplane.producer.rows import packed_chunk
from dataplane.producer.transport import Transport
from dataplane.protocol.cells import cells_of
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.producer.scripted import ScriptedGateway, answer, break_off, refuse

QUICK = RetryPolicy(first_pause_s=0.001, last_pause_s=0.002, per_s=1000)


@pytest_asyncio.fixture
async def transport(scripted: ScriptedGateway) -> AsyncIterator[Transport]:
    it = Transport(scripted.address, retry=QUICK)
    yield it
    await it.close()


def tags(key: str = "a") -> pb.PutTagsRequest:
    return pb.PutTagsRequest(partition_id="p", keys=[key], tags=[pb.Tags()])


async def test_an_effect_keeps_its_number_and_says_that_it_comes_again(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.revision = 41
    scripted.script["PutTags"] += [break_off(), break_off(grpc.StatusCode.INTERNAL)]
    await transport.effect("PutTags", tags(), 20)
    seen = [(one.request.number, one.request.retry) for one in scripted.requests["PutTags"]]
    assert seen == [(1, False), (1, True), (1, True)]
    for one in scripted.requests["PutTags"]:
        assert (one.request.seen.epoch, one.request.seen.n) == (1, 41)
        assert one.request.plane_id == scripted.plane_id
        assert one.request.client_id == transport.client_id
    assert transport.seen == Revision(1, 42)


async def test_what_the_gateway_itself_could_not_do_did_not_happen(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"].append(refuse(Unreachable("the gateway is ending")))
    await transport.effect("PutTags", tags(), 20)
    assert [one.request.retry for one in scripted.requests["PutTags"]] == [False, False]


async def test_numbers_are_settled_when_they_are_answered(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    for _ in range(3):
        await transport.effect("PutTags", tags(), 20)
    sent = [(one.request.number, one.request.settled) for one in scripted.requests["PutTags"]]
    assert sent == [(1, 0), (2, 1), (3, 2)]


async def test_an_error_of_the_plane_is_raised_as_it_is(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"].append(refuse(StaleWrite("late", keys=["a"], cleared_at=7)))
    with pytest.raises(StaleWrite) as caught:
        await transport.effect("PutTags", tags(), 20)
    assert (caught.value.keys, caught.value.cleared_at) == (["a"], 7)
    assert len(scripted.requests["PutTags"]) == 1


async def test_a_fault_that_the_gateway_tells_of_is_not_asked_for_again(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"].append(refuse(InternalError("a fault")))
    with pytest.raises(InternalError):
        await transport.effect("PutTags", tags(), 20)
    assert len(scripted.requests["PutTags"]) == 1


async def test_who_is_too_fast_comes_again_when_it_is_told(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"].append(
        refuse(RateLimited("too fast", retry_after_s=0.2, limit="calls"))
    )
    began = time.monotonic()
    await transport.effect("PutTags", tags(), 20)
    assert time.monotonic() - began >= 0.2
    assert [one.request.retry for one in scripted.requests["PutTags"]] == [False, False]


async def test_who_cannot_come_again_in_time_is_told_why(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    await transport.describe()
    scripted.script["PutTags"].append(
        refuse(RateLimited("too fast", retry_after_s=60.0, limit="calls"))
    )
    with pytest.raises(RateLimited) as caught:
        await transport.effect("PutTags", tags(), 5)
    assert caught.value.retry_after_s == 60.0


async def test_what_nobody_answered_in_time_may_have_happened(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"] += [break_off()] * 1000
    with pytest.raises(OutcomeUnknown) as caught:
        await transport.effect("PutTags", tags(), 0.3)
    assert caught.value.request_id == f"{transport.client_id}/1"
    scripted.script["PutTags"].clear()
    # Until it is told, the plane is to remember it.
    await transport.effect("PutTags", tags(), 20)
    assert scripted.requests["PutTags"][-1].request.settled == 0
    transport.numbers.told(1)
    await transport.effect("PutTags", tags(), 20)
    assert scripted.requests["PutTags"][-1].request.settled == 2


async def test_a_refusal_that_looks_at_nothing_leaves_an_earlier_try_unknown(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutTags"] += [break_off(), refuse(Unauthenticated("the token has expired"))]
    with pytest.raises(OutcomeUnknown):
        await transport.effect("PutTags", tags(), 20)


async def test_a_question_is_asked_again_and_has_a_deadline(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["List"] += [break_off(), answer(pb.ListResponse(full=True))]
    listed = await transport.ask("List", pb.ListRequest(partition_id="p"), 20)
    assert listed.full
    scripted.script["List"] += [break_off()] * 1000
    with pytest.raises((Unreachable, DeadlineExceeded)):
        await transport.ask("List", pb.ListRequest(partition_id="p"), 0.2)


async def test_a_claim_that_is_asked_again_gives_back_what_was_lost_on_the_way(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["Claim"] += [break_off(), break_off(), answer(pb.ClaimResponse(claim_id=5))]
    message = pb.ClaimRequest(partition_id="p", task="t", count=1)
    assert (await transport.claim(message, 20)).claim_id == 5
    one, other, last = scripted.requests["Claim"]
    assert one.number < other.number < last.number
    assert [[*each.abandoned] for each in (one, other, last)] == [
        [], [one.number], [one.number, other.number],
    ]  # fmt: skip
    scripted.script["Claim"] += [answer(pb.ClaimResponse(claim_id=6))]
    await transport.claim(message, 20)
    assert not scripted.requests["Claim"][-1].abandoned  # the gateway was told


async def test_repetitions_are_bounded_by_the_budget(scripted: ScriptedGateway) -> None:
    """Many calls at a gateway in trouble bring little more than themselves."""
    policy = RetryPolicy(first_pause_s=0.001, last_pause_s=0.001, share=0.2, per_s=0.001, burst=5)
    transport = Transport(scripted.address, retry=policy)
    scripted.script["PutTags"] += [break_off()] * 1000
    calls = 20
    for _ in range(calls):
        with pytest.raises(OutcomeUnknown):
            await transport.effect("PutTags", tags(), 2)
    assert calls < len(scripted.requests["PutTags"]) <= calls + 5 + calls * 0.2
    await transport.close()


async def test_nobody_there_says_where_and_why(roots: dict[str, Path]) -> None:
    transport = Transport(f"grpc+unix://{roots['runtime_dir']}/nobody.sock")
    with pytest.raises(Unreachable, match=r"nobody\.sock"):
        await transport.effect("PutTags", tags(), 0.3)
    await transport.close()
    with pytest.raises(PlaneLost, match="closed"):
        await transport.effect("PutTags", tags(), 0.3)


async def test_a_gateway_of_another_plane_is_refused(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    await transport.effect("PutTags", tags(), 20)
    scripted.plane_id = "another"
    with pytest.raises(PlaneLost, match="another"):
        await transport.describe()


async def test_a_gateway_that_comes_back_is_found(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    await transport.effect("PutTags", tags(), 20)
    await scripted.stop()
    await scripted.start()
    await transport.effect("PutTags", tags(), 20)
    assert [one.request.number for one in scripted.requests["PutTags"]] == [1, 2]


# -- rows in chunks ------------------------------------------------------------------------------


async def put(transport: Transport, rows: int, timeout: float = 20) -> pb.PutRowsResponse:
    keys = [f"k{i}" for i in range(rows)]
    cells = cells_of(keys, {"x": [np.full(100, i, np.int64) for i in range(rows)]})
    return await transport.put_rows("p", keys, None, cells, timeout=timeout)


def received(scripted: ScriptedGateway) -> list[tuple[int, int, int]]:
    """Of each stream: its number, where it went on, and how many chunks came."""
    return [
        (parts[0].header.request.number, parts[0].header.resume_offset, len(parts) - 1)
        for parts in scripted.requests["PutRows"]
    ]


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 1 << 20, (1 << 62) + 5])
@pytest.mark.parametrize("size", [1, 127, 128, 70_000])
def test_a_chunk_is_packed_as_its_message_is(offset: int, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    message = pb.PutRowsRequest(chunk=pb.Chunk(offset=offset, data=data[:size]))
    assert packed_chunk(offset, data[:size]) == message.SerializeToString()


async def test_a_stream_that_breaks_goes_on_where_the_gateway_has_it(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.drop_after.append(3000)
    await put(transport, 10)  # 8000 bytes, in chunks of 1024
    assert received(scripted) == [(1, 0, 3), (1, 3072, 5)]
    want = b"".join(np.full(100, i, np.int64).tobytes() for i in range(10))
    assert bytes(scripted.held[1]) == want


async def test_a_gateway_that_holds_nothing_any_more_gets_all_of_it(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    async def forget(request: object, context: object) -> None:
        scripted.held.clear()

    scripted.drop_after.append(3000)
    scripted.script["GetPutProgress"].append(forget)
    await put(transport, 10)
    assert [offset for _, offset, _ in received(scripted)] == [0, 0]


async def test_an_offset_that_is_wrong_by_then_is_asked_for_again(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    """Between the question and the stream the gateway let go of what it had."""
    scripted.drop_after.append(3000)
    stale = pb.GetPutProgressResponse(state=pb.PUT_STATE_RECEIVING, offset=1024)
    scripted.script["GetPutProgress"].append(answer(stale))
    await put(transport, 10)
    assert [offset for _, offset, _ in received(scripted)] == [0, 1024, 3072]


async def test_a_put_whose_bytes_are_all_there_sends_none_again(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["PutRows"].append(break_off())
    applying = pb.GetPutProgressResponse(state=pb.PUT_STATE_APPLYING)
    scripted.script["GetPutProgress"].append(answer(applying))
    await put(transport, 10)
    assert received(scripted) == [(1, 0, 8), (1, 8000, 0)]


async def test_what_the_gateway_does_not_take_is_not_sent(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    """A put over the limit is an error with both sizes, and not a bare status."""
    scripted.limits.max_put_bytes = 4000
    with pytest.raises(InvalidRequest, match=r"8000 bytes.*4000"):
        await put(transport, 10)
    with pytest.raises(InvalidRequest, match=r"takes 1048576"):
        await transport.effect("PutTags", tags("k" * (2 << 20)), 20)
    assert not scripted.requests["PutRows"]
    assert not scripted.requests["PutTags"]


# -- gets ----------------------------------------------------------------------------------------


def get_parts(data: bytes, total: int, *offsets: int) -> list[pb.GetRowsResponse]:
    header = pb.GetRowsHeader(
        keys=["a", "b"], total_bytes=total, columns=[pb.Column(name="x", dtype="int64")]
    )
    cuts = [*offsets, len(data)]
    return [
        pb.GetRowsResponse(header=header),
        *(pb.GetRowsResponse(chunk=pb.Chunk(offset=a, data=data[a:b])) for a, b in pairwise(cuts)),
    ]


@pytest.mark.parametrize(
    "parts",
    [
        get_parts(bytes(16), 16, 0)[1:],
        get_parts(bytes(16), 24, 0),
        get_parts(bytes(16), 1 << 40, 0),
        get_parts(bytes(8), 16, 0),
        get_parts(bytes(24), 16, 0),
        get_parts(bytes(16), 16, 8, 0),
        [],
    ],
    ids=["no header", "another size", "huge", "short", "long", "reordered", "nothing"],
)
async def test_a_get_that_is_not_as_announced_is_no_result(
    scripted: ScriptedGateway, transport: Transport, parts: list[pb.GetRowsResponse]
) -> None:
    scripted.script["GetRows"].append(answer(parts))
    with pytest.raises(InternalError):
        await transport.get_rows("p", ["a", "b"], [], timeout=20)


async def test_a_get_of_more_than_the_gateway_says_it_sends_is_not_taken(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.limits.max_get_bytes = 8
    scripted.script["GetRows"].append(answer(get_parts(bytes(16), 16, 0)))
    with pytest.raises(InternalError, match="at most 8"):
        await transport.get_rows("p", ["a", "b"], [], timeout=20)


async def test_a_get_that_breaks_off_begins_anew(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    scripted.script["GetRows"] += [break_off(), answer(get_parts(bytes(range(16)), 16, 0, 8))]
    header, shape, data = await transport.get_rows("p", ["a", "b"], [], timeout=20)
    assert (list(header.keys), shape.nbytes, bytes(data)) == (["a", "b"], 16, bytes(range(16)))


# -- who it is -----------------------------------------------------------------------------------


async def test_the_token_is_sent_and_read_again_when_its_file_changes(
    scripted: ScriptedGateway, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("dpt_one\n")
    transport = Transport(scripted.address, Access(token_file=file), retry=QUICK)
    await transport.effect("PutTags", tags(), 20)

    async def renew(request: object, context: object) -> None:
        file.write_text("dpt_another")
        await refuse(Unauthenticated("the token has expired"))(request, context)

    scripted.script["PutTags"].append(renew)
    await transport.effect("PutTags", tags(), 20)
    said = [one.get("authorization") for one in scripted.metadata]
    assert said[-3:] == ["Bearer dpt_one", "Bearer dpt_one", "Bearer dpt_another"]
    await transport.close()


def test_a_token_does_not_go_out_in_plain_text() -> None:
    with pytest.raises(InvalidRequest, match="plain text"):
        Transport("grpc://example.org:1", Access(token="dpt_secret"))
    Transport("grpc://127.0.0.1:1", Access(token="dpt_secret"))
    Transport("grpc://example.org:1", Access(token="dpt_secret", token_in_plain_text=True))


def test_secrets_are_in_no_repr_and_no_error(tmp_path: Path) -> None:
    access = Access(token="hush-hush")
    transport = Transport("grpcs://example.org:1", access)
    producer = AsyncProducer("grpcs://example.org:1", token="hush-hush")
    for shown in (access, transport, producer, transport.channel):
        assert "hush" not in repr(shown)
    file = tmp_path / "token"
    file.write_text("hush\nhush")
    with pytest.raises(InvalidRequest) as caught:
        Access(token_file=file).read_token()
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:1", "http://a:1", "grpcs://a", "grpcs://a:99999", "grpcs://a:1/x",
     "grpc+unix:x", "grpcs://u:p@a:1", "grpcs://a:1?x=1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="grpcs://host:port"):
        gateway_of(address)


def test_addresses() -> None:
    assert gateway_of("grpcs://a.example:5").target == "a.example:5"
    assert gateway_of("grpc://[::1]:5").target == "[::1]:5"
    assert gateway_of("grpc://[::1]:5").is_here
    assert not gateway_of("grpc://10.0.0.1:5").is_here
    assert gateway_of("grpc+unix:///run/x.sock").target == "unix:/run/x.sock"


# -- pauses --------------------------------------------------------------------------------------


def test_pauses_grow_to_a_limit_and_are_drawn() -> None:
    policy = RetryPolicy(first_pause_s=0.1, last_pause_s=1.0)
    assert [policy.pause_s(tries, 1.0) for tries in (1, 2, 3, 4, 5, 99)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    )
    draws = [policy.pause_s(5, random.Random(i).random()) for i in range(50)]
    assert min(draws) < 0.2
    assert max(draws) > 0.8


async def test_no_room_is_not_asked_for_again(
    scripted: ScriptedGateway, transport: Transport
) -> None:
    """The plane waited for room until its own deadline already."""
    scripted.script["BeginGroup"].append(refuse(QuotaExceeded("full", used_bytes=1, limit_bytes=1)))
    with pytest.raises(QuotaExceeded):
        await transport.effect("BeginGroup", pb.BeginGroupRequest(uid="u"), 20)
    assert len(scripted.requests["BeginGroup"]) == 1
