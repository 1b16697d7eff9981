"""Kill switches: a process of a plane sends itself a signal when it comes to a named point.

A process has switches if `DATAPLANE_SWITCHES` is set in its environment when it starts; no other
knows of them, and none costs anything there. They are thrown by a file in the plane's runtime
folder, which names the point and the how-manieth time counts. It is removed before the signal is
sent, so the process that takes the place of a killed one runs on.
"""

from __future__ import annotations

import json
import os
import secrets
import signal as signals
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dataplane.errors import InvalidRequest
from dataplane.testing.hits import FILE, Switches, read_switch, send_itself
from dataplane.testing.points import POINTS
from dataplane.testing.requests import watch_requests
from dataplane.testing.stores import watch_tags, watch_values

if TYPE_CHECKING:
    from dataplane.client.aio import AsyncClient
    from dataplane.client.sync import Client
    from dataplane.server.plane import PlaneServer

VARIABLE = "DATAPLANE_SWITCHES"
"""Set in the environment of a process that is to have switches."""


def runtime_of(client: Client | AsyncClient) -> Path:
    """The runtime folder of a client's plane, on the node of its tag store. InvalidRequest if that
    has no folder here."""
    unix = client._core.joined.tags.unix  # pyright: ignore[reportPrivateUsage] (of this package)
    if unix is None:
        raise InvalidRequest("this client was not told where its plane's runtime folder is")
    return Path(unix).parent


def arm(
    runtime: str | os.PathLike[str], point: str, nth: int = 1, signal: int = signals.SIGKILL
) -> None:
    """Have a process of a plane send itself a signal when it comes to a point for the nth time
    from now on. `runtime` is the plane's runtime folder. One switch at a time.

    Raises:
        InvalidRequest: there is no such point, or it cannot be counted or survived.
    """
    if point not in POINTS:
        raise InvalidRequest(f"there is no point {point!r:.80}; POINTS names all of them")
    if type(nth) is not int or nth < 1:
        raise InvalidRequest(f"nth counts from 1, not {nth!r:.80}")
    if point.endswith(".torn") and signal != signals.SIGKILL:
        raise InvalidRequest("a process that has written half a record can only be killed")
    wanted = {"id": secrets.token_hex(8), "point": point, "nth": nth, "signal": int(signal)}
    aside = Path(runtime) / f"{FILE}.new"
    aside.write_text(json.dumps(wanted))
    aside.replace(Path(runtime) / FILE)


def armed(runtime: str | os.PathLike[str]) -> str | None:
    """The point that is armed; None when its signal was sent, or nothing is armed."""
    found = read_switch(Path(runtime) / FILE)
    return found["point"] if found else None


def disarm(runtime: str | os.PathLike[str]) -> None:
    """No process sends itself anything from now on."""
    (Path(runtime) / FILE).unlink(missing_ok=True)


def install(
    server: PlaneServer,
    role: Literal["tags", "values", "both"],
    *,
    act: Callable[[int], None] = send_itself,
) -> Switches:
    """Put the switches of these stores in place, in the process that serves them.

    `act` is called with the signal at the point that is armed. InternalError if a method to be
    watched is not there: then a point of the table would never be come to.
    """
    switches = Switches(server.folders.runtime / FILE, act)
    if role != "values":
        watch_tags(switches, server)
    if role != "tags":
        watch_values(switches, server)
    watch_requests(switches, server, role)
    return switches
