"""What comes over a connection: frames at both ends, the meta of puts, their tags, listings.

The ends of a connection are the real ones, with a transport that only remembers. What they may
raise out of the call in which bytes arrive is nothing: asyncio has no answer to it but to end the
connection without a word.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import msgpack
import numpy as np

from dataplane.client.connection import Connection as BlockingConnection
from dataplane.client.results import unpack_listing
from dataplane.errors import DataplaneError, InternalError, InvalidRequest, QuotaExceeded, from_wire
from dataplane.server.connection import Connection, Payload
from dataplane.tags.keys import check_keys, unpack_tags
from dataplane.tags.listing import FIELDS, KEYS, LENGTHS
from dataplane.wire import auth, columns
from dataplane.wire.channel import Broken, Channel
from dataplane.wire.columns import ABSENT
from dataplane.wire.frames import (
    FAILED,
    MAGIC,
    MAX_GREETING_BYTES,
    MAX_HEADER_BYTES,
    OK,
    PREFIX,
    frame,
    parse_header,
)
from dataplane.wire.messages import PutMeta, tags_from_wire, tags_to_wire
from tests.fuzz import trees
from tests.fuzz.target import KiB, MiB, Target

SECRET = b"s" * auth.SECRET_BYTES
ROOM = 64 * KiB
"""What there is for a payload."""

# -- streams of frames -------------------------------------------------------------------------


def split(data: bytes) -> list[Any]:
    """The frames of a stream, each with its payload; what is none stays bytes."""
    frames: list[Any] = []
    at = 0
    while len(data) - at >= PREFIX.size:
        magic, header_bytes, payload_bytes = PREFIX.unpack_from(data, at)
        begin = at + PREFIX.size
        end = begin + header_bytes
        if magic != MAGIC or end > len(data):
            break
        try:
            header = trees.unpacked(data[begin:end])
        except (ValueError, TypeError, RecursionError):
            break
        payload = data[end : end + payload_bytes]
        frames.append([header, payload])
        at = end + len(payload)
    if at < len(data):
        frames.append(data[at:])
    return frames


def joined(frames: list[Any]) -> bytes:
    """A stream of such frames, with the lengths that they have."""
    out = b""
    for part in frames:
        if isinstance(part, list) and len(part) == 2 and isinstance(part[1], bytes):
            header = trees.packed(part[0])
            out += PREFIX.pack(MAGIC, len(header), len(part[1])) + header + part[1]
        elif isinstance(part, bytes):
            out += part
    return out


class _Transport:
    """Takes what is written; says whether it was closed."""

    def __init__(self) -> None:
        self.closed = False
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, pieces: Any) -> None:
        for piece in pieces:
            self.written += piece

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        return None


class _Room:
    """Memory for a payload."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(bytearray(nbytes))

    def complete(self) -> None:
        pass

    def lost(self) -> None:
        pass

    def started(self) -> None:
        pass


class _Service:
    """Verbs that look at what they are given as careless as a verb may be."""

    plane_id = "0123456789abcdef"
    secret = SECRET
    meter = None

    def __init__(self) -> None:
        self.verbs: dict[str, Any] = {"echo": self._echo, "parts": self._parts, "late": self._late}

    def _echo(self, connection: Connection, number: int, body: Any) -> None:
        connection.reply(number, body)

    def _parts(self, connection: Connection, number: int, body: Any) -> None:
        first, second = body
        connection.reply(number, [len(first), second["a"]])

    async def _late(self, connection: Connection, number: int, body: Any) -> None:
        connection.reply(number, body[0])

    def served(self, connection: Connection) -> None:
        pass

    def greet(self, connection: Connection) -> Any:
        return None

    def accept(self, connection: Connection, header: Any, nbytes: int) -> Payload:
        if nbytes > ROOM:
            raise QuotaExceeded("no room", used_bytes=0, limit_bytes=ROOM)
        return _Room(nbytes)

    def gone(self, connection: Connection, *, stopped: bool) -> None:
        pass


_loops: list[asyncio.AbstractEventLoop] = []


def run(work: Any) -> Any:
    """What a coroutine returns; all of them run in one loop."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(work)


def close_loop() -> None:
    """For the end of a test: the loop is not left behind."""
    while _loops:
        _loops.pop().close()


async def feed(protocol: Any, data: bytes, step: int) -> None:
    """Bytes arrive, so many at a time, as asyncio brings them."""
    at = 0
    while at < len(data) and not protocol.closed and not protocol.transport_closed():
        buffer = protocol.get_buffer(-1)
        assert len(buffer), "a read into no memory would end the connection"
        take = min(step, len(buffer), len(data) - at)
        buffer[:take] = data[at : at + take]
        protocol.buffer_updated(take)
        at += take
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class _Served(Connection):
    def transport_closed(self) -> bool:
        return False


def _serve(data: bytes, *, greeted: bool) -> None:
    step = (1, 7, 100, 1 << 20)[data[0] & 3] if data else 1

    async def serve() -> None:
        transport = _Transport()
        connection = _Served(_Service(), local=True)
        connection.connection_made(cast("Any", transport))
        if greeted:
            connection.client_id, connection.role = "c", "client"
            asked = [connection.ask("hold", [n]) for n in range(3)]
        await feed(connection, data[1:], step)
        connection.connection_lost(None)
        assert connection._greeting is not None
        for number, body in _answers(transport.written):
            assert body.get("type") != "InternalError", f"request {number}: {body}"
        if greeted:
            for future in asked:
                future.cancelled() or future.exception()

    run(serve())


def _answers(written: bytearray) -> Iterator[tuple[int, dict[str, Any]]]:
    """The failures that a connection told its peer."""
    at = 0
    while at < len(written):
        _, header_bytes, payload_bytes = PREFIX.unpack_from(written, at)
        at += PREFIX.size
        kind, number, body = parse_header(bytes(written[at : at + header_bytes]))
        at += header_bytes + payload_bytes
        if kind == FAILED:
            yield number, body


def _hello(client: object = "c", proof: bytes = b"p" * 32, *more: object) -> bytes:
    return frame("hello", 1, [client, "client", None, b"n" * 32, proof, *more])


LIES = [
    b"\0" + PREFIX.pack(MAGIC, (1 << 32) - 1, 0) + b"\x93",
    b"\0" + PREFIX.pack(MAGIC, 5, (1 << 64) - 1) + b"\x93\xa1x\x01\xc0",
    b"\0" + PREFIX.pack(MAGIC, MAX_HEADER_BYTES, 1 << 46) + b"\x93\xa1x\x01\xc0",
    *(
        b"\0" + PREFIX.pack(MAGIC, len(head), 0) + head
        for head in (
            b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1", b"\x93" * 4000,
            b"\x93\xa4echo\x01" + b"\x91" * 500 + b"\xc0", b"\x93\xa4echo\x01" + b"\x81\xc0" * 500,
        )
    ),
]  # fmt: skip
"""Streams whose sizes are not true, or whose depth has no end."""


def _greeting_seeds() -> Iterator[bytes]:
    for step in range(4):
        yield bytes([step]) + _hello()
    yield b"\1" + _hello("c", b"p" * 32, "pid 1 on here")
    yield b"\1" + _hello("c" * 65) + frame("echo", 2, [1])
    yield b"\1" + frame("echo", 1, [1])
    yield from LIES


def _server_seeds() -> Iterator[bytes]:
    calls = frame("echo", 1, [1, "two", b"three", None, {"a": [1.5]}])
    calls += frame("parts", 2, [["x"], {"a": 1}]) + frame("late", 3, [0]) + frame("none", 4, None)
    for step in range(4):
        yield bytes([step]) + calls
        yield bytes([step]) + frame("echo", 5, [], 100) + bytes(100) + frame("echo", 6, [2])
    yield b"\2" + frame("echo", 1, [], 2 * ROOM) + bytes(ROOM)
    yield b"\2" + frame(OK, 1, [1]) + frame(FAILED, 2, {"type": "KeyNotFound", "message": "no"})
    yield b"\2" + frame(FAILED, 3, {"type": "StaleWrite", "keys": ["a"]}) + frame(OK, 99, None)
    yield from LIES


def _into(body: Any, nbytes: int) -> memoryview:
    """Memory for an answer's payload, as somebody has it who knows how much he asked for."""
    if nbytes > ROOM:
        raise InternalError("more than was asked for")
    return memoryview(bytearray(nbytes))


class _Channel(Channel):
    def transport_closed(self) -> bool:
        return cast("Any", self._transport).closed


def _channel(data: bytes) -> None:
    step = (1, 7, 100, 1 << 20)[data[0] & 3] if data else 1

    async def receive() -> None:
        transport = _Transport()
        channel = _Channel(lambda at, header: at.answer(header.number, header.body))
        channel.connection_made(cast("Any", transport))
        waiting = [
            channel.send("echo", 1), channel.send("read", [], into=_into), channel.send("pin", []),
        ]  # fmt: skip
        waiting[2].cancel()
        await feed(channel, data[1:], step)
        channel.connection_lost(None)
        for future in [*waiting, channel._challenge]:
            assert future.done()
            error = None if future.cancelled() else future.exception()
            assert error is None or isinstance(error, (DataplaneError, Broken)), repr(error)

    run(receive())


def _client_seeds() -> Iterator[bytes]:
    answers = frame("challenge", 0, [b"c" * 32]) + frame(OK, 1, ["answer"])
    for step in range(4):
        yield bytes([step]) + answers + frame(OK, 2, [["gone"]], 50) + bytes(50) + frame(OK, 3, [7])
    yield b"\2" + answers + frame(OK, 2, [], 9) + bytes(9) + frame(OK, 3, [])
    yield b"\2" + frame(OK, 77, [], 1 << 40) + bytes(500)
    failed = {"type": "KeyNotFound", "message": "no", "partition_id": "p", "keys": ["k"]}
    yield b"\2" + frame(FAILED, 1, failed) + frame(FAILED, 0, {"type": "PlaneLost"})
    yield b"\2" + frame("hold", 9, [1, 2, 3]) + frame(FAILED, 2, {"type": "None", "message": 1})
    yield from LIES


def _blocking(data: bytes) -> None:
    """One frame is waited for at a time: the server's challenge, or an answer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[1:])
        theirs.shutdown(socket.SHUT_WR)
        connection = BlockingConnection(ours)
        deadline = time.monotonic() + 30.0
        if data and data[0] & 1:
            assert type(connection._challenge(deadline)) is bytes
        else:
            connection.call("read", [], deadline, into=_into)


def _blocking_seeds() -> Iterator[bytes]:
    yield b"\1" + frame("challenge", 0, [b"c" * 32])
    yield b"\0" + frame(OK, 1, ["answer"])
    yield b"\0" + frame(OK, 1, [], 50) + bytes(50)
    yield b"\0" + frame(OK, 1, [], 50) + bytes(80)
    yield b"\0" + frame(OK, 1, [], 1 << 40) + bytes(80)
    for seed in _client_seeds():
        yield b"\0" + seed[1:]
        yield b"\1" + seed[1:]


# -- messages ----------------------------------------------------------------------------------


def _meta(data: bytes) -> None:
    meta = PutMeta.unpack(data)
    assert PutMeta.unpack(meta.pack()) == meta or "nan" in repr(meta)


def _meta_seeds() -> Iterator[bytes]:
    yield PutMeta("p", ["a"], 0, 1, 0, None, None).pack()
    yield PutMeta("p", ["a", "b"], 15, 9, 8, (1, 5), (1, 4), 7, 1.5).pack()
    yield b"\xdd\xff\xff\xff\xff"
    yield b"\x99" * 2000


def _tags(data: bytes) -> None:
    count = data[0] & 7 if data else 1
    keys = [f"k{i}" for i in range(count)]
    tags, sizes = unpack_tags(data[1:], keys, saved=bool(data and data[0] & 8))
    assert len(tags) == len(sizes) == count
    assert tags_from_wire(trees.unpacked(trees.packed(tags_to_wire(tags)))) == tags or "nan" in str(
        tags
    )
    for of in tags:
        columns.encode(list(of.values()))


def _tags_seeds() -> Iterator[bytes]:
    one = msgpack.packb({"n": 1, "f": 1.5, "s": "text", "b": True, "l": [1, [2]], "m": {"a": None}})
    yield b"\1" + one
    yield b"\3" + one * 3
    yield b"\x09" + msgpack.packb(
        {"dataplane.lost": ["x"], "dataplane.lost_at": 1.0, "dataplane.lost_stores": ["s"]}
    )
    yield b"\1" + b"\x81\xa1a" + b"\x91" * 600 + b"\xc0"
    yield b"\2" + b"\xdf\xff\xff\xff\xff" * 2
    yield b"\1" + b"\x81\xa1a\xdd\xff\xff\xff\xff"


def _unpack_many(data: bytes) -> list[Any]:
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(data[1:])
    return [data[0], *unpacker]


def _pack_many(value: Any) -> bytes:
    first, *rest = value
    return bytes([first]) + b"".join(map(trees.packed, rest))


def _keys(data: bytes) -> None:
    keys = trees.value_in(data)
    check_keys(keys)
    assert all(type(key) is str and "\0" not in key and "\n" not in key for key in keys)


def _keys_seeds() -> Iterator[bytes]:
    yield msgpack.packb(["a", "b", "kéy/1"])
    yield msgpack.packb(["x" * 1024])
    yield msgpack.packb(["../a", "a\nb"])


def _error(data: bytes) -> None:
    error = from_wire(trees.value_in(data))
    assert str(error) == error.message


def _error_seeds() -> Iterator[bytes]:
    for body in (
        {"type": "KeyNotFound", "message": "no", "partition_id": "p", "keys": ["k"]},
        {"type": "QuotaExceeded", "message": "full", "used_bytes": 1, "limit_bytes": 2},
        {"type": "Other"}, {}, [], None, "text", 5, {"type": ["KeyNotFound"], "message": None},
    ):  # fmt: skip
        yield msgpack.packb(body)


# -- listings ----------------------------------------------------------------------------------


def _column(data: bytes) -> None:
    match trees.value_in(data):
        case [str(kind), int(rows), list(sizes), bytes(rest)]:
            pass
        case _:
            return
    buffers: list[Any] = []
    at = 0
    for size in sizes:
        if type(size) is not int:
            buffers.append(None)
            continue
        buffers.append(memoryview(rest)[at : at + size])
        at += size
    array = columns.decode(kind, rows, buffers)
    cells = columns.to_cells(kind, array)
    assert len(cells) == rows
    columns.to_numpy(kind, [array, array])
    repr(cells)


def _columns() -> list[columns.Column]:
    cells: list[list[Any]] = [
        [1, 2, 3], [1, ABSENT, 3], [0.5, ABSENT], [True, False, True], [True, ABSENT],
        ["a", "", "ключ"], [ABSENT, "a", ABSENT], [None, [1], {"a": 2}], [ABSENT, None], [],
    ]  # fmt: skip
    return [columns.encode(of) for of in cells]


def _column_seeds() -> Iterator[bytes]:
    for column in _columns():
        sizes = [None if b is None else len(b) for b in column.buffers]
        rest = b"".join(bytes(b) for b in column.buffers if b is not None)
        yield msgpack.packb([column.kind, column.rows, sizes, rest])
        yield msgpack.packb([column.kind, 1 << 20, sizes, rest])
        yield msgpack.packb([column.kind, 1 << 40, sizes, rest])
        yield msgpack.packb([column.kind, -1, sizes, rest])
    far = np.array([0, 1 << 30, 1 << 30], np.int32).tobytes()
    back = np.array([0, 5, -7], np.int32).tobytes()
    for offsets in (far, back):
        yield msgpack.packb(["s", 2, [None, 12, 3], offsets + b"abc"])
        yield msgpack.packb(["p", 2, [None, 12, 3], offsets + b"\x01\x02\x03"])
    yield msgpack.packb(["s", 1, [None, 8, 2], np.array([0, 2], np.int32).tobytes() + b"\xff\xfe"])
    yield msgpack.packb(["i", 2, [None, None], b""])


def _listing(data: bytes) -> None:
    match trees.value_in(data):
        case [body, bytes(payload)]:
            listing = unpack_listing("p", body, memoryview(payload))
        case _:
            return
    count = len(listing)
    assert len(listing.keys) == count
    assert len(listing.tags) == count
    assert len(listing.fields) == count
    for name in listing.tag_names:
        assert len(listing.column(name)) == count
    assert len(listing.lengths("x")) == count
    listing.to_meta()
    repr(listing)


def _listing_of(pieces: list[dict[str, columns.Column]], rows: list[int], sets: Any) -> bytes:
    payload = b""
    wire: list[Any] = []
    for name in sorted({name for piece in pieces for name in piece}):
        parts: list[Any] = []
        for piece in pieces:
            column = piece.get(name)
            parts.append(None if column is None else [column.kind, column.sizes()])
            if column is not None:
                payload += b"".join(bytes(b) for b in column.buffers if b is not None)
        wire.append([name, parts])
    return msgpack.packb([[[1, 5], True, ["gone"], rows, sets, wire], payload])


def _numbers(*numbers: int) -> columns.Column:
    return columns.Column("n", len(numbers), (None, np.array(numbers, np.int32).tobytes()))


def _listing_seeds() -> Iterator[bytes]:
    one = {
        KEYS: columns.encode(["a", "b"]), "n": columns.encode([1, 2]), FIELDS: _numbers(0, 0),
        "s": columns.encode(["x", ABSENT]), LENGTHS + "x": _numbers(3, 4),
    }  # fmt: skip
    two = {
        KEYS: columns.encode(["c"]), "n": columns.encode([0.5]), FIELDS: _numbers(1),
        "l": columns.encode([[1, None]]),
    }  # fmt: skip
    yield _listing_of([one], [2], [[["x"]]])
    yield _listing_of([one, two], [2, 1], [[["x"]], [["x"], []]])
    yield _listing_of([], [], [])
    yield msgpack.packb([[[1, 5], True, [], [1 << 40], [[]], [["n", [["i", [-1, 8]]]]]], bytes(8)])
    yield msgpack.packb([[[1, 5], True, [], [-3], [[]], [[KEYS, [["s", [-1, 8, 0]]]]]], bytes(8)])


def _stream_mutation(data: bytes, chance: random.Random) -> bytes:
    return data[:1] + trees.by_trees(split, joined)(data[1:], chance)


def _stream_plants(data: bytes, payload: bytes) -> Iterator[bytes]:
    for planted in trees.planted(split, joined)(data[1:], payload):
        yield data[:1] + planted


TARGETS = [
    Target(
        "frames-greeting", lambda data: _serve(data, greeted=False), _greeting_seeds, (),
        limit_bytes=1 * MiB, max_len=2 * MAX_GREETING_BYTES, mutate=_stream_mutation,
        plant=_stream_plants,
    ),
    Target(
        "frames-server", lambda data: _serve(data, greeted=True), _server_seeds, (),
        mutate=_stream_mutation, plant=_stream_plants, max_len=16 * KiB,
    ),
    Target(
        "frames-channel", _channel, _client_seeds, (), mutate=_stream_mutation,
        plant=_stream_plants, max_len=16 * KiB,
    ),
    Target(
        "frames-blocking", _blocking, _blocking_seeds, (DataplaneError, OSError),
        mutate=_stream_mutation, plant=_stream_plants, max_len=16 * KiB,
        limit_bytes=MAX_HEADER_BYTES,
    ),
    Target(
        "put-meta", _meta, _meta_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
    Target(
        "tags", _tags, _tags_seeds, (InvalidRequest,),
        mutate=trees.by_trees(_unpack_many, _pack_many),
        plant=trees.planted(_unpack_many, _pack_many),
    ),
    Target(
        "keys", _keys, _keys_seeds, (InvalidRequest,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
    Target("errors", _error, _error_seeds, (), mutate=trees.by_trees(), plant=trees.planted()),
    Target(
        "column", _column, _column_seeds, (InvalidRequest, InternalError), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
    Target(
        "listing", _listing, _listing_seeds, (DataplaneError,), mutate=trees.by_trees(),
        plant=trees.planted(),
    ),
]  # fmt: skip
