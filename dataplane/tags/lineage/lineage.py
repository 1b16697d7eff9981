"""Lineage: what was asked of the tag store lately and what came of it, one entry per request. Pure.

What changed rows is kept as the journal has it, packed; beside it what no journal has: what was
read, what was refused, and at which stage of training the client was. So an entry costs an append,
nothing that counts is kept alive by it, and a store that is started again has of the journal's
entries what its replay reads. How a group's are found in it is for search.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dataplane.errors import InvalidRequest
from dataplane.tags import records as r
from dataplane.tags.lineage.ring import Ring

GOT: Final = -1
"""partition_id, keys, fields: values were looked up, to be read"""
REFUSED: Final = -2
"""verb, partition_id, the first keys, how many there were, class of the error, message, attempt"""
NOTED: Final = -3
"""verb, n, partition_id, keys, fields, hashes, previews: what a client says of values that it put
or got, field by field"""
LOADED: Final = -4
"""Nothing: a checkpoint was loaded, with rows of whose past nothing is known."""

OFF, ON, HASHES, PREVIEWS = "off", "on", "hashes", "previews"
DETAILS: Final = (OFF, ON, HASHES, PREVIEWS)

OVERHEAD_BYTES: Final = 250
"""Of an entry, beside what it carries."""
KEY_BYTES: Final = 110
"""Of a key in a list."""
MAX_REFUSED_KEYS: Final = 64
MAX_MESSAGE: Final = 300
MAX_STAGE: Final = 64
MAX_STAGES: Final = 50_000
"""Clients whose stages are remembered; the design is for 10,000 at a time."""

_CLIENT_AT: Final = {r.PUT: 0, r.CLEAR: 0, r.BEGIN: 0, r.END: 0, r.COMMIT: 4, r.RELEASE: 5}
"""Where the body of a record says whose request it was."""
KEPT: Final = frozenset({*_CLIENT_AT, r.CLAIM, r.PARTITION, r.LOST, r.START})


class Lineage:
    """The last requests, so many bytes of them."""

    def __init__(self, limit_bytes: int, detail: str = ON) -> None:
        self.ring = Ring(limit_bytes)
        self.detail = detail
        """What clients are asked to add of values: nothing, `hashes`, or `previews` too."""
        self.partial = False
        """Whether rows may be older than the first entry there ever was: their store went on from a
        snapshot, or loaded a checkpoint."""
        self.stages: dict[str, str] = {}
        """At which stage of training each client says that it is."""

    def wrote(self, kind: int, n: int, at: float, body: Any, record: bytes) -> None:
        """A change was journaled, as this record."""
        if kind == r.PUT:
            client_id = body[0]
        elif kind in KEPT:
            client_id = _client_of(kind, body)
        elif kind == r.RESTORE and body[0] == "end":
            self.partial = True
            self.ring.append((LOADED, n, at, "", "", None), OVERHEAD_BYTES)
            return
        else:
            return
        entry = (kind, n, at, self.stages.get(client_id, ""), client_id, record)
        self.ring.append(entry, OVERHEAD_BYTES + len(record))

    def got(
        self,
        n: int,
        at: float,
        client_id: str,
        partition_id: str,
        keys: list[str],
        fields: list[str],
    ) -> None:
        """Somebody looked up where these fields of these keys lie."""
        stage = self.stages.get(client_id, "")
        entry = (GOT, n, at, stage, client_id, (partition_id, keys, fields))
        self.ring.append(entry, OVERHEAD_BYTES + KEY_BYTES * (len(keys) + len(fields)))

    def refused(
        self,
        n: int,
        at: float,
        client_id: str,
        verb: str,
        partition_id: str,
        keys: Sequence[str],
        error: Exception,
        attempt: int | None = None,
    ) -> None:
        """A request changed nothing, for this reason."""
        first = list(keys[:MAX_REFUSED_KEYS])
        message = str(error)[:MAX_MESSAGE]
        carried = (verb, partition_id, first, len(keys), type(error).__name__, message, attempt)
        nbytes = OVERHEAD_BYTES + KEY_BYTES * len(first) + 2 * len(message)
        stage = self.stages.get(client_id, "")
        self.ring.append((REFUSED, n, at, stage, client_id, carried), nbytes)

    def noted(self, n: int, at: float, client_id: str, note: tuple[Any, ...], nbytes: int) -> None:
        """A client says more of what it put or got."""
        stage = self.stages.get(client_id, "")
        self.ring.append((NOTED, n, at, stage, client_id, note), OVERHEAD_BYTES + nbytes)

    def enter(self, client_id: str, stage: str) -> None:
        """A client is at another stage; at none with an empty name."""
        self.stages.pop(client_id, None)
        if stage:
            self.stages[client_id] = stage
            if len(self.stages) > MAX_STAGES:
                del self.stages[next(iter(self.stages))]

    def forget(self, client_id: str) -> None:
        """A client is long gone."""
        self.stages.pop(client_id, None)


def check_stage(stage: object) -> str:
    """The name of a stage. InvalidRequest if it is none; an empty one stands for no stage."""
    if type(stage) is str and len(stage) <= MAX_STAGE and stage.isprintable():
        return stage
    raise InvalidRequest(
        f"a stage is a printable word of at most {MAX_STAGE} letters such as 'advantage', not "
        f"{stage!r:.80}"
    )


def _client_of(kind: int, body: Any) -> str:
    """Whose request a record was; empty where nobody asked."""
    if kind == r.CLAIM:
        return body[2] if len(body) == 8 else body[3]
    if kind == r.PARTITION:
        return body[-3]
    at = _CLIENT_AT.get(kind)
    return body[at] if at is not None and at < len(body) else ""
