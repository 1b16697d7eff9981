"""What a report tells of a plane, as a client asks for it: sizes over time, lives of groups."""

from __future__ import annotations

import time
from typing import Any, Final

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.retry import ask_again
from dataplane.client.tags import plane_status
from dataplane.errors import InvalidRequest
from dataplane.report.lives import Lives
from dataplane.report.record import PlaneRecord, PlaneSamples, Waited

ENTRIES: Final = 60_000
"""Of the last requests that are gone through: groups before them are not told of."""
ROWS_AT_ONCE: Final = 300
"""So few that a loop with other work, as a gateway's, is back at it within some 3 ms. From 1,000 on
a collection of what they are made of takes 80."""


def samples_taken(core: Core, deadline: float) -> Verb[PlaneSamples]:
    """The plane's sizes over time."""
    answer: dict[str, Any] = (yield from ask_again(core, "samples", [], deadline)).body
    return PlaneSamples(
        answer["interval_s"],
        answer["times_s"],
        answer["columns"],
        [(partition_id, task, lags) for partition_id, task, lags in answer["lags"]],
        [Waited(*each) for each in answer["waits"]],
    )


def plane_record(core: Core, deadline: float) -> Verb[PlaneRecord]:
    """What a report tells of the plane, of now."""
    status = yield from plane_status(core, deadline)
    samples = yield from samples_taken(core, deadline)
    lives, gone = Lives(), 0
    try:
        gone = yield from _tell_lives(core, lives, deadline)
    except InvalidRequest:
        pass  # it keeps no lineage
    groups, left_out = lives.groups()
    stores: dict[str, Any] = status.get("values", {})
    return PlaneRecord(
        name=core.joined.name,
        plane_id=core.joined.plane_id,
        version=str(status.get("version", "")),
        at_s=time.time(),
        uptime_s=float(status.get("uptime_s", 0.0)),
        capacity_bytes=sum(int(store.get("capacity_bytes", 0)) for store in stores.values()),
        status={
            "keys": sum(each["keys"] for each in status["partitions"].values()),
            "clients": status["clients"],
            "stores": len(stores),
            "open_groups": status["kept"]["groups"],
            "groups": lives.outcomes(),
            "bytes_in_use": status.get("bytes_in_use", 0),
            "refused": status.get("totals", {}).get("refused", 0),
        },
        samples=samples,
        groups=groups,
        groups_left_out=left_out,
        gone=gone,
        lengths=lives.lengths(),
    )


def _tell_lives(core: Core, lives: Lives, deadline: float) -> Verb[int]:
    """Go through the last requests; of how many nothing is remembered, or is looked at."""
    body: list[Any] = [None, None, None, 0, 1]
    answer: dict[str, Any] = (yield from ask_again(core, "trace", body, deadline)).body
    first = int(answer["gone"])
    if answer["more"]:  # where the last one is, only who comes after it is told
        body = [None, None, None, (1 << 63) - 1, 1]
        last = (yield from ask_again(core, "trace", body, deadline)).body
        first = max(first, int(last["next"]) - ENTRIES)
    since = first
    while True:
        body = [None, None, None, since, ROWS_AT_ONCE]
        answer = (yield from ask_again(core, "trace", body, deadline)).body
        lives.add(answer["entries"])
        since = int(answer["next"])
        if not answer["more"]:
            return first
