"""A TCP proxy that makes a network fail: between clients and one server of a plane.

Owns a listening socket, a thread with an event loop, and the connections through it. It knows
frames, so faults can be aimed at whole messages and at parts of them. It does not know the plane's
secret, and could change nothing unnoticed in a connection with TLS, which it passes as mere bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from dataplane.errors import DeadlineExceeded, InvalidRequest
from dataplane.testing.links import Cut, Damage, Faults, Link
from dataplane.testing.stream import Part
from dataplane.wire.address import Address

Direction = Literal["requests", "answers", "both"]
"""What clients send, what the server sends."""

CALL_S = 10.0
"""How long the proxy's own loop may take to do what it is told."""


class FaultProxy:
    """A place on 127.0.0.1 that leads to a server of a plane, as long as nothing is wrong.

    `address` is the server's: TCP where it has that, else its unix socket. Every fault lasts until
    `heal()`, holds for all connections, those to come too, and is in effect when the method
    returns. Close it, or use it as a context manager: no socket and no thread stays behind.

    Raises:
        InvalidRequest: the address names no place.
    """

    def __init__(self, address: Address) -> None:
        if address.tcp is None and address.unix is None:
            raise InvalidRequest("an address without a place cannot be proxied")
        self.target = address
        self.connections = 0
        """Connections that were accepted so far."""
        self._requests = Faults()
        self._answers = Faults()
        self._silent = False
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._pid = os.getpid()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        self.address = Address(None, ("127.0.0.1", port))
        """Where clients connect instead."""
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"proxy of {address}", daemon=True
        )
        self._thread.start()
        _proxies.add(self)

    # -- what goes wrong ---------------------------------------------------------------------

    def delay(self, seconds: float, of: Direction = "both") -> None:
        """Everything arrives so much later, in order."""
        self._set(of, "delay_s", _positive(seconds, "seconds"))

    def throttle(self, bytes_per_s: float, of: Direction = "both") -> None:
        """So many bytes pass in a second, over all connections of a direction."""
        self._set(of, "bytes_per_s", _positive(bytes_per_s, "bytes_per_s"))

    def drop(self, of: Direction = "both") -> None:
        """Nothing arrives, as if all packets were lost. TCP sends them again: with `heal` all of
        it arrives, in order."""

        def dropped() -> None:
            for faults in self._of(of):
                faults.passing.clear()

        self._call(dropped)

    def half_open(self, of: Direction = "both") -> None:
        """What is sent disappears, as if the other side's machine had died: no end, no reset,
        no answer. New connections are accepted, and nobody is there (with `both`). With `heal`
        connections in which something is missing are reset, as the machine does once it is back.
        """
        self._set(of, "swallow", True)
        if of == "both":
            self._silent = True

    def cut(self) -> None:
        """Reset all connections, now. New ones are not affected."""
        self._call_async(self._cut_all)

    def refuse(self) -> None:
        """Reset all connections, now, and each new one as soon as it is made."""

        async def refused() -> None:
            self._refusing = True
            await self._cut_all()

        self._call_async(refused)

    def cut_after(
        self,
        frames: int = 0,
        *,
        part: Part = "prefix",
        byte: int = 0,
        of: Literal["requests", "answers"] = "requests",
    ) -> None:
        """Once so many frames have passed from now on, end the connection of the next one before
        this byte of this part of it. What comes before arrives; the sender is reset.

        `cut_after(1)` ends it when one request has arrived and before it is answered;
        `cut_after(part="payload", byte=-1)` before the last byte of a payload.
        """
        faults = self._one_of(of)
        self._call(lambda: faults.cuts.append(Cut(faults.frames + frames + 1, part, byte)))

    def corrupt(
        self,
        frame: int = 1,
        *,
        part: Part = "payload",
        byte: int = 0,
        mask: int = 0x01,
        of: Literal["requests", "answers"] = "requests",
    ) -> None:
        """Flip bits of a byte of the frame-th frame from now on; bytes count from the end of the
        part where they are negative. A part that has no such byte stays as it is."""
        if not 0 < mask < 256:
            raise InvalidRequest(f"mask names the bits of a byte to flip, not {mask!r:.80}")
        faults = self._one_of(of)
        self._call(lambda: faults.damages.append(Damage(faults.frames + frame, part, byte, mask)))

    def duplicate(self) -> None:
        """Each request arrives twice, as if its sender had repeated it; but greetings, requests
        that want no answer, and those over 64 MiB. Of two answers the first one passes."""
        self._set("requests", "repeat", True)

    def heal(self) -> None:
        """Nothing is wrong any more."""

        async def healed() -> None:
            self._refusing = self._silent = False
            for faults in self._of("both"):
                faults.heal()
            for link in [link for link in self._links if link.swallowed]:
                await link.cut()

        self._call_async(healed)

    # -- what was seen -----------------------------------------------------------------------

    @property
    def frames(self) -> tuple[int, int]:
        """Requests and answers that began to pass so far, greetings among them."""
        return self._requests.frames, self._answers.frames

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that passed so far, of requests and of answers."""
        return self._requests.nbytes, self._answers.nbytes

    @property
    def open(self) -> int:
        """Connections that are there now."""
        return len(self._links)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections and the proxy. Repeatable."""
        if self._closed or os.getpid() != self._pid:
            return

        async def ended() -> None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            running = list(self._links.values())
            await self._cut_all()
            await asyncio.gather(*running, return_exceptions=True)

        self._call_async(ended)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()
        _proxies.discard(self)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FaultProxy({self.address} -> {self.target})"

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets: nobody moves anything through them."""
        sockets = [self._listener]
        for link in self._links:
            sockets += [sock for sock in (link.client, link.server) if sock is not None]
        for sock in sockets:
            sock.close()

    # -- inside ------------------------------------------------------------------------------

    _refusing = False

    def _of(self, of: Direction) -> list[Faults]:
        if of == "both":
            return [self._requests, self._answers]
        return [self._one_of(of)]

    def _one_of(self, of: str) -> Faults:
        if of not in ("requests", "answers"):
            raise InvalidRequest(
                f"of is requests, answers or (not for single messages) both, not {of!r:.80}"
            )
        return self._requests if of == "requests" else self._answers

    def _set(self, of: Direction, name: str, value: Any) -> None:
        every = self._of(of)

        def done() -> None:
            for faults in every:
                setattr(faults, name, value)

        self._call(done)

    def _call(self, function: Callable[[], None]) -> None:
        async def called() -> None:
            function()

        self._call_async(called)

    def _call_async(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it on the proxy's loop; returns when it is done."""
        if self._closed:
            raise InvalidRequest("the proxy was closed")

        async def done() -> None:
            await work()

        answer = asyncio.run_coroutine_threadsafe(done(), self._loop)
        try:
            answer.result(CALL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self} did not do it within {CALL_S:g} s",
                waited_s=CALL_S,
                explanation="its thread is busy, or another thread holds the interpreter",
            ) from None

    async def _cut_all(self) -> None:
        for link in list(self._links):
            await link.cut()

    def _accept(self) -> None:
        """Somebody is at the door, or was."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            link = Link(client, self._requests, self._answers)
            self._links[link] = self._loop.create_task(self._serve(link))

    async def _serve(self, link: Link) -> None:
        try:
            if self._refusing:
                await link.cut()
            elif self._silent:
                await link.run(None)
            else:
                server = None
                with contextlib.suppress(OSError):
                    server = await self._reach()
                if server is None:
                    await link.cut()
                else:
                    await link.run(server)
        finally:
            await link.end()
            del self._links[link]

    async def _reach(self) -> socket.socket:
        if self.target.tcp is not None:
            host, port = self.target.tcp
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            place: Any = (host, port)
        else:
            sock = socket.socket(socket.AF_UNIX)
            place = self.target.unix
        sock.setblocking(False)
        try:
            await self._loop.sock_connect(sock, place)
        except BaseException:
            sock.close()
            raise
        return sock


def _positive(value: float, what: str) -> float:
    if not 0 < value < float("inf"):
        raise InvalidRequest(f"{what} is a positive number, not {value!r:.80}")
    return float(value)


_proxies: weakref.WeakSet[FaultProxy] = weakref.WeakSet()


def _after_fork() -> None:
    for proxy in list(_proxies):
        proxy.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
