"""Calls between a process and its child over one socket: msgpack both ways, answers in any order.

Owns the framing and who waits for which answer. Nothing that arrives is unpickled or evaluated, and
nothing larger than `MAX_MESSAGE_BYTES` is taken in.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import msgpack

MAX_MESSAGE_BYTES: Final = 256 << 20

_LENGTH: Final = struct.Struct("<I")

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Answers one verb: takes plain data and returns plain data."""

Errors: TypeAlias = Mapping[str, type[Exception]]
"""Errors that cross as what they are, by a name. The name "" is for all others."""


class CallFailed(Exception):
    """The other side could not do what it was asked, and says why."""


class Disconnected(Exception):
    """The other side is gone."""

    def __init__(self, what: str, *, asked: bool) -> None:
        super().__init__(what)
        self.asked = asked
        """Whether it may have heard the question."""


class Calls:
    """One end of the socket. Both ends may ask and answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
        errors: Errors | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._errors: Errors = {"": CallFailed, **(errors or {})}
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.is_gone = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def over(
        cls, sock: socket.socket, handlers: Mapping[str, Handler], errors: Errors | None = None
    ) -> Calls:
        """This end of a connected stream socket, which it owns from here on."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, handlers, errors)

    async def ask(self, verb: str, body: Any = None) -> Any:
        """What the other side answers. A call that is cancelled is cancelled there too.

        Raises:
            CallFailed: it could not, or the question does not travel; one of `errors` if that is
                what happened.
            Disconnected: it is gone, or went before it answered.
        """
        if self.is_gone:
            raise Disconnected(f"the other side is gone: {verb!r} was not sent", asked=False)
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(["ask", number, verb, body])
            await self._drained()
            return await answer
        except asyncio.CancelledError:
            if not self.is_gone:
                self._send(["cancel", number])
            raise
        finally:
            self._waiting.pop(number, None)

    async def gone(self) -> None:
        """Returns when the other side is gone."""
        await asyncio.wait({self._listening})

    async def close(self) -> None:
        """Close the socket; whoever waits for an answer is Disconnected."""
        self._listening.cancel()
        await asyncio.wait({self._listening})
        for task in list(self._answering.values()):
            task.cancel()
        self._writer.close()

    def _send(self, message: list[Any]) -> None:
        """Send a message, in full or not at all."""
        try:
            packed: bytes = msgpack.packb(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._errors[""](f"{message[2]!r:.80} is not plain data: {error}") from None
        if len(packed) > MAX_MESSAGE_BYTES:
            raise self._errors[""](
                f"a message of {len(packed)} bytes; {MAX_MESSAGE_BYTES} are allowed"
            )
        self._writer.write(_LENGTH.pack(len(packed)) + packed)

    async def _drained(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise Disconnected(f"the other side is gone: {error}", asked=True) from None

    async def _listen(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_MESSAGE_BYTES:
                    break
                self._take(msgpack.unpackb(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, TypeError):
            pass  # cut off, or nothing that this side would have sent
        finally:
            self.is_gone = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Disconnected("the other side is gone", asked=True))

    def _take(self, message: Any) -> None:
        kind, number, *rest = message
        if kind == "ask":
            verb, body = rest
            task = asyncio.create_task(self._answer(number, verb, body))
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number, None))
        elif kind == "cancel":
            if number in self._answering:
                self._answering[number].cancel()
        elif kind == "answer":
            (body,) = rest
            self._settle(number, lambda answer: answer.set_result(body))
        else:
            name, text = rest
            error = self._errors.get(name, self._errors[""])(str(text))
            self._settle(number, lambda answer: answer.set_exception(error))

    def _settle(self, number: int, settle: Callable[[asyncio.Future[Any]], None]) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            settle(answer)

    async def _answer(self, number: int, verb: str, body: Any) -> None:
        try:
            self._send(["answer", number, await self._handlers[verb](body)])
        except Exception as error:  # of the handler, or what it says does not travel
            self._send(["error", number, *self._told(error)])
        try:
            await self._drained()
        except Disconnected:
            pass

    def _told(self, error: Exception) -> tuple[str, str]:
        """An error as it travels: under the name of its nearest class."""
        named = [(len(cls.__mro__), name) for name, cls in self._errors.items() if name]
        for _, name in sorted(named, reverse=True):
            if isinstance(error, self._errors[name]):
                return name, str(error)
        if isinstance(error, self._errors[""]):
            return "", str(error)
        return "", f"{type(error).__name__}: {error}"
