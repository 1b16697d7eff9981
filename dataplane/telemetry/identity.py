"""Which trace a group's spans are in, and whether it is followed: by a hash, so that every process
comes to the same without a word between them. Pure."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8


class Followed(NamedTuple):
    """The trace of a group, or of a row that is of none."""

    trace_id: int
    root_id: int
    """The span that all of its others are children of: that of the put which began it."""

    def within(self, sample: float) -> bool:
        """Whether it is among this part of all. By the same bits as OpenTelemetry's own
        `traceidratio`, so that of the two the smaller holds."""
        return (self.trace_id & 0xFFFF_FFFF_FFFF_FFFF) < sample * 2.0**64


@lru_cache(maxsize=65_536)
def followed(plane_id: str, partition_id: str, identity: str) -> Followed:
    """The trace of a uid, or of the key of a row that has none, in a partition of a plane."""
    digest = blake2b(digest_size=TRACE_BYTES + SPAN_BYTES, person=b"dataplane.trace")
    for part in (plane_id, partition_id, identity):
        encoded = part.encode("utf-8", "surrogatepass")
        # With its length, so that no two of these read alike.
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    whole = digest.digest()
    # Neither may be 0, by the standard.
    return Followed(
        int.from_bytes(whole[:TRACE_BYTES], "big") or 1,
        int.from_bytes(whole[TRACE_BYTES:], "big") or 1,
    )
