"""Which names become labels: the largest ones, as many as a time-series database likes. Pure.

A partition per policy version, or a task per experiment, must not make series without end: versions
of a family are one, and what is beyond the largest is summed as `other`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_PARTITIONS: Final = 32
MAX_TASKS: Final = 16
OTHER: Final = "other"
MAX_CHARACTERS: Final = 120
"""Of a name that somebody else chose; two that differ only beyond are one."""


class Largest:
    """The names that are shown. One that was shown stays shown while it is there, so that series do
    not come and go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shown: set[str] = set()

    def choose(self, sizes: Mapping[str, float]) -> set[str]:
        """The names that are shown now, of these with their sizes."""
        self._shown &= sizes.keys()
        rest = sorted(sizes.keys() - self._shown, key=lambda name: (-sizes[name], name))
        self._shown.update(rest[: self._most - len(self._shown)])
        self._shown.discard(OTHER)
        return self._shown

    def label(self, name: str) -> str:
        """The label of a name: itself where it is shown."""
        return name if name in self._shown else OTHER


def readable(name: str) -> str:
    """A name as a label: what cannot be printed is replaced, and what is long is cut."""
    if len(name) > MAX_CHARACTERS:
        name = name[: MAX_CHARACTERS - 3] + "..."
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)
