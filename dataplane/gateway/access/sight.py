"""What a caller is told of clients of the plane: who they are, or whether they are there. Pure.

Inside a plane everybody may hear of everybody. Outside, ids and labels are for who may `operate` in
the partition that they are told of. A caller's own client is called as it calls itself.
"""

from __future__ import annotations

from dataplane.gateway.access.roles import Principal
from dataplane.inspection import ClientReport


class Sight:
    """What one caller is told, in one answer."""

    def __init__(self, principal: Principal, own: str = "", own_inside: str = "") -> None:
        """
        Args:
            own: what the caller's client calls itself; empty if it did not say.
            own_inside: what the plane calls that one.
        """
        self._principal = principal
        self._own = own
        self._own_inside = own_inside
        self._may: dict[str | None, bool] = {}
        self.of_plane = principal.everywhere("operate")
        """Whether it hears of what concerns the plane as a whole: stores, where values lie."""

    def names(self, partition_id: str | None) -> bool:
        """Whether clients are named that have to do with a partition; None: with the plane."""
        may = self._may.get(partition_id)
        if may is None:
            may = self.of_plane
            if partition_id is not None and not may:
                may = self._principal.may("operate", partition_id)
            self._may[partition_id] = may
        return may

    def called(self, client_id: str, partition_id: str | None) -> str:
        """What a client is called in front of the caller; empty if that is not told."""
        if client_id and client_id == self._own_inside:
            return self._own
        return client_id if self.names(partition_id) else ""

    def client(self, client: ClientReport, partition_id: str | None) -> ClientReport:
        """A client as it is told of."""
        return ClientReport(
            self.called(client.client_id, partition_id),
            client.label if self.names(partition_id) else "",
            client.alive,
        )
