"""Puts that wait on disk while the gateway is away: what comes of each when it is back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    OutcomeUnknown,
    PermissionDenied,
    PlaneLost,
    QuotaExceeded,
    RateLimited,
    SchemaMismatch,
    StaleWrite,
    Unauthenticated,
    Unreachable,
)
from dataplane.producer import AsyncProducer, Rejected, RetryPolicy, Trajectory, sending
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.producer.scripted import ScriptedGateway, answer, break_off, refuse
from tests.deadline import until

Make = Callable[..., AsyncProducer]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(sending, "LAST_PAUSE_S", 0.01)


@pytest_asyncio.fixture
async def make(scripted: ScriptedGateway, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes producers with a spool, which ask again quickly."""
    made: list[AsyncProducer] = []

    def one(**settings: Any) -> AsyncProducer:
        settings = {
            "spool": tmp_path / "spool", "spool_after_s": 0.05,
            "retry": RetryPolicy(first_pause_s=0.001, last_pause_s=0.01, per_s=1000), **settings,
        }  # fmt: skip
        made.append(AsyncProducer(scripted.address, **settings))
        return made[-1]

    yield one
    for it in made:
        await it.close()


def trajectory(uid: str) -> Trajectory:
    return Trajectory.from_response(uid, [1], [2], [-0.5])


def arrived(scripted: ScriptedGateway, rpc: str = "PutTags") -> list[tuple[str, int, bool]]:
    """Of each put its first key, number, and whether it says that it comes again."""
    return [(one.keys[0], one.request.number, one.request.retry) for one in scripted.requests[rpc]]


async def away(scripted: ScriptedGateway, producer: AsyncProducer, *keys: str) -> None:
    """The gateway was there, and is not when these are put."""
    await producer._transport.describe()  # however long it takes to connect
    await producer.kv_put("before", "p", tags={}, if_absent=True)
    await scripted.stop()
    channel = producer._transport.channel._channel
    await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, "it notices")
    for key in keys:
        meta = await producer.kv_put(key, "p", tags={}, if_absent=True)
        assert meta.revision is None


async def test_what_is_put_while_the_gateway_is_away_comes_in_order(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a", "b", "c")
    assert producer.spooled == 3
    assert len(scripted.applied) == 1
    await scripted.start()
    await producer.flush()
    assert producer.spooled == 0
    assert arrived(scripted) == [
        ("before", 1, False), ("a", 2, False), ("b", 3, False), ("c", 4, False),
    ]  # fmt: skip


async def test_every_kind_of_put_comes_as_it_was(scripted: ScriptedGateway, make: Make) -> None:
    producer = make()
    await scripted.stop()
    x = np.arange(1000, dtype=np.int64)
    await producer.kv_put("row", "p", {"x": x}, {"n": 1}, if_absent=True)
    put = await producer.put_trajectories([trajectory("u")], "p", attempt=5)
    assert [(one.key, one.spooled, one.accepted) for one in put.results] == [("u_0_0", True, False)]
    await scripted.start()
    await producer.flush()
    (parts,) = scripted.requests["PutRows"]
    assert b"".join(part.chunk.data for part in parts[1:]) == x.tobytes()
    assert dict(parts[0].header.tags[0].values)["n"].int_value == 1
    assert parts[0].header.mode == pb.PUT_MODE_IF_ABSENT
    (message,) = scripted.requests["PutTrajectories"]
    assert message.attempt == 5
    assert message.trajectories[0] == trajectory("u").to_message()


async def test_a_put_that_could_overwrite_does_not_wait(
    scripted: ScriptedGateway, make: Make
) -> None:
    """Hours later it might bring back what was cleared meanwhile."""
    producer = make()
    await scripted.stop()
    with pytest.raises(Unreachable):
        await producer.kv_put("a", "p", tags={}, timeout=0.1)
    with pytest.raises(Unreachable):
        await producer.kv_put("a", "p", tags={}, must_exist=True, timeout=0.1)
    assert producer.spooled == 0


async def test_a_put_that_may_have_arrived_comes_again_as_such(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await producer._transport.describe()
    await producer.kv_put("before", "p", tags={}, if_absent=True)

    async def applied_but_not_answered(request: Any, context: Any) -> None:
        scripted._effect(request)
        await scripted.stop()

    scripted.script["PutTags"].append(applied_but_not_answered)
    meta = await producer.kv_put("a", "p", tags={}, if_absent=True)
    assert meta.revision is None
    await scripted.start()
    await producer.flush()
    assert arrived(scripted)[1:] == [("a", 2, False), ("a", 2, True)]
    seen = [one.request.seen.n for one in scripted.requests["PutTags"][1:]]
    assert seen == [1, 1]  # as it was when it was first asked for
    assert len(scripted.applied) == 2


async def test_a_later_process_sends_on_under_the_same_name_and_numbers(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a", "b")
    await producer.close()
    assert len(scripted.applied) == 1
    await scripted.start()
    later = make()
    await later.flush()
    assert arrived(scripted)[1:] == [("a", 2, False), ("b", 3, False)]
    assert later.client_id == producer.client_id
    await later.kv_put("c", "p", tags={}, if_absent=True)
    last = scripted.requests["PutTags"][-1].request
    assert last.client_id == producer.client_id
    assert last.number > 3
    assert last.settled == last.number - 1


@pytest.mark.parametrize(
    "error",
    [
        AlreadyWritten("it is there", partition_id="p", keys=["a"]),
        StaleWrite("closed", partition_id="p", keys=["a"], attempt=5),
        StaleWrite("cleared", partition_id="p", keys=["a"], cleared_at=9),
        PermissionDenied("not there"),
        SchemaMismatch("int32 is due", partition_id="p", keys=["a"], fields=["x"]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_the_plane_refuses_is_set_aside_and_told(
    scripted: ScriptedGateway, make: Make, error: DataplaneError
) -> None:
    told: list[Rejected] = []
    producer = make(on_rejected=told.append)
    await away(scripted, producer, "a", "b")
    scripted.script["PutTags"].append(refuse(error))
    await scripted.start()
    await producer.flush()
    assert producer.rejected == 1
    (rejected,) = told
    assert (rejected.keys, rejected.partition_id) == (["a"], "p")
    assert type(rejected.error) is type(error)
    assert rejected.path is not None
    assert rejected.path.exists()
    assert [key for key, *_ in arrived(scripted)] == ["before", "a", "b"]


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("the gateway is ending"),
        QuotaExceeded("full", used_bytes=1, limit_bytes=1),
        RateLimited("too fast", retry_after_s=0.001, limit="calls"),
        Unauthenticated("the token has expired"),
        DeadlineExceeded("late", waited_s=1.0),
        InternalError("a fault"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_may_be_different_later_is_tried_later(
    scripted: ScriptedGateway, make: Make, error: DataplaneError
) -> None:
    producer = make()
    await away(scripted, producer, "a", "b")
    scripted.script["PutTags"] += [refuse(error)] * 3
    await scripted.start()
    await producer.flush()
    assert producer.rejected == 0
    assert [key for key, *_ in arrived(scripted)] == ["before", *["a"] * 4, "b"]


async def test_a_put_that_meets_fault_after_fault_does_not_stop_the_others(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a", "b")
    scripted.script["PutTags"] += [refuse(InternalError("a fault"))] * sending.MAX_FAULTS
    await scripted.start()
    await producer.flush()
    assert producer.rejected == 1
    assert arrived(scripted)[-1][0] == "b"


def beyond_history() -> Any:
    return refuse(StaleWrite("history does not reach back", partition_id="p", keys=["a"]))


async def test_a_put_too_old_to_be_judged_that_had_no_effect_goes_on_as_a_new_one(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a")
    scripted.script["PutTags"] += [break_off(), beyond_history()]
    await scripted.start()
    await producer.flush()
    assert [one.number for one in scripted.requests["GetOutcome"]] == [2]
    assert arrived(scripted)[1:] == [("a", 2, False), ("a", 2, True), ("a", 3, False)]
    assert producer.rejected == 0


async def test_a_put_too_old_to_be_judged_that_had_its_effect_is_done(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a")

    async def applied(request: Any, context: Any) -> None:
        scripted._effect(request)
        await break_off()(request, context)

    scripted.script["PutTags"] += [applied, beyond_history()]
    await scripted.start()
    await producer.flush()
    assert len(scripted.applied) == 2
    assert len(arrived(scripted)) == 3
    assert producer.rejected == 0


async def test_what_nobody_remembers_is_not_done_twice(
    scripted: ScriptedGateway, make: Make
) -> None:
    producer = make()
    await away(scripted, producer, "a")
    unknown = refuse(OutcomeUnknown("settled before", request_id="x/2"))
    scripted.script["PutTags"] += [unknown] * 2
    scripted.script["GetOutcome"].append(unknown)
    await scripted.start()
    await producer.flush()
    assert producer.rejected == 1
    assert len(scripted.applied) == 1


async def test_who_may_not_even_ask_what_became_of_it_holds_nothing_up(
    scripted: ScriptedGateway, make: Make
) -> None:
    told: list[Rejected] = []
    producer = make(on_rejected=told.append)
    await away(scripted, producer, "a", "b", "c")
    no = refuse(PermissionDenied("not any more"))
    scripted.script["PutTags"] += [break_off(), no, break_off(), beyond_history()]
    scripted.script["GetOutcome"].append(no)
    await scripted.start()
    await producer.flush()
    assert [(one.keys, type(one.error)) for one in told] == [
        (["a"], OutcomeUnknown), (["b"], PermissionDenied),
    ]  # fmt: skip
    assert arrived(scripted)[-1][0] == "c"


async def test_trajectories_that_go_to_quarantine_later_are_told(
    scripted: ScriptedGateway, make: Make
) -> None:
    told: list[Rejected] = []
    producer = make(on_rejected=told.append)
    await scripted.stop()
    await producer.put_trajectories([trajectory("u")], "p", if_absent=True)
    wrong = pb.TrajectoryResult(key="x/1/0", quarantine="quarantine.p", reason="labels are short")
    scripted.script["PutTrajectories"].append(answer(pb.PutTrajectoriesResponse(results=[wrong])))
    await scripted.start()
    await producer.flush()
    assert [(one.keys, one.path) for one in told] == [(["x/1/0"], None)]
    assert "labels are short" in str(told[0].error)


async def test_another_plane_gets_nothing_of_it(scripted: ScriptedGateway, make: Make) -> None:
    producer = make()
    await away(scripted, producer, "a")
    await producer.close()
    scripted.plane_id = "another"
    await scripted.start()
    later = make()
    with pytest.raises(DeadlineExceeded, match="another"):
        await later.flush(timeout=0.5)
    with pytest.raises(PlaneLost):
        await later.kv_put("b", "p", tags={}, if_absent=True)
    assert later.spooled == 1
    assert len(scripted.applied) == 1


async def test_a_full_spool_raises(scripted: ScriptedGateway, make: Make) -> None:
    producer = make(spool_bytes=500)
    await scripted.stop()
    with pytest.raises(QuotaExceeded, match="spool"):
        for i in range(20):
            await producer.kv_put(f"k{i}", "p", tags={}, if_absent=True)
    waiting = producer.spooled
    assert 0 < waiting < 20
    await scripted.start()
    await producer.flush()
    assert len(scripted.applied) == waiting


async def test_a_flush_says_what_waits(scripted: ScriptedGateway, make: Make) -> None:
    producer = make()
    await scripted.stop()
    await producer.kv_put("a", "p", tags={}, if_absent=True)
    with pytest.raises(DeadlineExceeded, match="1 puts wait"):
        await producer.flush(timeout=0.2)


async def test_a_callback_that_fails_stops_nothing(
    scripted: ScriptedGateway, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(rejected: Rejected) -> None:
        raise ZeroDivisionError

    producer = make(on_rejected=fail)
    await away(scripted, producer, "a", "b")
    scripted.script["PutTags"].append(refuse(PermissionDenied("no")))
    await scripted.start()
    await producer.flush()
    assert "on_rejected failed" in caplog.text
    await until(lambda: len(scripted.applied) == 2, "b arrives")
