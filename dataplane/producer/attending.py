"""Keeps a producer present while it holds claims and does not ask for anything."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dataplane.errors import DataplaneError, PlaneLost
from dataplane.producer.transport import Transport
from dataplane.types import Claim
from dataplane.v1 import dataplane_pb2 as pb

log = logging.getLogger("dataplane.producer")

STREAM_S: Final = 3600.0
"""A stream of so long is followed by another."""
PAUSE_S: Final = 0.5
"""Before a stream that broke off is begun again; leases last many times as long."""


class Attending:
    """A stream to the gateway that is there while claims are held. Of one event loop."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: set[tuple[str, str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    def hold(self, claim: Claim) -> None:
        """A claim was granted."""
        if not claim.keys:
            return
        self._held.add(_name(claim))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._attend())

    def let_go(self, claim: Claim) -> None:
        """A claim was committed, released or lost."""
        self._held.discard(_name(claim))
        if not self._held and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Be present no longer."""
        self._held.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _attend(self) -> None:
        transport = self._transport
        while True:
            message = pb.AttendRequest(client_id=transport.client_id, plane_id=transport.plane_id)
            try:
                async for _ in transport.stream("Attend", message, STREAM_S):
                    pass
            except PlaneLost:
                return
            except DataplaneError as error:
                log.debug("not present for a moment: %s", error)
            await asyncio.sleep(PAUSE_S)


def _name(claim: Claim) -> tuple[str, str, int]:
    return claim.partition_id, claim.task, claim.claim_id
