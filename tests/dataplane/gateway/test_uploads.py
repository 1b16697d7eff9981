"""Puts in parts: what is taken, what is kept, who has it; and who waits for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.codec.foreign import block_of
from dataplane.codec.shapes import Column
from dataplane.codec.template import ALIGN
from dataplane.errors import InvalidRequest, OutOfRange, RateLimited
from dataplane.gateway.calls.budget import Budget
from dataplane.gateway.calls.uploads import (
    JOINED_BYTES,
    SMALL_BYTES,
    Header,
    Owner,
    Received,
    Upload,
    Uploads,
    header_of,
)
from dataplane.protocol import chunks
from dataplane.protocol.cells import Cells, cells_of
from dataplane.v1 import dataplane_pb2 as pb

OWNER = Owner("me", "c", 1)


def header(total: int = 100, **parts: Any) -> Header:
    """The header of a put of one row with so many bytes."""
    cells = cells_of(["a"], {"x": [np.zeros(total, np.uint8)]})
    message = pb.PutRowsHeader(
        partition_id="p", keys=["a"], columns=cells.shape.to_columns(), total_bytes=total, **parts
    )
    return header_of(message, max_put_bytes=1 << 30, max_object_bytes=1 << 20)


class Kept:
    """Uploads, and what was let go of."""

    def __init__(self, resume_s: float = 10.0) -> None:
        self.uploads = Uploads(resume_s)
        self.released: list[str] = []

    def begin(self, name: str, owner: Owner = OWNER, total: int = 100) -> Upload:
        upload, _ = self.uploads.begin(
            owner, header(total), name, lambda: self.released.append(name)
        )
        return upload


# -- what is taken ---------------------------------------------------------------------------


def test_chunks_follow_each_other_and_end_where_the_header_says() -> None:
    upload = Kept().begin("s")
    upload.add(0, bytes(30))
    for offset in (0, 29, 31, -1, 1 << 62):
        with pytest.raises(OutOfRange) as wrong:
            upload.add(offset, bytes(1))
        assert wrong.value.offset == 30
    with pytest.raises(InvalidRequest, match="ends at 101, beyond the 100 bytes"):
        upload.add(30, bytes(71))
    assert not upload.is_whole
    upload.add(30, bytes(70))
    assert upload.is_whole
    with pytest.raises(InvalidRequest):
        upload.add(100, b"x")


@given(
    sizes=st.lists(st.integers(0, 3 * SMALL_BYTES), max_size=12),
    cuts=st.lists(st.integers(0, 1 << 18), max_size=3),
)
def test_what_came_is_what_is_there(sizes: list[int], cuts: list[int]) -> None:
    received = Received()
    expected = b""
    for i, size in enumerate(sizes):
        data = bytes([i + 1]) * size
        received.add(data)
        expected += data
        if cuts and i % 3 == 2:
            at = min(cuts.pop(), len(expected))
            before = received.pieces()
            joined = b"".join(before)
            received.cut(at)
            assert b"".join(before) == joined  # what was given out stays as it is
            expected = expected[:at]
    assert received.nbytes == len(expected)
    assert b"".join(received.pieces()) == expected


def test_many_small_chunks_take_little_more_than_they_bring() -> None:
    received = Received()
    for _ in range(300_000):
        received.add(b"x")
    assert len(received) <= 1 + 300_000 // JOINED_BYTES
    large = bytes(SMALL_BYTES)
    received.add(large)
    assert received.pieces()[-1] is large  # and this is not copied


# -- what is kept ----------------------------------------------------------------------------


def test_a_put_that_broke_off_goes_on_where_it_was() -> None:
    kept = Kept()
    upload = kept.begin("first")
    upload.add(0, bytes(60))
    kept.uploads.leave(upload, "first", 5.0)
    again, before = kept.uploads.resume(OWNER, header(), 60, "second") or (None, None)
    assert again is upload
    assert before is None
    assert upload.stream == "second"
    upload.add(60, bytes(40))
    assert upload.is_whole
    kept.uploads.drop(upload)
    assert kept.released == ["first"]
    assert not len(kept.uploads)


def test_it_goes_on_with_the_same_header_and_not_beyond_what_came() -> None:
    kept = Kept()
    upload = kept.begin("first")
    upload.add(0, bytes(60))
    with pytest.raises(InvalidRequest, match="another header"):
        kept.uploads.resume(OWNER, header(mode=pb.PUT_MODE_IF_ABSENT), 60, "second")
    for offset in (61, -1):
        with pytest.raises(OutOfRange) as beyond:
            kept.uploads.resume(OWNER, header(), offset, "second")
        assert beyond.value.offset == 60
    for other in (OWNER._replace(principal="you"), OWNER._replace(client_id="d")):
        with pytest.raises(OutOfRange) as nothing:
            kept.uploads.resume(other, header(), 60, "second")
        assert nothing.value.offset == 0
    assert upload.stream == "first"
    # What is said of the request itself may differ: it is a repetition now.
    same = header(request=pb.Request(retry=True, settled=3), resume_offset=20)
    resumed = kept.uploads.resume(OWNER, same, 20, "second")
    assert resumed == (upload, "first")
    assert upload.received.nbytes == 20


def test_the_later_of_two_streams_has_it() -> None:
    kept = Kept()
    upload = kept.begin("first")
    upload.add(0, bytes(60))
    assert kept.uploads.resume(OWNER, header(), 60, "second") == (upload, "first")
    kept.uploads.leave(upload, "first", 1.0)
    assert upload.stream == "second"  # who was put out has left nothing
    upload.asked = True
    anew, before = kept.uploads.begin(OWNER, header(), "third", lambda: None)
    assert before == "second"
    assert kept.released == ["first"]
    assert anew.received.nbytes == 0
    assert anew.asked  # it is the same effect
    kept.uploads.drop(upload)
    assert kept.uploads.find(OWNER) is anew


def test_what_is_not_resumed_in_time_is_forgotten() -> None:
    kept = Kept(resume_s=10.0)
    one, two, three = (kept.begin(str(n), OWNER._replace(number=n)) for n in (1, 2, 3))
    kept.uploads.leave(one, one.stream, 1.0)
    kept.uploads.leave(two, two.stream, 5.0)
    assert kept.uploads.expire(10.9) == 0
    assert kept.uploads.expire(11.0) == 1
    assert kept.released == ["1"]
    assert kept.uploads.expire(1e9) == 1  # the third is under way
    assert kept.uploads.find(three.owner) is three
    kept.uploads.close()
    assert kept.released == ["1", "2", "3"]
    assert not len(kept.uploads)
    never = Kept(resume_s=0)
    upload = never.begin("1")
    never.uploads.leave(upload, upload.stream, 1.0)
    assert never.released == ["1"]


def test_the_one_left_longest_ago_is_given_up_first() -> None:
    kept = Kept()
    for number, (principal, left) in enumerate([("a", 3.0), ("b", 1.0), ("a", 2.0), ("a", None)]):
        owner = Owner(principal, "c", number)
        upload = kept.begin(str(number), owner)
        if left is not None:
            kept.uploads.leave(upload, upload.stream, left)
    assert kept.uploads.give_up_oldest("a")
    assert kept.uploads.give_up_oldest(None)
    assert kept.uploads.give_up_oldest(None)
    assert not kept.uploads.give_up_oldest(None)
    assert kept.released == ["2", "1", "0"]


# -- blocks of what came ---------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    data=st.data(),
)
def test_a_block_is_the_same_however_its_bytes_came(
    lengths: list[int], cuts: list[int], data: st.DataObject
) -> None:
    from dataplane.codec.encode import encode_batch

    keys = [str(i) for i in range(len(lengths))]
    fields = {
        "ids": [np.arange(n, dtype=np.int64) for n in lengths],
        "flags": [np.arange(n) % 2 == 0 for n in lengths],
        "score": np.arange(len(lengths), dtype=np.float32),
        "wide": [np.full((n, 3), n, np.int16) for n in lengths],
    }
    cells = cells_of(keys, fields)
    raw = b"".join(map(bytes, cells.pieces))
    pieces: list[bytes] = []
    for size in cuts:
        pieces.append(raw[:size])
        raw = raw[size:]
    pieces.append(raw)
    shape = cells.shape
    block = block_of(shape.columns, shape.lengths, shape.rows, pieces)
    ours = encode_batch(keys, fields)
    assert block.lengths == ours.lengths
    assert block.nbytes == ours.nbytes
    assert block.nbytes % ALIGN == 0
    assert b"".join(block.pieces) == b"".join(ours.pieces)
    target = bytearray(block.nbytes)
    block.write_into(memoryview(target))
    assert target == b"".join(block.pieces)
    for wrong in ([*pieces, b"x"], pieces[:-1] if pieces[-1] else pieces[:-2]):
        if sum(map(len, wrong)) != cells.shape.nbytes:
            with pytest.raises(InvalidRequest):
                block_of(shape.columns, shape.lengths, shape.rows, wrong)


def test_a_bool_is_0_or_1() -> None:
    column = Column("f", "bool", None, ())
    none = np.empty((0, 3), np.int32)
    block_of([column], none, 3, [b"\x00\x01", b"\x00"])
    with pytest.raises(InvalidRequest, match="'f': a bool is a byte 0 or 1, not 255"):
        block_of([column], none, 3, [b"\x00\x01", b"\xff"])


# -- chunks on the wire ----------------------------------------------------------------------


@given(offset=st.integers(0, (1 << 63) - 1), data=st.binary(max_size=300))
def test_a_chunk_is_the_message_that_it_stands_for(offset: int, data: bytes) -> None:
    message = pb.PutRowsRequest(chunk=pb.Chunk(offset=offset, data=data)).SerializeToString()
    found = chunks.parse_put(message)
    if data:
        assert isinstance(found, chunks.Chunk)
        assert (found.offset, bytes(found.data)) == (offset, data)
        assert chunks.chunk_bytes(offset, [data[:7], memoryview(data)[7:]]) == message
    else:
        assert isinstance(found, pb.PutRowsRequest)


@given(st.binary(max_size=40))
def test_whatever_comes_is_read_as_protobuf_reads_it(message: bytes) -> None:
    try:
        expected = pb.PutRowsRequest.FromString(message)
    except Exception:
        expected = None
    found = chunks.parse_put(message)
    if isinstance(found, chunks.Chunk):
        assert expected is not None
        assert expected.WhichOneof("part") == "chunk"
        assert (expected.chunk.offset, expected.chunk.data) == (found.offset, bytes(found.data))
    else:
        assert (found if expected is not None else None) == expected


@given(
    pieces=st.lists(st.binary(max_size=50), max_size=6),
    size=st.integers(1, 40),
    offset=st.integers(0, 100),
)
def test_chunks_hold_all_pieces_in_order(pieces: list[bytes], size: int, offset: int) -> None:
    made = [
        pb.GetRowsResponse.FromString(each).chunk for each in chunks.chunks_of(pieces, size, offset)
    ]
    expected = [
        (at, data) for at, data in Cells(cells_of([], {}).shape, pieces).chunks(size, offset)
    ]
    assert [(each.offset, each.data) for each in made] == expected


# -- memory ----------------------------------------------------------------------------------


async def _waits(budget: Budget, owner: str, nbytes: int) -> asyncio.Task[Any]:
    task = asyncio.create_task(budget.take(owner, nbytes, 5.0))
    before = budget.waiting
    for _ in range(3):
        await asyncio.sleep(0)
    assert budget.waiting == before + 1
    return task


async def test_who_comes_first_is_let_in_first() -> None:
    budget = Budget(100)
    first = await budget.take("a", 80, 1.0)
    large = await _waits(budget, "b", 50)
    small = await _waits(budget, "c", 10)  # there is room, but not its turn
    first.release()
    first.release()
    with await large, await small:
        assert budget.used_bytes == 60
    assert budget.used_bytes == 0
    assert budget.used_by("a") == 0


async def test_who_has_its_share_keeps_nobody_else_waiting() -> None:
    budget = Budget(100, 60)
    mine = await budget.take("a", 50, 1.0)
    more = await _waits(budget, "a", 20)
    with await budget.take("b", 30, 1.0):
        also = await _waits(budget, "a", 5)  # it would fit, but comes behind its own
        mine.release()
        with await more, await also:
            assert budget.used_by("a") == 25
    with pytest.raises(InvalidRequest, match="61 bytes are more than the 60"):
        await budget.take("a", 61, 1.0)
    assert budget.used_bytes == 0


async def test_who_waits_in_vain_holds_nothing_and_holds_nobody_up() -> None:
    budget = Budget(100)
    with await budget.take("a", 90, 1.0):
        with pytest.raises(RateLimited, match=r"no room for 50 bytes .* 90 of .* 100") as full:
            await budget.take("b", 50, 0.01)
        assert full.value.limit == "buffer_bytes"
        given_up = await _waits(budget, "b", 50)
        behind = await _waits(budget, "c", 10)
        given_up.cancel()
        with await behind:
            assert budget.used_bytes == 100
        assert budget.waiting == 0
    assert budget.used_bytes == 0


async def test_what_was_left_behind_goes_before_anybody_waits() -> None:
    left: list[tuple[str, Callable[[], None]]] = []

    def reclaim(owner: str | None) -> bool:
        for entry in left:
            if owner in (None, entry[0]):
                left.remove(entry)
                entry[1]()
                return True
        return False

    budget = Budget(100, 60, reclaim=reclaim)
    for owner, nbytes in (("a", 20), ("b", 30), ("a", 30), ("b", 20)):
        held = await budget.take(owner, nbytes, 1.0)
        left.append((owner, held.release))
    # Its own first, where it is its share that is used up; then the oldest.
    with await budget.take("a", 40, 1.0):
        assert [owner for owner, _ in left] == ["b", "b"]
        with await budget.take("c", 50, 1.0):
            assert not left
            assert budget.used_bytes == 90
    assert budget.used_bytes == 0
