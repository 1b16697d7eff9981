"""Who is who: what is known of clients, for messages. Pure. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from dataplane.tags.explain.wording import quoted, short

MAX_LABEL = 60


class Clients(NamedTuple):
    """Which clients have a connection, and where each says that it runs."""

    attached: Container[str]
    labels: Mapping[str, str]

    def is_alive(self, client_id: str) -> bool:
        """Whether it has a connection: one that stopped, or is cut off, has none soon after."""
        return client_id in self.attached

    def label(self, client_id: str) -> str:
        """Where it runs, as it said itself; empty if that is not known."""
        return self.labels.get(client_id, "")

    def called(self, client_id: str) -> str:
        """What to call a client.

        Example: `pid 4711 on node-3 (client 3f2a9c0d11223344)`.
        """
        if not client_id:
            return "a client that is not known"
        plain = client_id.isascii() and client_id.isalnum() and len(client_id) <= MAX_LABEL
        name = f"client {client_id if plain else quoted(client_id)}"
        label = self.label(client_id)
        return f"{short(label, MAX_LABEL)} ({name})" if label else name

    def about(self, client_id: str) -> dict[str, Any]:
        """What is known of it, for the wire."""
        label, alive = self.label(client_id), self.is_alive(client_id)
        return {"client_id": client_id, "label": label, "alive": alive}

    def state(self, client_id: str) -> str:
        """`alive` or `dead`."""
        return "alive" if self.is_alive(client_id) else "dead"
