"""Folders with a number in their name, such as `ckpt-step-40`: there whole, or not at all.

Owns the names on the way there. A folder is filled as `<name>.partial-<random>` and renamed when it
is on the disk. One of the same name is set aside as `<name>.aside-<random>` for that moment; what
is to go is renamed to `<name>.removed-<random>` first. So whatever a kill leaves says what it is.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final

from trainer.checkpoint import disk

PARTIAL: Final = "partial"
ASIDE: Final = "aside"
REMOVED: Final = "removed"


class Series:
    """The folders of one prefix in one folder."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder = folder
        self.prefix = prefix
        self._name = re.compile(rf"{re.escape(prefix)}-([0-9]+)")
        self._leftover = re.compile(
            rf"({re.escape(prefix)}-[0-9]+)\.({PARTIAL}|{ASIDE}|{REMOVED})-[0-9a-f]+"
        )

    def path(self, number: int) -> Path:
        """Where the folder of this number is, if it is there."""
        return self.folder / f"{self.prefix}-{number}"

    def numbers(self) -> list[int]:
        """Those that are there, ascending."""
        if not self.folder.is_dir():
            return []
        names = (self._name.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def begin(self, number: int) -> Path:
        """A new folder to fill; it counts for nothing until it is published."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._beside(number, PARTIAL)
        partial.mkdir()
        return partial

    def publish(self, partial: Path, number: int) -> Path:
        """Sync what was filled and give it its name, in place of one that has it; the path."""
        path, aside = self.path(number), None
        disk.sync_tree(partial)
        if path.exists():
            aside = self._beside(number, ASIDE)
            disk.rename(path, aside)
        disk.rename(partial, path)
        disk.sync_folder(self.folder)
        if aside is not None:
            disk.remove(aside)
        return path

    def discard(self, number: int) -> None:
        """Remove the folder of this number, if it is there."""
        path = self.path(number)
        if path.exists():
            removed = self._beside(number, REMOVED)
            disk.rename(path, removed)
            disk.remove(removed)

    def recover(self) -> list[Path]:
        """Put back what was set aside and never replaced, and remove what else a kill left; what
        was removed. Only while nothing is being saved."""
        removed: list[Path] = []
        if not self.folder.is_dir():
            return removed
        for path in sorted(self.folder.iterdir()):
            found = self._leftover.fullmatch(path.name)
            if found is None:
                continue
            place = path.with_name(found[1])
            if found[2] == ASIDE and not place.exists():
                disk.rename(path, place)
                disk.sync_folder(self.folder)
                continue
            disk.remove(path)
            removed.append(path)
        return removed

    def _beside(self, number: int, what: str) -> Path:
        return self.folder / f"{self.prefix}-{number}.{what}-{secrets.token_hex(6)}"
