"""The calls of consumers: Claim, Commit, Release, and Attend, by which one is simply there.

A consumer's client here stays connected to the plane as long as it has a call under way, and a
while longer, so the terms of its leases do not run. What was granted and cannot be handed over goes
back at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from dataplane.client.aio import AsyncClient
from dataplane.client.claims import Granted, claim_listing, give_back
from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import GRACE_S
from dataplane.client.tags import present
from dataplane.errors import DataplaneError
from dataplane.gateway.call import Call
from dataplane.gateway.calls.arguments import keys_of, names_of, revision_to, where_of
from dataplane.gateway.calls.listed import SPARE_BYTES, Listed
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.producers import claiming
from dataplane.gateway.service import Handler
from dataplane.types import Claim, KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb

log = logging.getLogger("dataplane.gateway")

LEASE_S: Final = 30.0
GIVE_BACK_S: Final = 10.0
"""How long it is tried to tell the tag store of a claim that is given back; the client's next claim
tells it too, and so does its end."""
MIN_BEAT_S: Final = 0.05


class Claiming:
    """Claim, Commit, Release and Attend."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._max_answer_bytes = config.max_message_bytes - SPARE_BYTES
        self._beat_s = max(config.absence_s / 4, MIN_BEAT_S)
        """Seconds between two answers of `Attend`."""
        self._giving: set[asyncio.Task[None]] = set()
        self.handlers: dict[str, Handler] = {
            "Claim": self.claim,
            "Commit": partial(self._end, "kv_commit", pb.CommitResponse),
            "Release": partial(self._end, "kv_release", pb.ReleaseResponse),
            "Attend": self.attend,
        }

    # -- claims ------------------------------------------------------------------------------

    async def claim(self, request: pb.ClaimRequest, call: Call) -> pb.ClaimResponse:
        """Rows of a task under a lease, as soon as there are enough."""
        call.require("claim", request.partition_id)
        where, fields = where_of(request), names_of(request.fields, "fields")
        replica: tuple[int, int, int] | None = None
        if request.HasField("replica"):
            its = request.replica
            replica = its.dp_rank, its.dp_size, its.batch_index

        def verb(core: Core, deadline: float) -> Verb[Granted]:
            return claim_listing(
                core,
                request.partition_id,
                request.task,
                request.count,
                fields,
                where,
                request.order_by or None,
                request.groups,
                request.lease_s or LEASE_S,
                replica,
                deadline - GRACE_S,
            )

        async with call.client(request.client_id, request.plane_id) as client:
            with claiming(request.number, request.abandoned):
                granted = await client.run(verb, call.timeout(self._longest_s) + GRACE_S)
            try:
                rows = await Listed(granted.listing).all(
                    self._max_answer_bytes, "claim fewer at a time; these were given back"
                )
                return pb.ClaimResponse(
                    claim_id=granted.claim_id,
                    revision=revision_to(granted.listing.revision),
                    rows=rows,
                    deliveries=granted.deliveries,
                    end=granted.end,
                )
            except BaseException:
                self._give_back(client, granted)
                raise

    def _give_back(self, client: AsyncClient, granted: Granted) -> None:
        if not granted.claim_id:
            return

        async def give() -> None:
            try:
                await client.run(
                    lambda core, deadline: give_back(core, granted.number, deadline), GIVE_BACK_S
                )
            except DataplaneError as error:
                log.info("a claim that nobody was handed was not given back yet: %s", error)

        task = asyncio.get_running_loop().create_task(give())
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def close(self) -> None:
        """Returns when nothing is being given back any more."""
        if self._giving:
            await asyncio.wait(set(self._giving))

    async def _end(
        self, verb: str, response: Any, request: pb.CommitRequest | pb.ReleaseRequest, call: Call
    ) -> Any:
        """Finish claimed rows, or give them back. ClaimLost names those that are not held."""
        call.require("claim", request.partition_id)
        if not request.claim_id:
            # The last claim of a partition holds nothing, and its end is asked of nobody.
            call.check_plane(request.request.plane_id)
            now = await call.reader.run(present, call.timeout(self._longest_s))
            return response(revision=revision_to(now))
        keys = keys_of(request.keys)
        meta = KVBatchMeta(request.partition_id, keys, [{} for _ in keys])
        claim = Claim(request.task, request.claim_id, meta, [1] * len(keys))
        async with call.asking(request.request) as client:
            ended: Revision = await getattr(client, verb)(
                claim, timeout=call.timeout(self._longest_s)
            )
        return response(revision=revision_to(ended))

    # -- attendance --------------------------------------------------------------------------

    async def attend(
        self, request: pb.AttendRequest, call: Call
    ) -> AsyncIterator[pb.AttendResponse]:
        """Beats now and then; meanwhile the client is here. Ends at the caller's deadline."""
        async with call.client(request.client_id, request.plane_id) as client:
            await client.attach(timeout=call.timeout(self._longest_s))
            loop = asyncio.get_running_loop()
            left: float | None = call.context.time_remaining()
            until = float("inf") if left is None else loop.time() + call.timeout(left)
            while loop.time() < until:
                yield pb.AttendResponse()
                await asyncio.sleep(min(self._beat_s, max(0.0, until - loop.time())))
