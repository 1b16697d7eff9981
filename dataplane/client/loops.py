"""The connections of one event loop, which end with it.

Owns when they are closed: by their client, or by the end of the loop, whichever comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from dataplane.wire.address import Address
from dataplane.wire.channel import Channel


class Loop:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.channels: dict[tuple[Address, bool], asyncio.Task[Channel]] = {}
        """By address, and whether it is for puts that send a payload."""
        self.end = self._end()

    async def _end(self) -> AsyncGenerator[None]:
        """Closes the connections. A loop that ends closes the generators that it has begun."""
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections, on their own loop."""
        for task in self.channels.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            else:
                task.cancel()
