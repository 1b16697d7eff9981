"""The process of a gateway: one event loop that serves until it is told to end, or its plane has.

`dataplane gateway` runs it in the foreground, `dataplane.init()` as a child (child.py), Ray in an
actor (actor.py). As a child it reads one JSON line with its settings from standard input, answers
with one on standard output, and from then on watches standard input: its end says that the parent
is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import uvloop

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import DataplaneError, InternalError, PlaneLost, to_wire
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from dataplane.logs.process import hide, set_up

log = logging.getLogger("dataplane.gateway")


async def serve(
    joined: Joined,
    config: GatewayConfig,
    plane_config: Config,
    *,
    ready: Callable[[GatewayServer], None],
    until: asyncio.Event,
) -> None:
    """Serve a plane until `until` is set, then drain. PlaneLost if the plane ended before."""
    set_up(
        "gateway", level=plane_config.log_level, form=plane_config.log_format,
        plane=joined.name, plane_id=joined.plane_id,
    )  # fmt: skip
    hide(joined.secret)
    server = GatewayServer(joined, config, plane_config)
    try:
        await server.start()
        ready(server)
        ends = [asyncio.create_task(e.wait()) for e in (until, server.health.gone)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    finally:
        # Without its plane nothing under way can come to anything.
        await server.stop(0.0 if server.health.gone.is_set() else None)
    if not until.is_set():
        raise PlaneLost(f"plane {joined.name!r} ({joined.plane_id}) has ended")


M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 128 << 20
"""Freed memory that the allocator keeps for what comes next: the first touch of a fresh page costs
as much as all that is done with its bytes."""
LARGE_BYTES: Final = 32 << 20
"""The most that glibc lets it take from there."""


def prepare_process() -> None:
    """Let this process have as many connections as it may, and use its memory again."""
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()


def run_until_signalled(
    joined: Joined,
    config: GatewayConfig,
    plane_config: Config,
    announce: Callable[[str], None],
) -> None:
    """What `dataplane gateway` does: serve until SIGTERM or SIGINT; a second one ends the drain.

    PlaneLost if the plane ended before.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        serving: GatewayServer | None = None
        hurrying: set[asyncio.Task[None]] = set()

        def on_signal() -> None:
            if signalled.is_set() and serving is not None:
                hurrying.add(loop.create_task(serving.hurry()))
            signalled.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)

        def ready(server: GatewayServer) -> None:
            nonlocal serving
            serving = server
            for address in server.addresses:
                announce(f"the gateway of plane {joined.name!r} listens at {address}")
            if server.metrics is not None:
                announce(f"metrics are at http://{server.metrics.target}/metrics")

        await serve(joined, config, plane_config, ready=ready, until=signalled)

    prepare_process()
    uvloop.run(main())


def child() -> None:
    """Entry point of the child of `init()`."""
    from dataplane.host.embedded import attach_address

    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    plane_config = Config(**settings["plane_config"])
    set_up("gateway", level=plane_config.log_level, form=plane_config.log_format)

    def say(message: dict[str, Any]) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    async def main() -> None:
        # A terminal's Ctrl-C goes to the whole group; the parent decides when the gateway ends.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        ended = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, ended.set)

        def stdin_readable() -> None:
            loop.remove_reader(0)
            ended.set()

        loop.add_reader(0, stdin_readable)
        await serve(
            attach_address(settings["address"], plane_config),
            GatewayConfig(**settings["config"]),
            plane_config,
            ready=lambda server: say({"addresses": server.addresses}),
            until=ended,
        )

    prepare_process()
    try:
        uvloop.run(main())
    except DataplaneError as error:
        say({"error": to_wire(error)})
        sys.exit(1)
    except Exception as error:
        log.exception("the gateway could not be served")
        say({"error": to_wire(InternalError(f"{type(error).__name__}: {error}"))})
        sys.exit(1)


if __name__ == "__main__":
    child()
