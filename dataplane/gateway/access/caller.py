"""Who makes the call under way, and what it has used: found by handlers, set by the guard."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Final, NamedTuple

from dataplane.errors import InternalError, Unauthenticated, Unreachable
from dataplane.gateway.access.limits import Throttle
from dataplane.gateway.access.roles import Principal
from dataplane.gateway.access.tokens import TokenFile

REFUSED: Final = (
    "these are no credentials that hold: send a token as metadata `authorization: Bearer <token>`, "
    "or connect with a certificate that is bound to a principal"
)
"""Said to everybody who has none, whatever is wrong with what they showed."""


class Caller(NamedTuple):
    """Who makes a call, and by which credentials."""

    principal: Principal
    throttle: Throttle
    names: tuple[str, ...]
    """Of the certificate that it was found by."""
    credentials: TokenFile | None
    """Where it is looked whether they still hold; None if nobody's have to."""

    def check(self) -> None:
        """Raise unless the credentials still hold, with the same rights."""
        if self.credentials is None:
            return
        now = self.credentials.present(self.principal, self.names)
        if now is None or now.name != self.principal.name:
            raise Unauthenticated(REFUSED)
        if now.grants != self.principal.grants:
            raise Unreachable("what these credentials may do has changed meanwhile: call again")


_caller: ContextVar[Caller] = ContextVar("_caller")


def enter(who: Caller) -> None:
    """From here on this one makes the call of the present task."""
    _caller.set(who)


def caller() -> Principal:
    """Who makes the call under way. InternalError if none is."""
    return _current().principal


def throttle() -> Throttle:
    """What the caller of the call under way has used of its limits. InternalError if none is."""
    return _current().throttle


async def pace(nbytes: int) -> None:
    """Count bytes of the call under way, and wait as long as the caller's `bytes_per_s` asks for
    before any more are moved."""
    wait_s = throttle().bytes(nbytes)
    if wait_s:
        await asyncio.sleep(wait_s)


def _current() -> Caller:
    found = _caller.get(None)
    if found is None:
        raise InternalError("no call of the gateway is under way here")
    return found
