"""Every call of the protocol under every role and under none, through a real gateway with tokens.

The table says of each call who may make it, and how a call is made that has its effect. A call that
is missing here fails the first test.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from dataplane.client.tags import present
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.values import tags_to
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve, header_of, parts_of
from tests.dataplane.gateway.guarded import RPCS, add_token
from tests.dataplane.gateway.trajectories import right
from tests.faults.planes import Plane

Code = grpc.StatusCode

HERE, THERE, NOWHERE = "room-1", "room-2", "room-3"
"""A partition for which everybody but `elsewhere` has a role; that of `elsewhere`; and none. All
are as long as each other, and so are the messages in which they stand."""
ROLES = ("producer", "consumer", "reader", "admin")
EVERYBODY = {*ROLES, "elsewhere"}
_numbers = itertools.count(1)


@dataclass
class Setting:
    """What a call is made in."""

    plane: Plane
    caller: Caller
    partition: str

    def claim(self) -> dict[str, Any]:
        """Rows that are claimed, as those name them who end the claim."""
        task = f"task-{next(_numbers)}"
        claim = self.plane.client.kv_claim(self.partition, task, count=1)
        return {"task": task, "claim_id": claim.claim_id, "keys": claim.keys}

    def group(self) -> int:
        """An open attempt."""
        return self.plane.client.begin_group(f"u{next(_numbers)}", self.partition, n=1)

    def row(self) -> str:
        """A row that nobody needs."""
        key = f"k{next(_numbers)}"
        self.plane.client.kv_put(key, self.partition, {"x": np.arange(3)}, {"n": 1})
        return key


Make = Callable[[Setting], Any]


@dataclass(frozen=True)
class Row:
    """What the table says of a call."""

    who: set[str]
    make: Make
    """A request of it: with a partition that is there it has its effect."""
    prepare: Callable[[Setting], Mapping[str, Any]] = lambda _: {}
    """What has to be there, for who may make the call."""
    names_partition: bool = True


def _put_rows(at: Setting) -> Any:
    request = at.caller.request()
    rows = {f"new{next(_numbers)}": {"x": np.arange(3)}}
    return parts_of(*header_of(at.partition, rows, request=request))


def _ask(kind: Any, **parts: Any) -> Make:
    """A question of a partition."""
    return lambda at: kind(partition_id=at.partition, **parts)


def _effect(kind: Any, **parts: Any) -> Make:
    """An effect in a partition."""
    return lambda at: kind(request=at.caller.request(), partition_id=at.partition, **parts)


TABLE: dict[str, Row] = {
    "Describe": Row(EVERYBODY, lambda _: pb.DescribeRequest(), names_partition=False),
    "PutRows": Row({"producer", "admin"}, _put_rows),
    "GetPutProgress": Row({"producer", "admin"}, _effect(pb.GetPutProgressRequest)),
    "PutTags": Row(
        {"producer", "admin"},
        _effect(pb.PutTagsRequest, keys=["a"], tags=[tags_to({"n": 2})]),
    ),
    "PutTrajectories": Row(
        {"producer", "admin"},
        _effect(pb.PutTrajectoriesRequest, trajectories=[right(policy_spans=None)]),
    ),
    "GetRows": Row(set(ROLES), _ask(pb.GetRowsRequest, keys=["a"], fields=["x"])),
    "List": Row(set(ROLES), _ask(pb.ListRequest)),
    "Wait": Row(set(ROLES), _ask(pb.WaitRequest, count=1)),
    "Watch": Row(set(ROLES), _ask(pb.WatchRequest)),
    "Claim": Row(
        {"producer", "consumer", "admin"},
        lambda at: pb.ClaimRequest(
            client_id=at.caller.client_id,
            partition_id=at.partition,
            task=f"task-{next(_numbers)}",
            count=1,
        ),
    ),
    "Commit": Row(
        {"producer", "consumer", "admin"},
        _effect(pb.CommitRequest, task="t", claim_id=1, keys=["a"]),
        Setting.claim,
    ),
    "Release": Row(
        {"producer", "consumer", "admin"},
        _effect(pb.ReleaseRequest, task="t", claim_id=1, keys=["a"]),
        Setting.claim,
    ),
    "Attend": Row(
        EVERYBODY,
        lambda at: pb.AttendRequest(client_id=at.caller.client_id),
        names_partition=False,
    ),
    "Clear": Row(
        {"admin"},
        _effect(pb.ClearRequest, keys=["gone"]),
        lambda at: {"keys": [at.row()]},
    ),
    "BeginGroup": Row({"producer", "admin"}, _effect(pb.BeginGroupRequest, uid="u", n=1)),
    "EndGroup": Row(
        {"producer", "admin"},
        _effect(pb.EndGroupRequest, attempt=1, status="finished"),
        lambda at: {"attempt": at.group()},
    ),
    "ListPartitions": Row(EVERYBODY, lambda _: pb.ListPartitionsRequest(), names_partition=False),
    "CreatePartition": Row({"admin"}, _effect(pb.CreatePartitionRequest)),
    "SealPartition": Row({"admin"}, _effect(pb.SealPartitionRequest)),
    "DropPartition": Row({"admin"}, _effect(pb.DropPartitionRequest)),
    "Explain": Row(set(ROLES), _ask(pb.ExplainRequest)),
    "GetOutcome": Row(
        EVERYBODY,
        lambda at: pb.GetOutcomeRequest(client_id=at.caller.client_id, number=1),
        names_partition=False,
    ),
    "GetStatus": Row(EVERYBODY, lambda _: pb.GetStatusRequest(), names_partition=False),
    "Inspect": Row(set(ROLES), _ask(pb.InspectRequest, keys=["a", "nobody"])),
    "Tally": Row(set(ROLES), _ask(pb.TallyRequest)),
    "GetStats": Row(set(ROLES), _ask(pb.GetStatsRequest)),
    "ListClaims": Row(set(ROLES), _ask(pb.ListClaimsRequest)),
    "ListWaiters": Row(EVERYBODY, lambda _: pb.ListWaitersRequest(), names_partition=False),
    "ListHoldings": Row(set(), lambda _: pb.ListHoldingsRequest(), names_partition=False),
    "FindRevision": Row(EVERYBODY, lambda _: pb.FindRevisionRequest(), names_partition=False),
    "GetRecord": Row(set(), lambda _: pb.GetRecordRequest(), names_partition=False),
    "Trace": Row(set(ROLES), _ask(pb.TraceRequest)),
    "EnterStage": Row(
        EVERYBODY,
        lambda at: pb.EnterStageRequest(client_id=at.caller.client_id, stage="rollout"),
        names_partition=False,
    ),
}

UNKNOWN_AT_FIRST = {"GetOutcome"}
"""Calls that are answered UNKNOWN to who asked for no effect before."""


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[Any, ...]

    def about(self, partition: str) -> tuple[Any, ...]:
        """All of it, with the partition's name taken out."""
        name = partition.encode()
        trailers = [
            (key, value.replace(name, b"?") if isinstance(value, bytes) else value)
            for key, value in self.trailers
        ]
        return self.code, self.details.replace(partition, "?"), trailers


async def end_of(caller: Caller, rpc: str, message: Any) -> Ended:
    """How a call ends; one with many answers counts as OK when the first is there."""
    method = RPCS[rpc]
    call = getattr(caller.stub, rpc)(
        iter(message) if method.client_streaming else message,
        timeout=20,
        metadata=caller.metadata,
    )
    try:
        if method.server_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return Ended(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    return Ended(Code.OK, "", ())


class World:
    """A gateway with tokens, and a caller of each role."""

    def __init__(self, plane: Plane, gateway: GatewayServer, callers: Mapping[str, Caller]) -> None:
        self.plane = plane
        self.gateway = gateway
        self.callers = callers

    def make(self, rpc: str, role: str, partition: str, *, prepared: bool) -> Any:
        """A request that has its effect, where it is `prepared`."""
        row = TABLE[rpc]
        at = Setting(self.plane, self.callers[role], partition)
        message = row.make(at)
        for name, value in row.prepare(at).items() if prepared else ():
            field = getattr(message, name)
            if isinstance(value, list):
                del field[:]
                field.extend(value)
            else:
                setattr(message, name, value)
        return message

    def restore(self) -> None:
        """The partition HERE with one row, open for more."""
        client = self.plane.client
        if client.kv_list_partitions().get(HERE, {"sealed": True})["sealed"]:
            if HERE in client.kv_list_partitions():
                client.kv_drop_partition(HERE)
            client.kv_put("a", HERE, {"x": np.arange(3)}, {"n": 1})

    def revision(self) -> Revision:
        """That of the plane: any change of anything makes the next one."""
        return self.plane.client.run(lambda core, deadline: present(core, deadline))


@pytest.fixture
async def world(serve: Serve, callers: Callers, plane: Plane, tmp_path: Path) -> World:
    path = tmp_path / "tokens.json"
    tokens = {role: add_token(path, role, role, partition=HERE).text for role in ROLES}
    tokens["elsewhere"] = add_token(path, "elsewhere", "admin", partition=THERE).text
    tokens["everywhere"] = add_token(path, "everywhere", "admin").text
    tokens["expired"] = add_token(path, "expired", "admin", expires_s=1.0).text
    tokens["wrong"] = tokens["admin"][:-3] + "AAA"
    gateway = await serve(token_file=path)
    found = {role: await callers(gateway, token=token) for role, token in tokens.items()}
    found["none"] = await callers(gateway)
    world = World(plane, gateway, found)
    world.restore()
    return world


def test_every_call_has_a_row() -> None:
    assert set(TABLE) == set(RPCS)


@pytest.mark.parametrize("rpc", RPCS)
async def test_who_may_make_a_call_and_who_may_not(rpc: str, world: World) -> None:
    for role in (*ROLES, "elsewhere", "everywhere"):
        world.restore()
        allowed = role in TABLE[rpc].who or role == "everywhere"
        message = world.make(rpc, role, HERE, prepared=allowed)
        before = world.revision()
        ended = await end_of(world.callers[role], rpc, message)
        if not allowed:
            assert ended.code is Code.PERMISSION_DENIED, (role, ended)
            assert world.revision() == before, f"{role}: a call that is refused changes nothing"
        elif rpc in UNKNOWN_AT_FIRST:
            assert ended.code is Code.UNKNOWN, (role, ended)
        else:
            assert ended.code is Code.OK, (role, ended)


@pytest.mark.parametrize("rpc", RPCS)
async def test_without_credentials_that_hold_nothing_is_looked_at(rpc: str, world: World) -> None:
    before = world.revision()
    ends: list[Ended] = []
    for role, partition in itertools.product(("none", "wrong", "expired"), (HERE, NOWHERE)):
        message = world.make(rpc, role, partition, prepared=False)
        ends.append(await end_of(world.callers[role], rpc, message))
    assert ends[0].code is Code.UNAUTHENTICATED
    assert len(set(ends)) == 1, "whatever is wrong with them, the same is said"
    assert world.revision() == before
    assert len(world.gateway.producers) == 0


@pytest.mark.parametrize("rpc", [rpc for rpc, row in TABLE.items() if row.names_partition])
async def test_a_partition_that_is_forbidden_is_answered_like_one_that_is_not_there(
    rpc: str, world: World
) -> None:
    """Byte for byte, but for the name that the caller wrote itself."""
    for role in ("elsewhere", *sorted(set(ROLES) - TABLE[rpc].who)):
        ends = [
            (await end_of(world.callers[role], rpc, message)).about(partition)
            for partition in (HERE, NOWHERE)
            for message in [world.make(rpc, role, partition, prepared=False)]
        ]
        assert ends[0][0] is Code.PERMISSION_DENIED, role
        assert ends[0] == ends[1], role


async def test_what_is_told_of_the_plane_is_of_what_the_caller_sees(world: World) -> None:
    world.plane.client.kv_put("secret-key", "hidden", None, {})
    for role in EVERYBODY:
        caller = world.callers[role]
        listed = await caller.call("ListPartitions", pb.ListPartitionsRequest())
        assert set(listed.partitions) <= {HERE, THERE}
        if role != "elsewhere":
            assert set(listed.partitions) == {HERE}
        told = await caller.call("Explain", pb.ExplainRequest())
        assert not re.search("hidden|secret", str(told))
        told = await caller.call("GetStatus", pb.GetStatusRequest())
        assert set(told.status.entries["partitions"].map_value.entries) <= {HERE, THERE}
        assert not re.search("hidden|secret", str(told))
        for rpc, message in (
            ("ListClaims", pb.ListClaimsRequest()),
            ("ListWaiters", pb.ListWaitersRequest()),
            ("Trace", pb.TraceRequest()),
        ):
            answers = getattr(caller.stub, rpc)(message, timeout=20, metadata=caller.metadata)
            said = [str(answer) async for answer in answers]
            assert not re.search("hidden|secret", "".join(said)), (role, rpc)
    world.plane.client.kv_drop_partition("hidden")
