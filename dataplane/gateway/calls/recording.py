"""The call that brings what a report is made of: GetRecord, for who may operate the whole plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from dataplane.gateway.call import Call
from dataplane.gateway.calls.listed import SPARE_BYTES
from dataplane.gateway.calls.listing import PAGE_BYTES
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.service import Handler
from dataplane.report.record import PlaneRecord, as_json
from dataplane.v1 import dataplane_pb2 as pb


class Recording:
    """GetRecord."""

    def __init__(self, config: GatewayConfig) -> None:
        self._longest_s = config.max_call_s
        self._page_bytes = min(PAGE_BYTES, config.max_message_bytes - SPARE_BYTES)
        self._making = asyncio.Lock()
        """One at a time: each goes through tens of thousands of requests, and is megabytes."""
        self.handlers: dict[str, Handler] = {"GetRecord": self.record}

    async def record(
        self, request: pb.GetRecordRequest, call: Call
    ) -> AsyncIterator[pb.GetRecordResponse]:
        """The record as a document, in pieces."""
        for verb in ("operate", "explain"):
            call.principal.require_everywhere(verb)
        async with self._making:
            timeout = call.timeout(self._longest_s)
            if request.samples_only:
                samples = await call.reader.samples(timeout=timeout)
                record = PlaneRecord("", call.plane_id, "", time.time(), 0.0, 0, samples=samples)
            else:
                record = await call.reader.record(timeout=timeout)
            document = (await asyncio.to_thread(as_json, record)).encode()
        for at in range(0, len(document), self._page_bytes):
            yield pb.GetRecordResponse(json=document[at : at + self._page_bytes])
