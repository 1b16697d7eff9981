"""A process that forks while one of its threads connects: the child keeps nothing of that open."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane.client.connection import Connection
from dataplane.errors import DataplaneError
from dataplane.wire import sockets
from dataplane.wire.address import Address
from dataplane.wire.channel import Broken, Channel
from tests.deadline import eventually

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def sockets_of(pid: int) -> set[str]:
    """The sockets that a process has open."""
    found: set[str] = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return {name for name in found if name.startswith("socket:")}


def name_of(sock: socket.socket) -> str:
    """As `sockets_of` has it."""
    return f"socket:[{os.fstat(sock.fileno()).st_ino}]"


def connected_to(path: str) -> set[str]:
    """Those of our own making that are connected there."""
    return {
        name_of(sock)
        for sock in list(sockets._sockets)
        if sock.fileno() >= 0 and sock.family == socket.AF_UNIX and sock.getpeername() == path
    }


def blocking(address: Address) -> None:
    Connection.connect(
        address, b"secret", client_id="c", plane_id=None, tls=None, local=True,
        deadline=time.monotonic() + 60,
    )  # fmt: skip


def in_a_loop(address: Address) -> None:
    asyncio.run(Channel.connect(address, b"secret", client_id="c"))


@pytest.mark.parametrize("connects", [blocking, in_a_loop])
def test_a_socket_that_is_not_greeted_yet_is_not_the_childs(
    roots: dict[str, Path], connects: Callable[[Address], None]
) -> None:
    """Whoever waits for the end of the parent would wait for that of the child."""
    path = str(roots["runtime_dir"] / "silent.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        ended = threading.Event()

        def connect() -> None:
            with pytest.raises((Broken, OSError, DataplaneError)):
                connects(Address(path))  # nobody greets
            ended.set()

        thread = threading.Thread(target=connect)
        thread.start()
        accepted, _ = server.accept()
        mine = {name_of(server), name_of(accepted)}
        (under_way,) = connected_to(path)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.read(reader, 1)
            os._exit(0)
        try:
            assert mine <= sockets_of(child)
            eventually(lambda: under_way not in sockets_of(child), "the child has closed it")
            assert under_way in sockets_of(os.getpid())
        finally:
            os.write(writer, b".")
            os.waitpid(child, 0)
            os.close(reader)
            os.close(writer)
            accepted.close()
            thread.join()
        assert ended.is_set()
    os.unlink(path)
