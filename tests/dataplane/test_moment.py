"""Rows of one moment: in the order of their revisions, in steps, and as they were."""

from __future__ import annotations

import random
from operator import attrgetter

from dataplane.tags.rows import CHUNK_ROWS, Row
from dataplane.tags.views.moment import PORTION_ROWS, Moment
from tests.dataplane.audit import put
from tests.dataplane.test_views import read, store_with


def everything(rows: int, changed: int) -> tuple[Moment, list[Row]]:
    """A moment of a whole partition of which so many rows were changed, in slot order too."""
    store = store_with(rows)
    for i in random.Random(rows).sample(range(rows), changed):
        put(store, "p", [f"row{i}"], tags=[{"v": i}])
    slots = store.partition("p").slots
    return Moment(store.n, [(chunk, None) for chunk in slots.cut()]), list(slots)


def test_rows_come_oldest_first_and_in_the_order_of_slots() -> None:
    for rows, changed in ((1, 0), (CHUNK_ROWS, 0), (3 * CHUNK_ROWS, 0), (3 * CHUNK_ROWS, 50)):
        moment, slots = everything(rows, changed)
        assert read(moment) == sorted(slots, key=attrgetter("revision"))
        assert read(moment) == read(moment)


def test_chunks_are_left_as_they_are() -> None:
    moment, slots = everything(2 * CHUNK_ROWS, 100)
    read(moment)
    chunks = [chunk for chunk, _ in moment._parts]
    assert len(chunks[1].rows) == chunks[1].live == CHUNK_ROWS
    assert [row for chunk in chunks for row in chunk.live_rows()] == slots


def test_a_portion_is_small() -> None:
    moment, slots = everything(3 * CHUNK_ROWS, 100)
    portions = list(moment.portions())
    assert max(map(len, portions)) <= PORTION_ROWS
    assert sum(map(len, portions)) == len(slots)


def test_rows_that_are_not_meant_are_left_out() -> None:
    moment, slots = everything(CHUNK_ROWS, 20)
    odd = Moment(moment.revision, moment._parts, lambda row: row.revision % 2 == 1)
    expected = sorted((row for row in slots if row.revision % 2), key=attrgetter("revision"))
    assert read(odd) == expected
    assert read(Moment(moment.revision, moment._parts, lambda row: False)) == []
    assert read(Moment(5, [])) == []
