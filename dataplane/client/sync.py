"""The blocking client. Thread-safe: each call takes a connection of its own from a pool.

After a fork the child's copy is a new client: it closes what it inherited, without a word on the
wire, and connects again when it is used. Its torch runs with one thread from then on.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from dataplane.client.attendance import Attendance
from dataplane.client.connection import Connection, connect
from dataplane.client.control import Control
from dataplane.client.core import Core, Joined, StoreView, settle_in_child
from dataplane.client.effects import Ask, Done, Hold, Open, Pause, Run, Tell, Verb
from dataplane.client.get import GetOptions, Layout, Pad, get_batch
from dataplane.client.inspector import Inspector
from dataplane.client.pins import Pins
from dataplane.client.put import flags_of, put_batch, put_row
from dataplane.client.results import Listing, Rows
from dataplane.client.retry import ask_again
from dataplane.client.tags import Where, clear_rows, list_rows, plane_status
from dataplane.client.view import view_batch
from dataplane.config import Config
from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PlaneLost,
    Unreachable,
)
from dataplane.types import KVBatchMeta, Revision
from dataplane.wire.address import Address

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Result = TypeVar("Result")
Fields = Mapping[str, object]

MAX_IDLE = 64
"""Connections kept per server; threads beyond that connect anew."""


class Client(Control, Inspector):
    """A client of one plane, for threads. `AsyncClient` has the same verbs as coroutines.

    Every verb takes `timeout` in seconds; None means the configured default. At the deadline a
    verb raises DeadlineExceeded, and it may be repeated: a put has one effect however often its
    request travels.
    """

    def __init__(
        self,
        joined: Joined,
        config: Config | None = None,
        *,
        on_close: Callable[[bool], None] | None = None,
    ) -> None:
        self._core = Core(joined, config or Config())
        self._on_close = on_close
        self._default_s = self._core.config.timeout_s
        self._idle: dict[Address, deque[Connection]] = {}
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._pins = Pins(self._connect)
        self._attendance = _attendance_of(self)
        self._closed = False
        _clients.add(self)

    # -- verbs -------------------------------------------------------------------------------

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Fields | None = None,
        tags: Mapping[str, object] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Write one row's fields and tags at one revision; all of it or nothing.

        Tags merge into those the key has; fields replace those of the same name. With `attempt` (of
        `begin_group`) the row becomes one of that group, and draws on its room. A value is a
        tensor or array of any rank, or a Python value (str, bytes, numbers, None, lists, maps).
        Names of tags that begin with `dataplane.` are the plane's own.

        Raises:
            SchemaMismatch: a field has another dtype or rank than its first write fixed.
            ValueLost: fields for a row that is lost (it has the tag `dataplane.lost`): clear it.
            KeyNotFound: `must_exist` and the key does not exist.
            AlreadyWritten: `if_absent` and it does.
            StaleWrite: the key was cleared after this put began, or `attempt` is not open.
            QuotaExceeded: no room came free in time. After any error nothing was written.
        """
        flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
        deadline = self._deadline(timeout)
        return self._drive(
            put_row(self._core, key, partition_id, fields, tags, flags, deadline, attempt), deadline
        )

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Mapping[str, object] | Sequence[Mapping[str, object]] | TensorDict | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Write many rows at one revision; all of them or none. At most 65,536 keys, each once.

        `fields` is a mapping of columns (a tensor or array with a leading dimension of the keys,
        a jagged nested tensor, or a list with one value per key), a list with one mapping per
        key, or a TensorDict. `tags` is one mapping per key. See `kv_put` for errors.
        """
        flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
        deadline = self._deadline(timeout)
        return self._drive(
            put_batch(self._core, keys, partition_id, fields, tags, flags, deadline, attempt),
            deadline,
        )

    def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        pad: Pad | Mapping[str, Pad] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        total: int | None = None,
        trim: Mapping[str, tuple[int, int]] | None = None,
        on_missing: str = "raise",
        timeout: float | None = None,
    ) -> Rows:
        """Copies of rows, in the order of the keys and all of one moment.

        `select_fields` None takes every field that any of the keys has. `layout` is `nested`
        (jagged tensors), `padded` (dense, filled with `pad` or the field's own padding value),
        `list` (a tensor per row) or `packed` (rows joined, with cumulative lengths; `total`
        fixes the joined length, `out` names tensors to write into, `trim` cuts (head, tail)
        entries of each row of a field). The kind of container follows from the field's schema,
        never from the rows.

        Raises:
            KeyNotFound, ValueLost, FieldNotFound: naming all that is missing, or gone with a value
                store; with `on_missing="drop"` those keys are left out instead.
        """
        options = GetOptions(layout, pad, out, total, trim)
        deadline = self._deadline(timeout)
        return self._drive(
            get_batch(self._core, keys, partition_id, select_fields, options, on_missing, deadline),
            deadline,
        )

    @contextmanager
    def kv_view(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        timeout: float | None = None,
    ) -> Generator[Rows]:
        """Rows in place, without a copy, for as long as the context or any of its tensors lives.

        The tensors lie over a read-only mapping of the store: WRITING TO ONE KILLS THIS PROCESS
        (SIGSEGV). Clone what is to be changed. `nested` and `packed` need rows that lie side by
        side in this order, as a batch read back in its own order does; `list` takes any rows.
        """
        deadline = self._deadline(timeout)
        rows, close = self._drive(
            view_batch(self._core, keys, partition_id, select_fields, layout, deadline), deadline
        )
        try:
            yield rows
        finally:
            rows.fields = {}
            close()

    def kv_list(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        since: Revision | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        order_by: str | None = None,
        timeout: float | None = None,
    ) -> Listing:
        """The keys of a partition with tags, produced fields and row lengths, at one revision.

        `where` is a predicate over tags (see `dataplane.tags.where`). `since` takes the revision
        of an earlier listing: only rows that changed after it come back, and `cleared` names the
        keys that are gone; where history does not reach back that far, the listing is `full`.
        `columns` limits the tags, `limit` the rows. Changes that `limit` cut short carry `since`
        as their revision, so that following it loses nothing. `order_by` with `limit` gives the
        first rows by a tag (`"seq_len"`, `"-seq_len"` for the largest): numbers before texts
        before rows without it.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            list_rows(self._core, partition_id, where, since, columns, limit, deadline, order_by),
            deadline,
        )

    def kv_clear(
        self,
        keys: Sequence[str] | None,
        partition_id: str,
        *,
        where: Where | None = None,
        retire: bool = False,
        until: Revision | None = None,
        timeout: float | None = None,
    ) -> int:
        """Remove rows, tags and values, at one revision; how many there were.

        With `keys` None, all rows that match `where`. Keys that do not exist are no error. With
        `retire` the open attempts of the groups that are cleared are closed at the same revision:
        what their producers still put is StaleWrite. With `until` (the revision of an earlier
        answer) rows that changed after it stay: what was looked at is what is cleared.
        """
        deadline = self._deadline(timeout)
        return self._drive(
            clear_rows(self._core, keys, partition_id, where, retire, deadline, until), deadline
        )

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Sizes of the plane: partitions, bytes in use, value stores, clients, history; and under
        `waiting` how many requests wait for rows (or changes), claims, room under a quota, and
        partitions that are not there yet. Those that wait for room in a value store are in what
        that store says."""
        deadline = self._deadline(timeout)
        return self._drive(plane_status(self._core, deadline), deadline)

    # -- the plane ---------------------------------------------------------------------------

    @property
    def plane_id(self) -> str:
        """The random id of the plane that this client joined; it accepts no other."""
        return self._core.joined.plane_id

    @property
    def client_id(self) -> str:
        """The random id of this client; a forked child has another one."""
        return self._core.client_id

    @property
    def name(self) -> str:
        """The name under which the plane was joined."""
        return self._core.joined.name

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def revision(self) -> Revision:
        """The latest revision that this client has seen."""
        return self._core.seen

    def attach(self, *, timeout: float | None = None) -> None:
        """Connect to the plane now rather than with the first verb.

        From here on the plane knows this client: one that is hosted by Ray does not end for want
        of clients. PlaneLost if the plane is gone.
        """
        self._give_back(self._take(None, self._deadline(timeout)))

    def close(self, destroy: bool = False) -> None:
        """Let go of the plane; with `destroy` end it, for all of its clients. Repeatable."""
        if self._closed:
            return
        try:
            if destroy:
                deadline = self._deadline(5.0)
                try:
                    self._drive(ask_again(self._core, "destroy", [], deadline), deadline)
                except (PlaneLost, Unreachable, DeadlineExceeded):
                    pass  # it is gone already
        finally:
            self._closed = True
            # Connections in use are closed by the calls that use them: the end of one ends a
            # reservation, and a thread may still be copying into it.
            for pool in self._idle.values():
                while pool:
                    pool.pop().close()
            self._attendance.close()
            self._attendance.join()
            self._pins.close()
            for store in self._core.stores.values():
                if store.mappings is not None:
                    store.mappings.close()
            if self._core.spans is not None:
                self._core.spans.close()
            if self._on_close is not None:
                self._on_close(destroy)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client(plane {self.name!r} {self.plane_id}, {self._core.tags})"

    def __reduce__(self) -> Any:
        raise TypeError("a client does not travel; connect() in the other process instead")

    def _stay_attached(self) -> None:
        self._attendance.begin()

    # -- driving verbs -----------------------------------------------------------------------

    def run(
        self, verb: Callable[[Core, float], Verb[Result]], timeout: float | None = None
    ) -> Result:
        """The result of a verb that is made of others' steps: how another face of the plane is
        built. `verb` is given this client's core and the deadline."""
        deadline = self._deadline(timeout)
        return self._drive(verb(self._core, deadline), deadline)

    def _deadline(self, timeout: float | None) -> float:
        if timeout is None:
            return time.monotonic() + self._default_s
        if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise InvalidRequest(f"timeout is a positive number of seconds, not {timeout!r:.80}")
        return time.monotonic() + timeout

    # What it yields is an Effect, as Any: by its type alone each is told from the others.
    def _drive(self, verb: Generator[Any, Any, Result], deadline: float) -> Result:
        if self._closed:
            raise PlaneLost("this client was closed; connect again")
        if Core.meter is not None:
            verb = Core.meter.measured(verb)
        send = verb.send
        value: Any = None
        try:
            effect: Any = send(None)
            while True:
                try:
                    kind = effect.__class__
                    if kind is Ask:
                        at, name, body, payload, size, into = effect
                        if type(at) is Connection:
                            value = at.call(name, body, deadline, payload, size, into)
                        else:
                            connection = self._take(at, deadline)
                            try:
                                value = connection.call(name, body, deadline, payload, size, into)
                            finally:
                                self._give_back(connection)
                    elif kind is Open:
                        value = self._take(effect.store, deadline)
                    elif kind is Done:
                        value = self._give_back(effect.lane)
                    elif kind is Run:
                        value = effect.work()
                    elif kind is Tell:
                        value = effect.lane.tell(effect.verb, effect.body, deadline)
                    elif kind is Hold:
                        value = self._pins.pin(effect.store, effect.blocks, deadline)
                    elif kind is Pause:
                        value = time.sleep(effect.seconds)
                except BaseException as error:
                    effect = verb.throw(error)
                else:
                    effect = send(value)
        except StopIteration as end:
            return end.value

    def _take(self, store: StoreView | None, deadline: float) -> Connection:
        """A connection that nobody else uses until it is given back."""
        address = self._core.tags if store is None else store.address
        pool = self._idle.get(address)
        if pool is None:
            pool = self._idle.setdefault(address, deque())
        try:
            connection = pool.pop()
        except IndexError:
            connection = self._connect(store, deadline)
            connection.pool = pool
        if store is not None and not store.probed:  # another store at this address was
            self._core.probe(store, connection.greeting)
        return connection

    def _give_back(self, connection: Connection) -> None:
        pool = connection.pool
        if connection.usable and not self._closed and len(pool) < MAX_IDLE:
            pool.append(connection)
            return
        ended = not connection.usable
        connection.close()
        if ended:
            # What ended it has most likely ended others: a verb should not meet them one by one.
            for _ in range(len(pool)):
                try:
                    idle = pool.popleft()
                except IndexError:  # other threads take from it too
                    return
                if idle.is_quiet():
                    pool.append(idle)
                else:
                    idle.close()

    def _connect(self, store: StoreView | None, deadline: float) -> Connection:
        connection = connect(self._core, store, deadline)
        self._open.add(connection)
        return connection

    # -- fork --------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        """Become a new client in a forked child; what was inherited stays the parent's."""
        for connection in list(self._open):
            connection.close_in_child()
        self._open = weakref.WeakSet()
        self._idle = {}
        self._pins = Pins(self._connect)
        self._attendance = _attendance_of(self)
        self._core.new_identity()


def _attendance_of(client: Client) -> Attendance:
    """What keeps a client attached, and does not keep it from being collected."""
    reached = weakref.ref(client)

    def connect(store: StoreView | None, deadline: float) -> Connection:
        there = reached()
        if there is None:
            raise PlaneLost("the client is gone")
        return there._connect(store, deadline)  # pyright: ignore[reportPrivateUsage] (of this file)

    attendance = Attendance(connect)
    weakref.finalize(client, attendance.close)
    return attendance


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork() -> None:
    clients = list(_clients)
    for client in clients:
        client.close_in_child()
    if clients:
        settle_in_child()


os.register_at_fork(after_in_child=_after_fork)
