"""Groups and their attempts: the K sessions of one prompt, from begin to the last clear. Pure.

An attempt is the number of the revision at which its group began. It is open until the group ends,
begins anew or is retired, and only open attempts are remembered: whatever names another one is
too late, however late it comes.
"""

from __future__ import annotations

from dataplane.errors import InvalidRequest
from dataplane.tags.accounts import Account, Producer

RUNNING = "running"
FINISHED = "finished"
"""The status at which a group is whole."""

MARGIN_SHARE = 4
"""A group may use a quarter more than it declared ..."""
MARGIN_BYTES = 64 << 10
"""... and these bytes, so that small groups are not caught out by whole pages."""

MAX_SESSIONS = 65_536


class Group(Account):
    """One attempt at a prompt's sessions, with the room that is reserved for it."""

    __slots__ = (
        "at", "attempt", "declared_bytes", "kept_bytes", "n", "open", "partition_id", "positions",
        "producer", "since", "status", "store", "uid",
    )  # fmt: skip

    def __init__(
        self,
        uid: str,
        partition_id: str,
        attempt: int,
        n: int,
        declared_bytes: int,
        producer: Producer,
        *,
        at: float,
        store: str = "",
    ) -> None:
        super().__init__(producer)
        self.uid = uid
        self.partition_id = partition_id
        self.attempt = attempt
        self.n = n
        """Sessions that it is to have."""
        self.declared_bytes = declared_bytes
        self.producer = producer
        self.store = store
        """The value store that keeps room for it; empty if none does."""
        self.kept_bytes = declared_bytes if store else 0
        """What that store was told last to keep."""
        self.status = RUNNING
        self.since = attempt
        """Revision at which it took its status."""
        self.at = at
        """When that was, in seconds of the store's clock."""
        self.open = True
        self.positions: set[int] = set()
        """Slots of its trajectories."""
        self.settle_hold()

    @property
    def outstanding_bytes(self) -> int:
        """What is reserved and not used yet."""
        return max(0, self.declared_bytes - self.used_bytes)

    @property
    def limit_bytes(self) -> int:
        """What it may use in all: its declaration and a margin."""
        return self.declared_bytes + self.declared_bytes // MARGIN_SHARE + MARGIN_BYTES

    def settle_hold(self) -> None:
        """Reserve what is outstanding now."""
        self.hold(self.outstanding_bytes, max(0, self.n - self.rows) if self.open else 0)


def check_begin(n: object, declared_bytes: object) -> None:
    """Raise what is wrong with the sizes that `begin_group` is told."""
    if type(n) is not int or not 0 < n <= MAX_SESSIONS:
        raise InvalidRequest(
            f"n is the number of sessions of the group, 1 to {MAX_SESSIONS}, not {n!r:.80}"
        )
    if declared_bytes is not None and (
        type(declared_bytes) is not int or not 0 <= declared_bytes < 1 << 63
    ):
        raise InvalidRequest(
            f"declared_bytes is a number of bytes or nothing, not {declared_bytes!r:.80}"
        )
