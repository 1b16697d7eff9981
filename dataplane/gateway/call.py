"""A call under way: who makes it, how long it may take, and on whose behalf the plane is asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dataplane.errors import DeadlineExceeded, PlaneLost
from dataplane.gateway.producers import Asked, Producers
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb

if TYPE_CHECKING:
    from dataplane.client.aio import AsyncClient
    from dataplane.gateway.access.limits import Throttle
    from dataplane.gateway.access.roles import Principal

MARGIN_S: Final = 0.5
"""How much earlier than its caller the plane gives up, so that its reason arrives in time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one caller."""

    context: Any
    """gRPC's: deadline, metadata, whether the caller is still there."""
    principal: Principal
    throttle: Throttle
    producers: Producers
    reader: AsyncClient
    """The gateway's own client, for what changes nothing."""
    plane_id: str
    max_clients: int | None
    """How many clients this principal may have."""

    def timeout(self, longest_s: float) -> float:
        """Seconds that the plane may take: what the caller left, at most `longest_s`.

        DeadlineExceeded if nothing is left.
        """
        left: float | None = self.context.time_remaining()
        if left is None:
            return longest_s
        left -= min(MARGIN_S, 0.1 * left)
        if left <= 0:
            raise DeadlineExceeded(
                "the deadline passed before anything was asked",
                waited_s=0.0,
                explanation="the call arrived at its deadline",
            )
        return min(left, longest_s)

    def require(self, verb: str, partition_id: str, fields: Iterable[str] = ()) -> None:
        """PermissionDenied unless the caller may do this there, whether or not it exists."""
        self.principal.require(verb, partition_id, fields)

    def check_plane(self, plane_id: str) -> None:
        """PlaneLost if the caller means another plane."""
        if plane_id and plane_id != self.plane_id:
            raise PlaneLost(
                f"this gateway serves plane {self.plane_id}, and not {plane_id!r:.80}: what was "
                "asked of that one cannot be repeated here"
            )

    def asking(self, request: pb.Request) -> AbstractAsyncContextManager[AsyncClient]:
        """The caller's client, for one numbered effect."""
        self.check_plane(request.plane_id)
        asked = Asked(request.number, request.settled, Revision(request.seen.epoch, request.seen.n))
        return self.producers.asking(
            self.principal.name, request.client_id, asked, max_of_principal=self.max_clients
        )

    @asynccontextmanager
    async def client(self, client_id: str, plane_id: str) -> AsyncGenerator[AsyncClient]:
        """The caller's client, for what has no number: claims, attendance."""
        self.check_plane(plane_id)
        async with self.producers.client(
            self.principal.name, client_id, max_of_principal=self.max_clients
        ) as client:
            yield client
