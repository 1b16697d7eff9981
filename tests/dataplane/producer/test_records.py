"""Files of a spool that are cut, torn or damaged: what was whole is read, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.producer import records
from dataplane.producer.puts import put_of_rows
from dataplane.producer.records import MAGIC, Kind, body_of, body_of_put, pack, put_of_body, scan

bodies = st.binary(max_size=60)
entries = st.lists(st.tuples(st.sampled_from(list(Kind)), bodies), min_size=1, max_size=6)


def file_of(items: list[tuple[Kind, bytes]]) -> tuple[bytes, list[int]]:
    """A file, and where each record ends."""
    data, ends = b"", []
    for number, (kind, body) in enumerate(items, 1):
        data += b"".join(pack(kind, number, [body]))
        ends.append(len(data))
    return data, ends


def numbers(data: bytes) -> list[int]:
    return [record.number for record in scan(memoryview(data)).records]


@given(entries)
def test_what_was_written_is_read(items: list[tuple[Kind, bytes]]) -> None:
    data, ends = file_of(items)
    view = memoryview(data)
    found = scan(view)
    assert [(one.kind, body_of(view, one)) for one in found.records] == items
    assert (found.end, found.damaged) == (ends[-1], [])


@given(entries)
def test_a_file_that_is_cut_has_what_was_whole(items: list[tuple[Kind, bytes]]) -> None:
    """At every byte: a record that is cut off is not there, and is not called damaged either."""
    data, ends = file_of(items)
    for cut in range(len(data)):
        found = scan(memoryview(data[:cut]))
        whole = sum(end <= cut for end in ends)
        assert [one.number for one in found.records] == list(range(1, whole + 1))
        assert found.end == (ends[whole - 1] if whole else 0)
        assert not found.damaged


@given(entries, st.data())
def test_a_bit_that_flips_costs_its_record_only(
    items: list[tuple[Kind, bytes]], draw: st.DataObject
) -> None:
    data, ends = file_of(items)
    at = draw.draw(st.integers(0, len(data) - 1))
    bit = draw.draw(st.integers(0, 7))
    flipped = bytearray(data)
    flipped[at] ^= 1 << bit
    hit = sum(end <= at for end in ends)
    found = scan(memoryview(bytes(flipped)))
    expected = [n for n in range(1, len(items) + 1) if n != hit + 1]
    assert [one.number for one in found.records] == expected
    begin = ends[hit - 1] if hit else 0
    assert found.damaged == [(begin, ends[hit])]
    assert found.end == len(data)


def test_a_damaged_body_is_not_looked_into() -> None:
    """A producer's own bytes may look like a record."""
    forged = b"".join(pack(Kind.TRAJECTORIES, 666, [b"forged"]))
    data = bytearray(b"".join(pack(Kind.TRAJECTORIES, 1, [forged + b"x"])))
    data[-5] ^= 1
    assert numbers(bytes(data) + b"".join(pack(Kind.DONE, 2))) == [2]


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    scan(memoryview(data))
    scan(memoryview(MAGIC + data))
    for kind in (Kind.TRAJECTORIES, Kind.TAGS, Kind.ROWS):
        try:
            put_of_body(kind, memoryview(data))
        except ValueError:
            pass


def test_a_put_comes_back_as_it_was() -> None:
    put = put_of_rows(
        ["a", "b"], "p", {"x": [[1], [2, 3]]}, [{"n": 1}, {}], attempt=None, must_exist=False,
        if_absent=True, return_tags=False,
    )  # fmt: skip
    kind, body = body_of_put(put)
    again = put_of_body(kind, memoryview(b"".join(body)))
    assert again.message == put.message
    assert again.may_wait
    assert put.cells is not None
    assert again.cells is not None
    for offset in (0, 1, 7):
        assert b"".join(d for _, d in again.cells.chunks(3, offset)) == b"".join(
            d for _, d in put.cells.chunks(3, offset)
        )


def test_a_record_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BODY_BYTES", 10)
    with pytest.raises(InvalidRequest, match="can be spooled"):
        pack(Kind.ROWS, 1, [b"x" * 10])
