"""What an operator asks of a plane: verbs that change nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.client.core import Core
from dataplane.client.effects import Pause, Verb
from dataplane.client.put import as_keys
from dataplane.client.retry import ask_again
from dataplane.client.tags import PATIENCE_S, Where, plain_where
from dataplane.errors import DeadlineExceeded, InvalidRequest, Unreachable
from dataplane.inspection import (
    ClaimReport,
    ClientReport,
    FieldReport,
    KeyReport,
    LengthReport,
    PartitionStats,
    StoreReport,
    Tally,
    TaskReport,
    Waiter,
)
from dataplane.types import Revision

KEYS_AT_ONCE = 1000
SECOND_LOOK_S = 0.5
"""After which a block that nothing referred to is taken for an orphan if nothing does still."""


def inspect_keys(
    core: Core, keys: Sequence[str], partition_id: str, deadline: float
) -> Verb[list[KeyReport | None]]:
    """What the plane knows of each key."""
    names = as_keys(keys)
    out: list[KeyReport | None] = []
    for at in range(0, len(names), KEYS_AT_ONCE):
        body = [partition_id, names[at : at + KEYS_AT_ONCE]]
        answer = yield from ask_again(core, "inspect", body, deadline)
        out += [None if each is None else key_report(each) for each in answer.body]
    return out


def key_report(wire: dict[str, Any]) -> KeyReport:
    """A key as the tag store tells of it."""
    return KeyReport(
        revision=Revision(*wire["revision"]),
        fields=[FieldReport(**field) for field in wire["fields"]],
        producer=ClientReport(**wire["producer"]),
        **_without(wire, "revision", "fields", "producer"),
    )


def tally_rows(
    core: Core, partition_id: str, where: Where | None, until: Revision | None, deadline: float
) -> Verb[Tally]:
    """How much matches."""
    body = [partition_id, plain_where(where), until]
    answer = yield from ask_again(core, "tally", body, deadline)
    wire = answer.body
    return Tally(revision=Revision(*wire["revision"]), **_without(wire, "revision"))


def partition_stats(core: Core, partition_id: str, deadline: float) -> Verb[PartitionStats]:
    """What a partition is made of."""
    return stats_report((yield from ask_again(core, "stats", [partition_id], deadline)).body)


def stats_report(wire: dict[str, Any]) -> PartitionStats:
    """A partition's statistics as the tag store tells them."""
    lengths = {
        name: LengthReport(
            histogram=[(low, high, rows) for low, high, rows in of["histogram"]],
            **_without(of, "histogram"),
        )
        for name, of in wire["lengths"].items()
    }
    revision = Revision(*wire["revision"])
    return PartitionStats(
        revision=revision, lengths=lengths, **_without(wire, "revision", "lengths")
    )


def claims_and_tasks(
    core: Core, partition_id: str | None, deadline: float
) -> Verb[tuple[list[ClaimReport], list[TaskReport]]]:
    """What is claimed, and how far each task has come."""
    tasks, claims = (yield from ask_again(core, "claims", [partition_id], deadline)).body
    return (
        [
            ClaimReport(
                holders=[ClientReport(**holder) for holder in claim["holders"]],
                **_without(claim, "holders"),
            )
            for claim in claims
        ],
        [TaskReport(**task) for task in tasks],
    )


def who_waits(core: Core, deadline: float) -> Verb[list[Waiter]]:
    """Every request that waits at the tag store, the longest first."""
    answer = yield from ask_again(core, "waiters", [], deadline)
    return [_waiter(each) for each in answer.body]


def _waiter(wire: dict[str, Any]) -> Waiter:
    return Waiter(client=ClientReport(**wire["client"]), **_without(wire, "client"))


def revision_before(core: Core, age_s: float, deadline: float) -> Verb[Revision | None]:
    """The last revision that is known to be so many seconds old."""
    if isinstance(age_s, bool) or not isinstance(age_s, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise InvalidRequest(f"an age is seconds, not {age_s!r:.80}")
    answer = yield from ask_again(core, "moment", [age_s], deadline)
    return None if answer.body is None else Revision(*answer.body)


def store_holdings(core: Core, deadline: float) -> Verb[list[StoreReport]]:
    """What every value store has in use, who holds it, and what nothing refers to."""
    stores = (yield from ask_again(core, "stores", [], deadline)).body
    core.learn_stores(stores)
    reports: list[StoreReport] = []
    for store_id in stores:
        try:
            reports.append((yield from _holdings_of(core, store_id, deadline)))
        except (Unreachable, DeadlineExceeded) as error:
            reports.append(StoreReport(store_id, reachable=False, error=str(error)))
    return reports


def _holdings_of(core: Core, store_id: str, deadline: float) -> Verb[StoreReport]:
    (counts, held), unknown = yield from _look(core, store_id, deadline)
    if unknown:
        # What was published or freed between the two questions is none.
        yield Pause(SECOND_LOOK_S)
        (counts, held), again = yield from _look(core, store_id, deadline)
        unknown = {block: nbytes for block, nbytes in again.items() if block in unknown}
    return StoreReport(
        store_id,
        reachable=True,
        pid=counts["pid"],
        capacity_bytes=counts["capacity_bytes"],
        segment_bytes=counts["segment_bytes"],
        used_bytes=counts["used_bytes"],
        held_bytes=counts["held_bytes"],
        live_blocks=counts["blocks_published"],
        dead_blocks=counts["blocks_dead"],
        orphans=[{"block": block, "bytes": nbytes} for block, nbytes in sorted(unknown.items())],
        pins=[
            {
                "client": ClientReport(client_id, label, alive=True),
                "blocks": pinned, "bytes": pinned_bytes, "dead_bytes": kept_bytes,
                "age_s": age_s,
            }
            for client_id, label, _, _, pinned, pinned_bytes, kept_bytes, _, age_s in held
            if pinned
        ],
        reservations=[
            {
                "client": ClientReport(client_id, label, alive=True),
                "blocks": reserved, "bytes": reserved_bytes, "age_s": age_s,
            }
            for client_id, label, reserved, reserved_bytes, _, _, _, age_s, _ in held
            if reserved
        ],
    )  # fmt: skip


def _look(
    core: Core, store_id: str, deadline: float
) -> Verb[tuple[tuple[Any, Any], dict[int, int]]]:
    """What a value store says it holds, and which of its blocks the tag store does not know, with
    their bytes."""
    soon = min(deadline, time.monotonic() + PATIENCE_S)
    store = core.stores[store_id]
    counts, held, blocks, sizes = (yield from ask_again(core, "holdings", [], soon, store)).body
    if not blocks:
        return (counts, held), {}
    unknown = (yield from ask_again(core, "unknown_blocks", [store_id, blocks], deadline)).body
    ids, nbytes = np.frombuffer(blocks, np.int64), np.frombuffer(sizes, np.int64)
    of = np.isin(ids, unknown)
    return (counts, held), dict(zip(ids[of].tolist(), nbytes[of].tolist(), strict=True))


def _without(wire: dict[str, Any], *names: str) -> dict[str, Any]:
    """What of an answer is taken as it is."""
    return {name: value for name, value in wire.items() if name not in names}
