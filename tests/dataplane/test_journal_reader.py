"""Reading a journal back: whole records, a torn end that may be cut off, damage that may not."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import InternalError, InvalidRequest, JournalDamaged
from dataplane.tags import journal as j
from dataplane.tags import records as r
from dataplane.tags.journal import FileJournal, reading
from dataplane.tags.records import Head, Record, Records, Torn, framed, head_bytes
from tests.dataplane.journal_file import read

BODIES: list[Any] = [
    ("client", b"meta", b"\x80", "v0", (1, 2, 4096, 10, b"t", 1, b"\1")),
    ("client", "train", ["a", "b"], None, False, 3, 2),
    ("client", "train", None, {"status": {"in": ["done", 1, 2.5, None]}}, True, 4, 2),
    (),
    ("c" * 300, 1 << 40, [b"\x94\x01\x02\xcb" * 20]),
    ("v1", [None, ["10.0.0.1", 1]]),
]


def journal_of(path: Path, bodies: list[Any]) -> list[int]:
    """A journal with these records; where each of them begins, and the end."""
    journal = FileJournal(path, "plane", 3, open_schemas=True)
    starts = [journal.nbytes]
    for number, body in enumerate(bodies, 1):
        journal.append(j.PUT, number * 100, 12.5 + number, body)
        starts.append(journal.nbytes)
    journal.close()
    return starts


def read_back(path: Path) -> tuple[list[Record], Torn | None]:
    with reading(path) as records:
        assert records.head == Head("plane", 3, open_schemas=True)
        found = list(records)
        whole = path.stat().st_size - (records.torn.nbytes if records.torn else 0)
        assert records.end == whole
        return found, records.torn


def expected(bodies: list[Any], starts: list[int]) -> list[Record]:
    return [
        Record(j.PUT, number * 100, 12.5 + number, msgpack.unpackb(msgpack.packb(body)), start)
        for number, (body, start) in enumerate(zip(bodies, starts, strict=False), 1)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_what_was_written_is_read_back_with_where_it_is(path: Path) -> None:
    starts = journal_of(path, BODIES)
    assert read_back(path) == (expected(BODIES, starts), None)
    assert [[r.kind, r.n, r.at, r.body] for r in read_back(path)[0]] == read(path)[1]


def test_a_journal_that_is_being_written_can_be_read(path: Path) -> None:
    journal = FileJournal(path, "plane", 3, open_schemas=True)
    assert read_back(path) == ([], None)
    journal.append(j.PUT, 1, 2, ())  # a whole number is a time, too
    assert [(r.n, r.at) for r in read_back(path)[0]] == [(1, 2.0)]
    journal.close()


def test_cut_at_any_byte_of_its_last_two_records_it_ends_with_the_last_whole_one(
    path: Path,
) -> None:
    starts = journal_of(path, BODIES)
    data = path.read_bytes()
    records = expected(BODIES, starts)
    for cut in range(starts[-3], len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in starts[1:])
        found, torn = read_back(path)
        assert found == records[:whole]
        if cut in starts:
            assert torn is None
        else:
            assert torn is not None
            assert (torn.offset, torn.nbytes) == (starts[whole], cut - starts[whole])
            path.write_bytes(data[: torn.offset])
            assert read_back(path) == (records[:whole], None)


HALF = framed(msgpack.packb((1, 1, 0.0, "a longer body than is there")))[:20]


@pytest.mark.parametrize("tail", [b"\0" * 4, b"\0" * 4096, b"\xff" * 7, HALF, HALF[:9]])
def test_what_follows_the_last_record_and_is_none_is_torn_off(path: Path, tail: bytes) -> None:
    starts = journal_of(path, BODIES)
    path.write_bytes(path.read_bytes() + tail)
    found, torn = read_back(path)
    assert found == expected(BODIES, starts)
    assert torn is not None
    assert (torn.offset, torn.nbytes) == (starts[-1], len(tail))


@pytest.mark.parametrize(
    "tail", [b"\xff" * 100, b"DPJRNL\0\2" * 9, b"\0" * 100 + b"x", HALF[:8] + b"xxxx"]
)
def test_what_follows_and_was_never_the_beginning_of_one_is_damage(path: Path, tail: bytes) -> None:
    starts = journal_of(path, BODIES)
    path.write_bytes(path.read_bytes() + tail)
    with pytest.raises(JournalDamaged, match="no record that was half written") as error:
        read_back(path)
    assert error.value.offset == starts[-1]


def test_any_flipped_bit_is_found_and_refused_by_file_and_offset(
    path: Path,
) -> None:
    starts = journal_of(path, BODIES)
    data = path.read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        if at == len(r.MAGIC):
            with pytest.raises(InvalidRequest, match=f"{path} is of format version"):
                read_back(path)
        else:
            begin = 0 if at < len(r.MAGIC) else max(s for s in [8, *starts] if s <= at)
            with pytest.raises(JournalDamaged, match=str(path)) as error:
                read_back(path)
            assert (error.value.path, error.value.offset) == (str(path), begin)
            assert f"at byte {begin} of {len(data)}" in str(error.value)


def test_records_before_the_damage_have_been_told_of_only_one_by_one(path: Path) -> None:
    """So that `verify` can say how far a journal is good."""
    starts = journal_of(path, BODIES)
    data = bytearray(path.read_bytes())
    data[starts[3] + 9] ^= 1
    path.write_bytes(data)
    found: list[Record] = []
    with reading(path) as records, pytest.raises(JournalDamaged, match="follows at") as error:
        found.extend(iter(records))
    assert error.value.offset == starts[3]
    assert f"follows at {starts[4]}" in str(error.value)


def test_a_length_that_hides_what_follows_is_no_torn_end(path: Path) -> None:
    """Read as one long record that was cut short, it would take all acknowledged ones with it."""
    starts = journal_of(path, BODIES)
    for length in (0, 5, 1 << 20, (1 << 32) - 1, starts[-1] - starts[1] - 8):
        data = bytearray(path.read_bytes())
        struct.pack_into("<I", data, starts[1], length)
        with pytest.raises(JournalDamaged) as error:
            list(Records(BytesIO(data), "file"))
        assert error.value.offset == starts[1]


def test_a_whole_record_is_found_beyond_any_amount_of_damage(path: Path) -> None:
    starts = journal_of(path, [*BODIES, b"\x94\x01\x7f\xcb" * 300_000, "last"])
    data = bytearray(path.read_bytes())
    for at in range(starts[2], starts[-2], 10):
        data[at] ^= 0x55
    with pytest.raises(JournalDamaged) as error:
        list(Records(BytesIO(data), "file"))
    assert error.value.offset == starts[2]
    assert f"follows at {starts[-2]}" in str(error.value)
    del data[starts[-2] + 3 :]  # and where none follows
    with pytest.raises(JournalDamaged, match="no record that was half written") as error:
        list(Records(BytesIO(data), "file"))
    assert error.value.offset == starts[2]


class Counting(BytesIO):
    """A file that says the most that was ever asked of it."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size >= 0
        self.most = max(self.most, size)
        return super().read(size)


def test_no_memory_is_taken_for_a_length_before_it_is_known_to_be_there() -> None:
    start = head_bytes(Head("plane", 1, open_schemas=False))
    for length in (1 << 31, (1 << 32) - 1, 100 << 20, 100):
        # A list of four, whose third part ends in the middle.
        file = Counting(start + struct.pack("<II", length, 0) + b"\x94\x01\x01\xcb\0\0")
        records = Records(file, "file")
        if length > r.MAX_RECORD_BYTES:
            with pytest.raises(JournalDamaged):
                list(records)
        else:
            assert list(records) == []
            assert records.torn is not None
        assert file.most <= (1 << 20) + 64
    head = Counting(r.MAGIC + bytes([r.VERSION]) + struct.pack("<II", 1 << 30, 0))
    with pytest.raises(JournalDamaged, match="header is not whole"):
        Records(head, "file")
    assert head.most < 100


def test_a_record_of_more_than_is_read_back_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(r, "MAX_RECORD_BYTES", 1000)
    journal = FileJournal(path, "plane", 3, open_schemas=True)
    with pytest.raises(InternalError, match="at most 1000 are read back"):
        journal.append(j.PUT, 1, 0.0, b"x" * 1000)
    journal.append(j.PUT, 1, 0.0, b"x" * 900)  # nothing is broken
    journal.close()
    assert len(read_back(path)[0]) == 1


@pytest.mark.parametrize(
    "packed",
    [
        [1, 2, 3.0], [1, 2, 3.0, 4, 5], {"kind": 1, "n": 2, "at": 3.0}, [1.0, 2, 3.0, "body....."],
        [1, -2, 3.0, "body....."], [1, 2, 3, "body....."], [True, 2, 3.0, "body....."],
        [1, 2, 3.0, msgpack.ExtType(5, b"data")], [1, 2, 3.0, {1: "no text is this key"}],
    ],
    ids=str,
)  # fmt: skip
def test_what_has_a_right_checksum_and_is_no_record_is_refused(packed: Any) -> None:
    good = framed(msgpack.packb((1, 1, 0.0, "a whole record")))
    start = head_bytes(Head("plane", 1, open_schemas=False)) + good
    strange = framed(msgpack.packb(packed))
    for file in (start + strange, start + strange + good):
        records = Records(BytesIO(file), "file")
        with pytest.raises(JournalDamaged, match=r"checksum is right|none has") as error:
            list(records)
        assert error.value.offset == len(start)


@pytest.mark.parametrize(
    "start",
    [
        b"", b"D", r.MAGIC, b"PK\3\4" * 30, r.MAGIC + bytes([r.VERSION]),
        head_bytes(Head("plane", 1, open_schemas=False))[:-1],
        *(
            r.MAGIC + bytes([r.VERSION]) + framed(msgpack.packb(head))
            for head in (
                {"plane_id": "plane", "epoch": 1},
                {"plane_id": 1, "epoch": 1, "open_schemas": False},
                {"plane_id": "plane", "epoch": 0, "open_schemas": False}, ["plane", 1, False, 0.0],
                {"plane_id": "plane", "epoch": 1, "open_schemas": False, "more": 1},
            )
        ),
    ],
    ids=repr,
)  # fmt: skip
def test_a_file_that_does_not_begin_as_a_journal_is_refused(start: bytes) -> None:
    with pytest.raises(JournalDamaged, match=r"the journal here/journal is damaged at byte [08]"):
        Records(BytesIO(start), "here/journal")


def test_another_version_is_refused_and_both_are_named() -> None:
    old = b"DPJRNL\0\1" + framed(msgpack.packb({"plane_id": "plane", "epoch": 1}))
    with pytest.raises(InvalidRequest, match=r"format version 1; this release reads version 3"):
        Records(BytesIO(old), "file")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=40)
        | st.binary(max_size=200) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=10,
    ), min_size=1, max_size=6),
    st.data(),
)  # fmt: skip
def test_whatever_records_say_their_end_can_be_torn_off(bodies: list[Any], data: Any) -> None:
    file = BytesIO()
    file.write(head_bytes(Head("plane", 1, open_schemas=False)))
    starts: list[int] = []
    for n, body in enumerate(bodies):
        starts.append(file.tell())
        file.write(framed(msgpack.packb((j.PUT, n, 1.5, body))))
    cut = data.draw(st.integers(starts[-1], file.tell() - 1))
    whole = BytesIO(file.getvalue()[:cut])
    records = Records(whole, "file")
    found = list(records)
    same = [msgpack.unpackb(msgpack.packb(body)) for body in bodies]
    assert [record.body for record in found] == same[:-1]
    assert (records.torn is None) == (cut == starts[-1])
    assert records.end == starts[-1]


def test_a_file_that_ends_earlier_than_it_said_is_damaged() -> None:
    """It is cut while it is read: nothing is made up for what is missing."""

    class Shrinking(BytesIO):
        def seek(self, at: int, whence: int = 0, /) -> int:
            return super().seek(at, whence) + (1000 if whence == 2 else 0)

    packed = msgpack.packb((1, 1, 0.0, "body"))
    start = head_bytes(Head("plane", 1, open_schemas=False))
    file: BinaryIO = Shrinking(start + struct.pack("<II", 500, zlib.crc32(b"")) + packed[:9])
    with pytest.raises(JournalDamaged):
        list(Records(file, "file"))
