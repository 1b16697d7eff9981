"""A gateway on a thread, for callers that block."""

from __future__ import annotations

import asyncio
import threading

from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from tests.faults.planes import Plane


class Serving:
    """A gateway that serves for the length of a block."""

    def __init__(self, plane: Plane, config: GatewayConfig) -> None:
        self._plane = plane
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: GatewayServer | None = None

    @property
    def address(self) -> str:
        """Where producers reach it."""
        assert self._server is not None
        return self._server.addresses[0]

    def __enter__(self) -> Serving:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None
        self._run(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _start(self) -> None:
        self._server = GatewayServer(self._plane.joined, self._config, self._plane.config)
        await self._server.start()

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]
