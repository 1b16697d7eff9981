"""Metrics as lines of JSON: written whole or not at all, strict, and read back.

Owns the form of `metrics.jsonl`: `{"step": 3, "time": 1754040000.1, "non_finite": 0, "values":
{…}}`, one line a log call. A value that is not finite is null, and `non_finite` counts them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """One log call."""

    step: int
    time: float
    """Seconds since 1970."""
    values: dict[str, float]
    """Those that were finite."""


class JsonLines:
    """A tracker that appends to a file. A line that a crash cut short is cut off."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """OSError: the file cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = _end_of_last_line(self._file)
        os.ftruncate(self._file, self._end)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line. OSError: the disk did not take it, and nothing of it is there."""
        plain: dict[str, float | None] = {name: _finite(v) for name, v in values.items()}
        line = {
            "step": int(step),
            "time": self._clock(),
            "non_finite": sum(value is None for value in plain.values()),
            "values": plain,
        }
        text = json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        data = memoryview(text.encode("utf-8", "backslashreplace") + b"\n")
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += written

    def close(self) -> None:
        """Close the file; repeatable."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def jsonl(path: str | Path) -> JsonLines:
    """A tracker that appends lines of JSON to this file."""
    return JsonLines(Path(path))


def read_metrics(path: str | Path) -> Iterator[MetricsLine]:
    """The lines of a file of metrics, in order; a line that is none, such as a torn last one, is
    passed over."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = cast("dict[str, Any]", json.loads(text))
                values = cast("dict[str, float | None]", line["values"])
                yield MetricsLine(
                    int(line["step"]),
                    float(line["time"]),
                    {name: value for name, value in values.items() if value is not None},
                )
            except (ValueError, TypeError, KeyError, AttributeError):
                continue


def _finite(value: float) -> float | None:
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)  # of numpy and torch too
    return number if math.isfinite(number) else None


def _end_of_last_line(file: int) -> int:
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - TAIL_BYTES)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
