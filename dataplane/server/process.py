"""The process of an embedded plane: both stores behind one socket.

Started by `dataplane.init()` as a child that ends when the pipe to its parent closes, or by
`dataplane serve`, which runs it until SIGTERM.

The child reads one JSON line with its settings from standard input, answers with one JSON line on
standard output, and from then on only watches standard input for its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from dataplane.config import Config
from dataplane.errors import DataplaneError, InternalError, to_wire
from dataplane.host.folders import Folders, Ownership, claim, plane_folders, remove_unowned, sweep
from dataplane.host.records import Record, write_record, write_secret
from dataplane.server.plane import PlaneServer, prepare_process
from dataplane.wire.auth import SECRET_BYTES


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
    """Run an embedded plane in this process until `until` is set or the plane is destroyed."""
    ownership: Ownership = claim(folders)
    try:
        secret = secrets.token_bytes(SECRET_BYTES)
        write_secret(folders, secret)
        server = PlaneServer(folders, config, secret)
        try:
            address = await server.listen("plane.sock", config.tcp_host)
            await server.serve_both("local")
            assert address.unix is not None
            write_record(folders, Record(folders.name, folders.plane_id, address.unix, address.tcp))
            ready(server)
            ends = [asyncio.create_task(e.wait()) for e in (until, server.ended)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        finally:
            await server.close()
    finally:
        ownership.release()
        remove_unowned(folders)


def child() -> None:
    """Entry point of the child of `init()`."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    config = Config(**settings["config"])
    folders = plane_folders(
        settings["name"], settings["plane_id"], config.runtime_dir, config.shm_dir
    )

    def say(message: dict[str, Any]) -> None:
        os.write(1, json.dumps(message).encode() + b"\n")

    async def main() -> None:
        # A terminal's Ctrl-C goes to the whole group; the parent decides when the plane ends.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        parent_gone = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, parent_gone.set)

        def stdin_readable() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                parent_gone.set()

        loop.add_reader(0, stdin_readable)
        await serve(folders, config, ready=lambda _: say({"ok": True}), until=parent_gone)

    prepare_process()
    try:
        uvloop.run(main())
    except DataplaneError as error:
        say({"error": to_wire(error)})
        sys.exit(1)
    except Exception as error:
        logging.exception("the plane could not be served")
        say({"error": to_wire(InternalError(f"{type(error).__name__}: {error}"))})
        sys.exit(1)


def run_until_signalled(name: str, config: Config, announce: Callable[[str], None]) -> None:
    """What `dataplane serve` does: a plane in this process until SIGTERM or SIGINT."""
    sweep(config.runtime_dir, config.shm_dir)
    folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)

    async def main() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await serve(
            folders,
            config,
            ready=lambda server: announce(
                f"plane {name!r} ({folders.plane_id}) serves at {server.address}"
            ),
            until=stopped,
        )

    prepare_process()
    uvloop.run(main())


if __name__ == "__main__":
    child()
