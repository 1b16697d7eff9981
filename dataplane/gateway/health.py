"""What a gateway says of its health: that it serves, as long as the plane behind it answers.

Owns the question to the plane, and how many may watch the answer: nobody is asked who he is for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health as untyped_health
from grpc_health.v1 import health_pb2

from dataplane.client.aio import AsyncClient
from dataplane.client.tags import present
from dataplane.errors import DataplaneError, PlaneLost
from dataplane.gateway.service import NAME

log = logging.getLogger("dataplane.gateway")

LOOK_S: Final = 1.0
"""Between two looks at the plane."""
ANSWER_S: Final = 5.0
"""How long it may take to answer."""
MAX_WATCHERS: Final = 64

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES: Final = ("", NAME)


class Health:
    """gRPC's health service, of one gateway."""

    def __init__(self, reader: AsyncClient) -> None:
        self._reader = reader
        self._told: Any = cast("Any", untyped_health).aio.HealthServicer()
        self._watchers = 0
        self.serving = False
        self.gone = asyncio.Event()
        """Set when the plane is gone for good."""

    async def Check(self, request: Any, context: Any) -> Any:
        return await self._told.Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already: use Check"
            )
        self._watchers += 1
        try:
            await self._told.Watch(request, context)
        finally:
            self._watchers -= 1

    async def List(self, request: Any, context: Any) -> Any:
        told = health_pb2.HealthCheckResponse(status=SERVING if self.serving else NOT_SERVING)
        # Older versions have neither this call nor its messages.
        answer: Any = cast("Any", health_pb2).HealthListResponse
        return answer(statuses=dict.fromkeys(SERVICES, told))

    async def say(self, *, serving: bool) -> None:
        """Tell whether it serves."""
        self.serving = serving
        for service in SERVICES:
            await self._told.set(service, SERVING if serving else NOT_SERVING)

    async def end(self) -> None:
        """Tell that it serves no more, whatever comes."""
        self.serving = False
        await self._told.enter_graceful_shutdown()

    async def follow(self) -> None:
        """Ask the plane again and again, until it is gone."""
        while True:
            try:
                await self._reader.run(present, ANSWER_S)
                serves = True
            except PlaneLost as error:
                log.info("the plane is gone: %s", error)
                await self.say(serving=False)
                self.gone.set()
                return
            except DataplaneError as error:
                if self.serving:
                    log.warning("the plane does not answer: %s", error)
                serves = False
            if serves != self.serving:
                await self.say(serving=serves)
            await asyncio.sleep(LOOK_S)
