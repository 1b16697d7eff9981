"""What both faces of an outside client share: its gateway, who it is, what it has seen.

Owns the steps of a verb: a verb is a generator that yields what it wants of the gateway, and a
face, blocking or asyncio, waits for it. So each verb is written once, and encodes and decodes in
its caller's thread; only the calls themselves run on the calling loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, TypeVar

from dataplane.config import Config
from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost, Unreachable
from dataplane.producer.access import Access
from dataplane.producer.loop import CallingLoop, calling_loop
from dataplane.producer.transport import Transport
from dataplane.telemetry.opening import open_spans
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

Result = TypeVar("Result")

Step: TypeAlias = Callable[[Transport], Coroutine[Any, Any, Any]]
"""A call to the gateway. Comes back: its answer."""
Steps: TypeAlias = Generator[Step, Any, Result]
"""A verb under way, which ends in a Result."""

MARGIN_S: Final = 0.5
MARGIN_SHARE: Final = 0.1
"""How much earlier than its caller a gateway lets the plane give up, so that the reason arrives."""

WAY_S: Final = 0.02
"""What a call takes until it waits at the plane."""

ATTEND_S: Final = 3600.0
"""Longest call of an attendance; another follows it."""
ATTEND_PAUSE_S: Final = 0.5
"""Before an attendance that broke off is begun anew."""
MAX_ATTEMPTS: Final = 65_536
"""Attempts at groups whose partition is remembered."""


class Reach:
    """A client of one gateway. For any thread."""

    def __init__(self, address: str, config: Config) -> None:
        """InvalidRequest if the address is none, or files that the settings name cannot be read."""
        self.address = address
        self.config = config
        self.closed = False
        self.stage = ""
        """At which stage of training its requests are."""
        self.spans = open_spans(lambda: self.plane_id, config.otel_sample) if config.otel else None
        """What makes spans of its verbs, where its setting `otel` says so."""
        self._line = _Line(calling_loop(), address, access_of(config))
        self._attempts: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()  # guards the attempts
        weakref.finalize(self, self._line.close)

    # -- steps -------------------------------------------------------------------------------

    def start(self, step: Step) -> Future[Any]:
        """Begin a call to the gateway, in its own thread."""
        if self.closed:
            raise PlaneLost("this client was closed; connect again")
        return self._line.start(step)

    def seconds(self, timeout: float | None) -> float:
        """How long a call may take."""
        return self._checked(self.config.timeout_s if timeout is None else timeout)

    def wait_s(self, timeout: float | None) -> float:
        """How long is waited for something to happen."""
        return self._checked(self.config.wait_timeout_s if timeout is None else timeout)

    def _checked(self, timeout: float) -> float:
        if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise InvalidRequest(f"timeout is a positive number of seconds, not {timeout!r:.80}")
        return float(timeout)

    # -- who it is ---------------------------------------------------------------------------

    @property
    def client_id(self) -> str:
        """The random id of this client."""
        return self._line.transport.client_id

    @property
    def plane_id(self) -> str:
        """The plane behind the gateway; empty before it was asked."""
        return self._line.transport.plane_id

    @property
    def seen(self) -> Revision:
        """The latest revision that an answer carried."""
        return self._line.transport.seen

    def see(self, revision: pb.Revision) -> Revision:
        """Note a revision that an answer carried."""
        return self._line.transport.see(revision)

    # -- attempts ----------------------------------------------------------------------------

    def note_attempt(self, attempt: int, partition_id: str) -> None:
        """An attempt is of a group of this partition."""
        with self._lock:
            self._attempts[attempt] = partition_id
            self._attempts.move_to_end(attempt)
            if len(self._attempts) > MAX_ATTEMPTS:
                self._attempts.popitem(last=False)

    def partition_of(self, attempt: int) -> str | None:
        """The partition of an attempt that this client has begun or put rows of."""
        with self._lock:
            return self._attempts.get(attempt)

    def forget_attempt(self, attempt: int) -> None:
        """It has ended."""
        with self._lock:
            self._attempts.pop(attempt, None)

    # -- leases ------------------------------------------------------------------------------

    def attend(self) -> None:
        """From now on the client must not seem to be gone: it holds leases."""
        self._line.attend()

    def close(self) -> Future[None] | None:
        """Let go of the gateway. What comes back is done when the connection is closed."""
        if self.closed:
            return None
        self.closed = True
        return self._line.close()


class _Line:
    """The transport and what stays under way on it. Knows no Reach, which may be collected."""

    def __init__(self, loop: CallingLoop, address: str, access: Access) -> None:
        self._loop = loop
        # It begins nothing by itself, so that any thread may make it.
        self.transport = Transport(address, access)
        self._attending: Future[None] | None = None

    def start(self, step: Step) -> Future[Any]:
        return self._loop.start(step(self.transport))

    def attend(self) -> None:
        if self._attending is None or self._attending.done():
            self._attending = self._loop.start(_attend(self.transport))

    def close(self) -> Future[None] | None:
        if self._attending is not None:
            self._attending.cancel()
        try:
            return self._loop.start(self.transport.close())
        except (InvalidRequest, PlaneLost):
            return None  # a forked child, or a process that is ending


async def _attend(transport: Transport) -> None:
    """Be here until cancelled, or until the plane is gone."""
    while True:
        try:
            message = pb.AttendRequest(client_id=transport.client_id, plane_id=transport.plane_id)
            async for _ in transport.stream("Attend", message, ATTEND_S):
                pass
        except PlaneLost:
            return
        except DataplaneError:
            await asyncio.sleep(ATTEND_PAUSE_S)


def with_margin(seconds: float) -> float:
    """The deadline of a call whose gateway is to give up after so many seconds."""
    seconds += WAY_S
    return seconds + min(MARGIN_S, MARGIN_SHARE * seconds / (1.0 - MARGIN_SHARE))


def access_of(config: Config) -> Access:
    """What the settings say of who the client is."""
    return Access(
        token_file=config.token_file,
        ca_file=config.ca_file,
        cert_file=config.client_cert_file,
        key_file=config.client_key_file,
    )


def finished(verb: Steps[Result], ask: Callable[[Step], Any]) -> Result:
    """The result of a verb; `ask` waits for each of its calls."""
    try:
        step = verb.send(None)
        while True:
            try:
                answer = ask(step)
            except BaseException as error:
                step = verb.throw(error)
            else:
                step = verb.send(answer)
    except StopIteration as end:
        return end.value


def describe(reach: Reach, seconds: float) -> Steps[pb.DescribeResponse]:
    """What the gateway serves. Unreachable if nobody answers."""
    try:
        return (yield lambda transport: transport.describe(seconds))
    except TimeoutError as error:
        raise Unreachable(f"{reach.address} did not answer in time: {error}") from error
