"""What a report is about: a run, a plane, or both. Pure."""

from __future__ import annotations

from dataplane.report.chart import Points
from dataplane.report.record import PlaneRecord
from dataplane.report.run_record import RunRecord


class Data:
    """What the report is about. Either may be missing."""

    def __init__(self, run: RunRecord | None, plane: PlaneRecord | None) -> None:
        self.run = run
        self.plane = plane

    @property
    def begin_s(self) -> float:
        """Where the plane's times count from."""
        assert self.plane is not None
        times = self.plane.samples.times_s
        known = [group.begun_s for group in self.plane.groups[:1]]
        return min([self.plane.at_s - self.plane.uptime_s, *times[:1], *known])

    def column(self, name: str) -> Points:
        """A column of the plane's samples over seconds since its begin."""
        if self.plane is None:
            return []
        samples = self.plane.samples
        values = samples.columns.get(name, [])
        return [(at - self.begin_s, v) for at, v in zip(samples.times_s, values, strict=False)]

    def series(self, *names: str) -> Points:
        """A logged value over steps."""
        return [] if self.run is None else self.run.series(*names)
