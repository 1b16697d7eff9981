"""One connection through a fault proxy: two sockets, and what happens to the bytes in between.

Owns the sockets of one connection and its tasks. What is to happen says `Faults`, one for each
direction, which all connections of a proxy share. Of the proxy's loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.testing.stream import Part, Piece, Stream

RECEIVE_BYTES = 256 << 10
MAX_QUEUED = 64
"""Reads that may be on their way through a delay."""
MAX_REPEATED_BYTES = 64 << 20
"""Larger requests pass once only, as each is kept until it has passed."""
SLICE_S = 0.01
"""How often a throttled connection passes a little."""

_RESET = struct.pack("ii", 1, 0)


class Damage(NamedTuple):
    """A byte to change."""

    frame: int
    part: Part
    byte: int
    """Negative: from the end of the part."""
    mask: int


class Cut(NamedTuple):
    """Where to end the connection: before this byte of this part of this frame."""

    frame: int
    part: Part
    byte: int


@dataclass
class Faults:
    """What happens to one direction of all connections."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    swallow: bool = False
    repeat: bool = False
    damages: list[Damage] = field(default_factory=list[Damage])
    cuts: list[Cut] = field(default_factory=list[Cut])
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    frames: int = 0
    """Frames that began to pass."""
    nbytes: int = 0
    free_at: float = 0.0
    """When a throttled direction may pass more."""

    def __post_init__(self) -> None:
        self.passing.set()

    def heal(self) -> None:
        """Nothing happens any more."""
        self.delay_s = 0.0
        self.bytes_per_s = None
        self.swallow = self.repeat = False
        self.damages.clear()
        self.cuts.clear()
        self.passing.set()


class Link:
    """One client's connection and the one to the plane that belongs to it."""

    def __init__(self, client: socket.socket, requests: Faults, answers: Faults) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.requests = requests
        self.answers = answers
        self.swallowed = False
        """Whether bytes are missing in it, so that it can only be ended."""
        self.repeated: set[int] = set()
        """Requests that pass twice, by number; those whose first answer has passed too."""
        self.answered: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._ended = asyncio.Event()

    async def run(self, server: socket.socket | None) -> None:
        """Pass what comes until both sides have ended, or `end`. Without a server all is silent."""
        if self._ending:  # it was ended before it was there
            if server is not None:
                server.close()
            return
        self.server = server
        pipes = [_Pipe(self, self.client, server, self.requests, is_request=True)]
        if server is not None:
            pipes.append(_Pipe(self, server, self.client, self.answers, is_request=False))
        self._tasks = [
            asyncio.ensure_future(work) for pipe in pipes for work in (pipe.read(), pipe.write())
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks)
        finally:
            await self.end()

    async def end(self, *, reset: Iterable[socket.socket | None] = ()) -> None:
        """Close both sockets; those in `reset` with a reset, which takes back what is on the way.

        The others get to their end what has passed before.
        """
        if self._ending:
            await self._ended.wait()
            return
        self._ending = True
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        # The loop must have let go of the sockets before their numbers can be taken anew.
        await asyncio.gather(*others, return_exceptions=True)
        resets = list(reset)
        for sock in (self.client, self.server):
            if sock is None:
                continue
            if sock in resets and sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
        self._ended.set()

    async def cut(self) -> None:
        """Reset both sides."""
        await self.end(reset=(self.client, self.server))


class _Pipe:
    """One direction of a link."""

    def __init__(
        self,
        link: Link,
        source: socket.socket,
        target: socket.socket | None,
        faults: Faults,
        *,
        is_request: bool,
    ) -> None:
        self._link = link
        self._source = source
        self._target = target
        self._faults = faults
        self._is_request = is_request
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED)
        self._stream = Stream()
        self._frame = 0
        """Number of the frame that passes, over all connections of the direction."""
        self._copy: bytearray | None = None
        """The frame that passes, if it is to pass twice."""
        self._held: bytearray | None = None
        """The head of an answer of which it is not known yet whether it may pass."""
        self._skipping = False
        self._refused = False
        """Whether the receiver has ended. What it has said before is still to be heard."""

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._source, RECEIVE_BYTES)
            except OSError:
                data = b""
            await self._queue.put((loop.time() + self._faults.delay_s, data))
            if not data:
                return

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._queue.get()
            if self._faults.delay_s and due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._faults.passing.wait()
            if self._faults.swallow or self._target is None:
                self._link.swallowed = True
                if not data:
                    return  # not even the end is told
                continue
            if not data:
                with contextlib.suppress(OSError):
                    self._target.shutdown(socket.SHUT_WR)
                return
            for piece in self._stream.feed(data):
                if not await self._pass(piece):
                    await self._link.end(reset=(self._source,))
                    return

    async def _pass(self, piece: Piece) -> bool:
        """Pass a piece, or what the faults make of it; False if the connection ends here."""
        faults = self._faults
        if piece.begins:
            faults.frames += 1
            self._frame = faults.frames
            if self._is_request:
                self._copy = bytearray() if faults.repeat else None
            else:
                self._held = bytearray() if self._link.repeated else None
        data, cut = self._cut(piece, self._damaged(piece))
        if self._is_request:
            await self._send_request(piece, data)
        else:
            await self._send_answer(piece, data)
        if cut is None and piece.ends:
            cut = next((c for c in faults.cuts if c == (self._frame + 1, "prefix", 0)), None)
        if cut is not None:
            faults.cuts.remove(cut)
            return False
        return True

    def _damaged(self, piece: Piece) -> bytes:
        data = piece.data
        for damage in list(self._faults.damages):
            at = damage.byte if damage.byte >= 0 else piece.of + damage.byte
            if (damage.frame, damage.part) == (self._frame, piece.part) and (
                0 <= at - piece.at < len(data)
            ):
                changed = bytearray(data)
                changed[at - piece.at] ^= damage.mask
                data = bytes(changed)
                self._faults.damages.remove(damage)
        return data

    def _cut(self, piece: Piece, data: bytes) -> tuple[bytes, Cut | None]:
        """What may pass of a piece, and the cut that keeps back the rest."""
        for cut in self._faults.cuts:
            at = cut.byte if cut.byte >= 0 else piece.of + cut.byte
            if (cut.frame, cut.part) == (self._frame, piece.part) and (
                0 <= at - piece.at < len(data)
            ):
                return data[: at - piece.at], cut
        return data, None

    async def _send_request(self, piece: Piece, data: bytes) -> None:
        copy = self._copy
        if copy is not None:
            copy += data
            if piece.part == "header" and piece.at + len(piece.data) == piece.of:
                header = self._stream.header()
                if header is None or not header.number or header.kind == "hello":
                    copy = self._copy = None
                else:
                    self._link.repeated.add(header.number)  # before an answer can come
        await self._send(data)
        if copy is not None and piece.ends:
            if len(copy) <= MAX_REPEATED_BYTES:
                await self._send(bytes(copy))
            self._copy = None

    async def _send_answer(self, piece: Piece, data: bytes) -> None:
        if self._held is not None:
            self._held += data
            if piece.part != "header" or piece.at + len(piece.data) < piece.of:
                return
            data, self._held = bytes(self._held), None
            header = self._stream.header()
            if header is not None and type(header.kind) is int:
                if header.number in self._link.answered:
                    self._link.answered.discard(header.number)
                    self._link.repeated.discard(header.number)
                    self._skipping = True
                elif header.number in self._link.repeated:
                    self._link.answered.add(header.number)
        if not self._skipping:
            await self._send(data)
        if piece.ends:
            self._skipping = False

    async def _send(self, data: bytes) -> None:
        loop, faults = asyncio.get_running_loop(), self._faults
        assert self._target is not None
        while data and not self._refused:
            some = data
            if faults.bytes_per_s is not None:
                some = data[: max(1, int(faults.bytes_per_s * SLICE_S))]
                begin = max(loop.time(), faults.free_at)
                faults.free_at = begin + len(some) / faults.bytes_per_s
                await asyncio.sleep(faults.free_at - loop.time())
            try:
                await loop.sock_sendall(self._target, some)
            except OSError:
                self._refused = True
                return
            faults.nbytes += len(some)
            data = data[len(some) :]
