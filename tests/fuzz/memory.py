"""What one call took of memory at its highest, by what the kernel says of this process."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Final

_CLEAR: Final = Path("/proc/self/clear_refs")
_STATM: Final = Path("/proc/self/statm")


class TooMuchMemory(AssertionError):
    """An input took more than twice what its format allows."""


class Watch:
    """Looks at the highest mark of resident memory; where that can be reset, it is exact."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = 2 * limit_bytes
        self.highest = 0
        """The most that one call took, in bytes."""
        self._base = self._reset()

    def check(self) -> None:
        """To be asked after each call. TooMuchMemory if the last one took more than the limit."""
        took = _highest() - self._base
        if took > self.highest:
            self.highest = took
        if took > self._limit:
            self._base = self._reset()
            raise TooMuchMemory(f"{took >> 20} MiB; {self._limit >> 20} MiB at most")
        if took > self._limit // 4:
            self._base = self._reset()

    def _reset(self) -> int:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _highest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
