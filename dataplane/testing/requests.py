"""Which points the requests of a plane's clients come to: asked, about to be answered, answered."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from dataplane.errors import InternalError
from dataplane.tags.requests import BEGIN_GROUP, CLEAR, COMMIT, END_GROUP, RELEASE
from dataplane.testing.hits import Switches, replace
from dataplane.testing.points import SAVED

if TYPE_CHECKING:
    from dataplane.server.connection import Connection, Payload, Verb
    from dataplane.server.plane import PlaneServer
    from dataplane.wire.frames import Header

_TAG_VERBS = {
    "put_tags": "put",
    "publish": "put",
    CLEAR: "clear",
    "claim": "claim",
    COMMIT: "commit",
    RELEASE: "release",
    BEGIN_GROUP: "begin_group",
    END_GROUP: "end_group",
    **{f"checkpoint_{step}": f"save_{step}" for step in SAVED},
    "restore_end": "load_end",
}
"""Requests to the tag store, and the verb of the points that they come to."""
_VALUE_VERBS = {"reserve": "reserve", "commit": "publish", "pin": "pin", "read": "read"}


def watch_requests(switches: Switches, server: PlaneServer, role: str) -> None:
    """Watch the verbs of these stores."""
    families: dict[str, str] = {}
    if role != "values":
        families |= {wire: f"tags.{verb}" for wire, verb in _TAG_VERBS.items()}
    if role != "tags":
        families |= {wire: f"values.{verb}" for wire, verb in _VALUE_VERBS.items()}
    asked: weakref.WeakKeyDictionary[Connection, dict[int, str]] = weakref.WeakKeyDictionary()
    for wire, family in families.items():
        verb = server.verbs.get(wire)
        if verb is None:
            raise InternalError(f"there is no verb {wire!r} any more: its switches have no place")
        server.verbs[wire] = _asked(switches, verb, family, asked)

    def greeted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def greet(connection: Connection) -> Any:
            answer = inner(connection)
            _watch_answers(switches, connection, asked.setdefault(connection, {}))
            return answer

        return greet

    replace(server, "greet", greeted)
    if role == "tags":
        return

    def accepted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def accept(connection: Connection, header: Header, nbytes: int) -> Any:
            switches.hit("values.put_block.asked")
            place = inner(connection, header, nbytes)
            asked.setdefault(connection, {})[header.number] = "values.publish"
            return _Watched.when_there(switches, place)

        return accept

    replace(server, "accept", accepted)


def _asked(
    switches: Switches,
    verb: Verb,
    family: str,
    asked: weakref.WeakKeyDictionary[Connection, dict[int, str]],
) -> Verb:
    def watched(connection: Connection, number: int, body: Any) -> Coroutine[Any, Any, None] | None:
        switches.hit(f"{family}.asked")
        asked.setdefault(connection, {})[number] = family
        return verb(connection, number, body)

    return watched


def _watch_answers(switches: Switches, connection: Connection, asked: dict[int, str]) -> None:
    def replied(inner: Callable[..., Any]) -> Callable[..., Any]:
        def reply(number: int, body: Any) -> None:
            family = asked.pop(number, None)
            if family is None:
                inner(number, body)
                return
            switches.hit(f"{family}.unanswered")
            inner(number, body)
            transport = connection.transport
            switches.hit_later(
                f"{family}.answered",
                lambda: transport.is_closing() or not transport.get_write_buffer_size(),
            )

        return reply

    def replied_with(inner: Callable[..., Any]) -> Callable[..., Any]:
        async def reply_with(number: int, *rest: Any) -> None:
            family = asked.pop(number, None)
            if family is not None:
                switches.hit(f"{family}.unanswered")
            await inner(number, *rest)
            if family is not None:
                switches.hit(f"{family}.answered")

        return reply_with

    def failed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def fail(number: int, error: Any) -> None:
            asked.pop(number, None)
            inner(number, error)

        return fail

    replace(connection, "reply", replied)
    replace(connection, "reply_with", replied_with)
    replace(connection, "fail", failed)


class _Watched:
    """A payload that is arriving."""

    def __init__(self, switches: Switches, place: Payload) -> None:
        self._switches = switches
        self._place = place
        self.memory = place.memory

    @classmethod
    def when_there(
        cls, switches: Switches, place: Payload | asyncio.Future[Payload]
    ) -> Payload | asyncio.Future[Payload]:
        """The place, now or when there is room for it."""
        if not isinstance(place, asyncio.Future):
            return cls(switches, place)
        granted: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()

        def on_room(done: asyncio.Future[Payload]) -> None:
            error = done.exception()
            if error is not None:
                granted.set_exception(error)
            else:
                granted.set_result(cls(switches, done.result()))

        place.add_done_callback(on_room)
        return granted

    def started(self) -> None:
        self._place.started()
        self._switches.hit("values.put_block.part")

    def complete(self) -> None:
        self.memory = memoryview(b"")
        self._switches.hit("values.put_block.whole")
        self._place.complete()

    def lost(self) -> None:
        self.memory = memoryview(b"")
        self._place.lost()
