"""The calls that carry rows, and what they share: memory for what is on its way.

Owns how much of it there is, and what is forgotten when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.gateway.calls.budget import Budget
from dataplane.gateway.calls.gets import Gets
from dataplane.gateway.calls.puts import Puts
from dataplane.gateway.calls.uploads import Uploads
from dataplane.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from dataplane.gateway.service import Handler


class Rows:
    """PutRows, GetPutProgress and GetRows."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.uploads = Uploads(config.resume_s)
        self.budget = Budget(
            config.buffer_bytes,
            int(config.buffer_bytes * config.buffer_share),
            reclaim=self.uploads.give_up_oldest,
        )
        # One at a time: a row of an object is many times larger while it is translated.
        translating = asyncio.Semaphore(1)
        puts = Puts(config, self.uploads, self.budget, translating, clock)
        gets = Gets(config, self.budget, translating)
        self.handlers: dict[str, Handler] = {**puts.handlers, **gets.handlers}

    def expire(self) -> int:
        """Forget puts that were not resumed in time; how many. To be called now and then."""
        return self.uploads.expire(self._clock())

    def close(self) -> None:
        """Forget all puts that are not whole."""
        self.uploads.close()
