"""Sockets that are made so that no forked child keeps them: what was connected, or was about to be.

A process may fork while another of its threads connects. A copy of that socket in the child would
keep it open, and with it all that ends when its process does: leases, reservations, pins.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made", bound=socket.socket)

_making = threading.Lock()
"""Held while a socket is made and until it is noted; so nothing forks in between."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def made(make: Callable[[], Made]) -> Made:
    """The socket that `make` makes at once; a child that is forked later has it closed."""
    with _making:
        sock = make()
        _sockets.add(sock)
    return sock


def made_for(host: str) -> socket.socket:
    """A TCP socket for an address of this form."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return made(lambda: socket.socket(family, socket.SOCK_STREAM))


def _after_fork_in_child() -> None:
    _making.release()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for sock in list(_sockets):
        fd = sock.fileno()
        if fd >= 0:
            # Not closed: whoever has the number closes it when it is collected, and until then it
            # must be nobody else's.
            os.dup2(null, fd, inheritable=False)
    os.close(null)


os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_after_fork_in_child,
)
