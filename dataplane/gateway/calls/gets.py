"""GetRows: rows on their way out, a chunk at a time.

Owns the memory of a get, which is found before the bytes are fetched and given back when they have
gone; and how long it is waited for a receiver who takes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dataplane.client.get import TRIES, vanished
from dataplane.client.raw import Read, look_up, read
from dataplane.codec.shapes import OBJECT, Column
from dataplane.errors import InvalidRequest
from dataplane.gateway.calls.arguments import keys_of, names_of, revision_to
from dataplane.gateway.calls.budget import Budget, room_for
from dataplane.gateway.calls.objects import INLINE_BYTES, sent_rows
from dataplane.gateway.calls.patience import Patience
from dataplane.gateway.config import GatewayConfig
from dataplane.protocol.cells import Shape, shape_of
from dataplane.protocol.chunks import chunks_of
from dataplane.v1 import dataplane_pb2 as pb

if TYPE_CHECKING:
    from dataplane.client.core import Core
    from dataplane.client.effects import Verb
    from dataplane.client.memory import Bytes
    from dataplane.client.reading import FieldRows, ReadPlan
    from dataplane.gateway.call import Call
    from dataplane.gateway.service import Handler

OBJECT_FACTOR: Final = 4
"""How many times larger objects may be outside than in the store."""


class Gets:
    """GetRows."""

    def __init__(
        self, config: GatewayConfig, budget: Budget, translating: asyncio.Semaphore
    ) -> None:
        """`translating`: held while objects are made of others, of which there is room for one."""
        self._config = config
        self._budget = budget
        self._translating = translating
        self._patience = Patience(config.stall_s)
        self.handlers: dict[str, Handler] = {"GetRows": self.get_rows}

    async def get_rows(
        self, message: pb.GetRowsRequest, call: Call
    ) -> AsyncGenerator[pb.GetRowsResponse | bytes]:
        """See the protocol's GetRows."""
        partition_id = message.partition_id
        fields = names_of(message.fields, "fields")
        call.require("read", partition_id, fields)
        if len(set(fields)) != len(fields):
            raise InvalidRequest("a get names each field once")
        if not message.keys:
            yield pb.GetRowsResponse(header=pb.GetRowsHeader())
            return
        found = await self._found(message, call)
        try:
            shape, pieces = await self._sent(found)
            header = pb.GetRowsHeader(
                revision=revision_to(found.plan.revision),
                keys=found.plan.keys,
                columns=shape.to_columns(),
                total_bytes=shape.nbytes,
            )
            taking = self._patience.watch(call.context)
            try:
                taking.wait()
                yield pb.GetRowsResponse(header=header)
                for chunk in chunks_of(pieces, self._config.chunk_bytes):
                    wait_s = call.throttle.bytes(len(chunk))
                    if wait_s:
                        taking.rest()
                        await asyncio.sleep(wait_s)
                    taking.wait()
                    yield chunk
            finally:
                taking.rest()
        finally:
            found.release()

    async def _found(self, message: pb.GetRowsRequest, call: Call) -> _Found:
        """The rows' bytes, with room for them."""
        keys, fields = keys_of(message.keys, unique=False), list(message.fields) or None
        partition_id = message.partition_id
        gone: list[int] = []
        tries = 0
        while True:
            plan = await call.reader.run(
                lambda core, deadline: look_up(
                    core, keys, partition_id, fields, message.drop_missing, deadline
                ),
                call.timeout(self._config.max_call_s),
            )
            call.require("read", partition_id, [rows.name for rows in plan.fields])
            release = await room_for(self._budget, call, self._size(plan), self._config.max_call_s)
            try:
                found = await call.reader.run(
                    partial(_read, plan), call.timeout(self._config.max_call_s)
                )
            except BaseException:
                release()
                raise
            if found.data is not None:
                return _Found(plan, found.data, release)
            release()
            if found.gone:
                gone = found.gone
                tries += 1
            if tries == TRIES:
                raise vanished(partition_id, plan, gone)

    def _size(self, plan: ReadPlan) -> int:
        """What rows take in memory. InvalidRequest if that is more than one get may bring."""
        nbytes = memory = 0
        for rows in plan.fields:
            size = int(rows.nbytes.sum())
            nbytes += size
            memory += size * (1 + OBJECT_FACTOR if rows.schema.dtype == OBJECT else 1)
        limit = self._config.max_get_bytes
        if nbytes > limit:
            raise InvalidRequest(
                f"these {len(plan.keys)} rows take {nbytes} bytes; this gateway sends {limit} at "
                "once (max_get_bytes): ask for fewer keys or fields"
            )
        return memory

    async def _sent(self, found: _Found) -> tuple[Shape, list[memoryview | bytes]]:
        """The rows as they are sent."""
        plan = found.plan
        nbytes = sum(
            len(data)
            for rows, data in zip(plan.fields, found.data, strict=True)
            if rows.schema.dtype == OBJECT
        )
        if nbytes < INLINE_BYTES:
            return _laid_out(plan, found.data)
        async with self._translating:
            return await asyncio.to_thread(_laid_out, plan, found.data)


def _read(plan: ReadPlan, core: Core, deadline: float) -> Verb[Read]:
    return read(core, plan, deadline)


class _Found:
    """Rows that were read, and the room that they take."""

    __slots__ = ("data", "plan", "release")

    def __init__(self, plan: ReadPlan, data: list[Bytes], release: Callable[[], None]) -> None:
        self.plan = plan
        self.data = data
        self.release = release


def _laid_out(plan: ReadPlan, data: list[Bytes]) -> tuple[Shape, list[memoryview | bytes]]:
    """What rows look like to a producer, and their bytes in order."""
    columns: list[Column] = []
    lengths: list[npt.NDArray[np.int32]] = []
    pieces: list[memoryview | bytes] = []
    for rows, buffer in zip(plan.fields, data, strict=True):
        if rows.schema.dtype == OBJECT:
            sent = sent_rows(rows.name, plan.keys, rows.nbytes, buffer)
            columns.append(Column(rows.name, OBJECT, 0, (-1,)))
            lengths.append(np.array([len(row) for row in sent], np.int32))
            pieces.extend(sent)
        else:
            column = _column(rows)
            columns.append(column)
            lengths.extend(rows.shape[:, dim] for dim in column.free)
            pieces.append(buffer.data)
    count = len(plan.keys)
    joined = np.stack(lengths) if lengths else np.empty((0, count), np.int32)
    return shape_of(columns, joined, count), pieces


def _column(rows: FieldRows) -> Column:
    """A field with the sizes that all of its rows have; the ragged dimension differs whatever the
    rows happen to be."""
    name, schema = rows.name, rows.schema
    dims = [
        -1
        if dim == schema.ragged_dim or not _is_one(rows.shape[:, dim])
        else int(rows.shape[0, dim])
        for dim in range(schema.rank)
    ]
    return Column(name, schema.dtype, schema.ragged_dim, tuple(dims))


def _is_one(sizes: npt.NDArray[np.int32]) -> bool:
    return bool(len(sizes)) and bool((sizes == sizes[0]).all())
