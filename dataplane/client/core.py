"""What both faces of a client share: who it is, what it joined, what it has seen. No I/O."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dataplane.client.mappings import Mappings
from dataplane.client.memory import Recycler
from dataplane.client.numbers import ClaimNumbers, RequestNumbers
from dataplane.config import Config
from dataplane.errors import PlaneLost
from dataplane.types import Revision
from dataplane.wire.address import Address
from dataplane.wire.channel import Refused

if TYPE_CHECKING:
    from dataplane.metrics.client import ClientMeter
    from dataplane.telemetry.spans import Spans


@dataclass(frozen=True, slots=True)
class Joined:
    """A plane as its host describes it to a client."""

    name: str
    plane_id: str
    secret: bytes = field(repr=False)
    tags: Address = field()
    home: str | None = None
    """The value store that puts go to: the one of this node."""
    find: Callable[[], Address | None] | None = field(default=None, repr=False, compare=False)
    """Where the tag store is now, asked when nobody listens at `tags`; None if it cannot be told
    yet. PlaneLost if the plane has ended, and so where there is nobody to ask."""
    reach: Callable[[Address], Address] | None = field(default=None, repr=False, compare=False)
    """Where a client goes instead, for the address of a value store that it learns: tests lead it
    through a proxy. None: where the address says."""


_revision = Revision._make


def settle_in_child() -> None:
    """Make a forked child able to copy: torch's threads did not come along, and its next parallel
    operation would wait for them for ever. Data loaders' workers run with one thread too.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


class StoreView:
    """A value store as this client reaches it."""

    def __init__(self, store_id: str, address: Address) -> None:
        self.store_id = store_id
        self.address = address
        self.mappings: Mappings | None = None
        """Its segments, where they can be mapped from here."""
        self.probed = False
        """Whether it is known if they can."""
        self.segments: list[Any] | None = None
        """What it said of them: its id, their folder and the nonce that they carry."""


class Core:
    """The state of one client. Usable from any thread."""

    meter: ClassVar[ClientMeter | None] = None
    """Counts the calls of all clients of this process, where somebody asked for it."""

    def __init__(self, joined: Joined, config: Config) -> None:
        self.joined = joined
        self.config = config
        self.tags = joined.tags
        """Where the tag store is, as far as is known."""
        self.stage = ""
        """At which stage of training its requests are."""
        self.lineage = ""
        """What the plane keeps of requests, by its setting `lineage`; empty until it was met."""
        self.spans: Spans | None = None
        """What makes spans of its verbs, where its setting `otel` says so."""
        self.new_identity()

    def new_identity(self) -> None:
        """Become a client of one's own: at the start, and in a forked child."""
        self.client_id = secrets.token_hex(8)
        self.numbers = RequestNumbers()
        self.claims = ClaimNumbers()
        self.recycler = Recycler(self.config.reuse_bytes)
        self.seen = Revision(0, 0)
        self.stores: dict[str, StoreView] = {}
        if self.config.otel:
            from dataplane.telemetry.opening import open_spans

            self.spans = open_spans(lambda: self.joined.plane_id, self.config.otel_sample)

    def asked_at(self) -> Revision:
        """The revision from which a put that begins now is judged, should it have to be repeated:
        the last that its caller has seen."""
        return self.seen

    def see(self, revision: Any) -> Revision:
        """Note a revision that an answer carried."""
        seen = _revision(revision)
        if seen > self.seen:
            self.seen = seen
        return seen

    def find_tags(self) -> None:
        """Nobody listens where the tag store was: find out where it is. PlaneLost if the plane has
        ended."""
        joined = self.joined
        if joined.find is None:
            raise PlaneLost(
                f"nobody serves plane {joined.name!r} ({joined.plane_id}) at {self.tags} any more, "
                "and nobody would start it again"
            )
        self.tags = joined.find() or self.tags

    def has_moved(self) -> bool:
        """Whether the tag store is somewhere else by now: who answered where it was is another, or
        hung up. PlaneLost if the plane has ended."""
        before = self.tags
        if self.joined.find is not None:
            self.find_tags()
        if self.tags.tcp != before.tcp:
            return True
        self.tags = before  # of one place there may be two ways to it, and one was chosen
        return False

    def not_there(self, store: StoreView) -> Refused:
        """The error of who finds nobody where a value store was. The tag store is asked for its
        address the next time that it is wanted."""
        self.stores.pop(store.store_id, None)
        return Refused(f"nobody listens at {store.address}, where {store.store_id!r} was")

    def learn_stores(self, addresses: dict[str, Any]) -> None:
        """Take over what the tag store knows of value stores."""
        for store_id, wire in addresses.items():
            address = Address.from_wire(wire)
            if self.joined.reach is not None:
                address = self.joined.reach(address)
            known = self.stores.get(store_id)
            if known is None or known.address != address:
                self.stores[store_id] = StoreView(store_id, address)

    def is_local(self, store: StoreView | None, address: Address) -> bool:
        """Whether to reach a server (the tag store with None) through its unix socket."""
        if address.tcp is None:
            # The socket's file is the only way, and if it is gone, so is the plane.
            return address.unix is not None
        return (store is None or self.config.same_node_reads) and address.is_here()

    def probe(self, store: StoreView, greeting: dict[str, Any]) -> None:
        """Find out from a store's greeting whether its segments can be mapped from here. One that
        was started again, and has none of its earlier segments, is another one in this."""
        segments = greeting.get("segments")
        if store.probed and segments == store.segments:
            return
        store.probed = True
        store.segments = segments
        # Memory is held on the unix socket only: its end is how the store learns that we stopped.
        if segments and self.config.same_node_reads and self.is_local(store, store.address):
            _, folder, nonce = segments
            if os.path.isdir(folder):
                store.mappings = Mappings(folder, self.joined.plane_id, nonce)
