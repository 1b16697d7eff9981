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

MAX_MESSAGE_BYTES: Final = 64 << 20

_LENGTH: Final = struct.Struct("<I")

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Answers one verb: takes plain data and returns plain data."""


class CallFailed(Exception):
    """The other side could not do what it was asked, and says why."""


class Disconnected(Exception):
    """The other side is gone."""


class Calls:
    """One end of the socket. Both ends may ask and answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._gone = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def over(cls, sock: socket.socket, handlers: Mapping[str, Handler]) -> Calls:
        """This end of a connected stream socket, which it owns from here on."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, handlers)

    async def ask(self, verb: str, body: Any = None) -> Any:
        """What the other side answers.

        Raises:
            CallFailed: it could not.
            Disconnected: it is gone, or went before it answered.
        """
        if self._gone:
            raise Disconnected(f"the other side is gone: {verb!r} was not sent")
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(["ask", number, verb, body])
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def gone(self) -> None:
        """Returns when the other side is gone."""
        await asyncio.wait({self._listening})

    async def close(self) -> None:
        """Close the socket; whoever waits for an answer is Disconnected."""
        self._listening.cancel()
        await asyncio.wait({self._listening})
        for task in list(self._answering):
            task.cancel()
        self._writer.close()

    async def _send(self, message: list[Any]) -> None:
        packed: bytes = msgpack.packb(message)
        if len(packed) > MAX_MESSAGE_BYTES:
            raise CallFailed(f"a message of {len(packed)} bytes; {MAX_MESSAGE_BYTES} are allowed")
        try:
            self._writer.write(_LENGTH.pack(len(packed)) + packed)
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise Disconnected(f"the other side is gone: {error}") from None

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
            self._gone = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Disconnected("the other side is gone"))

    def _take(self, message: Any) -> None:
        kind, number, *rest = message
        if kind == "ask":
            verb, body = rest
            task = asyncio.create_task(self._answer(number, verb, body))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        (body,) = rest
        if kind == "answer":
            answer.set_result(body)
        else:
            answer.set_exception(CallFailed(str(body)))

    async def _answer(self, number: int, verb: str, body: Any) -> None:
        try:
            handler = self._handlers[verb]
            message = ["answer", number, await handler(body)]
        except Exception as error:
            message = ["error", number, f"{type(error).__name__}: {error}"]
        try:
            await self._send(message)
        except CallFailed as error:
            await self._send(["error", number, str(error)])
        except Disconnected:
            pass
