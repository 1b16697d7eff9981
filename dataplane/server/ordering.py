"""The first rows of a partition by a tag: a walk that keeps no more than it may still need."""

from __future__ import annotations

from dataplane.errors import InvalidRequest
from dataplane.server.slices import Slices, WorstSlice
from dataplane.tags.claims.queues import Order
from dataplane.tags.claims.ready import Key
from dataplane.tags.partition import Partition
from dataplane.tags.query import Predicate
from dataplane.tags.rows import Row

MAX_ORDERED = 1000
"""Rows that are put in order: sorting them holds the loop."""
STEP = 256


def parse_order(since: object, limit: object, order_by: object) -> Order:
    """The order that a listing asks for. InvalidRequest says what does not go together."""
    if since is not None:
        raise InvalidRequest("a listing since a revision has the order of the rows: no order_by")
    if type(limit) is not int or not 0 <= limit <= MAX_ORDERED:
        raise InvalidRequest(
            f"order_by goes with a limit of at most {MAX_ORDERED} rows, not {limit!r:.80}"
        )
    return Order.parse(order_by)


async def first_rows(
    partition: Partition, predicate: Predicate, order: Order, limit: int, worst: WorstSlice
) -> list[Row]:
    """The first so many rows that match, in an order, all of one moment."""
    slices = Slices(worst)
    best: list[tuple[Key, Row]] = []
    last: Key | None = None
    """Where the last of enough rows stands: what comes after it is passed over."""
    for chunk in partition.slots.cut() if limit else ():
        rows = chunk.live_rows()
        for at in range(0, len(rows), STEP):
            part = rows[at : at + STEP]
            if not predicate.matches_all:
                part = [row for row in part if predicate(row.tags)]
            for row in part if last is None else _not_beyond(part, order, last):
                place = order.key(row)
                if last is None or place < last:
                    best.append((place, row))
            if len(best) >= 2 * limit + STEP:
                best.sort(key=_place)
                del best[limit:]
                last = best[-1][0]
            await slices.breathe()
    best.sort(key=_place)
    return [row for _, row in best[:limit]]


def _not_beyond(rows: list[Row], order: Order, last: Key) -> list[Row]:
    """Rows without those that come after a place for sure: of a million most do, and a look at the
    number says so."""
    kind, bound = last[0], last[1]
    if kind != 0 or order.tag is None:
        return rows
    tag, numbers = order.tag, (int, float)
    if order.descending:
        bound = -bound
        return [
            row
            for row in rows
            if (value := row.tags.get(tag)).__class__ not in numbers or not value < bound
        ]
    return [
        row
        for row in rows
        if (value := row.tags.get(tag)).__class__ not in numbers or not value > bound
    ]


def _place(entry: tuple[Key, Row]) -> Key:
    return entry[0]
