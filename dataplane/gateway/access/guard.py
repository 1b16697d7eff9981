"""Who calls, and may they: asked of every call before anything else happens.

Owns the way from a call's metadata, or the certificate of its connection, to a `Principal`, and
what is refused without looking any further: calls without credentials that hold, calls that no
grant allows anywhere, and calls that come too fast or are too many. Which partition and fields a
request is about is for its handler to check, by `caller().require(…)`.

A call is judged before its first message is read: strangers cost no memory. Credentials are looked
at again with each message of a stream, so that a call which lasts ends soon after they were revoked
or have expired.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, cast

import grpc

from dataplane.errors import DataplaneError, InvalidRequest, PermissionDenied, Unauthenticated
from dataplane.gateway.access.caller import REFUSED, Caller, caller, enter, pace, throttle
from dataplane.gateway.access.guarded import Context, Handler, guarded_handler, refusing
from dataplane.gateway.access.limits import Throttles
from dataplane.gateway.access.roles import METHODS, Principal
from dataplane.gateway.access.tokens import TokenFile

__all__ = ["Guard", "caller", "pace", "throttle"]

log = logging.getLogger("dataplane.gateway")

SERVICE: Final = "dataplane.v1.DataPlaneService"
HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = (
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)

REPORT_EVERY_S: Final = 10.0
"""Refused calls are logged so often, not one by one: strangers must not fill a disk."""


class Guard(grpc.aio.ServerInterceptor):
    """Stands before every handler of a server. To be the first of its interceptors."""

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        anyone: Principal | None,
        throttles: Throttles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tokens: whose credentials hold; None if there are none.
            anyone: who calls without showing any; None if those are refused. What is shown and
                does not hold is refused all the same.
            throttles: what principals have under way.
            clock: seconds, for the pace of log lines.
        """
        if tokens is None and anyone is None:
            raise InvalidRequest("without tokens, and without `anyone`, nobody could call")
        self._tokens = tokens
        self._anyone = anyone
        self._throttles = throttles
        self._clock = clock
        self._refused = 0
        self._report_at = clock()
        self._unlisted: set[tuple[str, str]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, or one that refuses it."""
        method = handler_call_details.method
        service, _, name = method.removeprefix("/").partition("/")
        if service == HEALTH:
            return await continuation(handler_call_details)
        metadata = cast("Iterable[tuple[str, Any]]", handler_call_details.invocation_metadata)
        try:
            found = self._find(_shown(metadata))
        except DataplaneError as error:
            return refusing(error)
        # Whether there is such a method is not for strangers, so it is asked only now.
        handler = await continuation(handler_call_details)
        if found is not None:
            try:
                self._admit(found, handler, service, name)
            except DataplaneError as error:
                return refusing(error)

        def enter_call(context: Context) -> Caller:
            who = found
            if who is None:
                who = self._find_certified(context)
                self._admit(who, handler, service, name)
            enter(who)
            return who

        if handler is None:
            return None if found is not None else refusing(enter_call)
        return guarded_handler(handler, enter_call, looks=METHODS.get(name) in _LOOKING)

    def _find(self, shown: str | None) -> Caller | None:
        """Who calls; None if only the certificate of the connection can say it."""
        if self._tokens is None:
            assert self._anyone is not None
            return self._caller(self._anyone)
        if shown is not None:
            principal = self._tokens.find(shown)
            if principal is None:
                raise self._unknown()
            return self._caller(principal)
        if self._tokens.binds_certificates:
            return None
        if self._anyone is None:
            # As much work as for a token that is wrong.
            self._tokens.find("")
            raise self._unknown()
        return self._caller(self._anyone)

    def _find_certified(self, context: Context) -> Caller:
        assert self._tokens is not None
        # Its alternative names; its common name only if it has none of those.
        identities = cast("Iterable[bytes] | None", context.peer_identities())
        names = tuple(name.decode("utf-8", "replace") for name in identities or ())
        principal = self._tokens.find_certificate(names)
        if principal is not None:
            return self._caller(principal, names)
        # Who shows a certificate that stands for nobody has shown something that does not hold.
        if self._anyone is None or names:
            raise self._unknown()
        return self._caller(self._anyone)

    def _caller(self, principal: Principal, names: tuple[str, ...] = ()) -> Caller:
        throttle = self._throttles.of(principal.name, principal.limits)
        lasting = None if principal is self._anyone else self._tokens
        return Caller(principal, throttle, names, lasting)

    def _admit(self, who: Caller, handler: Handler | None, service: str, name: str) -> None:
        """Raise unless this principal may make such a call now."""
        who.throttle.require_call()
        if handler is None or service in REFLECTION:
            return
        verb = METHODS.get(name) if service == SERVICE else None
        if verb is not None:
            who.principal.require_any(verb)
            return
        if (service, name) not in self._unlisted:
            self._unlisted.add((service, name))
            log.error("/%s/%s has no row in METHODS: it is refused to everybody", service, name)
        raise PermissionDenied(f"{who.principal.name!r:.80} may not call {name!r:.80}")

    def _unknown(self) -> Unauthenticated:
        self._refused += 1
        now = self._clock()
        if now >= self._report_at:
            self._report_at = now + REPORT_EVERY_S
            log.info("calls without credentials that hold: %d, all refused", self._refused)
            self._refused = 0
        return Unauthenticated(REFUSED)


_LOOKING: Final = frozenset({"read", "list", "wait", "explain"})
"""Verbs that change nothing: an answer that comes after the credentials ended is not given."""


def _shown(metadata: Iterable[tuple[str, Any]] | None) -> str | None:
    """What a call shows as its token; None if it shows nothing. Anything that is no bearer token,
    or is there twice, is shown, and fits nothing."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
