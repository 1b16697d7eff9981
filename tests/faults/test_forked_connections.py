"""A process that forks while one of its threads connects: the child keeps nothing of that open."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from dataplane.client.connection import Connection
from dataplane.wire.address import Address
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


def test_a_socket_that_is_not_greeted_yet_is_not_the_childs(roots: dict[str, Path]) -> None:
    """Whoever waits for the end of the parent would wait for that of the child."""
    path = str(roots["runtime_dir"] / "silent.sock")
    before = sockets_of(os.getpid())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        ended = threading.Event()

        def connect() -> None:
            with pytest.raises(Exception):  # noqa: B017, PT011 (nobody greets)
                Connection.connect(
                    Address(path), b"secret", client_id="c", plane_id=None, tls=None, local=True,
                    deadline=time.monotonic() + 60,
                )  # fmt: skip
            ended.set()

        thread = threading.Thread(target=connect)
        thread.start()
        accepted, _ = server.accept()
        mine = {f"socket:[{os.fstat(s.fileno()).st_ino}]" for s in (server, accepted)}
        (under_way,) = sockets_of(os.getpid()) - before - mine
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
