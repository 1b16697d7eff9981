"""One look at a plane for `dataplane top`: how full, how fast, who lags, who waits, what is stuck.

Owns what a frame of `top` knows, which is also its JSON. Rates are differences between two looks.
What costs the plane a walk over its rows, the groups under way, is asked for less often the longer
it takes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dataplane.errors import PartitionNotFound

if TYPE_CHECKING:
    from dataplane.client.sync import Client

HISTORY: Final = 30
"""Looks whose rate is remembered."""
GROUPS: Final = 5
"""Open groups that are named, of each partition."""
SHARE: Final = 10.0
"""How many times as long as a look at groups took, until the next one."""


@dataclass(slots=True)
class Sample:
    """What one look found."""

    at_s: float
    """Seconds since 1970."""
    name: str
    plane_id: str
    revision: list[int]
    uptime_s: float | None
    clients: int | None
    """None where a gateway does not tell."""
    rates: dict[str, float]
    """Per second since the look before: `changes`, and each counter of the plane's totals."""
    stores: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    waiters: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    """Open groups, oldest first, those of dead producers before all others."""
    history: list[float] = field(default_factory=list[float])
    """Changes a second of the last looks."""

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        told = asdict(self)
        del told["history"]
        return told


class Sampler:
    """Looks at one plane again and again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: dict[str, float] = {}
        self._before_at = 0.0
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._groups: list[dict[str, Any]] = []
        self._groups_due = 0.0

    def look(self) -> Sample:
        """What there is now. Nothing has a rate at the first look."""
        client = self._client
        status = client.status()
        now = time.monotonic()
        described = client.kv_list_partitions()
        rates = self._rates(_counters(status, described), now)
        if "changes" in rates:
            self._history.append(rates["changes"])
        return Sample(
            at_s=round(time.time(), 3),
            name=client.name,
            plane_id=client.plane_id,
            revision=list(status["revision"]),
            uptime_s=status.get("uptime_s"),
            clients=status.get("clients"),
            rates={name: rate for name, rate in rates.items() if "/" not in name},
            stores=_stores(status.get("values", {})),
            partitions=_partitions(status["partitions"], described, rates),
            tasks=[asdict(each) for each in client.tasks()],
            waiters=[asdict(each) for each in client.waiters()],
            groups=self._open_groups(described),
            history=list(self._history),
        )

    def _rates(self, counters: dict[str, float], now: float) -> dict[str, float]:
        before, took_s = self._before, now - self._before_at
        self._before, self._before_at = counters, now
        if not before or took_s <= 0:
            return {}
        return {
            name: round((count - before[name]) / took_s, 3)
            for name, count in counters.items()
            if name in before
        }

    def _open_groups(self, described: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        began = time.monotonic()
        if began < self._groups_due:
            return self._groups
        groups: list[dict[str, Any]] = []
        for partition_id, entry in sorted(described.items()):
            if entry["groups"]:
                groups += _groups_of(self._client, partition_id)
        groups.sort(key=lambda each: (bool(each["alive"]), -each["age_s"]))
        self._groups = groups
        ended = time.monotonic()
        self._groups_due = ended + SHARE * (ended - began)
        return groups


def _counters(status: dict[str, Any], described: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What only grows, and the keys of each partition, whose rate may be negative."""
    totals: dict[str, float] = status.get("totals", {})
    keys = {f"keys/{name}": entry["keys"] for name, entry in described.items()}
    return {"changes": status["revision"][1], **totals, **keys}


def _stores(values: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "store_id": store_id,
            "used_bytes": store.get("used_bytes"),
            "capacity_bytes": store.get("capacity_bytes"),
            "held_bytes": store.get("held_bytes"),
            "pins": store.get("pins"),
            "waiting": store.get("waiting"),
            "error": store.get("unreachable"),
        }
        for store_id, store in sorted(values.items())
    ]


def _partitions(
    sizes: dict[str, Any], described: dict[str, dict[str, Any]], rates: dict[str, float]
) -> list[dict[str, Any]]:
    return [
        {
            "partition_id": name,
            "keys": entry["keys"],
            "keys_per_s": rates.get(f"keys/{name}"),
            "payload_bytes": sizes.get(name, {}).get("payload_bytes"),
            "used_bytes": entry["used_bytes"],
            "quota_bytes": None if entry["quota"] is None else entry["quota"].get("bytes"),
            "groups": entry["groups"],
            "waiting": entry["waiting"],
        }
        for name, entry in sorted(described.items())
    ]


def _groups_of(client: Client, partition_id: str) -> list[dict[str, Any]]:
    """The oldest open groups of a partition."""
    try:
        stuck = client.explain(partition_id, group_by="uid").stuck
    except PartitionNotFound:  # dropped meanwhile
        return []
    return [{"partition_id": partition_id, **each} for each in stuck if each.get("n")][:GROUPS]
