"""Messages delayed, repeated, cut short, damaged and swallowed: one effect each, no hang, no leak.

Between a client and a plane in a process of its own stands a fault proxy, so that every value goes
through TCP. Where nothing is damaged, every verb must succeed with its one effect; where bits were
flipped on the way, it may fail, in time and with a typed error, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.client.sync import Client
from dataplane.errors import DataplaneError, DeadlineExceeded, OutcomeUnknown, Unreachable
from dataplane.testing import FaultProxy, Proxies, proxied
from tests.contract.planes import running_loop
from tests.deadline import eventually, until
from tests.faults import planes
from tests.faults.planes import Plane

pytestmark = pytest.mark.faults

SMALL = torch.arange(100)
LARGE = torch.arange(200_000)
"""1.6 MB: many reads, and more than goes through a socket at once."""
TIMEOUT_S = 10.0
SLACK_S = 1.5

_numbers = itertools.count()


class Awaited:
    """The verbs of an asyncio client, each run to its end on an event loop in another thread."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(self.client, name)
        return lambda *args, **named: self.run(verb(*args, **named))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * TIMEOUT_S)


class Stage:
    """A client behind proxies, and a witness beside them."""

    def __init__(self, plane: Plane, stack: ExitStack, kind: str) -> None:
        self.plane = plane
        self.witness: Client = plane.client
        self.proxies: Proxies = stack.enter_context(proxied(plane))
        self.client: Any
        if kind == "sync":
            self.client = self.proxies.connect(timeout_s=TIMEOUT_S)
        else:
            loop = stack.enter_context(running_loop())
            self.client = Awaited(self.proxies.async_connect(timeout_s=TIMEOUT_S), loop)
            stack.callback(lambda: self.client.close())
        self.damaged = False
        """Whether its connections may have lost their place."""
        self.partition = f"messages-{next(_numbers)}"
        self.row = f"R{self.partition}"
        self.witness.kv_batch_put(
            [self.row, "L"], self.partition, [{"x": SMALL}, {"x": LARGE}], [{"n": 1}, {"n": 0}]
        )
        # Every connection is there that the verb needs, and it knows its stores.
        self.client.kv_put("warm", self.partition, {"x": SMALL})

    def attend(self) -> None:
        """Have the connection there that a blocking client that claims has besides."""
        if isinstance(self.client, Client):
            there = self.proxy.connections
            self.client._attendance.begin()
            eventually(lambda: self.proxy.connections > there, "it attends")

    @property
    def proxy(self) -> FaultProxy:
        """The one that all goes through: the plane has one process."""
        (proxy,) = self.proxies.all
        return proxy

    def lose_place(self) -> None:
        """End the connections on which a frame was damaged. A damaged length makes a side wait for
        bytes that never come: a blocking client gives such a connection up at the deadline, while
        one that others share (asyncio) stays until it ends."""
        self.proxy.cut()

    def changes(self) -> int:
        """Revisions of the partition so far."""
        return self.witness.kv_list(self.partition).revision.n

    def value(self, key: str) -> torch.Tensor:
        return self.witness.kv_batch_get([key], self.partition, layout="list").fields["x"][0]


class Act(ABC):
    """A call of a verb."""

    changes = 0
    """How many revisions it makes."""
    frame = 0
    """Which of its requests the faults are aimed at."""
    payload = (False, False)
    """Whether that request and its answer have one."""

    def prepare(self, s: Stage) -> Any:  # noqa: B027 (most need nothing)
        """What it needs that is not to fail."""

    @abstractmethod
    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        """Make the call."""

    @abstractmethod
    def check(self, s: Stage, result: Any) -> None:
        """That the result is right, and so is the plane."""


class PutTags(Act):
    changes = 1

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_put("N", s.partition, None, {"n": 7}, **named)

    def check(self, s: Stage, result: Any) -> None:
        listing = s.witness.kv_list(s.partition, where={"n": 7})
        assert listing.keys == ["N"]
        assert result.revision == listing.revision


class Put(Act):
    changes = 1
    payload = (True, False)

    def __init__(self, value: torch.Tensor) -> None:
        self.sent = value

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_put("N", s.partition, {"x": self.sent}, {"n": 7}, **named)

    def check(self, s: Stage, result: Any) -> None:
        assert s.value("N").equal(self.sent)
        assert result.revision == s.witness.kv_list(s.partition).revision


class Get(Act):
    frame = 1
    """The first one asks where the values are."""
    payload = (False, True)

    def __init__(self, large: bool) -> None:
        self.large = large

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        key = "L" if self.large else s.row
        return s.client.kv_batch_get([key], s.partition, layout="list", **named)

    def check(self, s: Stage, result: Any) -> None:
        assert result.fields["x"][0].equal(LARGE if self.large else SMALL)


class Resolve(Get):
    frame = 0
    payload = (False, False)


class List(Act):
    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_list(s.partition, where={"n": 1}, **named)

    def check(self, s: Stage, result: Any) -> None:
        assert result.keys == [s.row]


class Clear(Act):
    changes = 1

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_clear([s.row, "L"], s.partition, **named)

    def check(self, s: Stage, result: Any) -> None:
        assert result == 2
        assert s.witness.kv_list(s.partition).keys == ["warm"]


class Claim(Act):
    def prepare(self, s: Stage) -> Any:
        s.attend()

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_claim(s.partition, "t", count=1, where={"n": 1}, **named)

    def check(self, s: Stage, result: Any) -> None:
        assert result.keys == [s.row]
        assert list(result.deliveries) == [1]
        with pytest.raises(DeadlineExceeded):
            s.witness.kv_claim(s.partition, "t", count=1, where={"n": 1}, timeout=0.02)
        s.witness.kv_claim(s.partition, "t", count=1, where={"n": 0})


class Commit(Act):
    def prepare(self, s: Stage) -> Any:
        s.attend()
        return s.client.kv_claim(s.partition, "t", count=1, where={"n": 1})

    def do(self, s: Stage, prepared: Any, **named: Any) -> Any:
        return s.client.kv_commit(prepared, **named)

    def check(self, s: Stage, result: Any) -> None:
        with pytest.raises(DeadlineExceeded):
            s.witness.kv_claim(s.partition, "t", count=1, where={"n": 1}, timeout=0.02)


ACTS: dict[str, Act] = {
    "put tags": PutTags(),
    "put small": Put(SMALL),
    "put large": Put(LARGE),
    "resolve": Resolve(False),
    "get small": Get(False),
    "get large": Get(True),
    "list": List(),
    "clear": Clear(),
    "claim": Claim(),
    "commit": Commit(),
}

acts = pytest.mark.parametrize("act", list(ACTS.values()), ids=list(ACTS))


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    with ExitStack() as stack:
        yield planes.start(stack, "messages", timeout_s=TIMEOUT_S, capacity_bytes=64 << 20, **roots)


@pytest.fixture(params=["sync", "async"])
def stage(request: pytest.FixtureRequest, plane: Plane) -> Iterator[Stage]:
    pid = plane.pid
    with ExitStack() as stack:
        staged = Stage(plane, stack, request.param)
        yield staged
        # Whatever was done to it: it is the same process, and serves this client and others.
        assert plane.pid == pid
        staged.proxies.heal()
        if staged.damaged:
            staged.lose_place()
        for client in (staged.client, staged.witness):
            client.kv_put("after", staged.partition, {"x": SMALL})
            assert client.kv_list(staged.partition, where={}).keys
            client.kv_clear(None, staged.partition, where={})
        # A damaged name may have led elsewhere.
        for partition in plane.client.kv_list_partitions():
            plane.client.kv_drop_partition(partition)
    eventually(lambda: not plane.client.status()["dead_blocks"], "all blocks are freed")
    assert plane.client.status()["bytes_in_use"] == 0


def once(s: Stage, act: Act, arm: Callable[[], None]) -> None:
    """The act succeeds, with its one effect, whatever `arm` lets happen."""
    prepared = act.prepare(s)
    before = s.changes()
    arm()
    began = time.monotonic()
    result = act.do(s, prepared)
    assert time.monotonic() - began < TIMEOUT_S
    assert s.changes() == before + act.changes
    s.proxies.heal()
    act.check(s, result)
    assert s.changes() == before + act.changes


@acts
def test_messages_that_come_late(stage: Stage, act: Act) -> None:
    once(stage, act, lambda: stage.proxy.delay(0.02))


@acts
def test_messages_that_come_in_pieces(stage: Stage, act: Act) -> None:
    once(stage, act, lambda: stage.proxy.throttle(4e6))


@acts
def test_messages_that_come_twice(stage: Stage, act: Act) -> None:
    frames = stage.proxy.frames[1]
    once(stage, act, stage.proxy.duplicate)
    # The second one was answered as well.
    assert stage.proxy.frames[1] >= frames + 2


def cuts(act: Act) -> list[tuple[str, dict[str, Any]]]:
    """A cut in every part of the request and of the answer, and between the two."""
    found: list[tuple[str, dict[str, Any]]] = [("requests", {"frames": act.frame + 1})]
    for of, payload in zip(("requests", "answers"), act.payload, strict=True):
        places = [("prefix", 0), ("prefix", 9), ("header", 0), ("header", -1)]
        if payload:
            places += [("payload", 0), ("payload", 333), ("payload", -1)]
        found += [(of, {"frames": act.frame, "part": part, "byte": at}) for part, at in places]
    return found


@pytest.mark.parametrize(
    ("act", "of", "where"),
    [(act, of, where) for act in ACTS.values() for of, where in cuts(act)],
    ids=[
        f"{name}-{of}-{'-'.join(map(str, where.values()))}"
        for name, act in ACTS.items()
        for of, where in cuts(act)
    ],
)
def test_messages_cut_anywhere(stage: Stage, act: Act, of: Any, where: dict[str, Any]) -> None:
    connections = 0

    def arm() -> None:
        nonlocal connections
        connections = stage.proxy.connections
        stage.proxy.cut_after(of=of, **where)

    once(stage, act, arm)
    assert stage.proxy.connections == connections + 1, "the cut was not where it was aimed at"


@acts
def test_every_connection_is_cut_while_a_message_is_on_its_way(stage: Stage, act: Act) -> None:
    def arm() -> None:
        stage.proxy.delay(0.05)
        begun, _ = stage.proxy.frames
        asyncio.run_coroutine_threadsafe(_cut_after(begun, stage.proxy), stage.proxy._loop)

    once(stage, act, arm)


async def _cut_after(requests: int, proxy: FaultProxy) -> None:
    await until(lambda: proxy.frames[0] > requests, "a message is on its way")
    await proxy._cut_all()


def fails_in_time(s: Stage, act: Act, prepared: Any, timeout_s: float) -> DataplaneError | None:
    """The error of the act, if it has one: a typed one, and no later than it should be."""
    began = time.monotonic()
    try:
        act.do(s, prepared, timeout=timeout_s)
    except DataplaneError as error:
        return error
    finally:
        assert time.monotonic() - began < timeout_s + SLACK_S
    return None


@pytest.mark.parametrize(
    ("fault", "of"),
    [("half_open", "requests"), ("half_open", "both"), ("drop", "requests"), ("drop", "answers")],
)
@acts
def test_silence_ends_at_the_deadline(stage: Stage, act: Act, of: Any, fault: str) -> None:
    prepared = act.prepare(stage)
    before = stage.changes()
    getattr(stage.proxy, fault)(of)
    error = fails_in_time(stage, act, prepared, 0.2)
    assert isinstance(error, (DeadlineExceeded, Unreachable, OutcomeUnknown))
    # Whether it took effect is open, and a second effect is not.
    stage.proxies.heal()
    assert before <= stage.changes() <= before + act.changes
    if isinstance(error, OutcomeUnknown):
        stage.client.request_outcome(error.request_id)
    if not isinstance(act, (Clear, Claim, Commit)):
        act.check(stage, act.do(stage, prepared))
        assert stage.changes() <= before + 2 * act.changes


DAMAGES = [
    *(("prefix", at, mask) for at, mask in (
        (0, 0x01), (3, 0x80), (4, 0x01), (4, 0x80), (6, 0x01), (7, 0x80), (8, 0x01), (8, 0x80),
        (10, 0x01), (13, 0x80), (15, 0x01),
    )),
    *(("header", at, 0x80 if at % 2 else 0x01) for at in (0, 1, 2, 3, 4, 5, 8, 13, 16, 24)),
    *(("header", at, 0x80) for at in (0, 2, -8, -3, -1)),
]  # fmt: skip
"""Of the prefix: magic, version, both lengths with their low and high bytes. Of the header: its
kind, number, the ends of its body."""
DAMAGED = ("put small", "put large", "get large", "list", "commit")


@pytest.mark.parametrize(("part", "byte", "mask"), DAMAGES)
@pytest.mark.parametrize("of", ["requests", "answers"])
@pytest.mark.parametrize("act", [ACTS[name] for name in DAMAGED], ids=DAMAGED)
def test_a_damaged_message_harms_its_own_call_only(
    stage: Stage, act: Act, of: Any, part: Any, byte: int, mask: int
) -> None:
    """TCP's own checksum and TLS keep such damage away. Without them a flipped bit can make a
    message say something else, and no more than that: nothing dies, hangs, or is undone."""
    stage.damaged = True
    prepared = act.prepare(stage)
    before = stage.changes()
    stage.proxy.corrupt(act.frame + 1, part=part, byte=byte, mask=mask, of=of)
    error = fails_in_time(stage, act, prepared, 0.2)
    assert before <= stage.changes() <= before + act.changes
    if part == "prefix" and error is None:
        assert stage.changes() == before + act.changes
    assert stage.value(stage.row).equal(SMALL)
    assert stage.value("L").equal(LARGE)


@pytest.mark.parametrize("act", [ACTS["put small"], ACTS["put large"]], ids=["small", "large"])
def test_a_value_damaged_on_its_way_arrives_so(stage: Stage, act: Act) -> None:
    """Values carry no checksum of their own: who cannot trust the network wraps it in TLS."""
    stage.damaged = True
    before = stage.changes()
    stage.proxy.corrupt(1, part="payload", byte=-1)
    act.do(stage, None)
    assert stage.changes() == before + 1
    value = stage.value("N")
    assert value.shape == (SMALL.shape if act is ACTS["put small"] else LARGE.shape)


def descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_no_descriptor_is_left_of_any_of_it(plane: Plane, kind: str) -> None:
    def once_each() -> None:
        with ExitStack() as stack:
            s = Stage(plane, stack, kind)
            for act in (PutTags(), Put(SMALL), Put(LARGE), Get(True), List()):
                for of, where in cuts(act):
                    s.proxy.cut_after(of=of, **where)  # pyright: ignore[reportArgumentType]
                    act.do(s, None)
                    s.proxies.heal()
                for part in ("prefix", "header"):
                    s.proxy.corrupt(1, part=part)
                    fails_in_time(s, act, None, 0.1)
                s.proxy.half_open()
                fails_in_time(s, act, None, 0.05)
                s.proxies.heal()
                s.proxy.cut()
            s.witness.kv_clear(None, s.partition, where={})

    once_each()
    gc.collect()
    before = descriptors("self"), descriptors(plane.pid)
    once_each()
    once_each()
    gc.collect()

    def there() -> tuple[int, int]:
        return descriptors("self"), descriptors(plane.pid)

    def none_left() -> bool:
        return all(now <= then for now, then in zip(there(), before, strict=True))

    eventually(none_left, f"of {before} descriptors no more are there")
