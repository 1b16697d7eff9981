"""Frames and the message every put shares: what is read, and what is refused before it costs."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest, KeyNotFound, from_wire
from dataplane.wire.frames import (
    FAILED,
    MAGIC,
    MAX_GREETING_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    OK,
    PREFIX,
    Header,
    failure,
    frame,
    parse_header,
    parse_prefix,
)
from dataplane.wire.messages import PutMeta, is_revision

BODIES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.one_of(st.text(max_size=20), st.sampled_from([OK, FAILED])),
    st.integers(0, 1 << 62),
    BODIES,
    st.integers(0, MAX_PAYLOAD_BYTES),
)
def test_a_frame_is_read_as_it_was_written(
    kind: str | int, number: int, body: Any, payload_bytes: int
) -> None:
    data = frame(kind, number, body, payload_bytes)
    header_bytes, payload = parse_prefix(data, MAX_HEADER_BYTES)
    assert payload == payload_bytes
    assert len(data) == PREFIX.size + header_bytes
    assert parse_header(memoryview(data)[PREFIX.size :]) == Header(kind, number, body)


def test_the_prefix_is_sixteen_bytes_of_fixed_places() -> None:
    data = frame("put_block", 3, [], 1 << 40)
    assert data[:4] == b"DPF\2"
    assert struct.unpack("<IQ", data[4:16]) == (len(data) - 16, 1 << 40)
    assert msgpack.unpackb(data[16:]) == ["put_block", 3, []]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x05\x95" + bytes(13), "not a frame"),  # a pickle
        (b"GET / HTTP/1.1\r\n", "not a frame"),
        (bytes(16), "not a frame"),
        (b"DPF\3" + bytes(12), "frame version 3; this side speaks version 2"),
        (b"DPF\0" + bytes(12), "frame version 0"),
        (PREFIX.pack(MAGIC, MAX_GREETING_BYTES + 1, 0), "a frame header of 4097 bytes"),
        (PREFIX.pack(MAGIC, (1 << 32) - 1, 0), "a frame header of 4294967295 bytes"),
        (PREFIX.pack(MAGIC, 10, 1 << 63), "a frame payload of 9223372036854775808 bytes"),
        (PREFIX.pack(MAGIC, 10, (1 << 64) - 1), "a frame payload of"),
        (PREFIX.pack(MAGIC, 10, MAX_PAYLOAD_BYTES + 1), "a frame payload of"),
    ],
)
def test_a_prefix_that_is_not_ours_or_too_large_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        parse_prefix(data, MAX_GREETING_BYTES)


def test_limits_are_taken_to_the_byte() -> None:
    data = PREFIX.pack(MAGIC, MAX_GREETING_BYTES, MAX_PAYLOAD_BYTES)
    assert parse_prefix(data, MAX_GREETING_BYTES) == (MAX_GREETING_BYTES, MAX_PAYLOAD_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\xa1a\x01",  # cut short
        msgpack.packb(["list", 1, None]) + b"\0",  # more than one value
        msgpack.packb({"kind": "list"}),
        msgpack.packb("list"),
        msgpack.packb(["list", 1]),
        msgpack.packb(["list", 1, None, None]),
        msgpack.packb(["list", -1, None]),
        msgpack.packb(["list", "1", None]),
        msgpack.packb(["list", True, None]),
        msgpack.packb(["list", 1.0, None]),
        msgpack.packb([None, 1, None]),
        msgpack.packb([True, 1, None]),
        msgpack.packb([b"list", 1, None]),
        msgpack.packb([["list"], 1, None]),
        b"\x93\xa1\xff\x01\xc0",  # not UTF-8
        b"\xdd\xff\xff\xff\xff",  # 2^32 items that are not there
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
)
def test_a_header_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"frame header is"):
        parse_header(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        header = parse_header(data)
    except InvalidRequest:
        return
    assert type(header.kind) in (str, int)
    assert header.number >= 0


@given(st.binary(min_size=16, max_size=16))
def test_random_bytes_are_a_prefix_or_refused(data: bytes) -> None:
    try:
        sizes = parse_prefix(data, MAX_HEADER_BYTES)
    except InvalidRequest:
        assert data[:4] != MAGIC or PREFIX.unpack(data)[1:] > (0, 0)
    else:
        assert data[:4] == MAGIC
        assert sizes == PREFIX.unpack(data)[1:]


def test_a_header_beyond_the_limit_is_not_even_sent() -> None:
    with pytest.raises(InvalidRequest, match="split it into smaller ones"):
        frame("list", 1, [bytes(MAX_HEADER_BYTES)])


def test_an_error_is_answered_as_the_same_error() -> None:
    error = KeyNotFound("no key 'a'", partition_id="p", keys=["a"])
    data = failure(9, error)
    header = parse_header(data[PREFIX.size :])
    assert (header.kind, header.number) == (FAILED, 9)
    again = from_wire(header.body)
    assert type(again) is KeyNotFound
    assert (str(again), again.partition_id, again.keys) == ("no key 'a'", "p", ["a"])


# -- the message of a put

META = PutMeta("train", ["a", "b"], 3, 7, 4, (1, 9), None)


def test_the_meta_of_a_put_is_read_as_it_was_packed() -> None:
    for meta in (META, META._replace(stamp=(2, 5), seen=None), META._replace(settled=0, number=1)):
        again = PutMeta.unpack(meta.pack())
        assert again.keys == meta.keys
        assert again.seen in (None, [1, 9])
        assert again.stamp in (None, [2, 5])
        assert again.pack() == meta.pack()


@pytest.mark.parametrize(
    "packed",
    [
        None, "text", 7, ["train"], b"", b"\xc1", msgpack.packb(None), msgpack.packb("7 chars"),
        msgpack.packb({1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}),
        msgpack.packb(list(META)[:6]), msgpack.packb([*META, 1]),
    ],
)  # fmt: skip
def test_what_is_no_meta_of_a_put_is_refused(packed: object) -> None:
    with pytest.raises(InvalidRequest):
        PutMeta.unpack(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"flags": -1}, {"flags": 1 << 63}, {"flags": "1"}, {"flags": None}, {"flags": True},
        {"number": 4}, {"number": 0}, {"number": -1}, {"number": 1 << 63}, {"number": 7.0},
        {"settled": -1}, {"settled": 7}, {"settled": None}, {"settled": False},
        {"seen": 5}, {"seen": [1]}, {"seen": [1, 2, 3]}, {"seen": [1, -1]}, {"seen": [1, True]},
        {"stamp": "ab"}, {"stamp": [1.0, 2]}, {"stamp": [1 << 63, 0]}, {"stamp": {1: 2}},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_of_a_meta_that_will_not_do_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PutMeta.unpack(META._replace(**change).pack())


@given(st.binary(max_size=100))
def test_random_bytes_are_a_meta_or_refused(data: bytes) -> None:
    try:
        meta = PutMeta.unpack(data)
    except InvalidRequest:
        return
    assert meta.number > meta.settled >= 0


@pytest.mark.parametrize(
    ("value", "good"),
    [((0, 0), True), ([1, 2], True), ((1, (1 << 63) - 1), True), ((1, 1 << 63), False),
     ((1,), False), ((1, None), False), (None, False), ("12", False), ((-1, 0), False),
     ((True, 1), False), ({1: 1, 2: 2}, False), (b"12", False)],
)  # fmt: skip
def test_a_revision_is_two_numbers(value: object, good: bool) -> None:
    assert is_revision(value) is good
