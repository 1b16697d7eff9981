"""The process of an embedded plane: both stores behind one socket.

Started by `dataplane.init()` and by `dataplane serve` as a child that ends when the pipe to its
parent closes, and started again by them when it dies (host/embedded.py).

The child reads one JSON line with its settings from standard input, answers with one JSON line on
standard output, and from then on only watches standard input: its end says that the parent is gone,
a byte that it ends the plane.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from dataplane.config import Config
from dataplane.errors import DataplaneError, InternalError, JournalDamaged, to_wire
from dataplane.host.folders import (
    Folders,
    Ownership,
    claim,
    keep,
    plane_folders,
    remove_unowned,
)
from dataplane.host.records import Record, endpoint_of, secret_of, write_record
from dataplane.logs.process import hide, set_up
from dataplane.server.plane import PlaneServer, prepare_process

log = logging.getLogger("dataplane.server")

KILLED_LOCK_S = 2.0
"""How long others of a plane may hold its folders after they were killed."""


def new_plane_id() -> str:
    """A random id: clients of one plane never mistake another for it."""
    return secrets.token_hex(8)


async def serve(
    folders: Folders,
    config: Config,
    *,
    ready: Callable[[PlaneServer], None],
    until: asyncio.Event,
) -> None:
    """Run an embedded plane in this process until `until` is set or the plane is destroyed.

    Where an earlier process of the plane left its journal and segments, this one goes on from them.
    """
    ownership: Ownership = claim(folders)
    try:
        secret = secret_of(folders)
        hide(secret)
        server = PlaneServer(folders, config, secret)
        served = False
        try:
            await server.serve_both("local", "plane.sock", endpoint_of(folders, config.tcp_host))
            server.open_metrics("stores")
            address = server.address
            assert address.unix is not None
            write_record(folders, Record(folders.name, folders.plane_id, address.unix, address.tcp))
            if os.environ.get("DATAPLANE_SWITCHES"):
                from dataplane.testing import switches

                switches.install(server, "both")
            served = True
            log.info("plane %r is served at %s", folders.name, address)
            ready(server)
            ends = [asyncio.create_task(e.wait()) for e in (until, server.ended)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            log.info("plane %r ends", folders.name)
        except JournalDamaged as error:
            keep(folders, str(error))
            raise
        finally:
            # Whoever could not come up leaves what it found to the next one that tries.
            await server.close(keep_memory=not served)
    finally:
        ownership.release()
        remove_unowned(folders)


def child() -> None:
    """Entry point of the child of `init()`."""
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    config = Config(**settings["config"])
    folders = plane_folders(
        settings["name"], settings["plane_id"], config.runtime_dir, config.shm_dir
    )
    set_up(
        "stores", level=config.log_level, form=config.log_format,
        plane=folders.name, plane_id=folders.plane_id,
    )  # fmt: skip

    def say(message: dict[str, Any]) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    async def main() -> None:
        # A terminal's Ctrl-C goes to the whole group; the parent decides when the plane ends.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        parent_gone = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, parent_gone.set)

        told = b""

        def stdin_readable() -> None:
            nonlocal told
            told = os.read(0, 4096)
            loop.remove_reader(0)
            parent_gone.set()

        loop.add_reader(0, stdin_readable)
        await serve(folders, config, ready=lambda _: say({"ok": True}), until=parent_gone)
        # A parent that was killed holds its share of the folders a moment longer than its end of
        # the pipe; one that says so removes them itself.
        deadline = time.monotonic() + KILLED_LOCK_S
        while parent_gone.is_set() and not told and folders.runtime.exists():
            if remove_unowned(folders) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)

    prepare_process()
    try:
        uvloop.run(main())
    except DataplaneError as error:
        say({"error": to_wire(error)})
        sys.exit(1)
    except Exception as error:
        log.exception("the plane could not be served")
        say({"error": to_wire(InternalError(f"{type(error).__name__}: {error}"))})
        sys.exit(1)


if __name__ == "__main__":
    child()
