"""Queues: what a task may claim under one condition, in one order, and who waits for it. Pure.

A queue follows a view. Ready are the rows that match and that the task has neither committed nor
holds; of a condition about groups, the whole groups of which that is true of every row.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.tags.claims.ready import Key, Ready
from dataplane.tags.groups import Group
from dataplane.tags.rows import CHUNK_BITS, Row, Slots

if TYPE_CHECKING:
    from dataplane.tags.claims.leases import Granted
    from dataplane.tags.claims.shares import Rank
    from dataplane.tags.views.views import View

MAX_ORDER_BYTES = 1024
FILL_STEP = 256
"""Rows that are put in order in one step."""


class Order(NamedTuple):
    """In which order rows are offered: by revision, or by a tag and among equals by revision."""

    tag: str | None = None
    descending: bool = False

    @classmethod
    def parse(cls, order_by: object) -> Order:
        """`None`, the name of a tag, or that with a minus before it for the largest first."""
        if order_by is None:
            return cls()
        if type(order_by) is not str or not 0 < len(order_by) <= MAX_ORDER_BYTES:
            raise InvalidRequest(
                "order_by is a tag name, with a minus before it for the largest first, not "
                f"{order_by!r:.80}"
            )
        descending = order_by[0] == "-"
        tag = order_by[1:] if descending else order_by
        if not tag or not tag.isprintable():
            raise InvalidRequest(f"order_by names no tag: {order_by!r:.80}")
        return cls(tag, descending)

    @property
    def text(self) -> str | None:
        """What was parsed."""
        return None if self.tag is None else f"-{self.tag}" if self.descending else self.tag

    def key(self, row: Row) -> Key:
        """Where a row stands: numbers before texts before all that is in no order."""
        if self.tag is None:
            return (row.revision,)
        value: Any = row.tags.get(self.tag)
        kind = value.__class__
        if kind is int or (kind is float and not math.isnan(value)):
            return (0, -value if self.descending else value, row.revision)
        if kind is str:
            return (1, _Backwards(value) if self.descending else value, row.revision)
        return (2, 0, row.revision)


class _Backwards(str):
    """A text that comes before those it would come after."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)


class Ask:
    """One request for rows, while it waits."""

    __slots__ = ("client_id", "count", "fields", "lease_s", "number", "queue", "rank", "reply")

    def __init__(
        self,
        client_id: str,
        number: int,
        queue: Queue,
        count: int,
        fields: list[str],
        lease_s: float,
        rank: Rank | None,
        reply: Callable[[Granted | DataplaneError], None],
    ) -> None:
        self.client_id = client_id
        self.number = number
        """The same for all repetitions of the request."""
        self.queue = queue
        self.count = count
        """Rows or groups; of the whole batch, where it is asked for by rank."""
        self.fields = fields
        self.lease_s = lease_s
        self.rank = rank
        self.reply = reply

    @property
    def name(self) -> tuple[str, int]:
        """Tells it from all others."""
        return self.client_id, self.number


class Taken(Protocol):
    """What a task has taken already."""

    name: str

    def has(self, position: int) -> bool:
        """Whether the task has committed this row, or holds it."""
        ...


class Queue:
    """Follows a view as its subscriber."""

    def __init__(
        self, task: Taken, view: View, order: Order, slots: Slots, awake: dict[Queue, None]
    ) -> None:
        self.task = task
        self.view = view
        self.order = order
        self.ready = Ready()
        """Positions, or attempts of groups."""
        self.groups: dict[int, Group] = {}
        """The groups whose attempts are ready."""
        self.asks: OrderedDict[tuple[str, int], Ask] = OrderedDict()
        """Who waits, in the order in which they came."""
        self.complete = False
        """Whether everything that matched before it was made is in it."""
        self.users = 0
        """Requests that have it open."""
        self._slots = slots
        self._awake = awake
        self._unsettled: dict[Group, None] = {}
        """Groups that may be ready, or in another place. In the middle of a change a view can hold
        a group for whole that is about to go, so they are looked at when the change is done."""
        self._wanted = 0
        view.subscribers.append(self)

    @property
    def grouped(self) -> bool:
        """Whether it is about whole groups."""
        return self.view.condition.grouped

    @property
    def key(self) -> tuple[Any, Order]:
        """Tells it from the other queues of its task."""
        return self.view.condition, self.order

    # -- what is ready -----------------------------------------------------------------------

    def gained(self, position: int, row: Row, /) -> None:
        if self.grouped:
            group = row.account
            if type(group) is Group and group.attempt in self.ready:
                self.whole(group)
        elif not self.task.has(position):
            self.ready.put(position, self.order.key(row))
            self._stir()

    def lost(self, position: int, row: Row, /) -> None:
        if not self.grouped:
            self.ready.discard(position)

    def whole(self, group: Group, /) -> None:
        self._unsettled[group] = None
        self._awake[self] = None

    def broken(self, group: Group, /) -> None:
        self.ready.discard(group.attempt)
        self.groups.pop(group.attempt, None)
        self._unsettled.pop(group, None)

    def settle(self) -> None:
        """Look at the groups that a change concerned."""
        for group in self._unsettled:
            if not any(map(self.task.has, group.positions)):
                self.ready.put(group.attempt, self._place_of(group))
                self.groups[group.attempt] = group
        self._unsettled.clear()

    def fill(self) -> Iterator[None]:
        """Take in what its view, which is complete, knew before; step by step."""
        if self.grouped:
            for group in list(self.view.whole):
                self.offer_group(group)
                self.settle()
                yield
        else:
            for number, offsets in list(self.view.matching.items()):
                for step, offset in enumerate(sorted(offsets), 1):
                    position = (number << CHUNK_BITS) + offset
                    if position not in self.ready:  # a scan may have told of it
                        self.offer(position)
                    if not step % FILL_STEP:
                        yield
                yield
        self.complete = True
        self.look()

    def withhold(self, position: int, row: Row) -> None:
        """The task takes a row: it is not ready any more, nor is its group."""
        if not self.grouped:
            self.ready.discard(position)
        elif type(row.account) is Group:
            self.broken(row.account)

    def offer(self, position: int) -> None:
        """The task has let go of a row."""
        row = self._slots.at(position)
        if type(row) is not Row or self.task.has(position) or not self.matches(position):
            return
        if type(row.account) is Group and self.grouped:
            self.offer_group(row.account)
        else:
            self.ready.put(position, self.order.key(row))
            self._stir()

    def offer_group(self, group: Group) -> None:
        """The task may have let go of the last row of a group."""
        if group in self.view.whole:
            self.whole(group)

    def draw(self, count: int) -> list[list[int]]:
        """Take out the first so many rows, or groups: the positions of each, which `offer` puts
        back. A group's are in the order of its sessions."""
        numbers = [self.ready.pop() for _ in range(count)]
        if not self.grouped:
            return [[position] for position in numbers]
        return [self._sessions(self.groups.pop(attempt)) for attempt in numbers]

    def take(self, positions: Sequence[int]) -> list[int]:
        """Take out those of these rows that are ready, with their groups if it is about groups."""
        if not self.grouped:
            single = [position for position in positions if position in self.ready]
            for position in single:
                self.ready.discard(position)
            return single
        self.settle()
        groups: dict[int, None] = {}
        for position in positions:
            row = self._slots.at(position)
            group = row.account if type(row) is Row else None
            if type(group) is Group and group.attempt in self.ready:
                groups[group.attempt] = None
        taken: list[int] = []
        for attempt in groups:
            group = self.groups[attempt]
            self.broken(group)
            taken += self._sessions(group)
        return taken

    def matches(self, position: int) -> bool:
        """Whether a row would be ready if the task had not taken it."""
        row = self._slots.at(position)
        if type(row) is not Row:
            return False
        if self.grouped:
            return row.account in self.view.whole
        offsets = self.view.matching.get(position >> CHUNK_BITS)
        return offsets is not None and position & _OFFSET in offsets

    def _place_of(self, group: Group) -> Key:
        """A group stands where the first of its rows would."""
        return min([self.order.key(self._row(position)) for position in group.positions])

    def _sessions(self, group: Group) -> list[int]:
        return sorted(group.positions, key=lambda at: (_in_session(self._row(at)), at))

    def _row(self, position: int) -> Row:
        row = self._slots.at(position)
        assert type(row) is Row
        return row

    # -- who waits ---------------------------------------------------------------------------

    def enter(self, ask: Ask) -> None:
        """One more who waits."""
        self.asks[ask.name] = ask
        self.look()

    def leave(self, ask: Ask) -> None:
        """One who was answered, or waits no longer."""
        self.asks.pop(ask.name, None)
        self.look()

    def first(self) -> Ask | None:
        """Who has waited longest."""
        return next(iter(self.asks.values()), None)

    def look(self) -> None:
        """Who is the first may have changed, or what can come."""
        first = self.first()
        self._wanted = 0 if first is None else first.count
        if first is not None:
            self._awake[self] = None

    def _stir(self) -> None:
        if self._wanted and len(self.ready) >= self._wanted and self.complete:
            self._awake[self] = None


_OFFSET = (1 << CHUNK_BITS) - 1


def _in_session(row: Row) -> tuple[int, int, int, int]:
    """The place of a trajectory in its group: by session and index, where it says them."""
    session, index = row.tags.get("session_id"), row.tags.get("index")
    if type(session) is not int:
        return 1, 0, 0, row.revision
    return 0, session, index if type(index) is int else 0, row.revision
