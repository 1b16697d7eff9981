"""The endpoint of a process that serves a plane: what it reads, where it is, when it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from dataplane.metrics.endpoint import Endpoint, target_of
from dataplane.metrics.reading import Reading, read_meter
from dataplane.metrics.targets import Group, forget_target, group, write_target
from dataplane.metrics.timing import Begun, Meter
from dataplane.release import release
from dataplane.server.slices import Slices, WorstSlice

log = logging.getLogger("dataplane.metrics")

LOCAL: Final = "127.0.0.1"
ALL_ADDRESSES: Final = ("0.0.0.0", "::")
STEP: Final = 64
"""Connections looked at before others may run."""

Read = Callable[[], Coroutine[Any, Any, Reading]]


class ServedMetrics:
    """What one process of a plane tells Prometheus. Of its event loop."""

    def __init__(
        self,
        role: str,
        name: str,
        plane_id: str,
        runtime: Path | None,
        *,
        instance: str | None = None,
        host: str,
        port: int,
        known_as: str = LOCAL,
    ) -> None:
        """
        Args:
            role: which process of the plane it is, such as `tag_store`.
            name: of the plane.
            runtime: the folder that is to say where the endpoint is, if there is one.
            instance: which of several of the role; empty where there is one, None for the port.
            port: 0 for any.
            known_as: where scrapers find it, should it listen on all addresses.
        """
        self.role = role
        self._instance = instance
        self._labels = {"plane": name, "plane_id": plane_id, "role": role}
        self._runtime = runtime
        self._file: Path | None = None
        self._host, self._port = host, port
        self._known_as = known_as
        self._began = time.time()
        self._reads: list[Read] = []
        self._endpoint: Endpoint | None = None
        self.others: Callable[[], Mapping[str, str]] | None = None
        """Endpoints of the plane's value stores, by their id."""

    @property
    def target(self) -> str | None:
        """Where it listens, as `host:port`."""
        if self._endpoint is None:
            return None
        host, port = self._endpoint.address
        return target_of(self._known_as if host in ALL_ADDRESSES else host, port)

    def add(self, read: Read) -> None:
        """Read this too."""
        self._reads.append(read)

    def open(self, unready: Callable[[], str | None]) -> str:
        """Listen; where. `unready` says why the process cannot do its work now.

        InvalidRequest: there is no such host.
        """
        self._endpoint = Endpoint(
            self._read,
            host=self._host,
            port=self._port,
            loop=asyncio.get_running_loop(),
            unready=unready,
            targets=self._targets if self.others is not None else None,
        )
        target = self.target or ""
        if self._runtime is not None:
            of = target.rpartition(":")[2] if self._instance is None else self._instance
            process = f"{self.role}-{of}" if of else self.role
            self._file = write_target(self._runtime, process, target, self._labels)
        log.info("metrics of %s are at http://%s/metrics", self.role, target)
        return target

    def close(self) -> None:
        """Stop listening. Repeatable. The thread may be waiting for this loop: it is not joined on
        it for long."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        if self._file is not None:
            forget_target(self._file)

    async def _read(self) -> Reading:
        reading = Reading()
        labels = self._labels
        told = (labels["plane"], labels["plane_id"], self.role, release())
        reading.set("build_info", 1, *told)
        reading.set("start_time_seconds", self._began)
        for read in self._reads:
            reading.update(await read())
        return reading

    def _targets(self) -> list[Group]:
        assert self.others is not None
        found = [group(self.target or "", self._labels)]
        for store_id, target in self.others().items():
            labels = {**self._labels, "role": "value_store", "store": store_id}
            found.append(group(target, labels))
        return found


async def read_connections(meter: Meter, connections: Iterable[tuple[str, Begun]]) -> Reading:
    """What the connections of a server measure: role and unanswered requests of each."""
    reading = Reading()
    read_meter(meter, reading)
    roles = {"client": 0, "store": 0}
    oldest: dict[str, float] = {}
    in_flight = 0
    slices = Slices(WorstSlice())
    for number, (role, begun) in enumerate(connections):
        roles[role] = roles.get(role, 0) + 1
        in_flight += len(begun)
        for verb, came in begun.values():
            label = meter.label(verb)
            oldest[label] = min(came, oldest.get(label, came))
        if not number % STEP:
            await slices.breathe()
    now = perf_counter()
    reading.counts("connections", (((role,), n) for role, n in roles.items()))
    reading.set("requests_in_flight", in_flight)
    ages = {verb: now - oldest[verb] if verb in oldest else 0.0 for verb in meter.durations}
    ages.update({verb: now - came for verb, came in oldest.items()})
    reading.counts("oldest_request_seconds", (((verb,), age) for verb, age in ages.items()))
    return reading
