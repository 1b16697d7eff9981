"""The call that takes typed trajectories: PutTrajectories.

Owns what happens to them once they are checked: those that are right are one put, under the
request's number; each of the others goes to quarantine by the gateway's own client, under a key
that the request makes. So one that comes again adds no row of either kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.put import put_block
from dataplane.codec import objects
from dataplane.codec.foreign import Buffer, Foreign, block_of
from dataplane.codec.shapes import MAX_ROWS, MAX_SIZE, OBJECT, Column
from dataplane.codec.tags import pack_tags_many
from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QuotaExceeded,
    SchemaMismatch,
)
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import flags_of, revision_to
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.producers import check_client_id, plane_client_id
from dataplane.gateway.service import Handler
from dataplane.gateway.trajectory.ingest import Ingested, Refused, ingest
from dataplane.gateway.trajectory.quarantine import Quarantined, quarantined
from dataplane.gateway.trajectory.sequences import IngestRules
from dataplane.protocol.cells import cells_of
from dataplane.types import KVBatchMeta, Quota, Revision
from dataplane.v1 import dataplane_pb2 as pb

INLINE_BYTES: Final = 64 << 10
"""Requests of fewer bytes are checked on the event loop, larger ones in a thread."""
QUARANTINE_S: Final = 5.0
"""How long room in a quarantine is waited for: the reason is told all the same."""
LOOK_AGAIN_S: Final = 10.0
"""A quarantine is taken to be there for so long: one that was dropped is made with its quota."""

NOT_KEPT: Final = (QuotaExceeded, InvalidRequest, SchemaMismatch)
"""What keeps a trajectory out of quarantine without a fault: it is full, sealed, or used for
something else."""


class Trajectories:
    """PutTrajectories."""

    def __init__(self, config: GatewayConfig, wall: Callable[[], float] = time.time) -> None:
        """`wall`: seconds since 1970."""
        self._longest_s = config.max_call_s
        self._rules = IngestRules(config.vocab_size, config.max_tokens)
        self._quota = Quota(bytes=config.quarantine_bytes, rows=config.quarantine_rows)
        self._wall = wall
        self._seen: dict[str, float] = {}
        """When each quarantine was there, on the clock of the event loop."""
        self._making = asyncio.Lock()
        self.quarantined = 0
        """Trajectories that are kept in quarantine, or were once."""
        self.unkept = 0
        """Those that were refused, and which no quarantine took."""
        self.handlers: dict[str, Handler] = {"PutTrajectories": self.put}

    async def put(
        self, request: pb.PutTrajectoriesRequest, call: Call
    ) -> pb.PutTrajectoriesResponse:
        """Write those that are right, at one revision; what became of each."""
        call.require("put", request.partition_id)
        call.check_plane(request.request.plane_id)
        check_client_id(request.request.client_id)
        if not 0 < len(request.trajectories) <= MAX_ROWS:
            raise InvalidRequest(
                f"a request brings 1 to {MAX_ROWS} trajectories, not {len(request.trajectories)}"
            )
        flags = flags_of(request.mode, return_tags=False, request=request.request)
        found, block = await self._checked(request, call)
        revision = await self._write(request, found, block, flags, call)
        response = pb.PutTrajectoriesResponse(revision=revision_to(revision))
        results = [pb.TrajectoryResult() for _ in request.trajectories]
        for key, index in zip(found.keys, found.indices, strict=True):
            results[index].key = key
        if found.refused:
            for one, kept in zip(
                found.refused, await self._quarantine(request, found.refused, call), strict=True
            ):
                results[one.index].CopyFrom(kept)
        response.results.extend(results)
        return response

    # -- those that are right ----------------------------------------------------------------

    async def _checked(
        self, request: pb.PutTrajectoriesRequest, call: Call
    ) -> tuple[Ingested, Foreign | None]:
        """What they are, and the block of those that are right."""
        nbytes = request.ByteSize()
        wait_s = call.throttle.bytes(nbytes)
        if wait_s:
            await asyncio.sleep(wait_s)

        def work() -> tuple[Ingested, Foreign | None]:
            found = ingest(request.trajectories, self._rules, attempt=request.attempt)
            if request.all_or_nothing:
                found.check_whole()
            call.require("put", request.partition_id, found.fields)
            return found, _block(found) if found.fields else None

        if nbytes < INLINE_BYTES:
            return work()
        call.throttle.hold(nbytes)
        try:
            return await asyncio.to_thread(work)
        finally:
            call.throttle.let_go(nbytes)

    async def _write(
        self,
        request: pb.PutTrajectoriesRequest,
        found: Ingested,
        block: Foreign | None,
        flags: int,
        call: Call,
    ) -> Revision | None:
        if not found.keys:
            return None
        packed = pack_tags_many(found.tags)

        def verb(core: Core, deadline: float) -> Verb[KVBatchMeta]:
            return put_block(
                core, found.keys, request.partition_id, block, packed, found.tags, flags, deadline,
                request.attempt or None,
            )  # fmt: skip

        async with call.asking(request.request) as client:
            return (await client.run(verb, call.timeout(self._longest_s))).revision

    # -- the others --------------------------------------------------------------------------

    async def _quarantine(
        self, request: pb.PutTrajectoriesRequest, refused: Sequence[Refused], call: Call
    ) -> list[pb.TrajectoryResult]:
        """Keep those that are not right for people to look at; what is said of each."""
        rows = quarantined(
            refused,
            request.trajectories,
            partition_id=request.partition_id,
            principal=call.principal.name,
            client=plane_client_id(call.principal.name, request.request.client_id),
            number=request.request.number,
            received_at_s=self._wall(),
        )
        try:
            await self._keep(rows, call)
        except (*NOT_KEPT, DeadlineExceeded) as error:
            if isinstance(error, DeadlineExceeded):
                call.timeout(QUARANTINE_S)  # its caller's own deadline, or that of this put only
            self.unkept += len(refused)
            note = f" (and it could not be kept in quarantine: {type(error).__name__})"
            return [pb.TrajectoryResult(reason=one.reason + note) for one in refused]
        self.quarantined += len(refused)
        return [
            pb.TrajectoryResult(key=key, quarantine=rows.partition_id, reason=one.reason)
            for key, one in zip(rows.keys, refused, strict=True)
        ]

    async def _keep(self, rows: Quarantined, call: Call) -> None:
        await self._make(rows.partition_id, call)
        await call.reader.kv_batch_put(
            rows.keys, rows.partition_id, rows.fields, rows.tags, timeout=call.timeout(QUARANTINE_S)
        )

    async def _make(self, name: str, call: Call) -> None:
        """Make the quarantine with its quota, unless somebody did, who may have set another."""
        now = asyncio.get_running_loop().time
        async with self._making:
            if now() - self._seen.get(name, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
                return
            there = await call.reader.kv_list_partitions(timeout=call.timeout(QUARANTINE_S))
            if name not in there:
                await call.reader.kv_create_partition(
                    name, quota=self._quota, timeout=call.timeout(QUARANTINE_S)
                )
            self._seen[name] = now()


def _block(found: Ingested) -> Foreign:
    """The rows as a block of the store; nothing is copied but objects, which are packed."""
    columns: list[Column] = []
    lengths: list[npt.NDArray[np.int32]] = []
    pieces: list[Buffer] = []
    for name, values in found.fields.items():
        if isinstance(values[0], np.ndarray):
            cells = cells_of(found.keys, {name: values})
            columns.extend(cells.shape.columns)
            lengths.extend(cells.shape.lengths)
            pieces.extend(cells.pieces)
            continue
        packed = list(map(objects.pack, values))
        sizes = [len(row) for row in packed]
        if max(sizes) >= MAX_SIZE:
            raise InvalidRequest(f"field {name!r}: an object of {max(sizes)} bytes is too large")
        columns.append(Column(name, OBJECT, 0, (-1,)))
        lengths.append(np.array(sizes, np.int32))
        pieces.extend(packed)
    return block_of(columns, np.stack(lengths), len(found.keys), pieces)
