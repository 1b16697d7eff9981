"""One client whose verbs are done step by step, and whose connections break where they are told to.

The blocking client's own connections carry the requests; only the driver is another one, which
does one effect at a time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from typing import Any

from dataplane.client.connection import Connection
from dataplane.client.effects import Ask, Done, Effect, Open, Pause, Run, Tell, Verb
from dataplane.client.sync import Client
from dataplane.client.tags import present
from dataplane.errors import from_wire
from dataplane.wire.channel import Answer, Broken
from dataplane.wire.frames import OK, frame
from tests.faults.planes import Plane
from tests.history.calls import NotSent
from tests.history.record import Op, Put, Recorder

CALL_S = 20.0
"""Deadline of a request, however long it is to wait."""


class Fault(Enum):
    """What happens to a request."""

    NOT_SENT = auto()
    """The connection breaks before it leaves."""
    CUT_OFF = auto()
    """The connection is closed as soon as it has left."""
    UNHEARD = auto()
    """The connection breaks before the answer is read."""
    SPLIT = auto()
    """The head of a put arrives in this step, and the rest in a later one."""


class Died(Exception):
    """The client's process is gone."""


class Stepper:
    """One client. Does one effect of its verb in each step."""

    def __init__(
        self, name: str, client: Client, plane: Plane, pool: ThreadPoolExecutor, notes: Recorder
    ) -> None:
        self.name = name
        self.client = client
        self.busy = False
        """Whether a verb is under way."""
        self.left = False
        """Whether it has closed all its connections, and called nobody since."""
        self._plane = plane
        self._pool = pool
        """Threads in which answers are waited for that may take their time."""
        self._notes = notes
        self._verb: Verb[None]
        self._effect: Effect
        self._op: Op
        self._lanes: list[Any] = []
        self._asked: Any = None
        """The connection of a request that this step did not finish."""
        self._waiting: Future[Answer] | None = None
        """Its answer, where a thread waits for that; else the rest of a put is to be sent."""
        self._away = False

    @property
    def waiting(self) -> Future[Answer] | None:
        """What the next step waits for."""
        return self._waiting

    @property
    def asks(self) -> bool:
        """Whether the next step sends a request."""
        return self._asked is None and isinstance(self._effect, Ask)

    def start(self, op: Op, verb: Verb[None]) -> None:
        """Begin a call: its first step is still to be done."""
        self._op, self._verb, self.busy, self.left = op, verb, True, False
        self._advance(lambda: verb.send(None))

    def step(self, fault: Fault | None = None) -> None:
        """Do the next effect, with what is to go wrong about it."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._do(self._effect, fault)
        except Exception as raised:
            error = raised
        if self._asked is None:
            verb = self._verb
            self._advance(lambda: verb.send(value) if error is None else verb.throw(error))

    def _advance(self, to_next: Callable[[], Effect]) -> None:
        try:
            self._effect = to_next()
        except StopIteration:
            self.busy = False

    def _do(self, effect: Effect, fault: Fault | None) -> Any:
        client: Any = self.client
        if isinstance(effect, Ask):
            if self._asked is not None:
                return self._answer(effect)
            return self._ask(effect, fault)
        if isinstance(effect, Open):
            lane = client._take(effect.store, _deadline())
            self._lanes.append(lane)
            return lane
        if isinstance(effect, Done):
            self._lanes.remove(effect.lane)
            return client._give_back(effect.lane)
        if isinstance(effect, Tell):
            return effect.lane.tell(effect.verb, effect.body, _deadline())
        if isinstance(effect, Run):
            return effect.work()
        assert isinstance(effect, Pause)  # time makes no difference here
        return None

    # -- requests ----------------------------------------------------------------------------

    def _ask(self, effect: Ask, fault: Fault | None) -> Answer | None:
        client: Any = self.client
        lane = isinstance(effect.at, Connection)
        connection: Any = effect.at if lane else client._take(effect.at, _deadline())
        try:
            if fault is Fault.NOT_SENT:
                raise self._cut(connection, NotSent("cut before the request left"))
            if fault is Fault.CUT_OFF:
                connection._number += 1
                head = frame(effect.verb, connection._number, effect.body, effect.payload_bytes)
                connection._send(head, effect.payload, _deadline())
                raise self._cut(connection, Broken("cut when the request had left"))
            if fault is Fault.SPLIT and connection.local and effect.payload_bytes:
                return self._send_head(connection, effect)
            if effect.verb == "claim" and fault is None:
                self._waiting = self._pool.submit(_call, connection, effect)
                self._asked = connection
                return None
            answer = _call(connection, effect)
            if fault is Fault.UNHEARD:
                raise self._cut(connection, Broken("cut before the answer was read"))
            self._is_back()
            return answer
        finally:
            if not lane and connection is not self._asked:
                client._give_back(connection)

    def _send_head(self, connection: Any, effect: Ask) -> None:
        connection._number += 1
        head = frame(effect.verb, connection._number, effect.body, effect.payload_bytes)
        connection._send(head, (), _deadline())
        self._asked = connection
        # What left before on another connection has arrived when this is answered.
        revision_of(self._plane)
        if isinstance(self._op, Put) and self._op.begun is None:
            self._op.begun = self._notes.now()

    def _answer(self, effect: Ask) -> Answer:
        """The answer that was waited for, or that to a put whose head was sent."""
        client: Any = self.client
        connection, self._asked = self._asked, None
        waiting, self._waiting = self._waiting, None
        try:
            answer = waiting.result() if waiting is not None else _finish(connection, effect)
            self._is_back()
            return answer
        finally:
            if connection is not effect.at:
                client._give_back(connection)

    def interrupt(self) -> None:
        """Break the connection on which an answer is waited for."""
        self._leave()
        self._asked._socket.shutdown(socket.SHUT_RDWR)

    # -- connections -------------------------------------------------------------------------

    def _cut(self, connection: Any, error: Broken) -> Broken:
        self._leave()
        connection.close()
        return error

    def _leave(self) -> None:
        if not self._away:
            self._away = True
            self._notes.leaves(self.name)

    def _is_back(self) -> None:
        if self._away:
            self._away = False
            self._notes.returns(self.name)

    def leave(self) -> None:
        """Close all connections of a client that is not busy; its next call opens new ones."""
        client: Any = self.client
        self._leave()
        self.left = True
        for idle in client._idle.values():
            while idle:
                idle.pop().close()

    def die(self) -> None:
        """End as a killed process does: all connections close, and nothing more is said."""
        self._leave()
        if self._asked is not None:
            self._asked._socket.shutdown(socket.SHUT_RDWR)
            if self._waiting is not None:
                self._waiting.exception()
            self._asked.close()
        for lane in self._lanes:
            lane.close()
        self.client.close()
        if self.busy:
            self.busy = False
            _abandon(self._verb)


def _call(connection: Any, effect: Ask) -> Answer:
    _, verb, body, payload, nbytes, into = effect
    return connection.call(verb, body, _deadline(), payload, nbytes, into)


def _finish(connection: Any, effect: Ask) -> Answer:
    """Send the payload of a put whose head was sent; its answer."""
    try:
        connection._send(b"", effect.payload, _deadline())
        header, data = connection._receive(_deadline(), None)
    except OSError as error:
        connection.usable = False
        raise Broken(str(error)) from error
    if header.kind != OK:
        raise from_wire(header.body)
    return Answer(header.body, data)


def _abandon(verb: Verb[None]) -> None:
    """End a verb of which nothing is done any more, whatever it still asks for."""
    try:
        verb.throw(Died())
        while True:
            verb.send(None)
    except (Died, StopIteration):
        pass


def revision_of(plane: Plane) -> int:
    """The plane's revision."""
    client: Any = plane.client
    deadline = _deadline()
    return client._drive(present(client._core, deadline), deadline).n


def _deadline() -> float:
    return time.monotonic() + CALL_S
